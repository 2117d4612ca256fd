"""All that a case is held to, judged together: limits, a baseline or a published row, and whether figures are recorded."""

import msgspec
import pytest
from unit_examples import CASE, baseline, baseline_run, crashed, measurement, out_of_memory

from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.judge import comparable_row, judge
from pytest_gputrain.records import Holder, Published
from pytest_gputrain.records.published import Figure, Figures
from pytest_gputrain.records.tolerance import Cap, MemoryTolerance, Tolerance
from pytest_gputrain.utils.units import GiB

TOLERANCE = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02))
TIGHT = (Cap(metric="step_seconds", most=0.5, stated="gpu_limit on test_it"),)
BASE = baseline(*[baseline_run()] * 5)
SECONDS = BASE.runs[0].step_seconds[0]
ROW = Published(
    table="table",
    suite="llm",
    platform="h100",
    case=CASE,
    outcome="out_of_memory",
    cells={},
    figures={"pytorch": Figures()},
    made_with="torch 2.5.1",
)


def _took(factor, **fields):
    return measurement(step_seconds=(SECONDS * factor,) * 3, **fields)


def _judge(*replies, **criteria):
    held_to = {"case": CASE, "scale": "full", "judged": True, "tolerance": TOLERANCE, "most": 5, **criteria}
    return judge(Criteria(**held_to), replies)


def _status(judgement):
    return judgement.verdict.status


def test_a_case_that_is_held_to_nothing_has_no_verdict_and_what_the_suite_shares_is_no_regression():
    assert _judge(_took(1.0), judged=False, baseline=BASE)[:2] == (None, True)
    slower, held_to = (_took(1.2),) * 3, Criteria(case=CASE, scale="full", tolerance=TOLERANCE, baseline=BASE)
    assert [_status(judge(held_to, slower, **how)) for how in ({}, {"shift": 0.18})] == ["regressed", "inconclusive"]


LOOSE, BETWEEN, BELOW_BASE = (Cap(metric="step_seconds", most=SECONDS * it, stated="") for it in (100, 1.01, 0.5))


@pytest.mark.parametrize(
    ("factors", "held_to", "status", "settled", "asks_suite"),
    [
        # A limit counts for a case that is not judged; one reply over it is in doubt until there can be no more.
        ((9.0,) * 3, {"judged": False, "caps": TIGHT}, "over-limit", True, False),
        ((9.0,), {"judged": False, "caps": TIGHT}, "over-limit", False, False),
        ((9.0,), {"judged": False, "caps": TIGHT, "most": 1}, "over-limit", True, False),
        ((0.1,), {"judged": False, "caps": TIGHT}, "pass", True, False),
        # Both the baseline and the limits have to be settled; only the baseline's comparison asks for the other cases.
        ((1.2,), {"baseline": BASE, "caps": (LOOSE,)}, "inconclusive", False, True),
        ((1.0,), {"baseline": BASE, "caps": (BELOW_BASE,)}, "over-limit", False, False),
        ((1.0,), {"baseline": BASE, "caps": (LOOSE,)}, "pass", True, False),
        ((1.0, 1.02, 1.02, 1.02), {"baseline": BASE, "caps": (BETWEEN,)}, "over-limit", True, False),
        # Limits count for what is recorded, too.
        ((9.0,), {"records": True, "caps": TIGHT, "most": 1}, "over-limit", True, False),
        ((1.2,), {"baseline": BASE, "records": True}, "recorded", True, False),
    ],
)
def test_a_case_is_held_to_its_limits_beside_its_baseline(factors, held_to, status, settled, asks_suite):
    judgement = _judge(*map(_took, factors), **held_to)
    assert (_status(judgement), judgement.settled, judgement.asks_suite) == (status, settled, asks_suite)


@pytest.mark.parametrize("stored", [None, BASE])
def test_figures_that_are_wanted_are_recorded_whatever_they_are(stored):
    judgement = _judge(_took(2.0), baseline=stored, records=True)
    assert (_status(judgement), judgement.settled) == ("recorded", True)
    assert "has today's figures as its baseline now" in judgement.verdict.sentence
    assert judgement.verdict.before == ("new" if stored is None else "regressed")
    assert ("; against the baseline that it replaces: " in judgement.verdict.sentence) == (stored is not None)
    out = _judge(out_of_memory(), records=True).verdict
    assert (out.status, "has running out of memory as its baseline now" in out.sentence) == ("recorded", True)


@pytest.mark.parametrize(
    "replies",
    [
        (crashed(),),
        (_took(1.0), crashed()),
        (out_of_memory(environment=None),),  # a worker that the kernel killed does not tell where
        (_took(1.0), out_of_memory()),
        (_took(1.0, holders=(Holder(pid=4711, gpu=0, name="python"),)),),
    ],
)
def test_what_says_nothing_of_the_case_becomes_no_baseline(replies):
    judgement = _judge(*replies, records=True)
    assert _status(judgement) == "failed"
    assert judgement.settled


def test_a_published_row_counts_instead_of_a_baseline():
    judgement = _judge(_took(9.0), baseline=BASE, row=ROW, published_for=("h100",))
    assert (_status(judgement), judgement.settled) == ("improved", True)
    elsewhere = _judge(_took(9.0), published_for=("a100",)).verdict
    assert "published for a100 only" in elsewhere.sentence
    assert _judge(_took(9.0), row=ROW, published_for=("h100",), judged=False)[:2] == (None, True)


@pytest.mark.parametrize(
    ("other", "shown"),
    [({}, ROW), ({"published_for": None}, None), ({"case": CASE.replace(batch_size=7)}, None), ({"scale": "tiny"}, None)],
)
def test_a_row_is_shown_beside_a_case_only_if_the_two_can_be_compared(other, shown):
    held_to = {"case": CASE, "scale": "full", "judged": True, "tolerance": TOLERANCE, "row": ROW, "published_for": ("h100",)}
    assert comparable_row(Criteria(**held_to | other)) is shown


def test_a_new_case_without_an_emulated_run_is_held_to_the_memory_of_its_row():
    row = msgspec.structs.replace(
        ROW, figures={"pytorch": Figures(peak_allocated_bytes=Figure(low=GiB, high=GiB, rounding=1))}
    )
    far_above = measurement(peak_allocated_bytes=3 * GiB)
    assert _status(_judge(far_above, row=row)) == "regressed"
    assert _status(_judge(measurement(peak_allocated_bytes=GiB), row=row)) == "new"
    assert _status(_judge(far_above, row=row, baseline=BASE)) != "new"
    assert _status(_judge(far_above, row=msgspec.structs.replace(row, case=CASE.replace(batch_size=7)))) == "new"


@pytest.mark.parametrize(("have", "most", "runs"), [(1, 5, 3), (1, 2, 2), (3, 5, 4), (2, 5, 3), (5, 5, 5)])
def test_a_case_in_doubt_takes_enough_further_processes_to_agree(have, most, runs):
    assert Criteria(case=CASE, scale="full", tolerance=TOLERANCE, most=most).next_runs(have) == runs
