"""Judges measured runs against a baseline, metric by metric. Pure: no file, clock or hardware.

`pytest_gputrain.gate.step_times` has the rule of times (the median step of a process, and the scaling efficiency where a
test asks for it) and of what takes several processes to tell; here it meets the records. It wants no more than what a
baseline stores raw, so a better rule can replace it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

import msgspec

from pytest_gputrain.cases.identity import differences
from pytest_gputrain.gate.comparison import Comparison, other_device
from pytest_gputrain.gate.conclusion import Conclusion, to_record, without_baseline
from pytest_gputrain.gate.contention import describe_memory_shortage, with_contention
from pytest_gputrain.gate.counts import UNJUDGED, JudgedCounts, have_steps_in_common, judge_counts, with_evaluation
from pytest_gputrain.gate.criteria import Criteria, Judged
from pytest_gputrain.gate.host_bound import (
    COARSE_GPU_TOLERANCE,
    GPU_PRIOR_SD,
    HOST_PRIOR_SD,
    LEAST_HOST_TOLERANCE,
    WHY_GPU_SECONDS_ARE_HELD_COARSELY,
    gpu_seconds,
)
from pytest_gputrain.gate.memory import judge_memory
from pytest_gputrain.gate.messages import describe_changes, describe_failure, describe_metric, describe_process_count
from pytest_gputrain.gate.scaling import efficiencies
from pytest_gputrain.gate.step_times import MEAN_PRIOR_SD, MEAN_TOLERANCE, decide, mean_step, runs_out
from pytest_gputrain.gate.work import flops_apart
from pytest_gputrain.records import (
    Crashed,
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
from pytest_gputrain.records.tolerance import Tolerance
from pytest_gputrain.utils.units import format_bytes, format_percent


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
        return Judged(without_baseline(criteria, replies, no_scaling))
    sides = Comparison.of(criteria, replies, baseline, shift)
    name = sides.side.name
    if baseline.case.identity() != case.identity():
        change = differences(baseline.case, case)
        return Judged(to_record(sides, "not-comparable", f"is not what {name} measured ({change})"))
    is_out = len(sides.measured) < len(replies)
    foreign = other_device(sides.replies[0].environment, baseline.runs)
    if foreign and (is_out or not sides.baseline_fits):
        return Judged(to_record(sides, "not-comparable", f"cannot be compared with {name}: {foreign}"))
    if is_out:
        return _out_of_memory(sides)
    if not sides.baseline_fits:
        return Judged(to_record(sides, "improved", f"fits in memory now; {name} did not"))
    judged = [
        *_times(sides),
        *judge_memory(sides.measured, sides.fitted, sides.tolerance.memory, sides.most, sides.criteria.again),
        *_flops(sides),
    ]
    if no_scaling:
        judged.append(Judged(MetricVerdict(metric="scaling_efficiency", status="not-comparable", note=no_scaling)))
    elif measured_efficiencies := efficiencies(case, sides.measured):
        judged.append(_scaling(sides, measured_efficiencies, efficiencies(case, sides.fitted)))
    counts, is_first = _counts(sides), len(sides.measured) == 1 < sides.most
    judged += [Judged(metric, not (is_first and metric.status == "regressed")) for metric in counts.metrics]
    verdict = Conclusion(sides, tuple(metric.verdict for metric in judged), counts).verdict()
    may_differ = sides.lost_tensors and is_first and not sides.measured[0].counts_exactly
    return Judged(verdict, not may_differ and all(metric.settled for metric in judged))


def first_ratio(criteria: Criteria, replies: Sequence[Reply]) -> float | None:
    """Return the logarithm of the first run's step time over the baseline's; None if the times are not compared, or if the
    host decides them.

    Where the GPU waits for the host, it is that of GPU seconds as soon as these are held to the time tolerance.
    """
    baseline, measured = criteria.baseline, all(isinstance(reply, Measurement) for reply in replies)
    if baseline is None or baseline.case.identity() != criteria.case.identity() or not (replies and measured):
        return None
    sides = Comparison.of(criteria, replies[:1], baseline, shift=0.0)
    if not sides.fitted or not sides.baseline_fits or sides.why_time_is_foreign:
        return None
    base, new = sides.before, sides.now
    if sides.pace.is_host_bound:
        base, new = gpu_seconds(sides.fitted), gpu_seconds(sides.measured)
        if WHY_GPU_SECONDS_ARE_HELD_COARSELY or not (base and new):
            return None
    return decide(base, new, tolerance=criteria.tolerance.time).ratios[0]


def _out_of_memory(sides: Comparison) -> Judged[Verdict]:
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


def _times(sides: Comparison) -> list[Judged[MetricVerdict]]:
    """Judge the seconds of a step, and its GPU seconds if either side has them."""
    if reason := sides.why_time_is_foreign:
        return [Judged(_medians("step_seconds", "not-comparable", sides.now, sides.before, reason))]
    judged = [_step_seconds(sides)]
    # Another host may slow all steps, and so the mean. `_step_seconds` allows for this, and the mean has no such allowance.
    if not ((sides.pace.is_host_bound or sides.pace.changed) and sides.other_host):
        judged += _mean_step_seconds(sides, judged[0].verdict.status)
    if sides.pace.share is not None:
        judged.append(_gpu_seconds(sides))
    return judged + _input_seconds(sides)


def _step_seconds(sides: Comparison) -> Judged[MetricVerdict]:
    """Judge wall seconds by the time tolerance. If the GPU waits for the host, they are judged by how much hosts vary."""
    found, other, tolerance = sides.pace, sides.other_host, sides.tolerance
    if found.is_host_bound and other:
        value, baseline = statistics.median(sides.now), statistics.median(sides.before)
        limit, slower = baseline * (1 + tolerance.host_time), format_percent(value / baseline - 1, signed=False)
        allowed, fits = format_percent(tolerance.host_time, signed=False), value <= limit
        note = f"is held to {allowed} {other}, because {found}" if fits else f"it is {slower} slower {other}, and {found}"
        shown = _medians("step_seconds", "pass" if fits else "not-comparable", sides.now, sides.before, note)
        return Judged(msgspec.structs.replace(shown, limit=limit, gpu_busy_share=found.share))
    judged = _decided("step_seconds", sides.for_host(), sides.before, sides.now)
    metric = msgspec.structs.replace(judged.verdict, gpu_busy_share=found.share)
    if found.is_host_bound or found.changed:
        about = str(found)
        if metric.status == "pass" and metric.limit is not None and metric.baseline:
            allowed = format_percent(metric.limit / metric.baseline - 1, signed=False)
            about = f"is held to {allowed}, {'because' if found.is_host_bound else 'although'} {found}"
        elif metric.status == "regressed" and other and (metric.change or 0.0) <= tolerance.host_time:
            # When the baseline was recorded, the GPU decided how long this step took. So another host explains at most
            # `host_time`.
            about, metric = f"{found}, {other}", msgspec.structs.replace(metric, status="inconclusive")
        metric = msgspec.structs.replace(metric, note="; ".join(filter(None, [about, metric.note])))
    return judged._replace(verdict=metric)


def _mean_step_seconds(sides: Comparison, of_median: Status) -> list[Judged[MetricVerdict]]:
    """Judge the mean of the steps if their median has not changed. It shows that every third or tenth step is slow."""
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


def _input_seconds(sides: Comparison) -> list[Judged[MetricVerdict]]:
    """Judge how long a step waits for its batches on a GPU. It may wait longer by as much as the host may slow a step.

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


