"""Runs against a baseline: a verdict with its sentence. Pure: no file, clock or hardware.

The rule is plain here: the median of the runs' median steps against that of the baseline's, the median of the runs' peaks
against the largest of the baseline's, the median of their scaling efficiencies where a test asks for them, each with a
tolerance; a case fits if every run does. It wants no more than what a baseline stores raw, so a better rule can replace it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_gputrain.cases import differences
from pytest_gputrain.records import (
    Baseline,
    BaselineRun,
    Case,
    Crashed,
    Environment,
    Measurement,
    MetricName,
    MetricVerdict,
    OutOfMemory,
    Reply,
    Status,
    TimedOut,
    Verdict,
)
from pytest_gputrain.scaling import efficiency
from pytest_gputrain.settings import MemoryTolerance
from pytest_gputrain.units import MiB, format_bytes, format_percent, format_seconds, format_topology

GPU_MEMORY_FLOOR_BYTES: Final = 64 * MiB
"""Added to the memory limit on a GPU, whose allocator differs by a few segments from run to run. A CPU's count is exact."""

SHARED_CPU_RATIO: Final = 0.1
"""Least memory tolerance for several processes on a CPU: the threads of gloo let go of a buffer sooner or later, which moved
the peak of tiny models under FSDP2 by up to 6 % from run to run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How much worse passes."""

    time: float
    memory: MemoryTolerance


def judge(
    case: Case,
    replies: Sequence[Reply],
    baseline: Baseline | None,
    tolerance: Tolerance,
    hint: str = "",
    no_scaling: str = "",
) -> Verdict:
    """What ``replies`` (one per fresh process, at least one) mean against ``baseline``.

    Args:
        hint: for a missing baseline, what else is known of it.
        no_scaling: why the scaling efficiency, which was asked for, is not known.
    """
    for reply in replies:
        if isinstance(reply, (Crashed, TimedOut)):
            return Verdict(status="failed", sentence=f"{case} {describe_failure(reply)}")
    measured = [reply for reply in replies if isinstance(reply, Measurement)]
    out = [reply for reply in replies if isinstance(reply, OutOfMemory)]
    if baseline is None:
        return _without_baseline(case, out, hint, no_scaling)
    if baseline.case.identity() != case.identity():
        change = differences(baseline.case, case)
        return Verdict(
            status="not-comparable",
            sentence=f"{case} is not what its baseline of {_dates(baseline)} measured ({change}); {_RECORD}",
        )
    here = next(reply.environment for reply in replies if isinstance(reply, (Measurement, OutOfMemory)))
    foreign = _other_device(here, baseline.runs)
    fitted = [run for run in baseline.runs if run.outcome == "measured"]
    baseline_fits = len(fitted) == len(baseline.runs)
    if foreign and (out or not baseline_fits):
        sentence = f"{case} cannot be compared with its baseline of {_dates(baseline)}: {foreign}; {_RECORD}"
        return Verdict(status="not-comparable", sentence=sentence)
    if out:
        return _out_of_memory(case, out, len(replies), baseline, baseline_fits)
    if not baseline_fits:
        return Verdict(
            status="improved",
            sentence=f"{case} fits in memory now; its baseline of {_dates(baseline)} did not; {_RECORD}",
        )
    metrics = [_time(measured, fitted, tolerance.time), _memory(measured, fitted, tolerance.memory)]
    if no_scaling:
        metrics.append(MetricVerdict(metric="scaling_efficiency", status="not-comparable", note=no_scaling))
    elif (here_scales := efficiency(case, measured)) is not None:
        metrics.append(_scaling(here_scales, efficiency(case, fitted), measured, fitted, tolerance.time))
    return _conclude(case, tuple(metrics), measured, baseline, fitted)


