"""Judges figures against the absolute limits of a test (`gpu_limit`), whatever the baseline says. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pytest_gputrain.gate.contention import describe_others
from pytest_gputrain.gate.count_lines import describe_most, format_count, most_of_a_step
from pytest_gputrain.gate.messages import count
from pytest_gputrain.gate.step_times import exceeds
from pytest_gputrain.records import (
    FAILING,
    Case,
    Counts,
    Crashed,
    LimitVerdict,
    Lost,
    Measurement,
    Reply,
    Scale,
    TimedOut,
    Verdict,
)
from pytest_gputrain.records.counts import COUNT_FIGURES
from pytest_gputrain.records.tolerance import Cap
from pytest_gputrain.utils.units import format_bytes, format_seconds


class JudgedLimits(NamedTuple):
    limits: tuple[LimitVerdict, ...]
    settled: bool
    """Whether further fresh processes could not change them."""


def judge_limits(
    caps: Sequence[Cap], case: Case, replies: Sequence[Reply], *, scale: Scale, cpu_time: bool, most: int
) -> JudgedLimits:
    """Judge ``replies`` (one per fresh process) against each of ``caps``.

    A figure is over its limit if it is in every one of three processes: one that is bad must not fail a case. Where bytes
    are counted exactly, all of them count the same.

    Args:
        cpu_time: whether time on a CPU is judged.
        most: processes that there may be.
    """
    measured = [reply for reply in replies if isinstance(reply, Measurement)]
    lost = len(replies) - len(measured)
    limits, settled = [], True
    for cap in caps:
        if cap.metric in COUNT_FIGURES:
            counts, again = [*(run.counts for run in measured), None, None][:2]
            limit = _of_count(cap, counts, again, _why_not_of_this_scale(case, scale))
            limits.append(limit)
            settled = settled and (limit.status != "over-limit" or len(measured) > 1 or most == 1)
            continue
        values = [_value(cap, reply) for reply in measured]
        reason = "there are no figures" if not values else _why_not_judged(cap, case, measured[0], scale, cpu_time)
        over: bool | None = False
        if not reason:
            exact = cap.metric == "peak_allocated_bytes" and all(run.counts_exactly for run in measured)
            over = exceeds(values, cap.most, 1 if exact else most - lost)
            if over and cap.metric == "step_seconds" and (others := describe_others(measured)):
                reason = f"it exceeds the limit, but was measured {others}"
        value = statistics.median_high(values) if values else None
        limits.append(_judged(cap, value, reason, is_over=over is not False, runs=len(values)))
        settled = settled and over is not None
    # After a crash no further process is started, so the limits are settled.
    return JudgedLimits(tuple(limits), settled or any(isinstance(reply, (Crashed, TimedOut, Lost)) for reply in replies))


def judge_exact(
    caps: Sequence[Cap],
    case: Case,
    peak: int,
    *,
    scale: Scale,
    counts: Counts | None = None,
    again: Counts | None = None,
) -> tuple[LimitVerdict, ...]:
    """Judge figures of an emulated GPU against each of ``caps``.

    Args:
        peak: allocated bytes.
        counts: the counts of the steps, of which every step is judged.
        again: the same in a second run. A count that is over its limit in one of both is in doubt.
    """
    limits = []
    for cap in caps:
        if cap.metric in COUNT_FIGURES:
            limits.append(_of_count(cap, counts, again, _why_not_of_this_scale(case, scale)))
            continue
        timed = cap.metric == "step_seconds"
        reason = "an emulated GPU has no time" if timed else _why_not_of_this_scale(case, scale)
        limits.append(_judged(cap, None if timed else peak, reason, is_over=peak > cap.most, runs=1))
    return tuple(limits)


def _judged(cap: Cap, value: float | None, reason: str, *, is_over: bool, runs: int) -> LimitVerdict:
    return LimitVerdict(
        metric=cap.metric,
        status="not-judged" if reason else "over-limit" if is_over else "pass",
        value=value,
        limit=cap.most,
        stated=cap.stated,
        note=reason,
        runs=runs,
    )


def _of_count(cap: Cap, counts: Counts | None, again: Counts | None, reason: str = "") -> LimitVerdict:
    """Judge the step that has most of a count."""
    figure = next(figure for figure in COUNT_FIGURES if figure == cap.metric)
    limit = LimitVerdict(metric=figure, status="pass", value=None, limit=cap.most, stated=cap.stated)
    if not reason and figure == "python_calls" and counts and not counts.python:
        reason = "they were not counted"
    if reason or counts is None or not counts.steps or figure not in counts.figures:
        where = "a CPU" if counts and counts.on_cpu else "a GPU" if counts and counts.profiled else "an emulated GPU"
        not_here = f"a run on {where} does not count {figure}" if counts and counts.steps else ""
        note = reason or not_here or "what its steps ask of the GPU was not counted"
        return msgspec.structs.replace(limit, status="not-judged", note=note)
    most = most_of_a_step(figure, counts)
    limit = msgspec.structs.replace(limit, value=most)
    if most <= cap.most:
        return limit
    said, cause = describe_most(figure, counts)
    note = f"{said}, over its limit of {format_count(figure, round(cap.most))}{f': {cause}' if cause else ''}"
    if again is None or (again.steps and most_of_a_step(figure, again) > cap.most):
        return msgspec.structs.replace(limit, status="over-limit", note=note)
    note += ", which a second run in a fresh process does not confirm"
    return msgspec.structs.replace(limit, status="inconclusive", note=note)


def _value(cap: Cap, reply: Measurement) -> float:
    return reply.median_step_seconds if cap.metric == "step_seconds" else reply.peak_allocated_bytes


def _why_not_judged(cap: Cap, case: Case, reply: Measurement, scale: Scale, cpu_time: bool) -> str:
    """Say why a limit cannot judge a measurement; empty if it can. The tiny scale does not apply to a case of own code."""
    if reason := _why_not_of_this_scale(case, scale):
        return reason
    if cap.metric == "step_seconds" and reply.environment.device_type == "cpu" and not cpu_time:
        return "time on a CPU is shown, not judged"
    return ""


def _why_not_of_this_scale(case: Case, scale: Scale) -> str:
    return "it is meant for the full model, and this is the tiny scale" if scale == "tiny" and not case.code else ""


def with_limits(case: Case, verdict: Verdict | None, limits: tuple[LimitVerdict, ...]) -> Verdict | None:
    """Return ``verdict`` with the verdicts of the limits; None for a case without a verdict and without limits."""
    if not limits:
        return verdict
    over, doubtful = (
        " and ".join(_describe(limit) for limit in limits if limit.status == status)
        for status in ("over-limit", "inconclusive")
    )
    if verdict is None:
        judged = any(limit.status != "not-judged" for limit in limits)
        sentence = f"{case} is within its limits" if judged else f"{case} has no limit that was judged: {limits[0].note}"
        verdict = Verdict(status="pass", sentence=sentence)
    if not over and doubtful and verdict.status not in FAILING:
        begin = f"{verdict.sentence}; it also" if verdict.status == "inconclusive" else f"{case}"
        return msgspec.structs.replace(verdict, status="inconclusive", sentence=f"{begin} {doubtful}", limits=limits)
    if not over:
        return msgspec.structs.replace(verdict, limits=limits)
    if verdict.status in ("failed", "regressed"):
        return msgspec.structs.replace(verdict, sentence=f"{verdict.sentence}; it also {over}", limits=limits)
    return msgspec.structs.replace(verdict, status="over-limit", sentence=f"{case} {over}", limits=limits)


def _describe(limit: LimitVerdict) -> str:
    assert limit.value is not None
    if limit.metric in COUNT_FIGURES:
        return f"{limit.note} ({limit.stated})"
    if limit.metric == "step_seconds":
        what = f"takes {format_seconds(limit.value)} a step, over its limit of {format_seconds(limit.limit)}"
    else:
        what = f"needs {format_bytes(limit.value)} peak allocated, over its limit of {format_bytes(limit.limit)}"
    return f"{what} in {count(limit.runs, 'fresh run')} ({limit.stated})"
