"""Judges measured runs against a baseline: a verdict with its sentence. Pure: no file, clock or hardware.

`pytest_gputrain.gate.step_times` has the rule of times (the median step of a process, and the scaling efficiency where a
test asks for it) and of what takes several processes to tell; here it meets the records. It wants no more than what a
baseline stores raw, so a better rule can replace it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.identity import differences
from pytest_gputrain.gate.contention import describe_memory_shortage, describe_throttling, with_contention
from pytest_gputrain.gate.counts import JudgedCounts, have_steps_in_common, judge_counts, with_evaluation
from pytest_gputrain.gate.criteria import Criteria, Judged
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
from pytest_gputrain.gate.own_training import lost_tensors, other_shapes
from pytest_gputrain.gate.scaling import efficiencies
from pytest_gputrain.gate.step_times import MEAN_PRIOR_SD, MEAN_TOLERANCE, decide, mean_step, runs_out
from pytest_gputrain.gate.work import flops_apart
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
from pytest_gputrain.records.counts import COUNT_FIGURES, OF_THE_PROGRAM
from pytest_gputrain.records.tolerance import Tolerance
from pytest_gputrain.utils.units import format_bytes, format_percent, format_seconds


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Both sides of a case, and what it is held to."""

    criteria: Criteria
    replies: Sequence[Measurement | OutOfMemory]
    baseline: Baseline
    tolerance: Tolerance
    most: int
    """Runs that there may be."""
    prior: float
    """See `pytest_gputrain.gate.step_times.suite_prior`."""
    shift: float
    """See `pytest_gputrain.gate.step_times.suite_shift`."""
    doubted_from: float = 0.5
    """See `pytest_gputrain.gate.step_times.decide`."""

    @classmethod
    def of(cls, criteria: Criteria, replies: Sequence[Reply], baseline: Baseline, shift: float) -> _Comparison:
        return cls(
            criteria=criteria,
            replies=[reply for reply in replies if isinstance(reply, Measurement | OutOfMemory)],
            baseline=baseline,
            tolerance=criteria.tolerance,
            most=len(replies) if criteria.records else max(len(replies), criteria.most),
            prior=criteria.prior,
            shift=shift,
        )

    @property
    def case(self) -> Case:
        return self.criteria.case

    @property
    def side(self) -> OtherSide:
        return self.criteria.other_side or OtherSide.stored(self.baseline)

    @functools.cached_property
    def measured(self) -> Sequence[Measurement]:
        return [reply for reply in self.replies if isinstance(reply, Measurement)]

    @functools.cached_property
    def fitted(self) -> Sequence[BaselineRun]:
        return [run for run in self.baseline.runs if run.outcome == "measured"]

    @property
    def baseline_fits(self) -> bool:
        # None is recorded of both kinds, but a report may have such a case. One bad process must not lift its limits.
        return 2 * len(self.fitted) >= len(self.baseline.runs)

    @property
    def here(self) -> Environment:
        return self.measured[0].environment

    @functools.cached_property
    def pace(self) -> Pace:
        return pace(self.fitted, self.measured)

    @functools.cached_property
    def held_up(self) -> str:
        return held_up(self.measured, self.fitted)

    @functools.cached_property
    def other_host(self) -> str:
        """How the host differs; one whose cores other programs take, more than in the baseline, is another one, too."""
        return self.held_up or other_host(self.measured, self.fitted)

    @functools.cached_property
    def why_time_is_foreign(self) -> str:
        return _why_time_is_foreign(self.here, self.fitted, self.tolerance)

    @functools.cached_property
    def lost_tensors(self) -> str:
        """Which tensors train in no process any more. On a GPU a router may choose other experts in another process."""
        lost = [lost_tensors(run.trained, self.fitted[-1].trained) for run in self.measured]
        return lost[0] if all(lost) else ""

    @property
    def before(self) -> list[float]:
        """The median step of each run of the baseline."""
        return [statistics.median(run.step_seconds) for run in self.fitted]

    @property
    def now(self) -> list[float]:
        return [run.median_step_seconds for run in self.measured]

    def held_to(self, least: float, **rule: Any) -> _Comparison:
        """Return the comparison with a time tolerance of at least this, and other constants of the rule."""
        tolerance = dataclasses.replace(self.tolerance, time=max(self.tolerance.time, least))
        return dataclasses.replace(self, tolerance=tolerance, **rule)

    def for_host(self) -> _Comparison:
        """Return the comparison by what wall seconds are held to on the machine of their baseline."""
        if not self.pace.is_host_bound:
            return self
        return self.held_to(LEAST_HOST_TOLERANCE, prior=HOST_PRIOR_SD, shift=0.0, doubted_from=1.0)


