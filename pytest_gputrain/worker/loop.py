"""Times the steps: every step that is measured runs in `timed`, and `schedule` says which steps update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence

from pytest_gputrain.records import Case
from pytest_gputrain.worker.device import Device

Steps = Generator[bool, None, None]
"""The actions around the steps of a training: it is resumed before each step and after the last one, and says by what it
yields whether the optimizer updates at the step's end."""


def timed(
    updates: Sequence[bool],
    device: Device,
    after: Callable[[int, float], bool | None] = lambda index, seconds: None,
    meet: Callable[[], None] = lambda: None,
) -> Generator[bool, None, tuple[float, ...]]:
    """Run and time ``len(updates)`` steps, each from an idle device to an idle device. Return their seconds of wall time.

    Args:
        updates: what is yielded, step by step.
        after: called between two steps, outside of what is timed, with the number of steps done and the last one's seconds;
            true ends the loop.
        meet: waits for the other processes, outside of what is timed: who waits for whom inside of a step is then in the
            slowest one's time.
    """
    seconds: list[float] = []
    clock = time.perf_counter
    for index, update in enumerate(updates, start=1):
        device.synchronize()
        meet()
        start = clock()
        yield update
        device.synchronize()
        seconds.append(clock() - start)
        if after(index, seconds[-1]):
            break
    return tuple(seconds)


def schedule(count: int, accumulation: int) -> list[bool]:
    """Return for ``count`` micro-batches which of them end in an update: every ``accumulation``-th one, and the last one.

    The last, because ten steps of a case that accumulates thirty-two would otherwise never show the optimizer's time and
    memory. The median step is a plain micro-batch then, as in the published tables.
    """
    return [index % accumulation == 0 or index == count for index in range(1, count + 1)]


def counted_steps(case: Case) -> list[bool]:
    """Return for each step under the allocation counter whether the optimizer updates.

    The first makes its states. With them live, a step without gradients from before, and for accumulation one with them.
    Own code updates when it will: two whole rounds of the accumulation that its case declares.
    """
    if case.code:
        return [True] * (2 * case.gradient_accumulation)
    return [True, True] if case.gradient_accumulation == 1 else [True, False, True]


def timed_steps(case: Case) -> int:
    """Return how many steps are timed. With a data loader this is a multiple of its processes, see `levelled`."""
    return math.ceil(case.steps / max(1, case.loader_workers)) * max(1, case.loader_workers)


def lead_in(case: Case) -> int:
    """Return the number of steps before the timed ones that use up the batches which were loaded ahead."""
    return case.loader_workers


def levelled(seconds: Sequence[float], loaders: int) -> tuple[float, ...]:
    """Return for each step the mean over as many steps as processes load batches.

    These finish their batches at about the same time. Where they are too slow, one step waits long and the next ones find
    theirs: a median of single steps would never show the wait.
    """
    if loaders < 2:
        return tuple(seconds)
    groups = [seconds[at : at + loaders] for at in range(0, len(seconds), loaders)]
    return tuple(sum(group) / len(group) for group in groups for _ in group)
