"""Judges measured runs against a baseline: a verdict with its sentence. Pure: no file, clock or hardware.

`pytest_gputrain.gate.step_times` has the rule of times (the median step of a process, and the scaling efficiency where a
test asks for it) and of what takes several processes to tell; here it meets the records. It wants no more than what a
baseline stores raw, so a better rule can replace it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from pytest_gputrain.cases.identity import differences
from pytest_gputrain.gate.contention import describe_memory_shortage, describe_throttling, with_contention
from pytest_gputrain.gate.counts import BY_THE_RULES, JudgedCounts, have_steps_in_common, judge_counts
from pytest_gputrain.gate.host_bound import (
    COARSE_GPU_TOLERANCE,
    GPU_PRIOR_SD,
    HOST_PRIOR_SD,
    LEAST_HOST_TOLERANCE,
    WHY_GPU_SECONDS_ARE_HELD_COARSELY,
    Pace,
    gpu_seconds,
    held_up,
    other_host,
    pace,
)
from pytest_gputrain.gate.memory import (
    JudgedPeak,
    describe_memory,
    describe_missing_phases,
    is_memory_metric,
    judge_memory,
    phase_prefix,
)
from pytest_gputrain.gate.messages import (
    OtherSide,
    describe_changes,
    describe_counters,
    describe_failure,
    describe_metric,
    describe_process_count,
)
from pytest_gputrain.gate.scaling import efficiencies
from pytest_gputrain.gate.step_times import MEAN_PRIOR_SD, MEAN_TOLERANCE, PRIOR_SD, decide, mean_step, runs_out
from pytest_gputrain.records import (
    Baseline,
    BaselineRun,
    Case,
    Crashed,
    Environment,
    Lost,
    Measurement,
    MetricName,
    MetricVerdict,
    OutOfMemory,
    Reply,
    Status,
    TimedOut,
    Verdict,
)
from pytest_gputrain.records.counts import COUNT_FIGURES
from pytest_gputrain.records.tolerance import CountTerms, Tolerance
from pytest_gputrain.utils.bounds import LEAST_RUNS_ON_A_CPU, MOST_RUNS
from pytest_gputrain.utils.units import format_bytes, format_percent, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """The circumstances of a case: its suite, its test and the number of runs."""

    most: int = MOST_RUNS
    """Runs that there may be."""
    prior: float = PRIOR_SD
    """See `pytest_gputrain.gate.step_times.suite_prior`."""
    shift: float = 0.0
    """See `pytest_gputrain.gate.step_times.suite_shift`."""
    variables: tuple[str, ...] = ()
    """Names of the environment variables that the test has changed."""
    counts: CountTerms = BY_THE_RULES
    """How it is judged what steps ask of a CPU or a GPU."""
    doubted_from: float = 0.5
    """See `pytest_gputrain.gate.step_times.decide`."""
    other_side: OtherSide | None = None
    """What it is compared with, if that is no stored baseline."""
    elsewhere: str = ""
    """Where a missing baseline may be instead, with the remedy."""

    @property
    def again(self) -> str:
        """What to do about a figure that a stored baseline lacks, as the end of a sentence."""
        return "" if self.other_side else "; record it again"


class GateResult(NamedTuple):
    verdict: Verdict
    settled: bool = True
    """Whether further fresh processes could not change the verdict; if not, it is the one if there are to be none."""


def judge(
    case: Case,
    replies: Sequence[Reply],
    baseline: Baseline | None,
    tolerance: Tolerance,
    hint: str = "",
    no_scaling: str = "",
    circumstances: Circumstances = Circumstances(),
) -> GateResult:
    """Judge ``replies`` (one per fresh process, at least one) against ``baseline``.

    Args:
        hint: for a missing baseline, what else is known of it.
        no_scaling: why the scaling efficiency, which was asked for, is not known.
    """
    for reply in replies:
        if isinstance(reply, (Crashed, TimedOut, Lost)):
            return GateResult(Verdict(status="failed", sentence=f"{case} {describe_failure(reply)}"))
    measured = [reply for reply in replies if isinstance(reply, Measurement)]
    out = [reply for reply in replies if isinstance(reply, OutOfMemory)]
    if baseline is None:
        return GateResult(_without_baseline(case, out, hint, no_scaling, circumstances.elsewhere))
    side = circumstances.other_side or OtherSide.stored(baseline)
    if baseline.case.identity() != case.identity():
        change = differences(baseline.case, case)
        sentence = f"{case} is not what {side.name} measured ({change}){side.advise(_RECORD)}"
        return GateResult(Verdict(status="not-comparable", sentence=sentence))
    here = next(reply.environment for reply in replies if isinstance(reply, (Measurement, OutOfMemory)))
    foreign = _other_device(here, baseline.runs)
    fitted = _fitted(baseline)
    baseline_fits = _fits(baseline, fitted)
    if foreign and (out or not baseline_fits):
        sentence = f"{case} cannot be compared with {side.name}: {foreign}{side.advise(_RECORD)}"
        return GateResult(Verdict(status="not-comparable", sentence=sentence))
    if out:
        return _out_of_memory(case, out, len(replies), baseline, baseline_fits, side, circumstances)
    if not baseline_fits:
        sentence = f"{case} fits in memory now; {side.name} did not{side.advise(_RECORD)}"
        return GateResult(Verdict(status="improved", sentence=sentence))
    judged_metrics = [
        *_times(measured, fitted, tolerance, circumstances),
        *map(_from_peak, judge_memory(measured, fitted, tolerance.memory, circumstances.most)),
    ]
    if (computed := _flops(measured[0], fitted, tolerance, circumstances)) is not None:
        judged_metrics.append(computed)
    if no_scaling:
        judged_metrics.append(
            _JudgedMetric(MetricVerdict(metric="scaling_efficiency", status="not-comparable", note=no_scaling))
        )
    elif measured_efficiencies := efficiencies(case, measured):
        baseline_efficiencies = efficiencies(case, fitted)
        judged_metrics.append(
            _scaling(measured_efficiencies, baseline_efficiencies, measured, fitted, tolerance, circumstances)
        )
    counts, count_metrics = _counts(measured, fitted, circumstances)
    judged_metrics += count_metrics
    verdict = _conclude(
        case,
        tuple(judged_metric.metric for judged_metric in judged_metrics),
        counts,
        measured,
        side,
        fitted,
        tolerance,
        circumstances,
    )
    return GateResult(verdict, all(judged_metric.settled for judged_metric in judged_metrics))


def first_ratio(case: Case, replies: Sequence[Reply], baseline: Baseline | None, tolerance: Tolerance) -> float | None:
    """Logarithm of the first run's step time over the baseline's; None where the two are not compared, or tell of the host.

    Where the GPU waits for the host, it is that of GPU seconds as soon as these are held to the time tolerance.
    """
    measured = [reply for reply in replies if isinstance(reply, Measurement)]
    if baseline is None or baseline.case.identity() != case.identity() or not replies or len(measured) < len(replies):
        return None
    fitted = _fitted(baseline)
    if not fitted or not _fits(baseline, fitted) or _why_time_is_foreign(measured[0].environment, fitted, tolerance):
        return None
    base, new = _medians(fitted), [measured[0].median_step_seconds]
    if pace(fitted, measured[:1]).is_host_bound:
        base, new = gpu_seconds(fitted), gpu_seconds(measured[:1])
        if WHY_GPU_SECONDS_ARE_HELD_COARSELY or not (base and new):
            return None
    return decide(base, new, tolerance=tolerance.time).ratios[0]


def _fitted(baseline: Baseline) -> list[BaselineRun]:
    return [run for run in baseline.runs if run.outcome == "measured"]


def _fits(baseline: Baseline, fitted: Sequence[BaselineRun]) -> bool:
    # None is recorded of both kinds, but a report may have such a case. One bad process must not lift its limits.
    return 2 * len(fitted) >= len(baseline.runs)


def _medians(fitted: Sequence[BaselineRun]) -> list[float]:
    return [statistics.median(run.step_seconds) for run in fitted]


class _JudgedMetric(NamedTuple):
    metric: MetricVerdict
    settled: bool = True


def _from_peak(peak: JudgedPeak) -> _JudgedMetric:
    return _JudgedMetric(peak.metric, peak.settled)


_RECORD: Final = "record it with --gpu-baseline-update"
_RECORD_NEW: Final = "record it with --gpu-baseline-new"
"""The remedy for a case without a baseline. It does not accept regressions of other cases."""


def _without_baseline(case: Case, out: Sequence[OutOfMemory], hint: str, no_scaling: str, elsewhere: str) -> Verdict:
    if out:
        return Verdict(
            status="failed",
            sentence=f"{case} {describe_failure(out[0])}; if that is expected, {_RECORD}",
        )
    beside = f", and no scaling efficiency ({no_scaling})" if no_scaling else ""
    sentence = f"{case} has no baseline{f' ({hint})' if hint else ''}{beside}; {elsewhere or _RECORD_NEW}"
    return Verdict(status="new", sentence=sentence)


def _other_device(here: Environment | None, runs: Iterable[BaselineRun]) -> str:
    """Name the other device a run was recorded on; empty where all were recorded on this one, or this one is not known."""
    for there in (run.environment for run in runs):
        if here is not None and here.device_name != there.device_name:
            return f"recorded on {there.device_name}, here {here.device_name}"
    return ""


def _out_of_memory(
    case: Case,
    out: Sequence[OutOfMemory],
    runs: int,
    baseline: Baseline,
    baseline_fits: bool,
    side: OtherSide,
    given: Circumstances,
) -> GateResult:
    failure = f"{case} {describe_failure(out[0])}"
    if not baseline_fits:
        places = {run.out_of for run in baseline.runs if run.outcome == "out_of_memory"}
        if out[0].where in places:
            return GateResult(Verdict(status="pass", sentence=f"{failure}, as in {side.name}"))
        ran_out = f"{side.name} ran out of {' and '.join(map(str, places))} memory"
        return GateResult(Verdict(status="failed", sentence=f"{failure}; {ran_out}"))
    peak = max(run.peak_allocated_bytes or 0 for run in baseline.runs)
    if others := next(filter(None, (describe_memory_shortage(reply, baseline.runs) for reply in out)), ""):
        sentence = f"{failure}; {others}, so the case may still fit; it fitted with {format_bytes(peak)} allocated"
        return GateResult(Verdict(status="inconclusive", sentence=sentence))
    share = f" in {len(out)} of {runs} runs" if runs > 1 else ""
    decided = runs_out(len(out), runs, given.most)
    status: Status = "inconclusive" if decided is False else "regressed"
    sentence = (
        f"{failure}{share}; {side.name} fitted with {format_bytes(peak)} allocated; "
        f"{describe_changes(out[0].environment, baseline.runs, given.variables)}"
    )
    metric = MetricVerdict(metric="peak_allocated_bytes", status=status, baseline=peak)
    return GateResult(Verdict(status=status, sentence=sentence, metrics=(metric,)), decided is not None)


def _times(
    measured: Sequence[Measurement], fitted: Sequence[BaselineRun], tolerance: Tolerance, circumstances: Circumstances
) -> list[_JudgedMetric]:
    """Judge the seconds of a step, and those of its GPU where either side has them."""
    if reason := _why_time_is_foreign(measured[0].environment, fitted, tolerance):
        value = statistics.median(run.median_step_seconds for run in measured)
        baseline = statistics.median(_medians(fitted))
        metric = MetricVerdict(metric="step_seconds", status="not-comparable", value=value, baseline=baseline, note=reason)
        return [_JudgedMetric(metric)]
    found = pace(fitted, measured)
    judged = [_step_seconds(measured, fitted, found, tolerance, circumstances)]
    # Another host may make steps of all kinds slower, which `_step_seconds` allows for.
    if not ((found.is_host_bound or found.changed) and other_host(measured, fitted)):
        judged += _mean_step_seconds(measured, fitted, judged[0].metric.status, tolerance, circumstances)
    if found.share is not None:
        judged.append(_gpu_seconds(measured, fitted, found, tolerance, circumstances))
    return judged + _input_seconds(measured, fitted, tolerance, circumstances)


def _step_seconds(
    measured: Sequence[Measurement],
    fitted: Sequence[BaselineRun],
    found: Pace,
    tolerance: Tolerance,
    circumstances: Circumstances,
) -> _JudgedMetric:
    """Judge wall seconds by the time tolerance, or where the GPU waits for the host by what the host is known to vary."""
    other = other_host(measured, fitted)
    if found.is_host_bound and other:
        value, baseline = statistics.median(run.median_step_seconds for run in measured), statistics.median(_medians(fitted))
        limit, slower = baseline * (1 + tolerance.host_time), format_percent(value / baseline - 1, signed=False)
        allowed, fits = format_percent(tolerance.host_time, signed=False), value <= limit
        metric = MetricVerdict(
            metric="step_seconds",
            status="pass" if fits else "not-comparable",
            value=value,
            baseline=baseline,
            limit=limit,
            note=f"is held to {allowed} {other}, because {found}" if fits else f"it is {slower} slower {other}, and {found}",
            gpu_busy_share=found.share,
        )
        return _JudgedMetric(metric)
    tolerance, circumstances = _terms_of(found, tolerance, circumstances)
    new = [run.median_step_seconds for run in measured]
    judged = _decided("step_seconds", _medians(fitted), new, tolerance, circumstances, measured)
    metric = msgspec.structs.replace(judged.metric, gpu_busy_share=found.share)
    if found.is_host_bound or found.changed:
        about = str(found)
        if metric.status == "pass" and metric.limit is not None and metric.baseline:
            allowed = format_percent(metric.limit / metric.baseline - 1, signed=False)
            about = f"is held to {allowed}, {'because' if found.is_host_bound else 'although'} {found}"
        elif metric.status == "regressed" and other and (metric.change or 0.0) <= tolerance.host_time:
            # Only a step that the GPU decided in its baseline. No host explains more than this tolerance.
            about, metric = f"{found}, {other}", msgspec.structs.replace(metric, status="inconclusive")
        metric = msgspec.structs.replace(metric, note="; ".join(filter(None, [about, metric.note])))
    return judged._replace(metric=metric)


def _mean_step_seconds(
    measured: Sequence[Measurement],
    fitted: Sequence[BaselineRun],
    of_median: Status,
    tolerance: Tolerance,
    circumstances: Circumstances,
) -> list[_JudgedMetric]:
    """Judge the mean of the steps where their median tells no change: it sees every third or tenth step that is slow."""
    means, base = ([mean for run in runs if (mean := mean_step(run.step_seconds))] for runs in (measured, fitted))
    if of_median == "regressed" or len(means) < len(measured) or not base:
        return []
    tolerance = dataclasses.replace(tolerance, time=max(tolerance.time, MEAN_TOLERANCE))
    circumstances = dataclasses.replace(circumstances, prior=MEAN_PRIOR_SD, doubted_from=1.0)
    judged = _decided("mean_step_seconds", base, means, tolerance, circumstances, measured)
    if judged.metric.status == "regressed" and (waited := held_up(measured, fitted)):
        judged = judged._replace(metric=msgspec.structs.replace(judged.metric, status="inconclusive", note=waited))
    told = judged.metric.status not in ("pass", of_median)
    return [judged] if told or not judged.settled else []


def _input_seconds(
    measured: Sequence[Measurement], fitted: Sequence[BaselineRun], tolerance: Tolerance, circumstances: Circumstances
) -> list[_JudgedMetric]:
    """Judge on a GPU how long a step waits for its batches. It may wait longer by what the host may add to a step.

    A GPU that works meanwhile, or a gain elsewhere, hides it in the time of the step.
    """
    new, base = ([run.input_seconds for run in runs if run.input_seconds is not None] for runs in (measured, fitted))
    if measured[0].environment.device_type == "cpu" or not (new or base):
        return []
    metric = MetricVerdict(metric="input_seconds", status="not-comparable")
    if len(new) < len(measured) or not base:
        note = "it was not measured" if base else f"it was not measured before{circumstances.again}"
        return [_JudgedMetric(msgspec.structs.replace(metric, note=note))]
    step, other = statistics.median(_medians(fitted)), other_host(measured, fitted)
    least = tolerance.host_time if other else LEAST_HOST_TOLERANCE
    judged = _decided(
        "input_seconds",
        [step + seconds for seconds in base],
        [step + seconds for seconds in new],
        dataclasses.replace(tolerance, time=max(tolerance.time, least)),
        dataclasses.replace(circumstances, prior=HOST_PRIOR_SD, shift=0.0, doubted_from=1.0),
        measured,
    )
    metric = msgspec.structs.replace(
        judged.metric,
        value=statistics.median(new),
        baseline=statistics.median(base),
        limit=None if judged.metric.limit is None else judged.metric.limit - step,
        sensitivity=None,
    )
    if other and metric.status == "regressed":
        metric = msgspec.structs.replace(metric, status="not-comparable", note=f"{describe_metric(metric)}, {other}")
    return [judged._replace(metric=metric)]


def _terms_of(found: Pace, tolerance: Tolerance, circumstances: Circumstances) -> tuple[Tolerance, Circumstances]:
    """Return what wall seconds are held to on the machine of their baseline."""
    if not found.is_host_bound:
        return tolerance, circumstances
    return (
        dataclasses.replace(tolerance, time=max(tolerance.time, LEAST_HOST_TOLERANCE)),
        dataclasses.replace(circumstances, prior=HOST_PRIOR_SD, shift=0.0, doubted_from=1.0),
    )


def _gpu_seconds(
    measured: Sequence[Measurement],
    fitted: Sequence[BaselineRun],
    found: Pace,
    tolerance: Tolerance,
    circumstances: Circumstances,
) -> _JudgedMetric:
    """Judge GPU seconds where the GPU waits for the host, and else only show them: wall seconds hold them there."""
    profiled = [run for run in measured if run.gpu_steps]
    new, base = gpu_seconds(profiled), gpu_seconds(fitted)
    metric = MetricVerdict(metric="gpu_seconds", status="not-comparable")
    if not new or not base:
        note = "they were not measured" if base else f"there were none before{circumstances.again}"
        return _JudgedMetric(msgspec.structs.replace(metric, value=statistics.median(new) if new else None, note=note))
    value, baseline = statistics.median(new), statistics.median(base)
    if not found.is_host_bound:
        return _JudgedMetric(msgspec.structs.replace(metric, status="pass", value=value, baseline=baseline))
    circumstances, limit = dataclasses.replace(circumstances, prior=GPU_PRIOR_SD), tolerance.time
    if WHY_GPU_SECONDS_ARE_HELD_COARSELY:
        limit = max(limit, COARSE_GPU_TOLERANCE)
        circumstances = dataclasses.replace(circumstances, shift=0.0, doubted_from=1.0)
    judged = _decided("gpu_seconds", base, new, dataclasses.replace(tolerance, time=limit), circumstances, profiled)
    change = value / baseline - 1
    if judged.metric.status != "pass" or abs(change) <= tolerance.time or not WHY_GPU_SECONDS_ARE_HELD_COARSELY:
        return judged
    allowed = format_percent(limit, signed=False)
    note = f"changed by {format_percent(change)}, held to {allowed} because {WHY_GPU_SECONDS_ARE_HELD_COARSELY}"
    return judged._replace(metric=msgspec.structs.replace(judged.metric, note=note))


def _scaling(
    value: Sequence[float],
    base: Sequence[float],
    measured: Sequence[Measurement],
    fitted: Sequence[BaselineRun],
    tolerance: Tolerance,
    circumstances: Circumstances,
) -> _JudgedMetric:
    reason = _why_time_is_foreign(measured[0].environment, fitted, tolerance)
    if reason or not base:
        metric = MetricVerdict(
            metric="scaling_efficiency",
            status="not-comparable" if reason else "new",
            value=statistics.median(value),
            baseline=statistics.median(base) if base else None,
            note=reason or "there was none before",
        )
        return _JudgedMetric(metric)
    # A share of time that is lost to the others is a time, too: that of a step in units of one worker's.
    lost, before = [1 / efficiency for efficiency in value], [1 / efficiency for efficiency in base]
    tolerance, circumstances = _terms_of(pace(fitted, measured), tolerance, circumstances)
    return _decided("scaling_efficiency", before, lost, tolerance, circumstances, measured)


def _decided(
    name: MetricName,
    base: Sequence[float],
    new: Sequence[float],
    tolerance: Tolerance,
    circumstances: Circumstances,
    measured: Sequence[Measurement],
) -> _JudgedMetric:
    """Judge times, one of each run, and doubt a slowdown that other processes may have caused."""

    def judge_runs(indices: Sequence[int]) -> _JudgedMetric:
        most = max(1, circumstances.most - (len(new) - len(indices)))
        return _ruled(
            name, base, [new[index] for index in indices], tolerance, dataclasses.replace(circumstances, most=most)
        )

    judged = judge_runs(range(len(new)))
    return judged._replace(metric=with_contention(judged.metric, lambda indices: judge_runs(indices).metric, measured))


def _ruled(
    name: MetricName, base: Sequence[float], new: Sequence[float], tolerance: Tolerance, circumstances: Circumstances
) -> _JudgedMetric:
    """Judge times; an efficiency, whose reciprocals they are then, is shown as such."""
    decision = decide(
        base,
        new,
        tolerance=tolerance.time,
        prior=circumstances.prior,
        most=circumstances.most,
        shift=0.0 if name == "scaling_efficiency" else circumstances.shift,  # one worker is as slow as several, that day
        doubted_from=circumstances.doubted_from,
    )
    note = ""
    if decision.outcome != "pass":
        note = f"the whole suite is {format_percent(math.expm1(decision.shift))} today" if decision.shift else ""
    elif len(new) > 1 and decision.suspicious:
        ratios = ", ".join(format_percent(round(math.expm1(ratio), 6) + 0.0) for ratio in decision.ratios)
        note = f"measured {len(new)} times: {ratios}"
    value, baseline, limit = statistics.median(new), decision.centre, decision.centre * math.exp(decision.limit)
    if name == "scaling_efficiency":
        value, baseline, limit = 1 / value, 1 / baseline, 1 / limit
    metric = MetricVerdict(
        metric=name,
        status=decision.outcome,
        value=value,
        baseline=baseline,
        limit=limit,
        note=note,
        sd=decision.sd,
        sensitivity=math.expm1(decision.sensitivity),
        baseline_runs=len(base),
        runs=len(new),
        votes=decision.votes,
    )
    return _JudgedMetric(metric, decision.settled)


def _why_time_is_foreign(here: Environment, fitted: Sequence[BaselineRun], tolerance: Tolerance) -> str:
    if here.device_type == "cpu":
        # The same tiny step in fresh processes of one machine differed by up to 26 %, and more beside a busy neighbour.
        if not tolerance.cpu_time:
            return "time on a CPU is shown, not judged"
        if len(fitted) < LEAST_RUNS_ON_A_CPU:
            return f"time on a CPU is judged against {LEAST_RUNS_ON_A_CPU} runs or more, and there are {len(fitted)}"
    other = _other_device(here, fitted)
    if other:
        return other
    hosts = {run.environment.host for run in fitted} - {here.host}
    if here.device_type == "cpu" and hosts:
        return f"recorded on the host {min(hosts)}, here {here.host}"
    return describe_process_count(here, fitted)


def _flops(
    measured: Measurement, fitted: Sequence[BaselineRun], tolerance: Tolerance, circumstances: Circumstances
) -> _JudgedMetric | None:
    """Judge the FLOPs of a step, an exact count that is the same on every device; None where neither side has one."""
    value, baseline = measured.flops_per_step, fitted[-1].flops_per_step
    if describe_process_count(measured.environment, fitted) or not (value or baseline):
        return None
    if not (value and baseline):
        note = "its FLOPs were not counted" if baseline else f"its FLOPs were not counted before{circumstances.again}"
        return _JudgedMetric(MetricVerdict(metric="flops_per_step", status="not-comparable", value=value, note=note))
    ratio = value / baseline - 1
    status: Status = "pass"
    if abs(ratio) > tolerance.time:
        status = "regressed" if ratio > 0 else "improved"
    note = f"changed by {format_percent(ratio)}, within the limit" if ratio and status == "pass" else ""
    limit = baseline * (1 + tolerance.time)
    metric = MetricVerdict(metric="flops_per_step", status=status, value=value, baseline=baseline, limit=limit, note=note)
    return _JudgedMetric(metric)


def _counts(
    measured: Sequence[Measurement], fitted: Sequence[BaselineRun], circumstances: Circumstances
) -> tuple[JudgedCounts | None, list[_JudgedMetric]]:
    """Judge what steps ask of a CPU, or of a GPU of the same model: growth fails if a second process confirms it.

    Returns:
        What counts say, None where they are not compared; and the verdict of each figure.
    """
    before, now, terms = fitted[-1].counts, measured[0].counts, circumstances.counts
    if terms.mode == "off" or not (before or now) or describe_process_count(measured[0].environment, fitted):
        return None, []
    other = _other_device(measured[0].environment, fitted)
    if before is None or now is None or other or not have_steps_in_common(before, now):
        on_cpu = measured[0].environment.device_type == "cpu"
        asked = f"what its steps ask of {'a CPU' if on_cpu else 'the GPU'}"
        note = (
            f"{asked} was not recorded{circumstances.again}"
            if before is None
            else f"{asked} was not counted"
            if now is None
            else other or "no counted step updates where the step of its number was recorded to update"
        )
        metric = MetricVerdict(metric="operators" if on_cpu else "waits", status="not-comparable", note=note)
        return None, [_JudgedMetric(metric)]
    again = measured[1].counts if len(measured) > 1 else None
    judged = judge_counts(before, now, terms, again)
    assert judged is not None, "they have steps in common"
    alone = len(measured) == 1 < circumstances.most
    return judged, [_JudgedMetric(metric, not (alone and metric.status == "regressed")) for metric in judged.metrics]


def _conclude(
    case: Case,
    metrics: tuple[MetricVerdict, ...],
    counts: JudgedCounts | None,
    measured: Sequence[Measurement],
    side: OtherSide,
    fitted: Sequence[BaselineRun],
    tolerance: Tolerance,
    given: Circumstances,
) -> Verdict:
    measures = [metric for metric in metrics if metric.metric not in ("flops_per_step", *COUNT_FIGURES)]
    if all(metric.status == "not-comparable" for metric in measures):
        reasons = "; ".join(dict.fromkeys(metric.note for metric in measures))
        sentence = f"{case} cannot be compared with {side.name}: {reasons}{side.advise(_RECORD)}"
        return Verdict(status="not-comparable", sentence=sentence, metrics=metrics)

    of_counts: dict[Status, tuple[str, ...]] = {}
    if counts is not None:
        of_counts = {"regressed": counts.worse, "improved": counts.better}
    doubtful = counts.doubtful if counts is not None else ()

    def describe(status: Status) -> str:
        chosen = [metric for metric in metrics if metric.status == status]
        parts = [
            f"{describe_metric(metric)}{f'; {metric.note}' if metric.note else ''}"
            for metric in chosen
            if not is_memory_metric(metric) and metric.metric not in COUNT_FIGURES
        ]
        timed = bool(chosen) and chosen[0].metric == "step_seconds"
        parts[timed:timed] = describe_memory(chosen, measured[0], fitted)
        parts += of_counts.get(status, ())
        return f"{case} {', and '.join(parts)}" if parts else ""

    in_doubt = {metric.metric for metric in metrics if metric.status == "inconclusive"}
    unclear = describe("inconclusive").removeprefix(f"{case} ")
    if worse := describe("regressed"):
        flops_described = any(metric.metric == "flops_per_step" and metric.status == "regressed" for metric in metrics)
        since = [describe_changes(measured[0].environment, fitted, given.variables)]
        since += describe_counters(measured[0], fitted, flops=not flops_described)
        since += [_describe_seconds(metric) for metric in metrics if metric.metric in ("gpu_seconds", "input_seconds")]
        since += [describe_throttling(measured)]
        doubts = [f"{unclear}, which {_explanation(in_doubt, measured, fitted)} may explain"] if unclear else []
        doubt = "".join(f"; it also {what}" for what in (*doubts, *doubtful))
        gain = f"; but it {', and '.join(counts.better)}" if counts is not None and counts.better else ""
        sentence = f"{worse} ({side.short}); {', '.join(filter(None, since))}{doubt}{gain}"
        return Verdict(status="regressed", sentence=sentence, metrics=metrics)
    if unclear or doubtful:
        allowed, explanation = format_percent(tolerance.time, signed=False), _explanation(in_doubt, measured, fitted)
        exceeded = f"the tolerance of {allowed}" if "step_seconds" in in_doubt else "its limit"
        explained = f"{unclear}; this exceeds {exceeded}, but {explanation} may explain it"
        sentence = f"{case} {'; it also '.join((*([explained] if unclear else []), *doubtful))}"
        return Verdict(status="inconclusive", sentence=sentence, metrics=metrics)
    if not_gated := _not_gated(case, metrics, measured, side, fitted, given):
        return not_gated
    if better := describe("improved"):
        return Verdict(status="improved", sentence=f"{better}{side.advise(f'{_RECORD} to keep it')}", metrics=metrics)
    notes = [f"{_subject_of_note(metric)}{metric.note}" for metric in metrics if metric.note]
    of_steps = (metric.sensitivity for metric in metrics if metric.metric != "gpu_seconds")
    caught = next((sensitivity for sensitivity in of_steps if sensitivity is not None), None)
    if caught is not None:
        notes.append(f"a slowdown of {format_percent(caught, signed=False)} would be caught 99 times in 100")
    sentence = f"{case} is within its limits{': ' if notes else ''}{'; '.join(notes)}"
    return Verdict(status="pass", sentence=sentence, metrics=metrics)


def _explanation(unclear: Set[MetricName], measured: Sequence[Measurement], fitted: Sequence[BaselineRun]) -> str:
    """Say what may explain all that is inconclusive."""
    if unclear == {"mean_step_seconds"} and held_up(measured, fitted):
        return "the host"
    if "step_seconds" not in unclear or not pace(fitted, measured).changed or not other_host(measured, fitted):
        return "noise or the whole suite"
    return "the host" if len(unclear) == 1 else "the host, noise or the whole suite"


def _describe_seconds(metric: MetricVerdict) -> str:
    """Say how GPU seconds, or those of waiting for batches, have changed beside something worse; empty if they are worse."""
    if metric.value is None or metric.baseline is None or metric.status in ("regressed", "not-comparable"):
        return ""
    before, now = format_seconds(metric.baseline), format_seconds(metric.value)
    if metric.metric == "input_seconds":
        return f"waiting for batches {before} -> {now} a step" if before != now else ""
    return f"GPU seconds {before} -> {now}" if before != now else f"the same {now} of the GPU"


def _subject_of_note(metric: MetricVerdict) -> str:
    """Return what a note is about, to begin it with."""
    if metric.metric == "gpu_seconds":
        return f"its GPU seconds {'' if metric.status == 'pass' else 'are not compared: '}"
    if metric.metric == "input_seconds":
        return f"its wait for batches {'' if metric.status == 'pass' else 'is not compared: '}"
    if metric.metric == "step_seconds" and metric.gpu_busy_share is not None:
        return f"its step time {'' if metric.status == 'pass' else 'is not compared: '}"
    if metric.metric == "mean_step_seconds":
        return "its mean step was "
    if metric.metric == "python_calls" and metric.status == "not-comparable":
        return "its calls of Python functions are not compared: "
    return phase_prefix(metric)


def _not_gated(
    case: Case,
    metrics: tuple[MetricVerdict, ...],
    measured: Sequence[Measurement],
    side: OtherSide,
    fitted: Sequence[BaselineRun],
    given: Circumstances,
) -> Verdict | None:
    """Return the verdict if something cannot be gated that was asked for or recorded: it must not pass for gated."""
    status: Status = "not-comparable"
    said = ""
    by_name = {metric.metric: metric for metric in metrics}
    efficiency, gpu = by_name.get("scaling_efficiency"), by_name.get("gpu_seconds")
    operators = by_name.get("operators") or (by_name.get("waits") if measured[0].counts is None else None)
    if phases := describe_missing_phases(metrics, "new"):
        status, said = "new", f"has {phases} in {side.name}"
    elif phases := describe_missing_phases(metrics, "not-comparable"):
        said = f"has {phases}, as {side.name} had"
    elif efficiency is not None and efficiency.status == "new":
        status, said = "new", f"has no scaling efficiency in {side.name}"
    elif efficiency is not None and efficiency.value is None:
        return Verdict(status=status, sentence=f"{case} has no scaling efficiency: {efficiency.note}", metrics=metrics)
    elif fitted[-1].counts and given.counts.mode == "judge" and operators and operators.status == "not-comparable":
        said = f"is not compared in full with {side.name}: {operators.note}"
    elif gpu is not None and gpu.status == "not-comparable" and gpu.value is None:
        said = f"is not compared in full with {side.name}: its GPU seconds were not measured"
    return Verdict(status=status, sentence=f"{case} {said}{side.advise(_RECORD)}", metrics=metrics) if said else None
