"""Extrapolates what a deep model would show on fakes from what three shallow models of the same blocks showed.

A model that repeats a block runs the same events for each. Of three runs with 2, 3 and 4 repetitions the second has
everything of the first and some stretches more, the third each of these stretches twice: one where the blocks are built,
one where they run forward, one where they run backward, one for each loop of the optimizer, and so on. A deeper model has
them as often as it is deeper. What an event frees is an allocation whose number is an affine function of the depth, and
within a stretch of the repetition; so is every sum.

What does not follow these rules to the last event is refused, and then the deep model itself must run. But a model whose
fifth block is the first of another kind looks like any other: that all repetitions are alike is what ``repeats`` of an
architecture promises, and what a test holds every class of models to.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pytest_gputrain.records import LiveTensor
from pytest_gputrain.worker.trace import EMPTY_CACHE, Trace

ALL: Final = ""
"""Name of the operator for a sum over all of them."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The observations of one run on fake tensors.

    Attributes:
        device: trace of the device's memory, in order.
        host: of the host's, likewise.
        sums: FLOPs, parameters and the like, by the name of the sum and the operator's, or `ALL`.
    """

    device: Trace
    host: Trace
    sums: dict[tuple[str, str], int]


_SHALLOW: Final = (2, 3, 4, 5)
"""Repetitions of the models that run for a deeper one: three of them, or the last three where blocks are not yet alike."""


def extrapolate(run: Callable[[int], Observed], repetitions: int) -> Observed | None:
    """Return what ``run(repetitions)`` would show, from runs of fewer; None if that does not follow or is no less work."""
    if repetitions <= _SHALLOW[-1]:
        return None
    shallow: list[Observed] = []
    for count in _SHALLOW:
        shallow = [*shallow[-2:], run(count)]
        if len(shallow) == 3:
            observed = extrapolate_observed(shallow, repetitions - (count - 2))
            if observed is not None:
                return observed
    return None


def extrapolate_observed(shallow: Sequence[Observed], more: int) -> Observed | None:
    """Return what a model would show that repeats its blocks ``more`` times more often than the first of three.

    Args:
        shallow: of models with one repetition more each.

    Returns:
        None where that does not follow from these.
    """
    device = extrapolate_trace([observed.device for observed in shallow], more)
    host = extrapolate_trace([observed.host for observed in shallow], more)
    first, second, third = (observed.sums for observed in shallow)
    if device is None or host is None or not first.keys() == second.keys() == third.keys():
        return None
    if any(first[name] + third[name] != 2 * second[name] for name in first):
        return None
    return Observed(device, host, {name: value + more * (second[name] - value) for name, value in first.items()})


def extrapolate_trace(shallow: Sequence[Trace], more: int) -> Trace | None:
    """Return the trace of such a model, or None."""
    symbols: dict[Any, int] = {}
    first, second, third = (_Line.read(trace, symbols) for trace in shallow)
    stretches = _stretches(first, second, third)
    if stretches is None:
        return None
    events_and_allocations = _assembled(_events(first, second, third, stretches, more), list(symbols))
    return None if events_and_allocations is None else Trace(shallow[0].rounding, *events_and_allocations).in_order()


_CONTEXT: Final = 2
"""Events before an allocation that tell it from others of the same kind."""


class _Allocation(NamedTuple):
    tensor: LiveTensor
    before: tuple[Any, ...]
    """The last event before: tensors that were made, bytes that were freed."""


class _Line(NamedTuple):
    """A trace, event by event."""

    symbols: list[int]
    """The events: a mark, or an `_Allocation` that is made or freed."""
    numbers: list[int]
    """The numbers of the allocations; 0 for a mark."""

    @classmethod
    def read(cls, trace: Trace, symbols: dict[Any, int]) -> _Line:
        line = cls([], [])
        allocations: list[_Allocation] = []
        before: deque[Any] = deque(maxlen=_CONTEXT)
        for event in trace.events:
            symbol: Any = event
            number = 0
            if event >= 0:
                number = event
                allocations.append(_Allocation(trace.allocations[number], tuple(before)))
                symbol = True, allocations[number]
                before.append(trace.allocations[number])
            elif event > EMPTY_CACHE:
                number = ~event
                symbol = False, allocations[number]
                before.append(trace.allocations[number].bytes)
            line.symbols.append(symbols.setdefault(symbol, len(symbols)))
            line.numbers.append(number)
        return line


class _Stretch(NamedTuple):
    """Events that each repetition adds."""

    at: int
    """Place in the first line that they come before."""
    length: int


def _stretches(first: _Line, second: _Line, third: _Line) -> list[_Stretch] | None:
    """Return what the second line has more than the first, and the third twice; None where they differ otherwise."""
    stretches: list[_Stretch] = []
    # Places in the three lines; what lies before them is explained.
    a = b = c = 0
    while True:
        same = _common(first, second, third, a, b, c)
        a, b, c = a + same, b + same, c + same
        if _at_ends(first, second, third, a, b, c):
            return stretches
        # Of all the lengths that are repeated in the third line, the one after which most goes on alike.
        best = longest = 0
        for length in range(1, min(len(second.symbols) - b, (len(third.symbols) - c) // 2) + 1):
            if second.symbols[b + length - 1] != third.symbols[c + length - 1]:
                break
            stretch = second.symbols[b : b + length]
            if stretch != third.symbols[c + length : c + 2 * length]:
                continue
            same = _common(first, second, third, a, b + length, c + 2 * length)
            if same > longest:
                best, longest = length, same
            if _at_ends(first, second, third, a + same, b + length + same, c + 2 * length + same):
                best = length
                break
        if not best:
            return None
        stretches.append(_Stretch(a, best))
        b, c = b + best, c + 2 * best


def _at_ends(first: _Line, second: _Line, third: _Line, a: int, b: int, c: int) -> bool:
    return (a, b, c) == (len(first.symbols), len(second.symbols), len(third.symbols))


def _common(first: _Line, second: _Line, third: _Line, a: int, b: int, c: int) -> int:
    """Count the events from there on that are the same in all three, of allocations whose numbers grow evenly."""
    remaining = min(len(first.symbols) - a, len(second.symbols) - b, len(third.symbols) - c)
    for i in range(remaining):
        if not first.symbols[a + i] == second.symbols[b + i] == third.symbols[c + i]:
            return i
        if first.numbers[a + i] + third.numbers[c + i] != 2 * second.numbers[b + i]:
            return i
    return remaining


def _events(first: _Line, second: _Line, third: _Line, stretches: list[_Stretch], more: int) -> Iterator[tuple[int, int]]:
    """Yield symbol and number of each event of the deeper model."""
    a = b = c = 0
    for end, length in [*stretches, _Stretch(len(first.symbols), 0)]:
        for i in range(end - a):
            number = first.numbers[a + i]
            yield first.symbols[a + i], number + more * (second.numbers[b + i] - number)
        a, b, c = end, b + end - a, c + end - a
        for repetition in range(more):
            for i in range(length):
                # Once in the second line, and twice in the third: numbers of one repetition more, and of one further on.
                deeper = third.numbers[c + i] - second.numbers[b + i]
                further = third.numbers[c + length + i] - third.numbers[c + i]
                yield second.symbols[b + i], second.numbers[b + i] + (more - 1) * deeper + repetition * further
        b, c = b + length, c + 2 * length


def _assembled(events: Iterator[tuple[int, int]], happenings: list[Any]) -> tuple[array[int], list[LiveTensor]] | None:
    """Return the events and allocations of a trace; None unless all numbers fit the allocations that they name."""
    trace_events = array("q")
    allocations: list[_Allocation] = []
    live: set[int] = set()
    for symbol, number in events:
        happening = happenings[symbol]
        if isinstance(happening, int):
            trace_events.append(happening)
            continue
        is_new, allocation = happening
        if is_new:
            if number != len(allocations):
                return None
            allocations.append(allocation)
            live.add(number)
            trace_events.append(number)
        else:
            if number not in live or allocations[number] != allocation:
                return None
            live.remove(number)
            trace_events.append(~number)
    return trace_events, [allocation.tensor for allocation in allocations]
