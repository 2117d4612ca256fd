"""Judges the runs of head against those of base, round by round (`gputrain ab`). Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from pytest_gputrain.gate.criteria import Criteria, Judged
from pytest_gputrain.gate.messages import OtherSide
from pytest_gputrain.gate.regression import judge
from pytest_gputrain.gate.step_times import levelled
from pytest_gputrain.gate.suite_noise import prior_of
from pytest_gputrain.records import (
    Baseline,
    BaselineRun,
    Crashed,
    Emulated,
    Lost,
    Measured,
    Measurement,
    Reply,
    Report,
    Result,
    Summary,
    TimedOut,
    Verdict,
)
from pytest_gputrain.records.tolerance import CountTerms, MemoryTolerance, Tolerance
from pytest_gputrain.storage.reports import to_baseline

_Run = TypeVar("_Run", BaselineRun, Measurement)

_LEAST_ROUNDS: Final = 2
"""The least rounds of a case whose time is compared, because one round does not show how much rounds differ."""

_Key = tuple[str, str]
"""Suite and key of a case."""


def tolerance_of(settings: Mapping[str, Any]) -> Tolerance:
    """Return the tolerance that a report's settings set.

    Raises:
        KeyError, TypeError, ValueError: they do not say so.
    """
    return Tolerance(
        time=float(settings["time_tolerance"]),
        memory=msgspec.convert(settings["memory_tolerance"], MemoryTolerance),
        cpu_time=bool(settings.get("judge_cpu_time")),
    )


def _count_terms_of(settings: Mapping[str, Any]) -> CountTerms:
    """Return how counts are judged by a report's settings."""
    given = {"mode": settings.get("counts"), "tolerances": settings.get("count_tolerances")}
    return msgspec.convert({name: value for name, value in given.items() if value}, CountTerms)


class JudgedCase(NamedTuple):
    result: Result
    settled: bool
    """Whether no further round could change the verdict. If one could, this is the verdict without it."""


def compare(base: Sequence[Report], head: Sequence[Report], base_name: str, rounds: int = 0) -> dict[_Key, JudgedCase]:
    """Judge head's results, with all their runs, against base.

    Args:
        base: a report a round, as ``head``.
        base_name: how to name base.
        rounds: the most rounds that there may be, if these are the first ones.
    """
    rounds = max(rounds, len(head))
    before, after = [by_case(report) for report in base], [by_case(report) for report in head]
    keys = list(dict.fromkeys(key for round_ in after for key in round_))
    baselines = {key: _baseline(key, base, before) for key in keys}
    sides = {key: _level(baselines[key], [round_[key] for round_ in after if key in round_]) for key in keys}
    prior = prior_of(baseline for baseline, _ in sides.values() if baseline and baseline.runs)
    # Time on a CPU is judged here, because both sides ran on one host in the same minutes.
    tolerance = dataclasses.replace(tolerance_of(head[-1].settings), cpu_time=True)
    if rounds >= tolerance.cpu_runs:
        tolerance = dataclasses.replace(tolerance, cpu_runs=_LEAST_ROUNDS)
    counts = _count_terms_of(head[-1].settings)
    judged = {}
    for key, (baseline, results_of) in sides.items():
        replies = tuple(reply for result in results_of for reply in result.replies)
        criteria = criteria_of(results_of[0], baseline, tolerance, prior)
        criteria = dataclasses.replace(criteria, counts=counts, most=rounds, paired=True)
        verdict, settled = verdict_of(criteria, replies, base_name)
        is_compared = verdict.status not in ("new", "failed", "not-comparable")
        settled = settled and not (is_compared and len(replies) < min(_LEAST_ROUNDS, rounds))
        raw = tuple(reply for round_ in after if key in round_ for reply in round_[key].replies)
        result = msgspec.structs.replace(_over_rounds(results_of), replies=raw, verdict=verdict)
        judged[key] = JudgedCase(result, settled)
    return judged


def missing(base: Sequence[Report], head: Sequence[Report]) -> list[tuple[str, int]]:
    """Return the cases that head has in fewer rounds than base, and in how many."""
    before, after = (Counter(key for report in reports for key in by_case(report)) for reports in (base, head))
    return [(key, after[suite, key]) for (suite, key), rounds in before.items() if after[suite, key] < rounds]


