"""From a task to a search or to loss curves: what is launched, what is kept, and what it says in tables and sentences."""

import pytest
from unit_examples import CASE, crashed, measurement, out_of_memory, result, timed_out

from pytest_gputrain.gate.loss_trend import describe_divergence, describe_failed_curves
from pytest_gputrain.records import Task
from pytest_gputrain.records.study import LossCurve, Search, Try
from pytest_gputrain.report import studies as shown
from pytest_gputrain.report.terminal import render
from pytest_gputrain.session.studies import record_losses, search_batch

TASK = Task(case=CASE, scale="full", device_type="gpu", root=".")
FALLING = tuple(10 - step / 4 for step in range(40))
FLAT = (10.0,) * 40


def _search(memory, most=64, beyond=None):
    """A search on a machine where batches up to ``memory`` fit, a step taking 1 s and an eighth per sample."""
    launched = []

    def launch(task):
        launched.append(task)
        batch = task.case.batch_size
        if batch > memory:
            return beyond or out_of_memory()
        return measurement(batch_size=batch, step_seconds=(1 + batch / 8,), peak_allocated_bytes=batch)

    return search_batch(TASK, most, launch), launched


def _curves(losses, *, precision="bf16", platform="h100"):
    def launch(task):
        assert task.curve
        assert (task.case.steps, task.case.warmup) == (40, 0)
        losses_of_task = losses[task.case.precision]
        return measurement(losses=losses_of_task) if isinstance(losses_of_task, tuple) else losses_of_task

    case = CASE.replace(precision=precision)
    return record_losses(Task(case=case, scale="full", device_type="gpu", root="."), 40, platform, launch)


def _curve(precision, **fields):
    return LossCurve(**{"precision": precision, "outcome": "recorded", "losses": FALLING, "trend": "converging", **fields})


def test_a_precision_that_parameter_servers_lack_is_left_out():
    case = CASE.replace(parallel="ps", servers=1)
    study = record_losses(
        Task(case=case, scale="tiny", device_type="cpu", root="."), 40, "cpu", lambda task: measurement(losses=FALLING)
    )
    left_out = {curve.precision: curve.reason for curve in study.loss_curves if curve.outcome == "left_out"}
    assert left_out == {"fp16-amp": "parameter servers take no gradients of a scaled loss"}


def test_a_search_has_the_figures_of_the_fastest_and_all_tries_or_of_what_did_not_fit():
    study, launched = _search(11)
    assert (study.search.largest, study.search.fastest) == (11, 11)
    assert (study.reply.batch_size, study.task.case.batch_size) == (11, 11)
    sizes = [attempt.batch_size for attempt in study.search.tries]
    assert [str(task.case) for task in launched] == [f"{CASE}-batch_size={size}" for size in sizes]
    assert all(task.case.replace(batch_size=2, named=()) == CASE for task in launched)
    assert study.search.tries[0].samples_per_second == pytest.approx(1 / 1.125)
    study, _ = _search(0)
    assert (study.search.largest, study.search.fastest, study.task.case.batch_size) == (None, None, 1)
    assert study.reply == out_of_memory()


def test_a_time_out_and_a_stand_in_with_fewer_samples_bound_the_search_and_a_crash_is_the_reply():
    study, _ = _search(5, beyond=timed_out())
    assert (study.search.largest, study.search.tries[3].outcome) == (5, "timed_out")
    assert study.search.tries[3].reason == "was ended after 1,800 s (build); --gpu-timeout allows more"
    capped = search_batch(TASK, 64, lambda task: measurement(batch_size=min(task.case.batch_size, 6))).search
    assert capped.largest == 6
    assert {attempt.outcome for attempt in capped.tries if attempt.batch_size > 6} == {"capped"}
    study, _ = _search(5, beyond=crashed())
    assert (study.reply, study.task.case.batch_size) == (crashed(), 8)


def test_precisions_are_compared_with_fp32_and_the_case_keeps_its_own_reply():
    study = _curves({"fp32": FALLING, "bf16-amp": FALLING, "fp16-amp": FALLING[:7], "bf16": FLAT})
    assert [(curve.precision, curve.trend, curve.non_finite_step) for curve in study.loss_curves] == [
        ("fp32", "converging", None),
        ("bf16-amp", "converging", None),
        ("fp16-amp", "diverging", 8),
        ("bf16", "flat", None),
    ]
    assert [curve.gap for curve in study.loss_curves[:3]] == [None, 0.0, None]
    assert study.loss_curves[3].gap > 0.5
    assert study.reply.losses == FLAT


@pytest.mark.parametrize("platform", ["cpu", "unknown", "h100"])
def test_each_precision_is_trained_once_and_none_is_left_out_where_nothing_is_known_to_lack(platform):
    three = ["fp32", "bf16-amp", "fp16-amp"]
    for own in (*three, "bf16"):
        study = _curves(dict.fromkeys((*three, "bf16"), FALLING), precision=own, platform=platform)
        assert [curve.precision for curve in study.loss_curves] == list(dict.fromkeys((*three, own)))
        assert {curve.outcome for curve in study.loss_curves} == {"recorded"}


