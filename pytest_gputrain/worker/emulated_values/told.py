"""What is told at the end: what read a value that nobody knows, and what was assumed."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import Counter
from types import FrameType
from typing import Final

_MOST_PLACES: Final = 1000

_LIBRARIES: Final = tuple(
    os.path.join(path, "") for name in ("purelib", "platlib", "stdlib", "platstdlib") if (path := sysconfig.get_path(name))
)


class Places:
    """How often something happened at each line of the program."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, what: str) -> None:
        place = (what, _own_line())
        if place in self._counts or len(self._counts) < _MOST_PLACES:
            self._counts[place] += 1

    def told(self) -> list[dict[str, str | int]]:
        return [{"what": what, "where": where, "count": count} for (what, where), count in self._counts.most_common()]


def _own_line() -> str:
    """Find the innermost line of the program itself, in no library. Autograd's threads have none."""
    frame: FrameType | None = sys._getframe(1)
    own_folder = os.path.dirname(__file__)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", own_folder, *_LIBRARIES)) and "site-packages/" not in file:
            shorter = os.path.relpath(file)
            return f"{file if shorter.startswith('..') else shorter}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward pass"
