"""Scaling efficiency: what it is derived from, and how it is judged."""

import math

import pytest
from unit_examples import baseline, baseline_run, cpu_environment, gpu_environment, judged, measurement

from pytest_gputrain.gate.scaling import efficiency, one_worker
from pytest_gputrain.records import Case
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance

CASE = Case(model="llama-3.1-8b", parallel="ddp", gpus=4, sequence_length=512)
WIDE = Tolerance(time=0.10, memory=MemoryTolerance(ratio=0.02))
EIGHTY = baseline(baseline_run(step_seconds=(1.25,) * 3, one_worker_seconds=1.0), case=CASE)


def _run(seconds, alone=1.0):
    return measurement(step_seconds=(seconds,) * 3, one_worker_seconds=alone)


def _judged(seconds, alone=1.0, stored=EIGHTY):
    verdict = judged([_run(seconds, alone)] * 3, stored, WIDE, case=CASE).verdict
    return verdict, verdict.metric("scaling_efficiency")


@pytest.mark.parametrize(
    ("alone", "status"),
    [(1.0, "pass"), (0.92, "pass"), (0.90, "regressed"), (1.09, "pass"), (1.11, "improved")],
)
def test_efficiency_has_its_limits_at_the_time_tolerance(alone, status):
    verdict, metric = _judged(1.25, alone)
    assert (verdict.status, metric.status, metric.value) == (status, status, pytest.approx(alone / 1.25))
    assert (metric.baseline, metric.limit) == (pytest.approx(0.8), pytest.approx(0.8 / 1.1))


def test_one_worker_is_as_slow_as_several_on_a_slow_day():
    """So what the whole suite is slower by explains no efficiency."""
    verdict = judged([_run(1.5625)] * 3, EIGHTY, WIDE, case=CASE, shift=math.log(1.25)).verdict
    assert [(metric.metric, metric.status) for metric in verdict.metrics if metric.metric != "peak_allocated_bytes"] == [
        ("step_seconds", "inconclusive"),
        ("scaling_efficiency", "regressed"),
    ]


def test_accumulating_cases_are_compared_by_whole_updates():
    """Micro-batches that exchange nothing take as long as alone; the fourth pays for all."""
    case = CASE.replace(gradient_accumulation=4)
    run = measurement(step_seconds=(1.0, 1.0, 1.0, 2.0) * 2, one_worker_seconds=4.0)
    assert efficiency(case, [run]) == pytest.approx(4 / 5)
    assert efficiency(case, [_run(1.0)]) is None, "too few steps for an update"
    verdict, metric = _judged(1.25, None)
    assert (verdict.status, metric) == ("pass", None), "nor is there any without one worker"


def test_a_regression_of_another_figure_counts_before_a_missing_efficiency():
    stored = baseline(baseline_run(step_seconds=(1.0,) * 3), case=CASE)
    verdict, metric = _judged(1.05, stored=stored)
    assert verdict.status == "new"
    assert f"{CASE} has no scaling efficiency in its baseline of 2026-01-31; record it" in verdict.sentence
    assert (metric.value, metric.baseline, metric.note) == (pytest.approx(1 / 1.05), None, "there was none before")
    assert _judged(1.25, stored=stored)[0].status == "regressed"


@pytest.mark.parametrize("environment", [cpu_environment(), gpu_environment(device_count=8)], ids=["cpu", "eight devices"])
def test_efficiency_of_other_devices_is_not_compared(environment):
    stored = baseline(baseline_run(environment=environment, one_worker_seconds=5.0), case=CASE)
    here = {"environment": environment} if environment == cpu_environment() else {}
    reply = measurement(one_worker_seconds=1.0, **here)
    metric = judged([reply], stored, WIDE, case=CASE).verdict.metric("scaling_efficiency")
    assert (metric.status, metric.value, metric.baseline) == ("not-comparable", 1.0, 5.0)
    assert metric.note


@pytest.mark.parametrize(("parallel", "alone"), [("ddp", "single"), ("fsdp", "fsdp"), ("zero3", "zero3")])
def test_one_worker_does_the_same_work(parallel, alone):
    case = CASE.replace(parallel=parallel)
    single = one_worker(case)
    assert (single.gpus, single.parallel) == (1, alone)
    assert single.replace(gpus=4, parallel=parallel) == case