def judge(criteria: Criteria, replies: Sequence[Reply], shift: float = 0.0, no_scaling: str = "") -> Judged[Verdict]:
    """Judge ``replies`` (one per fresh process, at least one) against the baseline.

    Args:
        shift: as of `pytest_gputrain.gate.judge.judge`.
        no_scaling: why the scaling efficiency, which was asked for, is not known.
    """
    case, baseline = criteria.case, criteria.baseline
    for reply in replies:
        if isinstance(reply, (Crashed, TimedOut, Lost)):
            return Judged(Verdict(status="failed", sentence=f"{case} {describe_failure(reply)}"))
    if baseline is None:
        return Judged(_without_baseline(criteria, replies, no_scaling))
    sides = _Comparison.of(criteria, replies, baseline, shift)
    side = sides.side
    if baseline.case.identity() != case.identity():
        change = differences(baseline.case, case)
        sentence = f"{case} is not what {side.name} measured ({change}){side.advise(_RECORD)}"
        return Judged(Verdict(status="not-comparable", sentence=sentence))
    is_out = len(sides.measured) < len(replies)
    foreign = _other_device(sides.replies[0].environment, baseline.runs)
    if foreign and (is_out or not sides.baseline_fits):
        sentence = f"{case} cannot be compared with {side.name}: {foreign}{side.advise(_RECORD)}"
        return Judged(Verdict(status="not-comparable", sentence=sentence))
    if is_out:
        return _out_of_memory(sides)
    if not sides.baseline_fits:
        sentence = f"{case} fits in memory now; {side.name} did not{side.advise(_RECORD)}"
        return Judged(Verdict(status="improved", sentence=sentence))
    judged = [
        *_times(sides),
        *judge_memory(sides.measured, sides.fitted, sides.tolerance.memory, sides.most, sides.criteria.again),
        *_flops(sides),
    ]
    if no_scaling:
        judged.append(Judged(MetricVerdict(metric="scaling_efficiency", status="not-comparable", note=no_scaling)))
    elif measured_efficiencies := efficiencies(case, sides.measured):
        judged.append(_scaling(sides, measured_efficiencies, efficiencies(case, sides.fitted)))
    counts, count_metrics = _counts(sides)
    judged += count_metrics
    verdict = _conclude(sides, tuple(metric.verdict for metric in judged), counts)
    may_differ = sides.lost_tensors and len(sides.measured) == 1 < sides.most and not sides.measured[0].counts_exactly
    return Judged(verdict, not may_differ and all(metric.settled for metric in judged))


def first_ratio(criteria: Criteria, replies: Sequence[Reply]) -> float | None:
    """Logarithm of the first run's step time over the baseline's; None where the two are not compared, or tell of the host.

    Where the GPU waits for the host, it is that of GPU seconds as soon as these are held to the time tolerance.
    """
    baseline, measured = criteria.baseline, all(isinstance(reply, Measurement) for reply in replies)
    if baseline is None or baseline.case.identity() != criteria.case.identity() or not (replies and measured):
        return None
    sides = _Comparison.of(criteria, replies[:1], baseline, shift=0.0)
    if not sides.fitted or not sides.baseline_fits or sides.why_time_is_foreign:
        return None
    base, new = sides.before, sides.now
    if sides.pace.is_host_bound:
        base, new = gpu_seconds(sides.fitted), gpu_seconds(sides.measured)
        if WHY_GPU_SECONDS_ARE_HELD_COARSELY or not (base and new):
            return None
    return decide(base, new, tolerance=criteria.tolerance.time).ratios[0]


