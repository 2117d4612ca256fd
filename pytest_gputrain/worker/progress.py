"""Writes the worker's progress file: one JSON line for each event.

The parent reads the lines as they are appended, and they are still there after SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.records import Event, Phase

_STEP_EVENT_EVERY_SECONDS: Final = 0.2


class Progress:
    """Reports the worker's phase and step. Few steps are reported, so that the timed steps lose no time."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._next_step_event = 0.0
        self.phase: Phase = "start"
        self.step: int | None = None

    def enter(self, phase: Phase) -> None:
        """Report that ``phase`` begins."""
        self.phase, self.step = phase, None
        self._write(Event(phase=phase, at=time.monotonic()))

    def stepped(self, step: int, seconds: float | None, allocated_bytes: int | None) -> None:
        """Report that ``step`` steps of the phase are done.

        Args:
            seconds: the seconds of the last step; None if they are not known.
        """
        self.step = step
        now = time.monotonic()
        if now >= self._next_step_event:
            self._next_step_event = now + _STEP_EVENT_EVERY_SECONDS
            self._write(Event(phase=self.phase, step=step, step_seconds=seconds, allocated_bytes=allocated_bytes))

    def _write(self, event: Event) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # A full disk must not end the case.
                os.write(self._file, msgspec.json.encode(event) + b"\n")
