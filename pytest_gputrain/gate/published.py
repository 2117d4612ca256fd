"""Judges runs against published figures: a verdict with its sentence. Pure, like `pytest_gputrain.gate.regression`.

A printed figure is a range: what rounds to it, or the two ends where a range was printed. Anything inside passes; the
tolerance begins at its ends. Throughput is compared as the seconds of a step that it means.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

from pytest_gputrain.cases.identity import differences
from pytest_gputrain.gate.contention import GPU_MEMORY_NOISE_BYTES, describe_others
from pytest_gputrain.gate.messages import describe_failure, describe_metric
from pytest_gputrain.records import (
    Case,
    Crashed,
    Lost,
    Measurement,
    MetricName,
    MetricVerdict,
    OutOfMemory,
    Published,
    Reply,
    Scale,
    Status,
    TimedOut,
    Verdict,
)
from pytest_gputrain.records.published import Figure, Figures
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance
from pytest_gputrain.storage.published import GATED

MEMORY: Final[tuple[MetricName, ...]] = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
"""Memory of a GPU that a table may print; each is compared with its like."""


def judge_published(
    case: Case,
    replies: Sequence[Reply],
    row: Published | None,
    tolerance: Tolerance,
    *,
    scale: Scale,
    elsewhere: Sequence[str] = (),
) -> Verdict:
    """Judge ``replies`` (one per fresh process, at least one) against the row published for this platform.

    Args:
        elsewhere: for a missing row, platforms that the case was published for.
    """
    for reply in replies:
        if isinstance(reply, (Crashed, TimedOut, Lost)):
            return Verdict(status="failed", sentence=f"{case} {describe_failure(reply)}")
    measured = [reply for reply in replies if isinstance(reply, Measurement)]
    out = [reply for reply in replies if isinstance(reply, OutOfMemory)]
    reason = why_not_comparable(case, row, scale, elsewhere)
    if row is None or reason:
        if out:  # A published row never expects that a case runs out of memory.
            return Verdict(status="failed", sentence=f"{case} {describe_failure(out[0])}; {reason}")
        return Verdict(status="not-comparable", sentence=f"{case} cannot be compared: {reason}")
    if out:
        return _out_of_memory(case, out, len(replies), row)
    if row.outcome == "out_of_memory":
        return Verdict(status="improved", sentence=f"{case} fits in memory here; as {_describe_row(row)} it does not")
    if row.outcome == "error":
        return Verdict(status="improved", sentence=f"{case} trains here; as {_describe_row(row)} it ends with an error")
    figures = row.figures.get(GATED, Figures())
    metrics = [_time(case, measured, figures, tolerance.time, row.time_not_judged)]
    metrics += [_memory(name, measured, row, tolerance.memory) for name in MEMORY]
    return _conclude(case, tuple(metric for metric in metrics if metric is not None), measured, row)


def why_not_comparable(case: Case, row: Published | None, scale: Scale, elsewhere: Sequence[str] = ()) -> str:
    """Say why figures of ``case`` cannot be compared with ``row``; empty if they can."""
    if scale == "tiny":
        return "published figures are of the full model, this is the tiny scale"
    if row is None:
        return f"published for {', '.join(elsewhere)} only" if elsewhere else "no published table has it"
    if row.case.identity() != case.identity():
        return f"it is not the case of its row in {row.table} ({differences(row.case, case)})"
    if row.outcome == "measured" and not row.figures:
        return f"its row in {row.table} has pictures, not figures"
    return ""


class StepSeconds(NamedTuple):
    """The range of seconds of a step that a printed, rounded figure stands for."""

    least: float
    middle: float
    most: float


def step_seconds(case: Case, figures: Figures) -> StepSeconds | None:
    """Return the seconds of one micro-batch on every GPU, from whatever speed the table prints; None if it prints
    none."""
    if figures.step_seconds:
        printed = figures.step_seconds
        return StepSeconds(printed.least, printed.middle, printed.most)
    if figures.update_seconds:
        printed, parts = figures.update_seconds, case.gradient_accumulation
        return StepSeconds(printed.least / parts, printed.middle / parts, printed.most / parts)
    if figures.samples_per_second:
        return _seconds_of(case.batch_size * case.gpus, figures.samples_per_second)
    if figures.samples_per_second_per_gpu:
        return _seconds_of(case.batch_size, figures.samples_per_second_per_gpu)
    return None


def _seconds_of(samples: int, speed: Figure) -> StepSeconds:
    return StepSeconds(samples / speed.most, samples / speed.middle, samples / speed.least)


def _time(
    case: Case, measured: Sequence[Measurement], figures: Figures, tolerance: float, not_judged: str
) -> MetricVerdict | None:
    printed = step_seconds(case, figures)
    if printed is None:
        return None
    if not_judged:
        value = statistics.median(run.median_step_seconds for run in measured)
        return MetricVerdict(
            metric="step_seconds", status="not-comparable", value=value, baseline=printed.middle, note=not_judged
        )
    seconds = [_seconds(case, run, figures) for run in measured]
    known_seconds = [value for value in seconds if value is not None]
    if not known_seconds:
        note = f"published for whole updates, and {len(measured[0].step_seconds)} steps hold none"
        return MetricVerdict(metric="step_seconds", status="not-comparable", baseline=printed.middle, note=note)
    value = statistics.median(known_seconds)
    limit = printed.most * (1 + tolerance)
    status: Status = "regressed" if value > limit else "improved" if value < printed.least / (1 + tolerance) else "pass"
    others = describe_others(measured) if status == "regressed" else ""
    return MetricVerdict(
        metric="step_seconds",
        status="inconclusive" if others else status,
        value=value,
        baseline=printed.middle,
        limit=limit,
        note=f"measured {others}" if others else "",
        runs=len(measured),
    )


def _seconds(case: Case, run: Measurement, figures: Figures) -> float | None:
    """Return a run's seconds of one micro-batch: with its share of the update, unless the table gives those of a step."""
    if figures.step_seconds or case.gradient_accumulation == 1:
        return run.median_step_seconds
    seconds = run.update_seconds(case.gradient_accumulation)
    return None if seconds is None else seconds / case.gradient_accumulation


