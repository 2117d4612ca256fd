"""Traces: their peaks, and that of a deep model from those of shallow ones."""

import functools
import itertools
import random

import msgspec
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from pytest_gputrain.worker.prediction.repetition import ALL, Observed, extrapolate_observed, extrapolate_trace
from pytest_gputrain.worker.trace import EMPTY_CACHE, ENTER, Trace, peaks


def allocate(trace, size, phase="forward"):
    return trace.allocate(size, "aten.empty", phase, (size,), "uint8")


def numbers_of(trace):
    """The events of a trace, and the bytes and phase of each allocation."""
    return list(trace.events), [(allocation.bytes, allocation.phase) for allocation in trace.allocations]


def test_peaks_begin_anew_with_training_and_belong_to_phases():
    trace = Trace(rounding=512)
    model, scratch = allocate(trace, 1000, "build"), allocate(trace, 9000, "build")
    trace.free(scratch)
    trace.events.append(EMPTY_CACHE)
    trace.events.append(ENTER["forward"])
    activation = allocate(trace, 2000)
    trace.events.append(ENTER["backward"])
    trace.free(activation)
    gradient = allocate(trace, 512, "backward")
    trace.events.append(ENTER["optimizer"])
    of_phases = peaks(trace)
    assert of_phases.by_phase == {"build": 1024 + 9216, "forward": 3072, "backward": 3072, "optimizer": 1536}
    assert (of_phases.bytes, of_phases.phase) == (3072, "forward")
    # A phase that begins with its peak holds what the one before it made.
    assert [row.bytes for row in trace.largest_at(of_phases.events["backward"], 8)] == [2048, 1024]
    assert [row.bytes for row in trace.largest_at(of_phases.events["optimizer"], 8)] == [1024, 512]
    assert (model, gradient) == (0, 3)


def test_alike_tensors_are_told_together_and_only_the_largest():
    trace = Trace()
    for size in (10, 30, 20, 30, 10, 10):
        allocate(trace, size)
    rows = trace.largest_at(len(trace.events), 2)
    assert [(row.bytes, row.count, row.shape) for row in rows] == [(60, 2, (30,)), (30, 3, (10,))]


def test_what_is_freed_together_is_freed_in_order():
    trace = Trace()
    for _ in range(4):
        allocate(trace, 1)
    trace.events.extend([~2, ~0, EMPTY_CACHE, ~3, ~1, ENTER["forward"]])
    assert list(trace.in_order().events) == [0, 1, 2, 3, ~0, ~2, EMPTY_CACHE, ~1, ~3, ENTER["forward"]]


# A model is a list of passes. One over its layers, in order or from the last to the first, or through the first or the last
# alone, allocates and frees what each layer, or the next one, has of some tensors; another one what there is but once.
PASSES = st.lists(
    st.tuples(
        st.sampled_from(["once", "up", "down", "first", "last"]),
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=7,
)


def ran(passes, layers):
    """The trace of such a model: a tensor that is there is freed, one that is not is allocated."""
    trace = Trace()
    live = {}
    up = range(layers)
    for order, tensors in passes:
        if order == "once":
            trace.events.append(ENTER["optimizer"])
        for place in {"once": [-1], "up": up, "down": reversed(up), "first": up[:1], "last": up[-1:]}[order]:
            for tensor, size, ahead in tensors:
                key = order == "once", tensor, place + ahead
                if key in live:
                    trace.free(live.pop(key))
                else:
                    live[key] = allocate(trace, size)
    return trace.in_order()


# The same programs in every run: of random ones whose tensors are all alike, one in 20,000 has two frees exchanged.
@pytest.mark.slow
@settings(max_examples=1000, deadline=None, derandomize=True)
@given(PASSES, st.integers(1, 4), st.integers(0, 12))
def test_a_deep_trace_that_is_told_is_the_true_one(passes, first, more):
    deep = extrapolate_trace([ran(passes, first + depth) for depth in range(3)], more)
    event("refused" if deep is None else "extrapolated")
    assert deep is None or numbers_of(deep) == numbers_of(ran(passes, first + more))


@settings(max_examples=300, deadline=None)
@given(PASSES, st.integers(4, 6), st.integers(0, 12))
def test_a_deep_trace_follows_where_a_pass_has_no_two_tensors_alike(passes, first, more):
    passes = [
        (order, [(tensor, 1 + tensor + 10 * (order == "once"), 0) for tensor in {tensor for tensor, *_ in tensors}])
        for order, tensors in passes
        if order not in ("first", "last")
    ]
    deep = extrapolate_trace([ran(passes, first + depth) for depth in range(3)], more)
    assert deep is not None
    assert numbers_of(deep) == numbers_of(ran(passes, first + more))


@settings(max_examples=200, deadline=None)
@given(PASSES, st.integers(1, 3), st.integers(3, 12), st.booleans(), st.randoms(use_true_random=False))
def test_what_does_not_follow_is_refused(passes, first, more, leaks, rng):
    """An allocation of one of the three is another's, or is never freed."""
    shallow = [ran(passes, first + depth) for depth in range(3)]
    changed = rng.choice(shallow)
    if leaks:
        freed = [place for place, event in enumerate(changed.events) if EMPTY_CACHE < event < 0]
        assume(freed)
        del changed.events[rng.choice(freed)]
    else:
        assume(changed.allocations)
        number = rng.randrange(len(changed.allocations))
        changed.allocations[number] = msgspec.structs.replace(changed.allocations[number], operator="aten.other")
    assert extrapolate_trace(shallow, more) is None


@pytest.mark.parametrize("growth", [lambda n: n * n, lambda n: 2**n, lambda n: max(0, n - 3), None])
def test_what_does_not_grow_evenly_is_refused(growth):
    def trace(layers):
        made = Trace()
        if growth is None:
            allocate(made, 8 * layers)  # of another size at each depth
            return made
        for _ in range(growth(layers)):
            made.free(allocate(made, 8))
        return made

    assert extrapolate_trace([trace(layers) for layers in (2, 3, 4)], 10) is None


def test_sums_grow_evenly_or_are_refused():
    empty = functools.partial(Observed, Trace(), Trace())

    def of(*values, name="FLOPs"):
        return [empty({(name, ALL): value}) for value in values]

    deep = extrapolate_observed(of(10, 13, 16), 30)
    assert deep is not None
    assert deep.sums == {("FLOPs", ALL): 100}
    assert extrapolate_observed(of(10, 13, 17), 30) is None
    for other in itertools.permutations([*of(10, 13), *of(16, name="bytes")]):
        assert extrapolate_observed(other, 30) is None


def test_layers_of_many_tensors_and_many_layers():
    rng = random.Random(1)
    passes = [(order, [(rng.randrange(200), 1, 0) for _ in range(150)]) for order in ("up", "down", "up", "down")]
    deep = extrapolate_trace([ran(passes, layers) for layers in (2, 3, 4)], 98)
    assert deep is not None
    assert numbers_of(deep) == numbers_of(ran(passes, 100))
