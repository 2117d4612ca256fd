"""Judges runs on an emulated GPU against recorded ones. Pure.

Nothing here is noisy: the same code allocates, and asks the driver for, the same bytes in every process. So every growth is
a regression, whatever the tolerances say: of the peak, of the peak of each phase, of reserved memory, and of FLOPs. Bytes
moved may grow a little. Time is not judged, because there is none; what steps ask of the GPU is, by the rules of
`pytest_gputrain.gate.counts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from pytest_gputrain.cases.identity import differences
from pytest_gputrain.gate.counts import BY_THE_RULES, UNJUDGED, have_steps_in_common, judge_counts, with_evaluation
from pytest_gputrain.gate.criteria import Judged
from pytest_gputrain.gate.expected_times import describe_slowdown
from pytest_gputrain.gate.memory import PHASES, describe_memory, in_phase, is_memory_metric
from pytest_gputrain.gate.messages import OtherSide, describe_checkpointing, describe_metric
from pytest_gputrain.gate.own_training import lost_tensors, other_shapes
from pytest_gputrain.gate.step_memory import judge_heap, judge_left_behind, judge_steps
from pytest_gputrain.gate.work import WORK, describe_work, flops_apart
from pytest_gputrain.hardware.catalog import title_of
from pytest_gputrain.records import (
    FAILING,
    Case,
    Counts,
    EmulatedRun,
    MetricName,
    MetricVerdict,
    Rates,
    Recorded,
    Status,
    TrainingPhase,
    Verdict,
)
from pytest_gputrain.records.memory import BESIDE_STEPS
from pytest_gputrain.records.tolerance import CountTerms
from pytest_gputrain.utils.units import format_bytes, format_percent

_CHANGED: Final[tuple[Status, ...]] = ("regressed", "improved")
_MOVED_RATIO: Final = 0.01
"""Growth of the bytes that operators read and write that passes, because one cheap operator more is no regression."""
_STORED: Final = OtherSide("its baseline", "baseline", remedies=True)


class _Compared(NamedTuple):
    """The differences between a run and a recorded one. Each text follows the case in a sentence."""

    metrics: tuple[MetricVerdict, ...]
    worse: tuple[str, ...]
    better: tuple[str, ...]
    told: tuple[str, ...]
    doubtful: tuple[str, ...] = ()
    """Growth that a second run does not confirm."""
    is_trade: bool = False
    """Whether counts of steps are worse where something else is better, or the other way round."""


def judge(
    case: Case,
    run: EmulatedRun,
    recorded: Recorded | None,
    platform: str,
    terms: CountTerms = BY_THE_RULES,
    again: Counts | None = None,
    rates: Rates | None = None,
    elsewhere: str = "",
    side: OtherSide = _STORED,
) -> Verdict:
    """Judge a run on an emulated GPU against the recorded runs of its case.

    Args:
        platform: the marker of the platform.
        terms: how the counts of steps are judged.
        again: the counts of a second run, which must confirm any growth.
        rates: of the platform, to say what more work costs; None if they are not known.
        elsewhere: where figures may be that were not found, with the remedy.
        side: where the recorded figures come from.
    """
    title, side = title_of(platform), side._replace(platform=platform)
    if recorded is not None and recorded.case.identity() == case.identity():
        before = recorded.like(run) or recorded.nearest(run)
        verdict, remedy = _verdict(case, run, before, title, terms, again, rates, side)
        said = [verdict.sentence]
        # Other versions of libraries are no excuse for a higher figure. A figure that is not higher passes.
        if changed := ", ".join(_changed_conditions(before, run)):
            said.append(f"{'it was recorded' if side.remedies else f'{side.name} ran'} under other conditions ({changed})")
            remedy = side.if_expected() if verdict.status in FAILING else side.record()
        sentence = "; ".join(said) + (side.advise(remedy) if remedy else "")
        return msgspec.structs.replace(verdict, sentence=sentence, other_conditions=changed)
    if not run.fits:
        sentence = f"{case} {_what_does_not_fit(run, title, 'does not fit')}{side.advise(side.if_expected())}"
        return Verdict(status="failed", sentence=sentence)
    if recorded is None and not side.remedies:
        return Verdict(status="new", sentence=f"{case}: {side.name} has no figures of it")
    if recorded is None:
        remedy = elsewhere or side.record("new")
        sentence = f"{case} was never recorded on an emulated {title}; {remedy}"
        return Verdict(status="new", sentence=sentence)
    change = differences(recorded.case, case)
    of = f"was recorded on an emulated {title}" if side.remedies else f"{side.name} ran"
    sentence = f"{case} is not what {of} ({change}){side.advise(side.record())}"
    return Verdict(status="not-comparable", sentence=sentence)


def _changed_conditions(before: EmulatedRun, now: EmulatedRun) -> Iterator[str]:
    """Yield how the conditions differ: ``torch 2.12.0 -> 2.13.0``."""
    for name in sorted({*before.packages, *now.packages}):
        if before.packages.get(name) != now.packages.get(name):
            yield f"{name} {before.packages.get(name, 'absent')} -> {now.packages.get(name, 'absent')}"
    old, new = msgspec.structs.asdict(before.conditions), msgspec.structs.asdict(now.conditions)
    for name in filter("packages".__ne__, old):
        if old[name] != new[name]:
            yield f"{name.replace('_', ' ')} {old[name]} -> {new[name]}"


def _verdict(
    case: Case,
    run: EmulatedRun,
    before: EmulatedRun,
    title: str,
    terms: CountTerms,
    again: Counts | None,
    rates: Rates | None,
    side: OtherSide,
) -> tuple[Verdict, str]:
    """Return the verdict on a run, and the remedy."""
    if before.fits and not run.fits:
        sentence = f"{case} {_what_does_not_fit(run, title, 'no longer fits')}"
        return Verdict(status="regressed", sentence=sentence), side.if_expected()
    if run.fits and not before.fits:
        return Verdict(status="improved", sentence=f"{case} fits {title} now"), side.record()
    flops, recomputed = flops_apart(
        (before.flops_per_step, before.recomputed_flops_per_step), (run.flops_per_step, run.recomputed_flops_per_step)
    )
    before = msgspec.structs.replace(before, flops_per_step=flops, recomputed_flops_per_step=recomputed)
    compared = _compare(before, run, terms, again, side)
    metrics = compared.metrics
    not_compared = "".join(f"; {what}" for what in _not_compared(before, run, terms, side))
    told = "".join(f"; {what}" for what in compared.told)
    checkpointing = describe_checkpointing(before.recomputed_flops_per_step, run.recomputed_flops_per_step)
    switched = f"; {checkpointing}" if checkpointing else ""
    if compared.worse:
        worse = [metric for metric in metrics if metric.status == "regressed" and not is_memory_metric(metric)]
        grown = [metric.metric for metric in worse if metric.metric != "peak_reserved_bytes"]
        slower = describe_slowdown(case, grown, before, run, rates)
        shapes = other_shapes(run.batch_shapes, before.batch_shapes, side)
        sentence = f"{case} {'; '.join(filter(None, (*compared.worse, shapes, slower, *compared.doubtful)))}"
        if compared.is_trade:
            sentence += f"; but it {'; '.join(compared.better)}"
        sentence += switched
        verdict = Verdict(status="regressed", sentence=f"{sentence}{not_compared}", metrics=metrics)
        return verdict, side.if_expected() if compared.is_trade else ""
    if compared.doubtful:
        sentence = f"{case} {'; '.join(compared.doubtful)}{told}{not_compared}"
        return Verdict(status="inconclusive", sentence=sentence, metrics=metrics), ""
    if compared.better:
        sentence = f"{case} {'; '.join(compared.better)}{switched}{told}{not_compared}"
        return Verdict(status="improved", sentence=sentence, metrics=metrics), side.record()
    lost = (
        (before.bytes_per_step and not run.bytes_per_step)
        or (terms.mode == "judge" and _lost_counts(before, run))
        or _beside_steps_only_in(before, run)
    )
    memory = "the recorded memory" if side.remedies else f"the memory of {side.name}"
    sentence = f"{case} takes {memory}{told}{not_compared}"
    return Verdict(status="not-comparable" if lost else "pass", sentence=sentence, metrics=metrics), ""


def _compare(before: EmulatedRun, now: EmulatedRun, terms: CountTerms, again: Counts | None, side: OtherSide) -> _Compared:
    are_comparable, counts = before.fits and now.fits and terms.mode != "off", UNJUDGED
    if are_comparable and before.counts and now.counts:
        counts = judge_counts(before.counts, now.counts, terms, again) or UNJUDGED
    metrics = tuple(_metrics(before, now, work_rose=counts.work_rose))
    counts = with_evaluation(counts, before.evaluation_counts, now.evaluation_counts, terms)
    worse, better = (_changes(metrics, (status,), before, now) for status in _CHANGED)
    phases = before.phase_peak_bytes.keys() - now.phase_peak_bytes.keys() - {"between"} - BESIDE_STEPS
    if gone := sorted(phases) if now.phase_peak_bytes else []:
        worse.insert(0, f"no longer trains: it has no {' and no '.join(gone)}")
    if lost := lost_tensors(now.trained, before.trained):
        worse.insert(0, lost)
    told = tuple(
        f"the bytes that it moves {metric.note}" for metric in metrics if metric.metric == "bytes_per_step" and metric.note
    )
    if are_comparable and now.counts and not before.counts:
        note = f"what its steps ask of the GPU was not recorded{side.advise(side.record())}"
        metrics = (*metrics, MetricVerdict(metric="work", status="not-comparable", note=note))
    return _Compared(
        metrics=(*metrics, *counts.metrics),
        worse=(*worse, *counts.worse),
        better=(*better, *counts.better),
        told=(*told, *counts.told),
        doubtful=counts.doubtful,
        is_trade=bool((counts.worse and better) or (counts.better and worse) or (counts.worse and counts.better)),
    )


def _lost_counts(before: EmulatedRun, now: EmulatedRun) -> str:
    """Say why counts are not compared although the baseline has them; empty if they are compared."""
    if before.counts is None:
        return ""
    if now.counts is None:
        return "because it was not counted"
    return "" if have_steps_in_common(before.counts, now.counts) else "because no timed step of the same number was recorded"


def _not_compared(before: EmulatedRun, now: EmulatedRun, terms: CountTerms, side: OtherSide) -> Iterator[str]:
    """Name the figures that one side lacks."""
    if now.phase_peak_bytes and not before.phase_peak_bytes:
        yield f"its peaks of phases were not recorded, so they are not compared{side.advise(side.record())}"
    for phase in _beside_steps_only_in(now, before):
        yield f"its peak {in_phase(phase)} was not recorded, so it is not compared{side.advise(side.record())}"
    for phase in _beside_steps_only_in(before, now):
        yield f"its peak {in_phase(phase)} is not compared, because this run has none"
    if before.bytes_per_step and not now.bytes_per_step:
        yield "its FLOPs and the bytes that it moves are not compared, because they were not counted"
    elif now.bytes_per_step and not before.bytes_per_step and before.phase_peak_bytes:
        yield f"the bytes that it moves were not recorded, so they are not compared{side.advise(side.record())}"
    if terms.mode != "off" and (reason := _lost_counts(before, now)):
        yield f"what its steps ask of the GPU is not compared, {reason}"
    elif terms.mode != "off" and now.counts and not before.counts and (before.phase_peak_bytes or not now.phase_peak_bytes):
        yield f"what its steps ask of the GPU was not recorded, so it is not compared{side.advise(side.record())}"


def _beside_steps_only_in(one: EmulatedRun, other: EmulatedRun) -> list[TrainingPhase]:
    """Return the phases of evaluation and checkpoints that ``one`` has and ``other`` lacks, if both fit and have peaks of
    phases."""
    compared = one.fits and other.fits and one.phase_peak_bytes and other.phase_peak_bytes
    return [phase for phase in one.phase_peak_bytes if phase in BESIDE_STEPS - other.phase_peak_bytes.keys() and compared]


def _what_does_not_fit(run: EmulatedRun, title: str, what: str) -> str:
    """Say what does not fit, to follow the case in a sentence: ``does not fit H100 (79.1 GiB): CUDA out of memory. ...``."""
    return f"{what} {title} ({format_bytes(run.device_memory_bytes)}): {run.refused.rstrip('.')}"


def _metrics(before: EmulatedRun, now: EmulatedRun, *, work_rose: bool) -> Iterator[MetricVerdict]:
    """Return the verdicts on memory and on the work of operators.

    Args:
        work_rose: whether steps have more kernels, library calls or copies than before.
    """
    if not (before.fits and now.fits):
        return
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        yield _compared(name, getattr(before, name), getattr(now, name))
    for name, phase in PHASES.items():
        if phase in before.phase_peak_bytes and phase in now.phase_peak_bytes:
            yield _compared(name, before.phase_peak_bytes[phase], now.phase_peak_bytes[phase])
    for steps in judge_steps(
        _compared("peak_allocated_bytes", before.peak_allocated_bytes, now.peak_allocated_bytes),
        [now],
        [before],
        lambda name, values, peaks: Judged(_compared(name, peaks[0], values[0])),
        allowed_growth=now.allowed_growth,
    ):
        yield steps.verdict
    for kept in (*judge_heap([now], [before], allowed_growth=now.allowed_growth), *judge_left_behind([now], [before])):
        yield kept.verdict
    for name in WORK:
        value, baseline = getattr(now, name), getattr(before, name)
        if value is not None and baseline is not None:
            metric = _compared(name, baseline, value, _MOVED_RATIO if name == "bytes_per_step" else 0.0)
            if work_rose and name == "bytes_per_step" and metric.status == "improved":
                # Fewer bytes are no improvement if more kernels move them.
                note = f"fell by {format_percent(1 - value / baseline, signed=False)} while the number of its kernels rose"
                metric = msgspec.structs.replace(metric, status="pass", note=note)
            yield metric


def _compared(name: MetricName, baseline: int, value: int, ratio: float = 0.0) -> MetricVerdict:
    limit, least = baseline * (1 + ratio), baseline / (1 + ratio)
    status: Status = "regressed" if value > limit else "improved" if value < least else "pass"
    changed = name == "bytes_per_step" and status == "pass" and value != baseline
    note = f"changed by {format_percent(value / baseline - 1)}, within the limit" if changed else ""
    return MetricVerdict(metric=name, status=status, value=value, baseline=baseline, limit=limit, note=note)


def _changes(
    metrics: Sequence[MetricVerdict], statuses: Sequence[Status], before: EmulatedRun, now: EmulatedRun
) -> list[str]:
    """Describe the metrics with these statuses. Of several phases only one is described in full."""
    chosen = [metric for metric in metrics if metric.status in statuses]
    others = [
        describe_work(metric, before, now) if metric.metric in WORK else describe_metric(metric)
        for metric in chosen
        if not is_memory_metric(metric)
    ]
    return [*describe_memory(chosen, now, [before]), *others]
