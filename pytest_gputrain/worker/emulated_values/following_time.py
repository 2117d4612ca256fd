"""Measures how long a program waits for values and lines to be followed, and at which operators."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Final

from .program_lines import BACKWARD, line_of

_LONG_CALL_SECONDS: Final = 1e-3
"""The time of a call whose line is noted. To find the line of each call would itself take time."""

_LEAST_SECONDS: Final = 5.0
"""The time from which a user may want to know where it went."""

_NAMED: Final = 3


class FollowingTime:
    """The seconds that following values and lines adds to a program, by operator and line."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._of_short_calls: defaultdict[str, float] = defaultdict(float)
        self._of_lines: defaultdict[tuple[str, str], float] = defaultdict(float)

    def add(self, operator: str, seconds: float) -> None:
        """Add the seconds of a call of an operator, without the seconds of its kernel."""
        if seconds < _LONG_CALL_SECONDS:
            self._of_short_calls[operator] += seconds
        else:
            self._of_lines[operator, line_of(sys._getframe(1)) or BACKWARD] += seconds

    def sentence(self) -> str:
        """Say where the time went, if it is more than that of all else since the GPU was first used; else nothing."""
        parts = [(seconds, f"short calls of {operator}") for operator, seconds in list(self._of_short_calls.items())]
        parts += [(seconds, f"{operator} at {where}") for (operator, where), seconds in list(self._of_lines.items())]
        followed, whole = sum(seconds for seconds, _ in parts), time.perf_counter() - self._began
        if followed < max(_LEAST_SECONDS, whole / 2):
            return ""
        most = ", ".join(f"{seconds:.1f} s in {what}" for seconds, what in sorted(parts, reverse=True)[:_NAMED])
        return f"to follow values and lines took {followed:.1f} s of the {whole:.1f} s since the GPU was first used: {most}"
