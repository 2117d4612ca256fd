"""Absolute limits: when a figure is over one, and when that cannot be said."""

import msgspec
import pytest
from unit_examples import CASE, cpu_environment, crashed, measurement, out_of_memory, told

from pytest_gputrain.gate.limits import judge_exact, judge_limits, with_limits
from pytest_gputrain.records import CountCause, Counts, Holder, LimitVerdict, Place, StepCounts, Verdict
from pytest_gputrain.records.tolerance import Cap
from pytest_gputrain.utils.units import GiB

STATED = "gpu_limit on test_it"
MEMORY = Cap(metric="peak_allocated_bytes", most=24 * GiB, stated=STATED)
STEP = Cap(metric="step_seconds", most=0.5, stated=STATED)
OWN = CASE.replace(code="test_it.py::build", method="custom")


def _run(seconds=0.4, gib=20, **fields):
    return measurement(step_seconds=(seconds,) * 3, peak_allocated_bytes=round(gib * GiB), **fields)


def _against(cap, *replies, case=CASE, most=5, **how):
    return judge_limits([cap], case, replies, **{"scale": "full", "cpu_time": False, "most": most, **how})


OVER = _run(0.6, 25)
OVER_ON_CPU = _run(0.6, 25, environment=cpu_environment())
IN_THREADS = _run(gib=25, environment=cpu_environment(), counted_threads=2)
TINY = "it is meant for the full model, and this is the tiny scale"


@pytest.mark.parametrize(
    ("cap", "replies", "how", "status", "settled", "note"),
    [
        (MEMORY, [_run(gib=24)], {}, "pass", True, ""),
        *((cap, [OVER] * runs, {}, "over-limit", runs == 3, "") for cap in (MEMORY, STEP) for runs in (1, 2, 3)),
        *((cap, [OVER, _run()], {}, "pass", True, "") for cap in (MEMORY, STEP)),
        (STEP, [OVER], {"most": 1}, "over-limit", True, ""),
        # A CPU counts exactly, so one process decides; bytes of several threads are no exact count.
        (MEMORY, [OVER_ON_CPU], {}, "over-limit", True, ""),
        (MEMORY, [IN_THREADS], {}, "over-limit", False, ""),
        (MEMORY, [IN_THREADS] * 3, {}, "over-limit", True, ""),
        # A model at tiny scale is not what was limited; own code has its own size at any scale.
        (MEMORY, [OVER], {"scale": "tiny"}, "not-judged", True, TINY),
        (MEMORY, [OVER] * 3, {"scale": "tiny", "case": OWN}, "over-limit", True, ""),
        (STEP, [OVER_ON_CPU], {"case": OWN}, "not-judged", True, "time on a CPU is shown, not judged"),
        (STEP, [OVER_ON_CPU] * 3, {"case": OWN, "cpu_time": True}, "over-limit", True, ""),
        (MEMORY, [out_of_memory()], {}, "not-judged", True, "there are no figures"),
        # A process that ran out of memory is one fewer to decide with; after a crash nothing is open.
        (STEP, [OVER, OVER, out_of_memory()], {"most": 4}, "over-limit", False, ""),
        (STEP, [OVER, OVER, out_of_memory()], {"most": 3}, "over-limit", True, ""),
        (STEP, [OVER, crashed()], {}, "over-limit", True, ""),
    ],
)
def test_a_limit_is_judged_where_it_can_be(cap, replies, how, status, settled, note):
    (limit,), is_settled = _against(cap, *replies, **how)
    assert (limit.status, is_settled, limit.note) == (status, settled, note)


def test_time_beside_others_is_over_no_limit_and_memory_is():
    crowded = _run(seconds=0.6, gib=25, holders=(Holder(pid=7, gpu=0, name="python"),))
    (time,) = _against(STEP, *[crowded] * 3).limits
    assert time.status == "not-judged"
    assert time.note == "it exceeds the limit, but was measured beside python (pid 7) on GPU 0"
    assert _against(STEP, *[_run(holders=crowded.holders)] * 3).limits[0].status == "pass"
    assert _against(MEMORY, *[crowded] * 3).limits[0].status == "over-limit"


