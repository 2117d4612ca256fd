"""The search for the largest batch that fits and the fastest one, over simulated memories."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gputrain.records.study import Try
from pytest_gputrain.session.batch_search import find_batch

MOST = 1 << 14
memories = st.integers(0, MOST) | st.integers(0, 70)
maxima = st.integers(1, MOST) | st.integers(1, 70)


class Machine:
    """Batches up to ``memory`` fit; ``speed`` says how fast each is."""

    def __init__(self, memory, speed=lambda batch: 1.0, *, crashes_at=0, outcome="out_of_memory"):
        self.memory, self.speed, self.crashes_at, self.outcome = memory, speed, crashes_at, outcome
        self.asked = []

    def __call__(self, batch):
        self.asked.append(batch)
        if self.crashes_at and batch >= self.crashes_at:
            return Try(batch_size=batch, outcome="crashed", reason="ValueError: odd batch")
        if batch > self.memory:
            return Try(batch_size=batch, outcome=self.outcome, reason="full")
        return Try(batch_size=batch, outcome="fits", samples_per_second=self.speed(batch), peak_allocated_bytes=batch)


def _search(machine, most=MOST):
    return find_batch(machine, most)


@given(memories, maxima)
@example(1, 1)
@example(0, 1)
@example(7, 8)
@example(8, 8)
@example(9, 13)
@example(13, 13)
def test_the_largest_batch_that_fits_is_found_exactly(memory, most):
    assert _search(Machine(memory), most).largest == (min(memory, most) or None)


@given(memories, maxima, st.integers(1, MOST))
def test_few_batches_are_tried_and_none_twice_or_beyond_the_maximum(memory, most, best):
    machine = Machine(memory, lambda batch: 1 / (1 + abs(batch - best)))
    search = _search(machine, most)
    assert len(set(machine.asked)) == len(machine.asked) <= 2 * math.floor(math.log2(most)) + 4
    assert [attempt.batch_size for attempt in search.tries] == machine.asked
    assert all(1 <= batch <= most for batch in machine.asked)


@given(st.integers(1, MOST), st.dictionaries(st.integers(1, MOST), st.floats(0.1, 1e6)))
def test_the_fastest_is_the_best_of_what_was_tried(memory, speeds):
    search = _search(Machine(memory, lambda batch: speeds.get(batch, 1.0)))
    fitting = {attempt.batch_size: attempt.samples_per_second for attempt in search.tries if attempt.outcome == "fits"}
    assert fitting[search.fastest] == max(map(float, filter(None, fitting.values())))


def test_both_gaps_beside_the_fastest_are_halved_and_of_equally_fast_batches_the_smallest_is_named():
    machine = Machine(64, lambda batch: 100 - abs(batch - 17))
    search = _search(machine, 64)
    assert machine.asked == [1, 2, 4, 8, 16, 32, 64, 12, 24]
    assert search.fastest == 16
    assert _search(Machine(64, lambda batch: 100 - abs(batch - 23)), 64).fastest == 24
    assert _search(Machine(32, lambda batch: min(batch, 8)), 32).fastest == 8


@pytest.mark.parametrize("outcome", ["out_of_memory", "timed_out", "capped"])
def test_whatever_does_not_fit_bounds_the_search(outcome):
    search = _search(Machine(5, outcome=outcome))
    assert search.largest == 5
    assert {attempt.outcome for attempt in search.tries if attempt.batch_size > 5} == {outcome}
    nothing = _search(Machine(0, outcome=outcome))
    assert (len(nothing.tries), nothing.largest, nothing.fastest) == (1, None, None)


@given(st.integers(1, 64))
def test_a_crash_ends_the_search(batch):
    machine = Machine(MOST, crashes_at=batch)
    search = _search(machine)
    assert (search.largest, search.fastest) == (None, None)
    assert [attempt.outcome for attempt in search.tries].count("crashed") == 1
    assert search.tries[-1].outcome == "crashed"
