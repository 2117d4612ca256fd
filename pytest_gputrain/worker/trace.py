"""Records what was allocated and freed, in order, and derives the peaks from it."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import msgspec

from pytest_gputrain.records import LiveTensor, TrainingPhase
from pytest_gputrain.records.memory import BESIDE_STEPS

TRAINING: Final = -(2**62)
"""Among the events of a trace: training starts, and its peak is counted from there."""

ENTER: Final[dict[TrainingPhase | None, int]] = {
    phase: TRAINING - 1 - place for place, phase in enumerate((*get_args(TrainingPhase), None))
}
"""Among the events of a trace: a phase begins, or with None a part of a step of which no peak is taken."""
BLOCK: Final = 512
"""The allocator of a GPU rounds every request up to a multiple of this many bytes."""
SHOWN: Final = 8
"""Rows of the largest tensors at each peak."""

_ENTERED: Final = {event: phase for phase, event in ENTER.items()}


def taken(size: int, device: str) -> int:
    """Return the bytes of memory that a storage of this many bytes takes on a device of this type, such as ``cuda``."""
    return size if device == "cpu" else -(-size // BLOCK) * BLOCK


@dataclass(slots=True)
class Trace:
    """Records the allocations and frees of one memory.

    Args:
        rounding: bytes that every allocation is rounded up to a multiple of.

    Attributes:
        events: an allocation's number where it is made, its complement (``~number``) where it is freed, `TRAINING`, or
            one of `ENTER`.
        allocations: by number.
    """

    rounding: int = 1
    events: array[int] = field(default_factory=lambda: array("q"))
    allocations: list[LiveTensor] = field(default_factory=list)
    _kinds: dict[tuple[Any, ...], LiveTensor] = field(default_factory=dict, repr=False)
    """Allocations that are alike are one object, since a step makes the same ones as the step before."""

    def allocate(
        self, size: int, operator: str, phase: TrainingPhase, shape: tuple[int, ...], dtype: str, line: str = ""
    ) -> int:
        """Return the number of a new allocation."""
        kind = (size, operator, phase, shape, dtype, line)
        tensor = self._kinds.get(kind)
        if tensor is None:
            held = -(-size // self.rounding) * self.rounding
            lines = (line,) if line else ()
            tensor = self._kinds[kind] = LiveTensor(
                bytes=held, count=1, operator=operator, phase=phase, shape=shape, dtype=dtype, lines=lines
            )
        number = len(self.allocations)
        self.allocations.append(tensor)
        self.events.append(number)
        return number

    def free(self, number: int) -> None:
        self.events.append(~number)

    def begin_training(self) -> None:
        """Note that the build has ended. The peak of training counts from here."""
        self.events.append(TRAINING)

    def enter(self, phase: TrainingPhase | None) -> None:
        """Note that a phase begins. None stands for a part of a step that has no peak of its own."""
        self.events.append(ENTER[phase])

    @property
    def sizes(self) -> list[int]:
        """The bytes of the allocations, by their numbers."""
        return [allocation.bytes for allocation in self.allocations]

    def bytes_of(self, operators: Set[str], since: int) -> tuple[int, int]:
        """Return the most bytes of these operators' allocations after ``since`` events that existed at once, and the bytes
        that exist now."""
        live = peak = 0
        made: set[int] = set()
        for event in self.events[since:]:
            if event >= 0 and self.allocations[event].operator in operators:
                made.add(event)
                live += self.allocations[event].bytes
                peak = max(peak, live)
            elif ~event in made:
                live -= self.allocations[~event].bytes
        return peak, live

    def largest_at_peaks(self, phase_peaks: Peaks, rows: int = SHOWN) -> dict[TrainingPhase, tuple[LiveTensor, ...]]:
        """Return the tensors at the peak of each phase, in at most this many rows of equal tensors, the largest first."""
        return {phase: self.largest_at(event, rows) for phase, event in phase_peaks.events.items()}

    def by_origin(self, event_number: int) -> dict[TrainingPhase, int]:
        """Return the bytes after this many events, by the phase that allocated them."""
        origins: dict[TrainingPhase, int] = {}
        for number in self._live(event_number):
            allocation = self.allocations[number]
            origins[allocation.phase] = origins.get(allocation.phase, 0) + allocation.bytes
        return {phase: origins[phase] for phase in ENTER if phase in origins}

    def _live(self, event_number: int) -> set[int]:
        """Return the numbers of the allocations that existed after this many events."""
        live: set[int] = set()
        for event in self.events[:event_number]:
            if event >= 0:
                live.add(event)
            elif event > TRAINING:
                live.remove(~event)
        return live

    def largest_at(self, event_number: int, count: int) -> tuple[LiveTensor, ...]:
        """Return the allocations that existed after this many events: the ``count`` largest rows of equal ones, then the
        others by operator and phase."""
        alike: defaultdict[LiveTensor, list[LiveTensor]] = defaultdict(list)
        for number in sorted(self._live(event_number)):
            allocation = self.allocations[number]
            alike[msgspec.structs.replace(allocation, lines=()) if allocation.lines else allocation].append(allocation)
        rows = sorted(map(_together, alike.values()), key=lambda row: -row.bytes)
        others: defaultdict[tuple[str, TrainingPhase], list[LiveTensor]] = defaultdict(list)
        for row in rows[count:]:
            others[row.operator, row.phase].append(row)
        small = sorted(map(_together, others.values()), key=lambda row: -row.bytes)
        return (*rows[:count], *small)


def _together(rows: Sequence[LiveTensor]) -> LiveTensor:
    """Return one row that adds up several rows of one operator in one phase."""
    shapes = {(row.shape, row.dtype) for row in rows}
    shape, dtype = shapes.pop() if len(shapes) == 1 else ((), "")
    lines = tuple(dict.fromkeys(line for row in rows for line in row.lines))
    size, number = sum(row.bytes for row in rows), sum(row.count for row in rows)
    return msgspec.structs.replace(rows[0], bytes=size, count=number, shape=shape, dtype=dtype, lines=lines)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest sums of live allocations.

    Attributes:
        bytes: since training started, in its steps.
        phase: the phase in which that sum was reached.
        by_phase: ``build`` is before training started.
        events: until the peak of each phase.
    """

    bytes: int
    phase: TrainingPhase
    by_phase: dict[TrainingPhase, int]
    events: dict[TrainingPhase, int]


def peaks(trace: Trace) -> Peaks:
    """Return the peaks of a trace, which begins in phase ``build``."""
    sizes = trace.sizes
    phase: TrainingPhase | None = "build"
    peak_phase: TrainingPhase = "build"
    by_phase: dict[TrainingPhase, int] = {"build": 0}
    events: dict[TrainingPhase, int] = {"build": 0}
    live = peak = 0
    for place, event in enumerate(trace.events, start=1):
        if event >= 0:
            live += sizes[event]
        elif event > TRAINING:
            live -= sizes[~event]
            continue
        elif event == TRAINING:
            peak = 0
            continue
        else:
            phase = _ENTERED[event]
        if phase is not None and live > by_phase.get(phase, -1):
            by_phase[phase], events[phase] = live, place
        if live > peak and phase not in BESIDE_STEPS:
            peak, peak_phase = live, phase or "build"
    return Peaks(peak, peak_phase, by_phase, events)