_FLOPS: Final[tuple[MetricName, ...]] = ("flops_per_step", "recomputed_flops_per_step")
_COUNTED: Final[tuple[MetricName, ...]] = (*COUNT_FIGURES, "evaluation_counts")
_RECORD: Final = "record it with --gpu-baseline-update"
_RECORD_NEW: Final = "record it with --gpu-baseline-new"
"""The remedy for a case without a baseline. It does not accept regressions of other cases."""


def _without_baseline(criteria: Criteria, replies: Sequence[Reply], no_scaling: str) -> Verdict:
    case, hint = criteria.case, f" ({criteria.hint})" if criteria.hint else ""
    if out := next((reply for reply in replies if isinstance(reply, OutOfMemory)), None):
        remedy = "" if criteria.other_side else f"; if that is expected, {_RECORD}"
        return Verdict(status="failed", sentence=f"{case} {describe_failure(out)}{remedy}")
    if criteria.other_side:
        return Verdict(status="new", sentence=f"{case}: {criteria.other_side.name} has no figures of it")
    beside = f", and no scaling efficiency ({no_scaling})" if no_scaling else ""
    sentence = f"{case} has no baseline{hint}{beside}; {criteria.elsewhere or _RECORD_NEW}"
    return Verdict(status="new", sentence=sentence)


def _other_device(here: Environment | None, runs: Iterable[BaselineRun]) -> str:
    """Name the other device a run was recorded on; empty where all were recorded on this one, or this one is not known."""
    for there in (run.environment for run in runs):
        if here is not None and here.device_name != there.device_name:
            return f"recorded on {there.device_name}, here {here.device_name}"
    return ""


def _out_of_memory(sides: _Comparison) -> Judged[Verdict]:
    out = [reply for reply in sides.replies if isinstance(reply, OutOfMemory)]
    runs, stored, name = len(sides.replies), sides.baseline.runs, sides.side.name
    failure = f"{sides.case} {describe_failure(out[0])}"
    if not sides.baseline_fits:
        places = {run.out_of for run in stored if run.outcome == "out_of_memory"}
        if out[0].where in places:
            return Judged(Verdict(status="pass", sentence=f"{failure}, as in {name}"))
        ran_out = f"{name} ran out of {' and '.join(map(str, places))} memory"
        return Judged(Verdict(status="failed", sentence=f"{failure}; {ran_out}"))
    peak = max(run.peak_allocated_bytes or 0 for run in stored)
    if others := next(filter(None, (describe_memory_shortage(reply, stored) for reply in out)), ""):
        sentence = f"{failure}; {others}, so the case may still fit; it fitted with {format_bytes(peak)} allocated"
        return Judged(Verdict(status="inconclusive", sentence=sentence))
    share = f" in {len(out)} of {runs} runs" if runs > 1 else ""
    decided = runs_out(len(out), runs, sides.most)
    status: Status = "inconclusive" if decided is False else "regressed"
    sentence = (
        f"{failure}{share}; {name} fitted with {format_bytes(peak)} allocated; "
        f"{describe_changes(out[0].environment, stored, sides.criteria.variables)}"
    )
    metric = MetricVerdict(metric="peak_allocated_bytes", status=status, baseline=peak)
    return Judged(Verdict(status=status, sentence=sentence, metrics=(metric,)), decided is not None)


def _times(sides: _Comparison) -> list[Judged[MetricVerdict]]:
    """Judge the seconds of a step, and those of its GPU where either side has them."""
    if reason := sides.why_time_is_foreign:
        value, baseline = statistics.median(sides.now), statistics.median(sides.before)
        metric = MetricVerdict(metric="step_seconds", status="not-comparable", value=value, baseline=baseline, note=reason)
        return [Judged(metric)]
    judged = [_step_seconds(sides)]
    # Another host may make steps of all kinds slower, which `_step_seconds` allows for.
    if not ((sides.pace.is_host_bound or sides.pace.changed) and sides.other_host):
        judged += _mean_step_seconds(sides, judged[0].verdict.status)
    if sides.pace.share is not None:
        judged.append(_gpu_seconds(sides))
    return judged + _input_seconds(sides)