def _gpu_seconds(sides: Comparison) -> Judged[MetricVerdict]:
    """Judge GPU seconds if the GPU waits for the host. Otherwise they are only shown, because wall seconds are judged."""
    profiled = [run for run in sides.measured if run.gpu_steps]
    new, base = gpu_seconds(profiled), gpu_seconds(sides.fitted)
    if not new or not base:
        note = "they were not measured" if base else f"there were none before{sides.criteria.again}"
        return Judged(_medians("gpu_seconds", "not-comparable", new, (), note))
    metric = _medians("gpu_seconds", "pass", new, base)
    if not sides.pace.is_host_bound:
        return Judged(metric)
    held = dataclasses.replace(sides, replies=profiled, prior=GPU_PRIOR_SD)
    if WHY_GPU_SECONDS_ARE_HELD_COARSELY:
        held = held.held_to(COARSE_GPU_TOLERANCE, shift=0.0, doubted_from=1.0)
    judged = _decided("gpu_seconds", held, base, new)
    change = metric.change or 0.0
    if judged.verdict.status != "pass" or abs(change) <= sides.tolerance.time or not WHY_GPU_SECONDS_ARE_HELD_COARSELY:
        return judged
    note = (
        f"changed by {format_percent(change)}, held to {format_percent(held.tolerance.time, signed=False)} because "
        f"{WHY_GPU_SECONDS_ARE_HELD_COARSELY}"
    )
    return judged._replace(verdict=msgspec.structs.replace(judged.verdict, note=note))


