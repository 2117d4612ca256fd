"""Times the steps: every step that is measured runs in `timed`, and `schedule` says which steps update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from pytest_gputrain.records import Case
from pytest_gputrain.worker.device import Device


def timed(
    step: Callable[[bool], object],
    updates: Sequence[bool],
    synchronize: Callable[[], None],
    after: Callable[[int, float], bool | None] = lambda index, seconds: None,
    meet: Callable[[], None] = lambda: None,
) -> list[float]:
    """Run ``len(updates)`` steps and return their wall seconds, each from an idle device to an idle device.

    Args:
        step: runs one micro-batch; its argument says whether the optimizer updates at its end.
        updates: that argument, step by step.
        synchronize: waits until the device has done everything asked of it.
        after: called between two steps, outside of what is timed, with the number of steps done and the last one's seconds;
            true ends the loop.
        meet: waits for the other processes, outside of what is timed: who waits for whom inside of a step is then in the
            slowest one's time.
    """
    seconds: list[float] = []
    clock = time.perf_counter
    for index, update in enumerate(updates, start=1):
        synchronize()
        meet()
        start = clock()
        step(update)
        synchronize()
        seconds.append(clock() - start)
        if after(index, seconds[-1]):
            break
    return seconds


def schedule(count: int, accumulation: int) -> list[bool]:
    """Say which of ``count`` micro-batches end in an update: every ``accumulation``-th, and always the last.

    The last, because ten steps of a case that accumulates thirty-two would otherwise never show the optimizer's time and
    memory. The median step is a plain micro-batch then, as in the published tables.
    """
    return [index % accumulation == 0 or index == count for index in range(1, count + 1)]


def timed_steps(case: Case) -> int:
    """Count the steps that are timed: of a case with a loader a multiple of its processes, see `levelled`."""
    return math.ceil(case.steps / max(1, case.loader_workers)) * max(1, case.loader_workers)


def lead_in(case: Case) -> int:
    """Count the steps that are not timed after the loader has lost what it had loaded ahead: one batch of each process."""
    return case.loader_workers


def levelled(seconds: Sequence[float], loaders: int) -> tuple[float, ...]:
    """Return for each step the mean over as many steps as processes load for them.

    These finish their batches at about the same time. Where they are too slow, one step waits long and the next ones find
    theirs: a median of single steps would never show the wait.
    """
    if loaders < 2:
        return tuple(seconds)
    groups = [seconds[at : at + loaders] for at in range(0, len(seconds), loaders)]
    return tuple(sum(group) / len(group) for group in groups for _ in group)


class TimedOnDevice:
    """A step that notes when the device's own clock says that it began and ended."""

    def __init__(self, step: Callable[[bool], object], device: Device) -> None:
        self._step, self._device = step, device
        self._stamps: list[tuple[Any, Any]] = []

    def __call__(self, update: bool) -> None:
        begin = self._device.stamp()
        self._step(update)
        self._stamps.append((begin, self._device.stamp()))

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each step, read on an idle device; none where the device has no clock of its own."""
        if self._device.type == "cpu":
            return ()
        return tuple(self._device.seconds_between(begin, end) for begin, end in self._stamps)