def _step_seconds(sides: _Comparison) -> Judged[MetricVerdict]:
    """Judge wall seconds by the time tolerance, or where the GPU waits for the host by what the host is known to vary."""
    found, other, tolerance = sides.pace, sides.other_host, sides.tolerance
    if found.is_host_bound and other:
        value, baseline = statistics.median(sides.now), statistics.median(sides.before)
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
        return Judged(metric)
    judged = _decided("step_seconds", sides.for_host(), sides.before, sides.now)
    metric = msgspec.structs.replace(judged.verdict, gpu_busy_share=found.share)
    if found.is_host_bound or found.changed:
        about = str(found)
        if metric.status == "pass" and metric.limit is not None and metric.baseline:
            allowed = format_percent(metric.limit / metric.baseline - 1, signed=False)
            about = f"is held to {allowed}, {'because' if found.is_host_bound else 'although'} {found}"
        elif metric.status == "regressed" and other and (metric.change or 0.0) <= tolerance.host_time:
            # Only a step that the GPU decided in its baseline. No host explains more than this tolerance.
            about, metric = f"{found}, {other}", msgspec.structs.replace(metric, status="inconclusive")
        metric = msgspec.structs.replace(metric, note="; ".join(filter(None, [about, metric.note])))
    return judged._replace(verdict=metric)


def _mean_step_seconds(sides: _Comparison, of_median: Status) -> list[Judged[MetricVerdict]]:
    """Judge the mean of the steps where their median tells no change: it sees every third or tenth step that is slow."""
    runs = (sides.measured, sides.fitted)
    means, base = ([mean for run in side if (mean := mean_step(run.step_seconds))] for side in runs)
    if of_median == "regressed" or len(means) < len(sides.measured) or not base:
        return []
    by_means = sides.held_to(MEAN_TOLERANCE, prior=MEAN_PRIOR_SD, doubted_from=1.0)
    judged = _decided("mean_step_seconds", by_means, base, means)
    if judged.verdict.status == "regressed" and sides.held_up:
        judged = judged._replace(verdict=msgspec.structs.replace(judged.verdict, status="inconclusive", note=sides.held_up))
    told = judged.verdict.status not in ("pass", of_median)
    return [judged] if told or not judged.settled else []


def _input_seconds(sides: _Comparison) -> list[Judged[MetricVerdict]]:
    """Judge on a GPU how long a step waits for its batches. It may wait longer by what the host may add to a step.

    A GPU that works meanwhile, or a gain elsewhere, hides it in the time of the step.
    """
    runs = (sides.measured, sides.fitted)
    new, base = ([run.input_seconds for run in side if run.input_seconds is not None] for side in runs)
    if sides.here.device_type == "cpu" or not (new or base):
        return []
    metric = MetricVerdict(metric="input_seconds", status="not-comparable")
    if len(new) < len(sides.measured) or not base:
        note = "it was not measured" if base else f"it was not measured before{sides.criteria.again}"
        return [Judged(msgspec.structs.replace(metric, note=note))]
    step, other = statistics.median(sides.before), sides.other_host
    least = sides.tolerance.host_time if other else LEAST_HOST_TOLERANCE
    held = sides.held_to(least, prior=HOST_PRIOR_SD, shift=0.0, doubted_from=1.0)
    judged = _decided("input_seconds", held, [step + seconds for seconds in base], [step + seconds for seconds in new])
    limit = judged.verdict.limit
    metric = msgspec.structs.replace(
        judged.verdict,
        value=statistics.median(new),
        baseline=statistics.median(base),
        limit=None if limit is None else limit - step,
        sensitivity=None,
    )
    if other and metric.status == "regressed":
        metric = msgspec.structs.replace(metric, status="not-comparable", note=f"{describe_metric(metric)}, {other}")
    return [judged._replace(verdict=metric)]


