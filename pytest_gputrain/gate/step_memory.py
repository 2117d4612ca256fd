"""Judges the memory of each step against that of the step of the same number in a baseline, and names the step. Pure.

The peak of a case does not show a larger sample in one later step, nor memory that begins to grow late. On a CPU it is the
peak of the first steps alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from pytest_gputrain.gate.criteria import Judged
from pytest_gputrain.gate.messages import count
from pytest_gputrain.gate.step_times import exceeds
from pytest_gputrain.records import MetricName, MetricVerdict, StepMemory, TrainingPhase
from pytest_gputrain.records.step_memory import LEAST_HEAP, LEAST_RISE, OfStep, Rise, rise_of, unfolded
from pytest_gputrain.utils.units import format_bytes

KEPT: Final[dict[MetricName, tuple[TrainingPhase, str]]] = {
    "evaluate_kept_bytes": ("evaluate", "its evaluation"),
    "checkpoint_kept_bytes": ("checkpoint", "a checkpoint"),
}
STEP_METRICS: Final[tuple[MetricName, ...]] = ("step_peak_bytes", "step_growth_bytes", "heap_growth", *KEPT)
_HEAP_RATIO: Final = 0.5
_SAME_PEAK_RATIO: Final = 0.1
"""Peaks of one step in several runs count as different from this share of their growth on."""
_KEPT_RUNS: Final = 2
"""Fresh processes that have to agree on memory that is left behind."""


class HasSteps(Protocol):
    """A run that may have the memory of its steps."""

    @property
    def memory_of_steps(self) -> Sequence[StepMemory]: ...


class KeepsMemory(Protocol):
    """A run that may have the memory that its steps, its evaluation and its checkpoint leave behind."""

    @property
    def heap_growth(self) -> int | None: ...
    @property
    def kept_behind(self) -> Mapping[TrainingPhase, int]: ...


JudgePeaks = Callable[[MetricName, Sequence[int], Sequence[int]], Judged[MetricVerdict]]
"""Judges the peaks of runs against those of a baseline."""


def judge_steps(
    whole: MetricVerdict,
    measured: Sequence[HasSteps],
    fitted: Sequence[HasSteps],
    judge: JudgePeaks,
    *,
    allowed_growth: int = 0,
    settled: bool = True,
    again: str = "",
) -> Iterator[Judged[MetricVerdict]]:
    """Judge the memory of steps; nothing if neither side has it.

    Args:
        whole: the verdict on the peak of the case.
        allowed_growth: bytes that steps may keep each time.
        settled: whether another process could not show that growth is none.
        again: the remedy where the baseline has no memory of steps.
    """
    if not any(run.memory_of_steps for run in measured):
        return
    now, before = ([[*unfolded(run.memory_of_steps)] for run in side] for side in (measured, fitted))
    if not (all(now) and all(before)):
        note = "this run does not know it" if all(before) else f"it was not recorded{again}"
        yield Judged(MetricVerdict(metric="step_peak_bytes", status="not-comparable", note=note))
        return
    growth = _growth(now, before[-1], allowed_growth)
    yield Judged(growth, settled or growth.status == "pass")
    peak = _worst_peak(whole, now, before, judge)
    if growth.status == "pass" and peak is not None:
        yield peak


def judge_heap(
    measured: Sequence[KeepsMemory], fitted: Sequence[KeepsMemory], *, allowed_growth: int = 0, most: int = 1
) -> Iterator[Judged[MetricVerdict]]:
    """Judge what steps leave on the heap of the host, which holds no tensors of a GPU; nothing if the baseline has no such
    figure.

    Args:
        allowed_growth: bytes that steps may keep each time.
        most: runs that there may be.
    """
    now, before = ([run.heap_growth for run in side if run.heap_growth is not None] for side in (measured, fitted))
    note = (
        "leaves {} more on the host's heap after each step ({} before): look for losses that are kept "
        "without detach(), and for arrays in lists and caches, whose lines two compared snapshots of tracemalloc name"
    )
    limit = max(before, default=0) * (1 + _HEAP_RATIO) + max(LEAST_HEAP, allowed_growth)
    return _judge_kept("heap_growth", now, before, limit, note, most)


def judge_left_behind(
    measured: Sequence[KeepsMemory], fitted: Sequence[KeepsMemory], most: int = 1
) -> Iterator[Judged[MetricVerdict]]:
    """Judge the tensors that an evaluation or saving a checkpoint leaves behind; nothing if the baseline has no such
    figure."""
    for name, (phase, what) in KEPT.items():
        now, before = ([run.kept_behind[phase] for run in side if phase in run.kept_behind] for side in (measured, fitted))
        note = f"leaves {{}} of tensors behind {what} ({{}} before)"
        yield from _judge_kept(name, now, before, max(before, default=0) + LEAST_RISE, note, most)


def _judge_kept(
    name: MetricName, now: Sequence[int], before: Sequence[int], limit: float, note: str, most: int
) -> Iterator[Judged[MetricVerdict]]:
    # A run without a figure of `KEPT` no longer evaluates or saves, which the verdict on that phase says already.
    if not before or (not now and name in KEPT):
        return
    metric = MetricVerdict(metric=name, status="pass", baseline=max(before), limit=limit, runs=len(now))
    if not now:
        yield Judged(msgspec.structs.replace(metric, status="not-comparable", note="this run does not know it"))
        return
    above, value = exceeds(now, limit, min(most, _KEPT_RUNS)), statistics.median_high(now)
    metric = msgspec.structs.replace(metric, value=value)
    if above is not False:
        note = note.format(format_bytes(value), format_bytes(max(before)))
        metric = msgspec.structs.replace(metric, status="regressed", note=note)
    yield Judged(metric, above is not None)


def _growth(now: Sequence[Sequence[OfStep]], before: Sequence[OfStep], allowed: int) -> MetricVerdict:
    """Judge the growth of memory from step to step against that of the baseline."""
    rises = [_rise(run, before, max(LEAST_RISE, allowed)) for run in now]
    found = [rise for rise in rises if rise is not None]
    metric = MetricVerdict(metric="step_growth_bytes", status="pass", value=0.0, baseline=0.0, runs=len(now))
    if len(found) < len(now):
        return metric
    first, every, mean = found[0]
    after = "each step" if every == 1 else f"every {every} steps"
    note = f"keeps {format_bytes(mean)} more of tensors after {after} from step {first + 1} on, which it did not before"
    return msgspec.structs.replace(metric, status="regressed", value=mean, note=note)


def _rise(now: Sequence[OfStep], before: Sequence[OfStep], least: int) -> Rise | None:
    more = [0]
    for ours, theirs in zip(now, before, strict=False):
        more.append(ours.end - theirs.end if ours.peak and theirs.peak else more[-1])
    return rise_of(more[1:], least)


def _worst_peak(
    whole: MetricVerdict, now: Sequence[Sequence[OfStep]], before: Sequence[Sequence[OfStep]], judge: JudgePeaks
) -> Judged[MetricVerdict] | None:
    """Judge the step whose peak exceeds that of the baseline by most. None if no step is counted on both sides, or if most
    steps have grown as much as the whole case, whose verdict says so."""
    judged: dict[int, Judged[MetricVerdict]] = {}
    for at in range(min(map(len, (*now, *before)))):
        values, peaks = ([run[at].peak for run in side] for side in (now, before))
        if all(values) and all(peaks):
            judged[at] = judge("step_peak_bytes", values, peaks)
    if not judged:
        return None
    exceeding = [at for at, one in judged.items() if one.verdict.status == "regressed"]
    worst = max(exceeding or judged, key=lambda at: increase(judged[at].verdict))
    found = judged[worst]
    if not exceeding:
        return found._replace(verdict=msgspec.structs.replace(found.verdict, status="pass", note=""))
    is_told = whole.status == "regressed" and increase(found.verdict) <= increase(whole)
    if is_told and 2 * len(exceeding) > len(judged):
        return None
    value, baseline = found.verdict.value or 0, found.verdict.baseline or 0
    others = f", and needs more in {count(len(exceeding) - 1, 'other step')}" if len(exceeding) > 1 else ""
    note = f"peaks at {format_bytes(value)} in step {worst + 1} ({format_bytes(baseline)} before){others}"
    peaks = [run[worst].peak for run in now]
    if max(peaks) - min(peaks) > _SAME_PEAK_RATIO * increase(found.verdict):
        apart = format_bytes(max(peaks) - min(peaks))
        note += f"; but runs of this code differ there by {apart}, as they do if the data have no seed"
    return found._replace(verdict=msgspec.structs.replace(found.verdict, note=note))


def increase(metric: MetricVerdict) -> float:
    """Return by how much a figure is above its baseline."""
    return (metric.value or 0) - (metric.baseline or 0)
