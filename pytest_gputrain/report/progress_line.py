"""Draws a line below pytest's own that shows what the running case does."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Final

from pytest_gputrain.records import Case, Event
from pytest_gputrain.utils.sanitize import shown
from pytest_gputrain.utils.units import format_bytes, format_seconds

_DRAW_EVERY_SECONDS: Final = 0.1

# The sequence first moves down one line, which scrolls at the bottom, so that there is a line below. Then it moves up again,
# saves the place, moves down, writes, and restores the place.
_BEGIN: Final = "\x1bD\x1b[1A\x1b7\x1b[1B\r\x1b[2K"
_END: Final = "\x1b8"
_CLEAR: Final = "\x1b7\x1b[1B\r\x1b[2K\x1b8"

_PHASES: Final = {
    "start": "starting",
    "import": "importing",
    "build": "building",
    "count": "counting allocations",
    "warmup": "warming up",
    "evaluate": "evaluating",
    "save": "saving a checkpoint",
    "check": "checking",
    "profile": "profiling",
    "reply": "replying",
}


class ProgressLine:
    """Draws the line on a terminal and leaves pytest's lines alone.

    Args:
        width: columns of the terminal.
        uncaptured: makes a context in which ``sys.stdout`` is the terminal.
        kind: of the figures to come, where they are no measurements: ``emulated``.
    """

    def __init__(
        self, width: int, uncaptured: Callable[[], contextlib.AbstractContextManager[None]], kind: str = ""
    ) -> None:
        self._width = width
        self._kind = kind
        self._uncaptured = uncaptured
        self._drawn_at = 0.0

    def show(self, case: Case, event: Event, run: int = 1) -> None:
        """Draw an ``event`` of the case's process number ``run``, unless something was drawn just before."""
        now = time.monotonic()
        if now - self._drawn_at >= _DRAW_EVERY_SECONDS:
            self._drawn_at = now
            self._write(f"{_BEGIN}{describe(case, event, run, self._kind)[: self._width - 1]}{_END}")

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._drawn_at:
            self._drawn_at = 0.0
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        with self._uncaptured():
            sys.stdout.write(text)
            sys.stdout.flush()


def describe(case: Case, event: Event, run: int = 1, kind: str = "") -> str:
    """Return a description of progress: ``llama-3.1-8b-lora-bf16  run 2  step 3/10  0.42 s/step  35.6 GiB``."""
    parts = [str(case), *([kind] if kind else []), *([f"run {run}"] if run > 1 else [])]
    if event.phase == "measure":
        parts.append(f"step {event.step or 0}/{case.steps}")
    else:
        parts.append(_PHASES[event.phase])
    if event.step_seconds is not None:
        parts.append(f"{format_seconds(event.step_seconds)}/step")
    if event.allocated_bytes is not None:
        parts.append(format_bytes(event.allocated_bytes))
    return shown("  ".join(parts))
