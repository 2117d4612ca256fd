"""Verdicts on what the steps of a case ask of the GPU."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.gate.counts import judge_counts
from pytest_gputrain.records import CountCause, Counts, Place, StepCounts
from pytest_gputrain.records.tolerance import CountTerms, CountTolerance

LOSS = Place(file="train.py", function="train", text="loss.item()", line=42)
STEP = Place(file="train.py", function="train", text="optimizer.step()", line=45)
ADAM = Place(file="torch/optim/adam.py", function="_single_tensor_adam", line=400)
FOREACH = Place(file="torch/optim/adam.py", function="_multi_tensor_adam", line=600)


def cause(what, *counts, own=None, **fields):
    return CountCause(what=what, counts=counts, own=own, **fields)


def counts(*kinds, steps=None, causes=(), lines_unknown=""):
    """Return counts of one step of each kind, or of these steps."""
    kinds = tuple(kind if isinstance(kind, StepCounts) else StepCounts(**kind) for kind in kinds)
    return Counts(
        steps=tuple(range(len(kinds)) if steps is None else steps),
        kinds=kinds,
        causes=tuple(causes),
        lines_unknown=lines_unknown,
    )


def judged(before, now, **terms):
    """Judge steps that are all alike."""
    before, now = ({"launches": 1000} | figures for figures in (before, now))
    return judge_counts(counts(before, steps=[0] * 10), counts(now, steps=[0] * 10), CountTerms(**terms))


def statuses(verdict):
    return {metric.metric: metric.status for metric in verdict.metrics}


def status(figure, before, now, **terms):
    """Return the status of a case whose steps have these values of one figure."""
    return statuses(judged({figure: before}, {figure: now}, **terms))[figure]


ANY = ("waits", "collectives", "compilations", "graph_breaks", "mallocs", "frees")
FIELDS = [
    name for name in StepCounts.__struct_fields__ if name not in ("update", "slow_flops", "library_flops", "d2d_bytes")
]
whole = st.integers(min_value=0, max_value=10**6)
step_counts = st.builds(StepCounts, **dict.fromkeys(FIELDS, whole), update=st.booleans())


@st.composite
def any_counts(draw):
    kinds = draw(st.lists(step_counts, min_size=1, max_size=4))
    steps = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=12))
    return counts(*kinds, steps=steps)


@given(any_counts())
def test_equal_counts_pass_in_silence(same):
    verdict = judge_counts(same, same)
    assert {metric.status for metric in verdict.metrics} == {"pass"}
    assert not (verdict.worse or verdict.better or verdict.told or verdict.work_rose)


@given(step_counts, step_counts)
def test_no_figure_is_worse_both_ways(some, others):
    others = msgspec.structs.replace(others, update=some.update)
    there, back = (judge_counts(counts(a), counts(b)) for a, b in ((some, others), (others, some)))
    worse = [{name for name, status in statuses(verdict).items() if status == "regressed"} for verdict in (there, back)]
    assert not worse[0] & worse[1]


@pytest.mark.parametrize("figure", ANY)
@given(data=st.data())
def test_growth_of_any_single_step_fails(figure, data):
    base = StepCounts(waits=3, launches=1000, collectives=4)
    grown = msgspec.structs.replace(base, **{figure: getattr(base, figure) + data.draw(st.integers(1, 9))})
    steps = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12).filter(any))
    verdict = judge_counts(counts(base, steps=[0] * len(steps)), counts(base, grown, steps=steps))
    assert statuses(verdict)[figure] == "regressed"