def describe_failure(reply: Crashed | TimedOut | OutOfMemory) -> str:
    """What went wrong, as the rest of a sentence that begins with the case."""
    at = f" in step {reply.step + 1}" if reply.step is not None and reply.phase in ("warmup", "measure") else ""
    rank = "" if isinstance(reply, TimedOut) or reply.rank is None else f", rank {reply.rank}"
    place = f"({reply.phase}{at}{rank})"
    if isinstance(reply, TimedOut):
        return f"was ended after {format_seconds(reply.timeout_seconds)} {place}; --gpu-timeout allows more"
    if isinstance(reply, OutOfMemory):
        return f"ran out of {reply.where} memory {place}: {reply.message}"
    return f"gave no measurement {place}: {reply.sentence}"


_RECORD: Final = "record it with --gpu-baseline-update"


def _without_baseline(case: Case, out: Sequence[OutOfMemory], hint: str, no_scaling: str) -> Verdict:
    if out:
        return Verdict(
            status="failed",
            sentence=f"{case} {describe_failure(out[0])}; if that is expected, {_RECORD}",
        )
    beside = f", and no scaling efficiency ({no_scaling})" if no_scaling else ""
    return Verdict(status="new", sentence=f"{case} has no baseline{f' ({hint})' if hint else ''}{beside}; {_RECORD}")


def _other_device(here: Environment | None, runs: Iterable[BaselineRun]) -> str:
    """Which other device a run was recorded on; empty where all were recorded on this one, or this one is not known."""
    for there in (run.environment for run in runs):
        if here is not None and here.device_name != there.device_name:
            return f"recorded on {there.device_name}, here {here.device_name}"
    return ""


def _out_of_memory(case: Case, out: Sequence[OutOfMemory], runs: int, baseline: Baseline, baseline_fits: bool) -> Verdict:
    what = f"{case} {describe_failure(out[0])}"
    if not baseline_fits:
        known = {run.out_of for run in baseline.runs if run.outcome == "out_of_memory"}
        if out[0].where in known:
            return Verdict(status="pass", sentence=f"{what}, as in its baseline of {_dates(baseline)}")
        return Verdict(
            status="failed",
            sentence=f"{what}; its baseline of {_dates(baseline)} ran out of {' and '.join(map(str, known))} memory",
        )
    peak = max((run.peak_allocated_bytes or 0 for run in baseline.runs), default=0)
    some = f" in {len(out)} of {runs} runs" if runs > 1 else ""
    return Verdict(
        status="regressed",
        sentence=f"{what}{some}; its baseline of {_dates(baseline)} fitted with {format_bytes(peak)} allocated; "
        f"{_changes(out[0].environment, baseline.runs)}",
        metrics=(MetricVerdict(metric="peak_allocated_bytes", status="regressed", baseline=peak),),
    )


def _time(measured: Sequence[Measurement], fitted: Sequence[BaselineRun], tolerance: float) -> MetricVerdict:
    value = statistics.median(run.median_step_seconds for run in measured)
    base = statistics.median(statistics.median(run.step_seconds) for run in fitted)
    limit = base * (1 + tolerance)
    reason = _why_time_is_foreign(measured[0].environment, fitted)
    if reason:
        return MetricVerdict(metric="step_seconds", status="not-comparable", value=value, baseline=base, note=reason)
    status: Status = "regressed" if value > limit else "improved" if value < base / (1 + tolerance) else "pass"
    return MetricVerdict(metric="step_seconds", status=status, value=value, baseline=base, limit=limit)


def _why_time_is_foreign(here: Environment, fitted: Sequence[BaselineRun]) -> str:
    if here.device_type == "cpu":
        # The same tiny step in fresh processes of one machine differed by up to 26 %, and more beside a busy neighbour.
        return "time on a CPU is shown, not judged"
    other = _other_device(here, fitted)
    if other:
        return other
    return _other_count(here, fitted)


def _other_count(here: Environment, fitted: Sequence[BaselineRun]) -> str:
    counts = {run.environment.device_count for run in fitted} - {here.device_count}
    return f"recorded with {min(counts)} processes, here {here.device_count}" if counts else ""


