"""Tests the line that counts what a run did not compare."""

from __future__ import annotations

from unit_examples import CASE, result

from pytest_gputrain.records import MetricVerdict, Verdict
from pytest_gputrain.records.verdict import LimitVerdict
from pytest_gputrain.report import uncompared


def test_where_all_was_compared_there_is_no_line() -> None:
    metrics = (MetricVerdict(metric="step_seconds", status="pass", value=1.0, baseline=1.0),)
    assert uncompared.line([result(verdict=Verdict(status="pass", sentence="", metrics=metrics)), result()]) == ""


def test_cases_metrics_limits_tests_and_baselines_are_counted() -> None:
    lacking = MetricVerdict(metric="flops_per_step", status="not-comparable")
    limit = LimitVerdict(metric="step_seconds", status="not-judged", value=1.0, limit=2.0, stated="gpu_limit on test_it")
    results = [
        result(verdict=Verdict(status="new", sentence="")),
        result(verdict=Verdict(status="new", sentence="", metrics=(lacking,))),
        result(verdict=Verdict(status="recorded", sentence="")),
        result(verdict=Verdict(status="pass", sentence="", metrics=(lacking,), limits=(limit,))),
    ]
    assert uncompared.line(results, skipped=1, unclaimed=2) == (
        "not compared: 2 cases without a baseline, 1 case recorded instead, FLOPs of 1 case, step time of 1 case, "
        "1 test skipped, 2 baselines that no test asked for"
    )


def test_time_is_not_compared_with_a_prediction() -> None:
    held = Verdict(status="new", sentence="", held_to="prediction")
    assert uncompared.line([result(CASE, verdict=held)]) == "not compared: step time of 1 case"