def _gpu_seconds(sides: _Comparison) -> Judged[MetricVerdict]:
    """Judge GPU seconds where the GPU waits for the host, and else only show them: wall seconds hold them there."""
    profiled = [run for run in sides.measured if run.gpu_steps]
    new, base = gpu_seconds(profiled), gpu_seconds(sides.fitted)
    metric = MetricVerdict(metric="gpu_seconds", status="not-comparable")
    if not new or not base:
        note = "they were not measured" if base else f"there were none before{sides.criteria.again}"
        return Judged(msgspec.structs.replace(metric, value=statistics.median(new) if new else None, note=note))
    value, baseline = statistics.median(new), statistics.median(base)
    if not sides.pace.is_host_bound:
        return Judged(msgspec.structs.replace(metric, status="pass", value=value, baseline=baseline))
    held = dataclasses.replace(sides, replies=profiled, prior=GPU_PRIOR_SD)
    if WHY_GPU_SECONDS_ARE_HELD_COARSELY:
        held = held.held_to(COARSE_GPU_TOLERANCE, shift=0.0, doubted_from=1.0)
    judged = _decided("gpu_seconds", held, base, new)
    change, allowed = value / baseline - 1, sides.tolerance.time
    if judged.verdict.status != "pass" or abs(change) <= allowed or not WHY_GPU_SECONDS_ARE_HELD_COARSELY:
        return judged
    note = (
        f"changed by {format_percent(change)}, held to {format_percent(held.tolerance.time, signed=False)} because "
        f"{WHY_GPU_SECONDS_ARE_HELD_COARSELY}"
    )
    return judged._replace(verdict=msgspec.structs.replace(judged.verdict, note=note))


def _scaling(sides: _Comparison, value: Sequence[float], base: Sequence[float]) -> Judged[MetricVerdict]:
    reason = sides.why_time_is_foreign
    if reason or not base:
        metric = MetricVerdict(
            metric="scaling_efficiency",
            status="not-comparable" if reason else "new",
            value=statistics.median(value),
            baseline=statistics.median(base) if base else None,
            note=reason or "there was none before",
        )
        return Judged(metric)
    # A share of time that is lost to the others is a time, too: that of a step in units of one worker's.
    lost, before = [1 / efficiency for efficiency in value], [1 / efficiency for efficiency in base]
    return _decided("scaling_efficiency", sides.for_host(), before, lost)


def _decided(name: MetricName, sides: _Comparison, base: Sequence[float], new: Sequence[float]) -> Judged[MetricVerdict]:
    """Judge times, one of each run, and doubt a slowdown that other processes may have caused."""

    def judge_runs(indices: Sequence[int]) -> Judged[MetricVerdict]:
        most = max(1, sides.most - (len(new) - len(indices)))
        return _ruled(name, sides, base, [new[index] for index in indices], most)

    judged = judge_runs(range(len(new)))
    doubted = with_contention(judged.verdict, lambda indices: judge_runs(indices).verdict, sides.measured)
    return judged._replace(verdict=doubted)