def _memory(measured: Sequence[Measurement], fitted: Sequence[BaselineRun], tolerance: MemoryTolerance) -> MetricVerdict:
    value = statistics.median_high(run.peak_allocated_bytes for run in measured)
    peaks = [run.peak_allocated_bytes for run in fitted if run.peak_allocated_bytes is not None]
    here = measured[0].environment
    foreign = next((run.environment for run in fitted if run.environment.device_type != here.device_type), None)
    reason = _other_count(here, fitted)
    if foreign:
        reason = f"recorded on {foreign.device_name}, here {here.device_name}"
    elif not peaks:
        reason = "the baseline has no peak"
    if reason:
        return MetricVerdict(metric="peak_allocated_bytes", status="not-comparable", value=value, note=reason)
    highest, lowest = max(peaks), min(peaks)
    on_cpu = here.device_type == "cpu"
    slack = tolerance.bytes + (0 if on_cpu else GPU_MEMORY_FLOOR_BYTES)
    exact = on_cpu and here.device_count == 1
    ratio = max(tolerance.ratio, SHARED_CPU_RATIO) if on_cpu and not exact else tolerance.ratio
    limit = highest * (1 + ratio) + slack
    status: Status = "pass"
    if value > limit:
        status = "regressed"
    elif value < lowest / (1 + ratio) - slack:
        status = "improved"
    # A CPU's peak is an exact count: within the limit a change still says that something changed.
    changed = exact and status == "pass" and not lowest <= value <= highest
    note = f"changed by {value - highest:+,} bytes, within the limit" if changed else ""
    return MetricVerdict(metric="peak_allocated_bytes", status=status, value=value, baseline=highest, limit=limit, note=note)


def _scaling(
    value: float, base: float | None, measured: Sequence[Measurement], fitted: Sequence[BaselineRun], tolerance: float
) -> MetricVerdict:
    reason = _why_time_is_foreign(measured[0].environment, fitted)
    if reason:
        return MetricVerdict(metric="scaling_efficiency", status="not-comparable", value=value, baseline=base, note=reason)
    if base is None:
        return MetricVerdict(metric="scaling_efficiency", status="new", value=value, note="the baseline has none")
    limit = base / (1 + tolerance)
    status: Status = "regressed" if value < limit else "improved" if value > base * (1 + tolerance) else "pass"
    return MetricVerdict(metric="scaling_efficiency", status=status, value=value, baseline=base, limit=limit)


def _conclude(
    case: Case,
    metrics: tuple[MetricVerdict, ...],
    measured: Sequence[Measurement],
    baseline: Baseline,
    fitted: Sequence[BaselineRun],
) -> Verdict:
    compared = [metric for metric in metrics if metric.status not in ("not-comparable", "new")]
    if not compared:
        reasons = "; ".join(dict.fromkeys(metric.note for metric in metrics))
        sentence = f"{case} cannot be compared with its baseline of {_dates(baseline)}: {reasons}; {_RECORD}"
        return Verdict(status="not-comparable", sentence=sentence, metrics=metrics)
    worse = [metric for metric in compared if metric.status == "regressed"]
    better = [metric for metric in compared if metric.status == "improved"]
    if worse:
        findings = " and ".join(finding(metric, len(measured)) for metric in worse)
        recorded = f"baseline of {_dates(baseline)}, {_count(len(fitted), 'run')}"
        changes = [_changes(measured[0].environment, fitted), *_counters(measured[0], fitted)]
        return Verdict(status="regressed", sentence=f"{case} {findings} ({recorded}); {', '.join(changes)}", metrics=metrics)
    # What was asked for and cannot be gated must not pass for gated.
    for metric in (metric for metric in metrics if metric.metric == "scaling_efficiency"):
        if metric.status == "new":
            sentence = f"{case} has no scaling efficiency in its baseline of {_dates(baseline)}; {_RECORD}"
            return Verdict(status="new", sentence=sentence, metrics=metrics)
        if metric.value is None:
            sentence = f"{case} has no scaling efficiency: {metric.note}"
            return Verdict(status="not-comparable", sentence=sentence, metrics=metrics)
    if better:
        findings = " and ".join(finding(metric, len(measured)) for metric in better)
        return Verdict(status="improved", sentence=f"{case} {findings}; {_RECORD} to keep it", metrics=metrics)
    notes = [metric.note for metric in metrics if metric.note]
    return Verdict(
        status="pass", sentence=f"{case} is within its limits{': ' if notes else ''}{'; '.join(notes)}", metrics=metrics
    )