def _scaling(sides: Comparison, value: Sequence[float], base: Sequence[float]) -> Judged[MetricVerdict]:
    reason = sides.why_time_is_foreign
    if reason or not base:
        status: Status = "not-comparable" if reason else "new"
        return Judged(_medians("scaling_efficiency", status, value, base, reason or "there was none before"))
    # The reciprocal of an efficiency is the time of a step, in units of the step of one worker.
    lost, before = [1 / efficiency for efficiency in value], [1 / efficiency for efficiency in base]
    return _decided("scaling_efficiency", sides.for_host(), before, lost)


def _medians(name: MetricName, status: Status, new: Sequence[float], base: Sequence[float], note: str = "") -> MetricVerdict:
    """Return a metric with the medians of both sides, as far as they are known."""
    value, baseline = (statistics.median(side) if side else None for side in (new, base))
    return MetricVerdict(metric=name, status=status, value=value, baseline=baseline, note=note)


def _decided(name: MetricName, sides: Comparison, base: Sequence[float], new: Sequence[float]) -> Judged[MetricVerdict]:
    """Judge times, one of each run, and doubt a slowdown that other processes may have caused."""

    def judge_runs(indices: Sequence[int]) -> Judged[MetricVerdict]:
        most = max(1, sides.most - (len(new) - len(indices)))
        return _ruled(name, sides, base, [new[index] for index in indices], most)

    judged = judge_runs(range(len(new)))
    doubted = with_contention(judged.verdict, lambda indices: judge_runs(indices).verdict, sides.measured)
    return judged._replace(verdict=doubted)


def _ruled(
    name: MetricName, sides: Comparison, base: Sequence[float], new: Sequence[float], most: int
) -> Judged[MetricVerdict]:
    """Return the verdict on times. An efficiency is judged by its reciprocals, and shown as it is."""
    decision = decide(
        base,
        new,
        tolerance=sides.tolerance.time,
        prior=sides.prior,
        most=most,
        # A slow day slows one worker as much as several workers, so the ratio of their times stays the same.
        shift=0.0 if name == "scaling_efficiency" else sides.shift,
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


def _flops(sides: Comparison) -> Iterator[Judged[MetricVerdict]]:
    """Judge the FLOPs of a step, which are an exact count, and separately those of recomputation, as a share of all; nothing
    if neither side has them."""
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


def _counts(sides: Comparison) -> JudgedCounts:
    """Judge the counts of steps on a CPU, or on a GPU of the same model: growth fails if a second process confirms it."""
    measured, terms = sides.measured, sides.criteria.counts
    before, now = sides.fitted[-1].counts, measured[0].counts
    if terms.mode == "off" or not (before or now) or describe_process_count(sides.here, sides.fitted):
        return UNJUDGED
    other = other_device(sides.here, sides.fitted)
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
        return UNJUDGED._replace(metrics=(metric,))
    again, evaluated_again = (measured[1].counts, measured[1].evaluation_counts) if len(measured) > 1 else (None, None)
    steps = judge_counts(before, now, terms, again)
    assert steps is not None, "they have steps in common"
    evaluation = sides.fitted[-1].evaluation_counts, measured[0].evaluation_counts
    return with_evaluation(steps, *evaluation, terms, evaluated_again)