def _ruled(
    name: MetricName, sides: _Comparison, base: Sequence[float], new: Sequence[float], most: int
) -> Judged[MetricVerdict]:
    """Judge times; an efficiency, whose reciprocals they are then, is shown as such."""
    decision = decide(
        base,
        new,
        tolerance=sides.tolerance.time,
        prior=sides.prior,
        most=most,
        shift=0.0 if name == "scaling_efficiency" else sides.shift,  # a slow day slows one worker as much as several
        doubted_from=sides.doubted_from,
        paired=sides.criteria.paired,
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
    return Judged(metric, decision.settled)


def _why_time_is_foreign(here: Environment, fitted: Sequence[BaselineRun], tolerance: Tolerance) -> str:
    if here.device_type == "cpu":
        # The same tiny step in fresh processes of one machine differed by up to 26 %, and more beside a busy neighbour.
        if not tolerance.cpu_time:
            return "time on a CPU is shown, not judged"
        if len(fitted) < tolerance.cpu_runs:
            return f"time on a CPU is judged against {tolerance.cpu_runs} runs or more, and there are {len(fitted)}"
    other = _other_device(here, fitted)
    if other:
        return other
    hosts = {run.environment.host for run in fitted} - {here.host}
    if here.device_type == "cpu" and hosts:
        return f"recorded on the host {min(hosts)}, here {here.host}"
    return describe_process_count(here, fitted)


def _flops(sides: _Comparison) -> Iterator[Judged[MetricVerdict]]:
    """Judge the FLOPs of a step, an exact count that is the same on every device, and apart from them those that activation
    checkpointing repeats, as a share of all; nothing where neither side has them."""
    now, before = sides.measured[0], sides.fitted[-1]
    value, again = now.flops_per_step, now.recomputed_flops_per_step
    baseline, repeated = flops_apart((before.flops_per_step, before.recomputed_flops_per_step), (value, again))
    if describe_process_count(sides.here, sides.fitted) or not (value or baseline):
        return
    if not (value and baseline):
        note = "its FLOPs were not counted" if baseline else f"its FLOPs were not counted before{sides.criteria.again}"
        yield Judged(MetricVerdict(metric="flops_per_step", status="not-comparable", value=value, note=note))
        return
    yield _computed("flops_per_step", value, baseline, baseline, sides.tolerance)
    if again is not None and repeated is not None and (again or repeated):
        yield _computed("recomputed_flops_per_step", again, repeated, baseline + repeated, sides.tolerance)


def _computed(name: MetricName, value: int, baseline: int, total: int, tolerance: Tolerance) -> Judged[MetricVerdict]:
    """Judge the change of FLOPs as a share of the ``total`` of the baseline."""
    ratio, allowed = (value - baseline) / total, tolerance.time
    status: Status = "pass"
    if abs(ratio) > allowed:
        status = "regressed" if ratio > 0 else "improved"
    note = f"changed by {format_percent(ratio)}, within the limit" if ratio and status == "pass" else ""
    limit = baseline + total * allowed
    return Judged(MetricVerdict(metric=name, status=status, value=value, baseline=baseline, limit=limit, note=note))


def _counts(sides: _Comparison) -> tuple[JudgedCounts | None, list[Judged[MetricVerdict]]]:
    """Judge what steps ask of a CPU, or of a GPU of the same model: growth fails if a second process confirms it.

    Returns:
        What counts say, None where they are not compared; and the verdict of each figure.
    """
    measured, terms = sides.measured, sides.criteria.counts
    before, now = sides.fitted[-1].counts, measured[0].counts
    if terms.mode == "off" or not (before or now) or describe_process_count(sides.here, sides.fitted):
        return None, []
    other = _other_device(sides.here, sides.fitted)
    if before is None or now is None or other or not have_steps_in_common(before, now):
        on_cpu = sides.here.device_type == "cpu"
        asked = f"what its steps ask of {'a CPU' if on_cpu else 'the GPU'}"
        note = (
            f"{asked} was not recorded{sides.criteria.again}"
            if before is None
            else f"{asked} was not counted"
            if now is None
            else other or "no counted step updates where the step of its number was recorded to update"
        )
        metric = MetricVerdict(metric="operators" if on_cpu else "waits", status="not-comparable", note=note)
        return None, [Judged(metric)]
    again, evaluated_again = (measured[1].counts, measured[1].evaluation_counts) if len(measured) > 1 else (None, None)
    steps = judge_counts(before, now, terms, again)
    evaluation = sides.fitted[-1].evaluation_counts, measured[0].evaluation_counts
    judged = with_evaluation(steps, *evaluation, terms, evaluated_again)
    assert judged is not None, "they have steps in common"
    alone = len(measured) == 1 < sides.most
    return judged, [Judged(metric, not (alone and metric.status == "regressed")) for metric in judged.metrics]


def _conclude(sides: _Comparison, metrics: tuple[MetricVerdict, ...], counts: JudgedCounts | None) -> Verdict:
    case, side, measured, fitted = sides.case, sides.side, sides.measured, sides.fitted
    measures = [metric for metric in metrics if metric.metric not in (*_FLOPS, *_COUNTED)]
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
            if not is_memory_metric(metric) and metric.metric not in _COUNTED
        ]
        timed = bool(chosen) and chosen[0].metric == "step_seconds"
        parts[timed:timed] = describe_memory(chosen, measured[0], fitted)
        parts += of_counts.get(status, ())
        if status == "regressed" and sides.lost_tensors:
            parts.insert(0, sides.lost_tensors)
        return f"{case} {', and '.join(parts)}" if parts else ""

    told = "".join(f"; it also {metric.note}" for metric in metrics if metric.metric in OF_THE_PROGRAM and metric.note)
    in_doubt = {metric.metric for metric in metrics if metric.status == "inconclusive"}
    unclear = describe("inconclusive").removeprefix(f"{case} ")
    if worse := describe("regressed"):
        described = [metric.metric for metric in metrics if metric.status == "regressed"]
        since = [other_shapes(measured[0].batch_shapes, fitted[-1].batch_shapes, side)]
        since += [describe_changes(measured[0].environment, fitted, sides.criteria.variables)]
        since += describe_counters(measured[0], fitted, described)
        since += [_describe_seconds(metric) for metric in metrics if metric.metric in ("gpu_seconds", "input_seconds")]
        since += [describe_throttling(measured)]
        doubts = [f"{unclear}, which {_explanation(in_doubt, sides)} may explain"] if unclear else []
        doubt = "".join(f"; it also {what}" for what in (*doubts, *doubtful))
        gain = f"; but it {', and '.join(counts.better)}" if counts is not None and counts.better else ""
        sentence = f"{worse} ({side.short}); {', '.join(filter(None, since))}{doubt}{told}{gain}"
        return Verdict(status="regressed", sentence=sentence, metrics=metrics)
    if unclear or doubtful:
        allowed, explanation = format_percent(sides.tolerance.time, signed=False), _explanation(in_doubt, sides)
        exceeded = f"the tolerance of {allowed}" if "step_seconds" in in_doubt else "its limit"
        explained = f"{unclear}; this exceeds {exceeded}, but {explanation} may explain it"
        sentence = f"{case} {'; it also '.join((*([explained] if unclear else []), *doubtful))}"
        return Verdict(status="inconclusive", sentence=sentence, metrics=metrics)
    if not_gated := _not_gated(sides, metrics):
        return not_gated
    if better := describe("improved"):
        return Verdict(status="improved", sentence=f"{better}{told}{side.advise(f'{_RECORD} to keep it')}", metrics=metrics)
    notes = [f"{_subject_of_note(metric)}{metric.note}" for metric in metrics if metric.note]
    of_steps = (metric.sensitivity for metric in metrics if metric.metric != "gpu_seconds")
    caught = next((sensitivity for sensitivity in of_steps if sensitivity is not None), None)
    if caught is not None:
        notes.append(f"a slowdown of {format_percent(caught, signed=False)} would be caught 99 times in 100")
    sentence = f"{case} is within its limits{': ' if notes else ''}{'; '.join(notes)}"
    return Verdict(status="pass", sentence=sentence, metrics=metrics)


