"""Defines the record of the memory of each step of a training, and of a rise from step to step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from pytest_gputrain.records.whole import Whole

LEAST_RISE: Final = 4 * 1024
"""Bytes by which memory may rise from one step to another: losses and metrics are kept."""
COUNTED_ROUNDS: Final = 4
"""The rounds of own code whose tensors are counted one by one on a CPU. A round is a step, or as many as gradients are
accumulated over."""
LEAST_HEAP: Final = 64 * 1024
"""Bytes by which the heap of the host may grow in each step: what a step logs, and what a measurement keeps of it."""
_LEAST_RISES: Final = 3


class StepMemory(Struct, frozen=True, array_like=True):
    """Successive steps that take the same memory, in tensors."""

    steps: Whole
    """How many they are."""
    peak: Whole
    """The highest bytes within each step; 0 if they were not counted."""
    end: Whole
    """The bytes that live when each step is over."""


class OfStep(NamedTuple):
    """The memory of one step in bytes, as in `StepMemory`."""

    peak: int
    end: int


def folded(steps: Iterable[OfStep]) -> tuple[StepMemory, ...]:
    """Return steps in the form of a record, in which successive equal steps are one entry."""
    return tuple(StepMemory(sum(1 for _ in alike), *step) for step, alike in itertools.groupby(steps))


def unfolded(record: Iterable[StepMemory]) -> Iterator[OfStep]:
    """Yield each step of a record."""
    for alike in record:
        yield from itertools.repeat(OfStep(alike.peak, alike.end), alike.steps)


def counted_steps(record: Iterable[StepMemory]) -> int:
    """Return the number of steps whose memory was counted."""
    return sum(alike.steps for alike in record if alike.peak)


class Rise(NamedTuple):
    """A rise of values that repeats at even distances up to the last value."""

    first: int
    """The index of the first value that is higher than the one before."""
    every: int
    """The number of values from one rise to the next: 1 if each value is higher than the one before."""
    mean: float
    """The mean height of a rise."""


def rise_of(values: Sequence[int], least: int = LEAST_RISE) -> Rise | None:
    """Return how values rise at even distances up to the last one; None if they do not.

    They do so if they have risen three times or more at even distances, have not fallen since, and the next rise would be
    behind their end. A cache that fills is none: its rises stop, or come at odd distances.

    Args:
        least: by how much they have to rise each time on average, and more.
    """
    changes = [later - earlier for earlier, later in itertools.pairwise(values)]
    last_fall = max((at for at, change in enumerate(changes) if change < 0), default=-1)
    rises = [at + 1 for at, change in enumerate(changes) if change > 0 and at > last_fall]
    if len(rises) < _LEAST_RISES:
        return None
    every = rises[-1] - rises[-2]
    first = len(rises) - 2
    while first and rises[first] - rises[first - 1] == every:
        first -= 1
    number = len(rises) - first
    mean = (values[-1] - values[rises[first] - 1]) / number
    goes_on = len(values) - rises[-1] <= every
    return Rise(rises[first], every, mean) if number >= _LEAST_RISES and goes_on and mean > least else None