@pytest.mark.parametrize(("gib", "status"), [(24, "pass"), (25, "over-limit")])
def test_an_emulated_run_is_held_against_limits_of_memory_at_full_scale(gib, status):
    memory, time = judge_exact([MEMORY, STEP], CASE, round(gib * GiB), scale="full")
    assert memory == LimitVerdict(
        metric="peak_allocated_bytes", status=status, value=gib * GiB, limit=24 * GiB, stated=STATED, runs=1
    )
    assert (time.status, time.value, time.note) == ("not-judged", None, "an emulated GPU has no time")
    (tiny,) = judge_exact([MEMORY], CASE, round(gib * GiB), scale="tiny")
    assert (tiny.status, tiny.note) == ("not-judged", TINY)


WAITS = Cap(metric="waits", most=0, stated=STATED)
LOSS = Place(file="train.py", function="train", text="loss.item()", line=42)
NORM = Place(file="train.py", function="train", text="norm.item()", line=45)
COUNTS = Counts(
    steps=(0, 1, 0),
    kinds=(StepCounts(waits=1), StepCounts(waits=3)),
    causes=(CountCause(what="waits", own=LOSS, counts=(1, 1)), CountCause(what="waits", own=NORM, counts=(0, 2))),
)


def _counted(most, counts=COUNTS, again=None, scale="full", case=CASE):
    cap = Cap(metric="waits", most=most, stated=STATED)
    return judge_exact([cap], case, GiB, scale=scale, counts=counts, again=again)


SAME = msgspec.structs.replace(COUNTS, steps=(0, 0), kinds=COUNTS.kinds[:1])
NONE = msgspec.structs.replace(COUNTS, steps=(0, 0, 0), kinds=(StepCounts(),))


def test_limits_are_told_beside_what_the_baseline_says(snapshot):
    """Every step is held against the limit of a count, and whatever the baseline says counts less than a limit."""
    runs = judge_limits([MEMORY, STEP], CASE, [OVER] * 3, scale="full", cpu_time=False, most=5).limits
    emulated = judge_exact([MEMORY], CASE, 25 * GiB, scale="full")
    better = Verdict(status="improved", sentence="it is better")
    verdicts = {
        "as many as allowed": with_limits(CASE, None, _counted(3)),
        "one step has more": with_limits(CASE, None, _counted(2)),
        "all steps have more": with_limits(CASE, None, _counted(0, SAME)),
        "so has a second run": with_limits(CASE, better, _counted(2, again=COUNTS)),
        "a second run has fewer": with_limits(CASE, better, _counted(2, again=NONE)),
        "nothing was counted": with_limits(CASE, None, _counted(0, None)),
        "nothing was counted of a measured run": with_limits(CASE, None, _against(WAITS, OVER).limits),
        "a tiny model": with_limits(CASE, None, _counted(0, scale="tiny")),
        "tiny scale, but own code": with_limits(CASE, None, _counted(0, scale="tiny", case=OWN)),
        "an emulated run beside no baseline": with_limits(CASE, None, emulated),
        **{
            f"three runs beside {status}": with_limits(CASE, Verdict(status=status, sentence="it is so"), runs)
            for status in ("new", "inconclusive", "regressed", "failed")
        },
    }
    assert told(verdicts) == snapshot


def test_limits_that_hold_leave_the_verdict():
    verdict, limits = Verdict(status="new", sentence="it is new"), _against(MEMORY, _run()).limits
    assert with_limits(CASE, verdict, limits) == msgspec.structs.replace(verdict, limits=limits)
    within = Verdict(status="pass", sentence=f"{CASE} is within its limits", limits=limits)
    assert with_limits(CASE, None, limits) == within
    assert with_limits(CASE, verdict, ()) == verdict
    assert with_limits(CASE, None, ()) is None