def _explanation(unclear: Set[MetricName], sides: _Comparison) -> str:
    """Say what may explain all that is inconclusive."""
    if unclear == {"mean_step_seconds"} and sides.held_up:
        return "the host"
    if "step_seconds" not in unclear or not sides.pace.changed or not sides.other_host:
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
    if metric.metric == "recomputed_flops_per_step":
        return "its recomputed FLOPs "
    if metric.metric == "python_calls" and metric.status == "not-comparable":
        return "its calls of Python functions are not compared: "
    return phase_prefix(metric)


def _not_gated(sides: _Comparison, metrics: tuple[MetricVerdict, ...]) -> Verdict | None:
    """Return the verdict if something cannot be gated that was asked for or recorded: it must not pass for gated."""
    case, side = sides.case, sides.side
    status: Status = "not-comparable"
    said = ""
    by_name = {metric.metric: metric for metric in metrics}
    efficiency, gpu = by_name.get("scaling_efficiency"), by_name.get("gpu_seconds")
    is_counted = sides.fitted[-1].counts and sides.criteria.counts.mode == "judge"
    operators = by_name.get("operators") or (by_name.get("waits") if sides.measured[0].counts is None else None)
    if phases := describe_missing_phases(metrics, "new"):
        status, said = "new", f"has {phases} in {side.name}"
    elif phases := describe_missing_phases(metrics, "not-comparable"):
        said = f"has {phases}, as {side.name} had"
    elif efficiency is not None and efficiency.status == "new":
        status, said = "new", f"has no scaling efficiency in {side.name}"
    elif efficiency is not None and efficiency.value is None:
        return Verdict(status=status, sentence=f"{case} has no scaling efficiency: {efficiency.note}", metrics=metrics)
    elif is_counted and operators and operators.status == "not-comparable":
        said = f"is not compared in full with {side.name}: {operators.note}"
    elif gpu is not None and gpu.status == "not-comparable" and gpu.value is None:
        said = f"is not compared in full with {side.name}: its GPU seconds were not measured"
    return Verdict(status=status, sentence=f"{case} {said}{side.advise(_RECORD)}", metrics=metrics) if said else None