def test_arithmetic_that_the_device_lacks_is_left_out():
    study = _curves({"fp32": FALLING, "fp16-amp": FALLING}, precision="fp16-amp", platform="v100")
    assert [curve.outcome for curve in study.loss_curves] == ["recorded", "left_out", "recorded"]
    assert shown.explain([result(loss_curves=study.loss_curves)]) == ["bf16-amp left out: V100 has no bf16 arithmetic"]
    assert describe_failed_curves(CASE, study.loss_curves) is None


def test_a_precision_without_a_curve_is_told_and_the_others_are_kept():
    study = _curves({"fp32": out_of_memory(), "bf16-amp": FALLING, "fp16-amp": crashed(), "bf16": FALLING})
    assert describe_failed_curves(CASE, study.loss_curves) == (
        f"{CASE} in fp16-amp gave no measurement (measure in step 1): ValueError: loss is NaN"
    )
    assert [curve.trend for curve in study.loss_curves] == [None, "converging", None, "converging"]
    own = _curves({"fp32": FALLING, "bf16-amp": out_of_memory(), "fp16-amp": FALLING, "bf16": out_of_memory()})
    assert describe_failed_curves(CASE, own.loss_curves) == (
        f"{CASE} in bf16 ran out of device memory (measure in step 2): CUDA out of memory."
    )


RISING = tuple(10 * (1 + step / 2000) for step in range(40))


@pytest.mark.parametrize(
    ("fp32", "expected"),
    [
        (FLAT, "diverging"),
        (tuple(loss + 0.5 for loss in FLAT), "flat"),  # it ends below fp32
        (RISING, "diverging"),  # fp32 diverges itself
        (RISING[:30], "diverging"),
        (out_of_memory(), "diverging"),
    ],
)
def test_a_rise_is_compared_with_fp32_where_that_does_not_diverge(fp32, expected):
    study = _curves({"fp32": fp32, "bf16-amp": RISING, "fp16-amp": FLAT, "bf16": FLAT})
    assert [curve.trend for curve in study.loss_curves[1:]] == [expected, "flat", "flat"]


def test_divergence_counts_where_fp32_does_not_diverge_or_the_loss_of_the_case_is_not_finite():
    worse = _curve("fp16-amp", trend="diverging", losses=FALLING[:7], non_finite_step=8)
    assert describe_divergence(CASE, [_curve("fp32"), worse]) == (
        f"{CASE} diverges in fp16-amp (its loss is not finite in step 8), but not in fp32"
    )
    assert describe_divergence(CASE, [_curve("fp32", trend="diverging"), worse]) is None
    assert describe_divergence(CASE, [_curve("fp32"), _curve("bf16", trend="flat")]) is None
    own = _curve(CASE.precision, trend="diverging", losses=FALLING[:7], non_finite_step=8)
    for fp32 in ("diverging", "converging"):
        expected = f"{CASE} diverges: its loss is not finite in step 8"
        assert describe_divergence(CASE, [_curve("fp32", trend=fp32), own]) == expected


def test_searches_and_curves_are_shown_and_explained(snapshot):
    tries = (
        Try(batch_size=1, outcome="fits", samples_per_second=2.03),
        Try(batch_size=10, outcome="fits", samples_per_second=4.34),
        Try(batch_size=12, outcome="out_of_memory"),
    )
    found = Search(tries=tries, most=64, largest=11, fastest=10)
    at_most = Search(tries=tries[:1], most=1, largest=1, fastest=1)
    curves = (
        _curve("fp32"),
        _curve("bf16-amp", gap=0.012, trend="flat"),
        _curve("fp16-amp", losses=(10.0, 9.5), trend="diverging", non_finite_step=3),
        _curve("bf16", outcome="out_of_memory", losses=(), trend=None),
    )
    none_fits = Search(tries=(Try(batch_size=1, outcome="out_of_memory"),), most=64)
    shown_results = {
        "searched": [result(CASE.replace(batch_size=10, named=("batch_size",)), verdict=None, search=found)],
        "nothing fits": [result(verdict=None, summary=None, search=none_fits)],
        "the maximum fits": [result(verdict=None, search=at_most)] * 2,
        "bounded by a time-out": [result(verdict=None, search=_search(5, beyond=timed_out())[0].search)],
        "curves": [result(verdict=None, loss_curves=curves)],
        "diverges in fp32": [result(verdict=None, loss_curves=(_curve("fp32", trend="diverging"),))],
    }
    assert {
        name: (render(results, width=120, colour=False), shown.explain(results)) for name, results in shown_results.items()
    } == snapshot
