"""Times how long each process works before it first waits for the others, which shows which of them is late."""

from __future__ import annotations

from typing import Any

from pytest_gputrain.worker.device import Device


class StragglerClock:
    """Measures how long this process works in each step before it waits for another process.

    Processes wait for each other inside of a step, so all of its ends lie where the slowest one's does. What each does from
    their common start to its first exchange is not yet levelled.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._start: Any = None
        self._end: Any = None
        self.seconds: list[float] = []
        """Seconds of own work in each step that said when that was done."""

    def begin(self) -> None:
        """Start the clock as a step begins, at which all processes meet."""
        self._start, self._end = self._device.stamp(), None

    def done(self) -> None:
        """Stop the clock, because the step needs other processes from now on. Only the first call in a step counts."""
        if self._start is not None and self._end is None:
            self._end = self._device.stamp()

    def note(self) -> None:
        """Store the seconds of the step that has ended, once the device is idle."""
        if self._end is not None:
            self.seconds.append(self._device.seconds_between(self._start, self._end))
        self._start = self._end = None
