"""Judges peaks of memory against a baseline's, of training and of each phase, and names the tensors behind a change. Pure.

Phases are those of memory that was counted on a CPU, or emulated; on a GPU nothing keeps a peak of theirs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from pytest_gputrain.gate.contention import GPU_MEMORY_NOISE_BYTES
from pytest_gputrain.gate.criteria import Judged
from pytest_gputrain.gate.messages import count, describe_metric, describe_process_count, listed
from pytest_gputrain.gate.step_memory import KEPT, STEP_METRICS, increase, judge_heap, judge_left_behind, judge_steps
from pytest_gputrain.gate.step_times import exceeds
from pytest_gputrain.records import (
    BaselineRun,
    LiveTensor,
    Measurement,
    MetricName,
    MetricVerdict,
    Status,
    TrainingPhase,
)
from pytest_gputrain.records.memory import BESIDE_STEPS, peak_phase_of
from pytest_gputrain.records.tolerance import MemoryTolerance
from pytest_gputrain.utils.units import format_bytes, format_percent

SHARED_CPU_RATIO: Final = 0.1
"""Least memory tolerance for several processes on a CPU: the threads of gloo let go of a buffer sooner or later, which moved
the peak of tiny models under FSDP2 by up to 7.3 % from run to run."""

_SHARED_CPU_PHASE_RATIO: Final = 0.2
"""The least tolerance for a phase of such a case, as a share of the peak of training. Two buffers of FSDP2 that were let go
of late were 13 % of it in one of four busy runs. On torch 2.13 six runs of DDP and six of FSDP2, beside 30 busy ones, took
the same bytes in each phase."""

_SHARED_CPU_FIRST_RATIO: Final = 0.5
"""The least tolerance for the build and the forward pass of such a case, as a share of the peak of training. DDP sends a
flattened copy of all parameters while it is built, and the peak of training is at least twice as large; that copy, let go of
late, was 15.4 % of the peak of the click-through model."""

PHASES: Final[dict[MetricName, TrainingPhase]] = {
    "build_peak_bytes": "build",
    "forward_peak_bytes": "forward",
    "backward_peak_bytes": "backward",
    "between_peak_bytes": "between",
    "optimizer_peak_bytes": "optimizer",
    "evaluate_peak_bytes": "evaluate",
    "checkpoint_peak_bytes": "checkpoint",
    "checkpoint_host_peak_bytes": "checkpoint_host",
}
_IN_PHASE: Final[dict[TrainingPhase, str]] = {
    "between": "between backward passes",
    "evaluate": "in evaluation",
    "checkpoint": "while saving a checkpoint",
    "checkpoint_host": "on the host while saving a checkpoint",
}
"""How sentences name a phase, where it is not by its own name."""

_MOST_TENSORS_SHOWN: Final = 3
_MOST_LINES_SHOWN: Final = 3
_ROWS: Final = 8
"""The fewest rows of single shapes that a run keeps. Where it has fewer in all, it had no more."""

_Kind = tuple[str, TrainingPhase, tuple[int, ...], str]
"""The properties by which tensors of one kind differ from others."""


class PeaksByPhase(Protocol):
    """A run that has a peak of each phase."""

    @property
    def phase_peak_bytes(self) -> Mapping[TrainingPhase, int]: ...
    @property
    def largest(self) -> Mapping[TrainingPhase, Sequence[LiveTensor]]: ...


class _MemoryLimit(NamedTuple):
    """How much memory above a baseline passes, and how many runs must exceed it."""

    ratio: float
    slack: int
    exact: bool
    """Whether another process would only count the same."""
    most: int

    def judge(self, name: MetricName, values: Sequence[int], peaks: Sequence[int]) -> Judged[MetricVerdict]:
        """Judge the peaks of runs against those of a baseline."""
        value, highest, lowest = statistics.median_high(values), max(peaks), min(peaks)
        limit = highest * (1 + self.ratio) + self.slack
        above = exceeds(values, limit, 1 if self.exact else self.most)
        status: Status = "pass"
        if above is not False:
            status = "regressed"
        elif all(peak < lowest / (1 + self.ratio) - self.slack for peak in values):
            status = "improved"
        # Exact bytes change only if the training has changed. So the note tells of any change, even within the limit.
        changed = self.exact and status == "pass" and not lowest <= value <= highest
        note = f"changed by {value - highest:+,} bytes, within the limit" if changed else ""
        metric = MetricVerdict(
            metric=name, status=status, value=value, baseline=highest, limit=limit, note=note, runs=len(values)
        )
        return Judged(metric, above is not None)


def judge_memory(
    measured: Sequence[Measurement], fitted: Sequence[BaselineRun], tolerance: MemoryTolerance, most: int, again: str = ""
) -> list[Judged[MetricVerdict]]:
    """Judge the peak of training against the highest peak of the baseline, and each phase in the same way.

    Args:
        most: runs that there may be.
        again: the remedy where the baseline lacks an evaluation, a checkpoint or steps that this run has.
    """
    values = [run.peak_allocated_bytes for run in measured]
    peaks = [run.peak_allocated_bytes for run in fitted if run.peak_allocated_bytes is not None]
    here = measured[0].environment
    foreign = next((run.environment for run in fitted if run.environment.device_type != here.device_type), None)
    reason = describe_process_count(here, fitted)
    if foreign:
        reason = f"recorded on {foreign.device_name}, here {here.device_name}"
    elif not peaks:
        reason = "there was no peak before"
    if reason:
        value = statistics.median_high(values)
        metric = MetricVerdict(metric="peak_allocated_bytes", status="not-comparable", value=value, note=reason)
        return [Judged(metric)]
    on_cpu, alone = here.device_type == "cpu", here.device_count == 1
    rule = _MemoryLimit(
        ratio=tolerance.ratio if alone or not on_cpu else max(tolerance.ratio, SHARED_CPU_RATIO),
        slack=tolerance.bytes + (0 if on_cpu else GPU_MEMORY_NOISE_BYTES),
        exact=all(run.counts_exactly for run in measured),
        most=most,
    )
    whole = rule.judge("peak_allocated_bytes", values, peaks)

    def rule_of(phase: TrainingPhase) -> _MemoryLimit:
        if alone or not on_cpu:
            return rule
        # A buffer that outlives its phase adds as many bytes to a small phase as to a large one. So the tolerance is a share
        # of the largest peak.
        share = _SHARED_CPU_FIRST_RATIO if phase in ("build", "forward") else _SHARED_CPU_PHASE_RATIO
        return rule._replace(ratio=0.0, slack=rule.slack + round(max(rule.ratio, share) * max(peaks)))

    judged = [whole, *_phases(whole.verdict, measured, fitted, rule_of, again)]
    # With several threads or processes on a CPU it depends on their timing what is still alive at the end of a step.
    if rule.exact or not on_cpu:
        settled, growth = rule.exact or len(measured) >= most, measured[0].allowed_growth
        judged += judge_steps(
            whole.verdict, measured, fitted, rule.judge, allowed_growth=growth, settled=settled, again=again
        )
        judged += judge_heap(measured, fitted, allowed_growth=growth, most=most)
    if all(run.counted_threads == 1 for run in measured):
        judged += judge_left_behind(measured, fitted, most)
    return judged


def _phases(
    whole: MetricVerdict,
    measured: Sequence[Measurement],
    fitted: Sequence[BaselineRun],
    rule_of: Callable[[TrainingPhase], _MemoryLimit],
    again: str,
) -> Iterator[Judged[MetricVerdict]]:
    for name, phase in PHASES.items():
        values = [run.phase_peak_bytes[phase] for run in measured if phase in run.phase_peak_bytes]
        peaks = [run.phase_peak_bytes[phase] for run in fitted if phase in run.phase_peak_bytes]
        if values and peaks:
            peak = rule_of(phase).judge(name, values, peaks)
            # A note about the peak of training is not repeated for each phase.
            is_repeated = peak.verdict.note == whole.note
            yield peak._replace(verdict=msgspec.structs.replace(peak.verdict, note="")) if is_repeated else peak
        elif values and phase in BESIDE_STEPS:
            value = statistics.median_high(values)
            note = f"it was not recorded{again}"
            yield Judged(MetricVerdict(metric=name, status="not-comparable", value=value, note=note))
        elif values:
            value = statistics.median_high(values)
            yield Judged(MetricVerdict(metric=name, status="new", value=value, note="there was none before"))
        elif peaks:
            metric = MetricVerdict(metric=name, status="not-comparable", baseline=max(peaks), note="no step has it")
            yield Judged(metric)


def describe_missing_phases(metrics: Sequence[MetricVerdict], status: Status) -> str:
    """Name the phases that only one side has, which have this status then: ``no peak in forward and optimizer``.

    An evaluation or a checkpoint that is new is none of them: a baseline that is older stays valid."""
    missing = (metric for metric in metrics if metric.status == status and (status == "new" or metric.value is None))
    names = [PHASES[metric.metric] for metric in missing if metric.metric in PHASES]
    return f"no peak {_in_phases(names)}" if names else ""


def is_memory_metric(metric: MetricVerdict) -> bool:
    """Tell whether `describe_memory` describes the metric."""
    return metric.metric == "peak_allocated_bytes" or metric.metric in PHASES or metric.metric in STEP_METRICS


def phase_prefix(metric: MetricVerdict) -> str:
    """Return ``forward ``, to begin the note of a phase with; empty for a metric of no phase."""
    phase = PHASES.get(metric.metric)
    if phase in BESIDE_STEPS:
        return f"its peak {in_phase(phase)} {'is not compared: ' if metric.status == 'not-comparable' else ''}"
    return f"{phase} " if phase else ""


def describe_memory(
    metrics: Sequence[MetricVerdict], measured: PeaksByPhase, fitted: Sequence[PeaksByPhase]
) -> Iterator[str]:
    """Describe peaks that are worse, or better: the peak of training, the phases behind it, and single steps.

    Memory that an evaluation or a checkpoint leaves behind is mentioned once, and not again for the peaks that include it.
    """
    left = sum(map(increase, (metric for metric in metrics if metric.metric in KEPT)))
    metrics = [metric for metric in metrics if not (_is_behind(metric) and 0 < increase(metric) <= left)]
    yield from _describe_peaks(metrics, measured, fitted)
    for metric in metrics:
        phase, _ = KEPT.get(metric.metric, (None, ""))
        # The sentence on a phase's peak lists the same tensors, so they are listed here only if there is no such sentence.
        if phase and all(PHASES.get(other.metric) != phase for other in metrics):
            yield metric.note + _describe_tensors(phase, measured, _highest(fitted, phase), round(increase(metric)))
        elif metric.metric in STEP_METRICS:
            yield metric.note


def _is_behind(metric: MetricVerdict) -> bool:
    """Tell whether a figure includes what an evaluation or a checkpoint leaves in memory."""
    return metric.metric == "step_peak_bytes" or PHASES.get(metric.metric) in BESIDE_STEPS


def _describe_peaks(
    metrics: Sequence[MetricVerdict], measured: PeaksByPhase, fitted: Sequence[PeaksByPhase]
) -> Iterator[str]:
    peak = next((metric for metric in metrics if metric.metric == "peak_allocated_bytes"), None)
    phases = [metric for metric in metrics if metric.metric in PHASES]
    main = most_changed(
        phases, measured.phase_peak_bytes, lambda phase: bool(_describe_tensors(phase, measured, _highest(fitted, phase)))
    )
    if main is None:
        if peak is not None:
            yield describe_metric(peak)
        return
    phase = PHASES[main.metric]
    behind = _describe_tensors(phase, measured, _highest(fitted, phase)) + _describe_other_phases(main, phases)
    if peak is not None and (peak.value, peak.baseline) == (main.value, main.baseline):
        yield f"{describe_metric(peak)}, {in_phase(phase)}{behind}"
        return
    if peak is not None:
        yield describe_metric(peak)
    yield _describe_phase(main) + behind


def _highest(fitted: Sequence[PeaksByPhase], phase: TrainingPhase) -> PeaksByPhase:
    """Return the run of the baseline with the peak that sets the limit."""
    return max(fitted, key=lambda run: run.phase_peak_bytes.get(phase, -1))


def most_changed(
    metrics: Sequence[MetricVerdict],
    peaks: Mapping[TrainingPhase, int],
    has_cause: Callable[[TrainingPhase], bool] = lambda phase: False,
) -> MetricVerdict | None:
    """Return the phase that tables and sentences name. It is one whose change has a known cause; of several, the phase of
    the step's peak, or else the phase whose bytes have changed most.

    Args:
        metrics: the phases to choose from.
        peaks: the peak of each phase today.
    """
    peak = peak_phase_of(peaks)

    def weight(metric: MetricVerdict) -> tuple[bool, bool, float]:
        phase = PHASES[metric.metric]
        value, baseline = _value_and_baseline(metric)
        return has_cause(phase), phase == peak, abs(value - baseline)

    return max(metrics, key=weight, default=None)


def _describe_other_phases(main: MetricVerdict, metrics: Sequence[MetricVerdict]) -> str:
    """Name the changed phases beside the one that is described in full: ``, and more in backward and optimizer``."""
    by_word: dict[str, list[TrainingPhase]] = {}
    for metric in metrics:
        if metric is not main:
            by_word.setdefault(_more_or_less(metric), []).append(PHASES[metric.metric])
    return "".join(f", and {word} {_in_phases(names)}" for word, names in by_word.items())


def _describe_phase(metric: MetricVerdict) -> str:
    """Describe a phase: ``needs 12.0 MiB (50.0 %) more in forward, 36.0 MiB against 24.0 MiB allocated``."""
    value, baseline = _value_and_baseline(metric)
    share = f" ({format_percent(abs(value / baseline - 1), signed=False)})" if baseline else ""
    size, ends = format_bytes(abs(value - baseline)), (format_bytes(value), format_bytes(baseline))
    text = f"of {ends[0]} allocated" if ends[0] == ends[1] else f"{ends[0]} against {ends[1]} allocated"
    limited = metric.limit is not None and baseline < metric.limit < value
    limit = f", limit {format_bytes(metric.limit)}" if metric.limit is not None and limited else ""
    return f"needs {size}{share} {_more_or_less(metric)} {in_phase(PHASES[metric.metric])}, {text}{limit}"


def _describe_tensors(phase: TrainingPhase, now: PeaksByPhase, before: PeaksByPhase, change: int | None = None) -> str:
    """Describe the tensors at the phase's peak that are new there, or gone.

    Args:
        change: the bytes that they are to explain; None for those by which the peak has changed.
    """
    if phase in before.phase_peak_bytes and not before.largest.get(phase):
        return ""  # the baseline has no tensors of this phase
    if change is None:
        change = now.phase_peak_bytes.get(phase, 0) - before.phase_peak_bytes.get(phase, 0)
    sign = 1 if change > 0 else -1
    whole = _has_all(phase, now) and _has_all(phase, before)
    # A row without a type adds up the smaller tensors, which can be compared only if both sides have all tensors.
    old, new = ([row for row in run.largest.get(phase, ()) if row.dtype or whole] for run in (before, now))
    # Among tensors of the same size, those with a known shape come first.
    moved = sorted(
        _moved(old, new, sign, whole=whole), key=lambda one: (one.bytes, bool(one.row.dtype), _kind(one.row)), reverse=True
    )
    if not moved or not change:
        return ""
    first = moved[0]
    instead = "now" if first.is_there else "before"
    if first.row.bytes > abs(change):  # The tensor grew, or took the place of another one.
        return f", {instead} {tensor(first.row)}"
    if 2 * first.bytes > abs(change):
        share = "all" if format_bytes(first.bytes) == format_bytes(abs(change)) else "most"
        return f", {share} of it {'' if first.is_there else 'was '}{tensor(first.row)}"
    some = [one.row for one in moved if one.is_there == first.is_there][:_MOST_TENSORS_SHOWN]
    among = "including" if first.is_there else "including was"
    return f", {instead if sum(row.bytes for row in some) > abs(change) else among} {listed(map(tensor, some))}"


class _Moved(NamedTuple):
    """Tensors of which there are more than before, or fewer if memory has fallen."""

    bytes: int
    """How many bytes more, or fewer."""
    row: LiveTensor
    is_there: bool
    """Whether they are there now."""


def _moved(before: Sequence[LiveTensor], now: Sequence[LiveTensor], sign: int, *, whole: bool) -> Iterator[_Moved]:
    """Yield the tensors that have grown, or shrunk if ``sign`` is -1.

    Where no shape explains more than half of it, that is all that one operator made in one phase.

    Args:
        whole: whether both sides have all tensors that lived.
    """
    for maker in dict.fromkeys(_maker(row) for row in (*now, *before)):
        sides = [[row for row in rows if _maker(row) == maker] for rows in (before, now)]
        old, new = ({_kind(row): row for row in rows if row.dtype} for rows in sides)
        amounts = {kind: sign * (_bytes(new, kind) - _bytes(old, kind)) for kind in {**old, **new}}
        growth = sign * (sum(row.bytes for row in sides[1]) - sum(row.bytes for row in sides[0]))
        if not whole or 2 * max(amounts.values(), default=0) > growth > 0:
            for kind, amount in amounts.items():
                if amount > 0:
                    yield _Moved(min(amount, growth) if whole else amount, new.get(kind) or old[kind], kind in new)
        elif growth > 0:
            larger = sides[sign > 0]
            size, number = sum(row.bytes for row in larger), sum(row.count for row in larger)
            more = sign * (sum(row.count for row in sides[1]) - sum(row.count for row in sides[0]))
            size, number = (growth, more) if more > 0 else (size, number)
            lines = tuple(dict.fromkeys(line for row in larger for line in row.lines))
            row = msgspec.structs.replace(larger[0], bytes=size, count=number, shape=(), dtype="", lines=lines)
            yield _Moved(growth, row, sign > 0)


def _maker(row: LiveTensor) -> tuple[str, TrainingPhase]:
    return row.operator, row.phase


def _bytes(rows: Mapping[_Kind, LiveTensor], kind: _Kind) -> int:
    return rows[kind].bytes if kind in rows else 0


def _has_all(phase: TrainingPhase, run: PeaksByPhase) -> bool:
    """Tell whether the rows are all tensors at the peak; older files have only the largest."""
    rows = run.largest.get(phase, ())
    peak = run.phase_peak_bytes.get(phase, 0)
    return len(rows) < _ROWS or any(not row.dtype for row in rows) or sum(row.bytes for row in rows) >= peak


def tensor(row: LiveTensor) -> str:
    """Describe tensors: ``14.0 GiB (224 x bfloat16[4096, 4096] by mm in backward at train.py:41)``. A single
    tensor has no number, and what is not known is left out."""
    times = f"{row.count} x " if row.count > 1 and row.dtype else ""
    shape = f"{row.dtype}{list(row.shape)}" if row.shape else row.dtype or count(row.count, "tensor")
    more = len(row.lines) - _MOST_LINES_SHOWN
    lines = [*row.lines[:_MOST_LINES_SHOWN], *([f"{more} more lines"] if more > 0 else [])]
    at = f" at {listed(lines)}" if lines else ""
    return f"{format_bytes(row.bytes)} ({times}{shape} by {row.operator.removeprefix('aten.')} {in_phase(row.phase)}{at})"


def in_phase(phase: TrainingPhase) -> str:
    """Return ``in forward``."""
    return _IN_PHASE.get(phase, f"in {phase}")


def _in_phases(names: Sequence[TrainingPhase]) -> str:
    inside = [name for name in names if name not in _IN_PHASE]
    parts = [f"in {inside[0]}", *inside[1:]] if inside else []
    return listed([*parts, *(in_phase(name) for name in names if name in _IN_PHASE)])


def _kind(row: LiveTensor) -> _Kind:
    return row.operator, row.phase, row.shape, row.dtype


def _value_and_baseline(metric: MetricVerdict) -> tuple[int, int]:
    assert metric.value is not None
    assert metric.baseline is not None
    return int(metric.value), int(metric.baseline)


def _more_or_less(metric: MetricVerdict) -> str:
    value, baseline = _value_and_baseline(metric)
    return "more" if value > baseline else "less"