def _memory(
    name: MetricName, measured: Sequence[Measurement], row: Published, tolerance: MemoryTolerance
) -> MetricVerdict | None:
    framework, printed = next(
        ((framework, figure) for framework, figures in row.figures.items() if (figure := getattr(figures, name))), ("", None)
    )
    if printed is None:
        return None
    values = [value for run in measured if (value := getattr(run, name)) is not None]
    value = statistics.median_high(values) if values else None
    note = f"published for {framework}, not {GATED}" if framework != GATED else "" if values else "not measured here"
    note = note or row.memory_not_judged
    if value is None or note:
        return MetricVerdict(metric=name, status="not-comparable", value=value, baseline=printed.middle, note=note)
    slack = tolerance.bytes + GPU_MEMORY_NOISE_BYTES
    limit = printed.most * (1 + tolerance.ratio) + slack
    least = printed.least / (1 + tolerance.ratio) - slack
    status: Status = "regressed" if value > limit else "improved" if value < least else "pass"
    return MetricVerdict(metric=name, status=status, value=value, baseline=printed.middle, limit=limit, runs=len(measured))


def _out_of_memory(case: Case, out: Sequence[OutOfMemory], runs: int, row: Published) -> Verdict:
    failure = f"{case} {describe_failure(out[0])}"
    if row.outcome == "out_of_memory" and len(out) < runs:
        fitted = runs - len(out)
        return Verdict(
            status="improved",
            sentence=f"{case} fits in memory in {fitted} of {runs} runs; as {_describe_row(row)} it does not",
        )
    if row.outcome == "out_of_memory" and out[0].where == "device":
        return Verdict(status="pass", sentence=f"{failure}, as {_describe_row(row)}")
    if row.outcome != "measured":
        published_outcome = "ends with an error" if row.outcome == "error" else "runs out of device memory"
        return Verdict(status="failed", sentence=f"{failure}; as {_describe_row(row)} it {published_outcome}")
    share = f" in {len(out)} of {runs} runs" if runs > 1 else ""
    return Verdict(status="regressed", sentence=f"{failure}{share}; as {_describe_row(row)} it fits")


def _conclude(case: Case, metrics: tuple[MetricVerdict, ...], measured: Sequence[Measurement], row: Published) -> Verdict:
    sentences: dict[str, list[str]] = {"regressed": [], "inconclusive": [], "improved": []}
    for metric in metrics:
        if metric.status in sentences:
            sentences[metric.status].append(describe_metric(metric) + (f"; {metric.note}" if metric.note else ""))
    if sentences["regressed"]:
        row_and_software = f"{_describe_row(row)}; here with {_describe_software(measured[0])}"
        sentence = f"{case} {' and '.join(sentences['regressed'])} ({row_and_software})"
        return Verdict(status="regressed", sentence=sentence, metrics=metrics)
    statuses: tuple[Status, ...] = ("inconclusive", "improved")
    for status in statuses:
        if sentences[status]:
            sentence = f"{case} {' and '.join(sentences[status])} ({_describe_row(row)})"
            return Verdict(status=status, sentence=sentence, metrics=metrics)
    if all(metric.status == "not-comparable" for metric in metrics):
        reasons = "; ".join(dict.fromkeys(metric.note for metric in metrics)) or f"{row.table} prints nothing that is judged"
        return Verdict(status="not-comparable", sentence=f"{case} cannot be compared: {reasons}", metrics=metrics)
    return Verdict(status="pass", sentence=f"{case} is as {_describe_row(row)}", metrics=metrics)


def _describe_row(row: Published) -> str:
    return f"published in {row.table} with {row.made_with}"


def _describe_software(run: Measurement) -> str:
    torch = run.environment.packages.get("torch")
    return f"{f'torch {torch} on ' if torch else ''}{run.environment.device_name}"