def _over_rounds(results: Sequence[Result]) -> Result:
    """Return the last result with medians over all rounds that measured. Figures without a median are those of the last
    round."""
    measured = [result for result in results if result.summary is not None]
    if not measured:
        return results[-1]
    figures: dict[str, Any] = {}
    for name in Summary.__struct_fields__:
        values = [getattr(result.summary, name) for result in measured]
        numbers = [value for value in values if isinstance(value, int | float)]
        median = statistics.median_high if isinstance(values[-1], int) else statistics.median
        figures[name] = median(numbers) if numbers else values[-1]
    return msgspec.structs.replace(measured[-1], summary=Summary(**figures))


def criteria_of(result: Result, baseline: Baseline | None, tolerance: Tolerance, prior: float) -> Criteria:
    """Return the baseline, limits and tolerances of a case that is compared with another branch or report."""
    return Criteria(
        case=result.case,
        scale=result.scale,
        tolerance=tolerance,
        baseline=baseline,
        prior=prior,
        other_side=OtherSide.base(),
    )


def verdict_of(criteria: Criteria, replies: Sequence[Reply], base_name: str, shift: float = 0.0) -> Judged[Verdict]:
    """Return the verdict on replies that are compared with another branch or report.

    Args:
        base_name: how to name that side.
        shift: as of `pytest_gputrain.gate.judge.judge`.
    """
    case, baseline = criteria.case, criteria.baseline
    crashed = any(isinstance(reply, Crashed | TimedOut | Lost) for reply in replies)
    if baseline is None and not crashed:
        return Judged(Verdict(status="new", sentence=f"{case}: {base_name} has no such case"))
    if baseline is not None and not baseline.runs and not crashed:
        return Judged(Verdict(status="not-comparable", sentence=f"{case}: {base_name} has no figures of it"))
    return judge(criteria, replies, shift)


def by_case(report: Report) -> dict[_Key, Measured | Emulated]:
    """Return the first result of each case. Other tests may have measured the case again, or asked for its figures.

    A test that has changed nothing in the environment comes before one that has.
    """
    results: dict[_Key, Measured | Emulated] = {}
    for result in sorted(report.results, key=lambda result: bool(result.variables)):
        if isinstance(result, Measured | Emulated):
            results.setdefault((result.suite, result.key), result)
    return results


def _baseline(key: _Key, reports: Sequence[Report], rounds: Sequence[Mapping[_Key, Measured | Emulated]]) -> Baseline | None:
    baselines = [
        to_baseline(round_[key], date=report.created, session=report.session, commit=report.commit)
        for report, round_ in zip(reports, rounds, strict=True)
        if key in round_
    ]
    return (
        msgspec.structs.replace(baselines[0], runs=tuple(run for baseline in baselines for run in baseline.runs))
        if baselines
        else None
    )


def _level(baseline: Baseline | None, results: Sequence[Result]) -> tuple[Baseline | None, list[Result]]:
    """Return both sides without the noise that the two runs of each round share, if every round has figures of both."""
    runs = baseline.runs if baseline else ()
    replies = [reply for result in results for reply in result.replies]
    measured = [reply for reply in replies if isinstance(reply, Measurement)]
    if (
        baseline is None
        or not runs
        or not len(runs) == len(measured) == len(replies)
        or not all(run.step_seconds for run in runs)
    ):
        return baseline, list(results)
    base_seconds, head_seconds = levelled(_medians(baseline), [reply.median_step_seconds for reply in measured])
    levelled_runs = tuple(_with_median(run, seconds) for run, seconds in zip(runs, base_seconds, strict=True))
    levelled_results = [
        msgspec.structs.replace(result, replies=(_with_median(reply, seconds),))
        for result, reply, seconds in zip(results, measured, head_seconds, strict=True)
    ]
    return msgspec.structs.replace(baseline, runs=levelled_runs), levelled_results


def _with_median(run: _Run, seconds: float) -> _Run:
    """Return the run as if its median step took this long."""
    factor, alone = seconds / statistics.median(run.step_seconds), run.one_worker_seconds
    return msgspec.structs.replace(
        run,
        step_seconds=tuple(step * factor for step in run.step_seconds),
        one_worker_seconds=None if alone is None else alone * factor,
    )


def _medians(baseline: Baseline) -> list[float]:
    return [statistics.median(run.step_seconds) for run in baseline.runs if run.step_seconds]