_MEMORY: Final[dict[MetricName, str]] = {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "device_used_bytes": "in use on the device",
}


def finding(metric: MetricVerdict, runs: int) -> str:
    """``is 7.2 % slower: 5.04 s against 4.70 s a step, limit 4.84 s``, to follow the case in a sentence."""
    assert metric.value is not None
    assert metric.baseline is not None
    delta = metric.value / metric.baseline - 1 if metric.baseline else float("inf")
    size = format_percent(abs(delta), signed=False)
    limit = ""
    if metric.metric == "scaling_efficiency":
        if metric.limit is not None and delta < 0:
            limit = f", limit {format_percent(metric.limit, signed=False)}"
        values = f"{format_percent(metric.value, signed=False)} against {format_percent(metric.baseline, signed=False)}"
        return f"scales {size} {'worse' if delta < 0 else 'better'}: an efficiency of {values}{limit}"
    if metric.metric == "step_seconds":
        if metric.limit is not None and delta > 0:
            limit = f", limit {format_seconds(metric.limit)}"
        word = "slower" if delta > 0 else "faster"
        of = f" in {runs} runs" if runs > 1 else ""
        values = f"{format_seconds(metric.value)} against {format_seconds(metric.baseline)} a step{of}"
        return f"is {size} {word}: {values}{limit}"
    if metric.limit is not None and delta > 0:
        limit = f", limit {format_bytes(metric.limit)}"
    word = "more" if delta > 0 else "less"
    values = f"{format_bytes(metric.value)} against {format_bytes(metric.baseline)} {_MEMORY[metric.metric]}"
    return f"needs {format_bytes(abs(metric.value - metric.baseline))} ({size}) {word} memory: {values}{limit}"


def _counters(measured: Measurement, fitted: Sequence[BaselineRun]) -> Iterable[str]:
    """Exact counters that moved too: they tell a changed model from a slower one."""
    flops, before = measured.flops_per_step, fitted[-1].flops_per_step
    if flops and before and flops != before:
        yield f"{format_percent(flops / before - 1)} FLOPs per step"
    if measured.model_bytes and fitted[-1].model_bytes and measured.model_bytes != fitted[-1].model_bytes:
        yield f"model memory {format_bytes(fitted[-1].model_bytes)} -> {format_bytes(measured.model_bytes)}"
    alone, alone_before = measured.one_worker_seconds, fitted[-1].one_worker_seconds
    if alone and alone_before:
        yield f"one worker alone {format_seconds(alone_before)} -> {format_seconds(alone)}"


def _changes(here: Environment | None, runs: Sequence[BaselineRun]) -> str:
    """What differs between the baseline's latest environment and this one."""
    if here is None or not runs:
        return "environment unknown"
    there = runs[-1].environment
    changes = []
    for name in Environment.__struct_fields__:
        before, after = getattr(there, name), getattr(here, name)
        if name == "packages":
            changes += [
                f"{package} {before.get(package, 'absent')} -> {after.get(package, 'absent')}"
                for package in sorted({*before, *after})
                if before.get(package) != after.get(package)
            ]
        elif name == "topology" and before != after:
            changes.append(f"topology {format_topology(before)} -> {format_topology(after)}")
        elif before != after:
            changes.append(f"{name.replace('_', ' ')} {before} -> {after}")
    return f"since then: {', '.join(changes)}" if changes else "same environment"


def _dates(baseline: Baseline) -> str:
    return max((run.date[:10] for run in baseline.runs), default="an unknown day")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
