"""Judges predictions against recorded ones: a verdict with its sentence and what caused the change. Pure.

Nothing here is noisy, so every change of an exact counter is described and every growth is a regression: the peak of each
phase, FLOPs, and bytes moved. What the caching allocator holds is a replay whose packing a small change can tip, so it has
the tolerance of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pytest_gputrain.gate.memory import (
    PHASES,
    describe_missing_phases,
    describe_other_phases,
    describe_phase,
    describe_tensors,
    in_phase,
    main_phase,
    tensor,
)
from pytest_gputrain.gate.unmeasured import Sentences, nearest
from pytest_gputrain.gate.work import WORK, describe_work
from pytest_gputrain.records import Case, MetricName, MetricVerdict, Prediction, Status, Verdict
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.records.tolerance import MemoryTolerance
from pytest_gputrain.utils.units import format_bytes, format_percent

_CHANGED: Final[tuple[Status, ...]] = ("regressed", "improved")
_RECORD: Final = "record it with --gpu-predict --gpu-baseline-update"


def judge(
    case: Case, prediction: Prediction, recorded: Recorded[Prediction] | None, tolerance: MemoryTolerance, title: str
) -> Verdict:
    """Judge ``prediction`` against what is recorded of its case.

    Args:
        tolerance: of what the allocator holds.
        title: of the platform, as sentences name it.
    """
    found = nearest(
        case,
        prediction,
        recorded,
        Sentences(
            record=_RECORD,
            never_recorded=f"has no recorded prediction for {title}",
            other_case="is not what its recorded prediction was made for",
        ),
        does_not_fit=lambda: _what_does_not_fit(prediction, title, "does not fit"),
    )
    if isinstance(found, Verdict):
        return found
    before, changed = found
    if changed:
        return _under_other_conditions(case, prediction, before, changed, tolerance, title)
    metrics = tuple(_metrics(before, prediction, tolerance))
    worse, better = (_describe_changes(metrics, (status,), before, prediction) for status in _CHANGED)
    if before.fits and prediction.fits is False:
        worse.insert(0, _what_does_not_fit(prediction, title, "no longer fits"))
    elif prediction.fits and before.fits is False:
        better.insert(0, f"fits {title} now")
    gone = [phase for phase in before.phase_peak_bytes if phase not in prediction.phase_peak_bytes and phase != "between"]
    if gone or (before.flops_per_step and not prediction.flops_per_step):
        worse.insert(0, f"no longer trains: it has no {' and no '.join(gone) or 'arithmetic'}")
    if not worse and (unknown := describe_missing_phases(metrics, "new")):
        sentence = f"{case} has {unknown} in its recorded prediction; {_RECORD}"
        return Verdict(status="new", sentence=sentence, metrics=metrics)
    status: Status = "regressed" if worse else "improved" if better else "pass"
    sentences = worse or better
    if not sentences:
        return Verdict(status=status, sentence=f"{case} is predicted as recorded", metrics=metrics)
    remedy = f"; {_RECORD}" if status == "improved" else ""
    return Verdict(status=status, sentence=f"{case} {'; '.join(sentences)}{remedy}", metrics=metrics)


def _under_other_conditions(
    case: Case, now: Prediction, before: Prediction, changed: str, tolerance: MemoryTolerance, title: str
) -> Verdict:
    if now.fits is False and before.fits is not False:
        sentence = f"{case} {_what_does_not_fit(now, title, 'does not fit')}; if that is expected, {_RECORD}"
        return Verdict(status="failed", sentence=sentence)
    fits = [f"it fits {title} now"] if now.fits and before.fits is False else []
    changes = _describe_changes(list(_metrics(before, now, tolerance)), _CHANGED, before, now)
    moved = "; ".join([*fits, *changes]) or "it predicts the same"
    sentence = f"{case} was recorded under other conditions ({changed}); {moved}; {_RECORD}"
    return Verdict(status="not-comparable", sentence=sentence)


def _what_does_not_fit(prediction: Prediction, title: str, what: str) -> str:
    """Say what does not fit, to follow the case in a sentence: ``does not fit H100 (79.1 GiB): ...``."""
    target, refused = prediction.target, prediction.refused
    assert target.memory_bytes is not None
    assert refused is not None
    # What the build takes alone is no peak of a step.
    phase = refused.phase if refused.phase == "build" else prediction.peak_phase
    largest = prediction.largest.get(phase, ())
    needed = format_bytes(needed_bytes(prediction))
    return (
        f"{what} {title} ({format_bytes(target.memory_bytes)}): it needs {needed}, and runs out in "
        f"{refused.phase} for {tensor(refused)}; largest at the peak, {in_phase(phase)}: "
        f"{', '.join(map(tensor, largest[:3]))}"
    )


def needed_bytes(prediction: Prediction) -> int:
    """Tell how much of the platform's memory the case needs, building included."""
    held = prediction.peak_reserved_bytes or 0
    return max(held, *prediction.phase_peak_bytes.values(), 0) + prediction.target.context_bytes


def _metrics(before: Prediction, now: Prediction, tolerance: MemoryTolerance) -> Iterator[MetricVerdict]:
    for name, phase in PHASES.items():
        if phase not in before.phase_peak_bytes and phase in now.phase_peak_bytes:
            yield MetricVerdict(metric=name, status="new", value=now.phase_peak_bytes[phase])
        elif phase in before.phase_peak_bytes:
            yield _compared(name, before.phase_peak_bytes[phase], now.phase_peak_bytes.get(phase, 0))
    for name in WORK:
        yield _compared(name, getattr(before, name), getattr(now, name))
    if now.peak_reserved_bytes is not None and before.peak_reserved_bytes is not None:
        held, was = now.peak_reserved_bytes, before.peak_reserved_bytes
        limit = was * (1 + tolerance.ratio) + tolerance.bytes
        least = was / (1 + tolerance.ratio) - tolerance.bytes
        status: Status = "regressed" if held > limit else "improved" if held < least else "pass"
        yield MetricVerdict(metric="peak_reserved_bytes", status=status, value=held, baseline=was, limit=limit)


def _compared(name: MetricName, before: int, now: int) -> MetricVerdict:
    status: Status = "regressed" if now > before else "improved" if now < before else "pass"
    return MetricVerdict(metric=name, status=status, value=now, baseline=before, limit=before)


def _describe_changes(
    metrics: Sequence[MetricVerdict], statuses: Sequence[Status], before: Prediction, now: Prediction
) -> list[str]:
    """Describe the metrics of these statuses; of the phases, one in full."""
    metrics = [metric for metric in metrics if metric.status in statuses]
    phases = [metric for metric in metrics if metric.metric in PHASES]
    main = main_phase(phases, now, lambda phase: before)
    sentences = [_describe_change(metric, before, now) for metric in metrics if metric.metric not in PHASES]
    if main is None:
        return sentences
    behind = describe_tensors(PHASES[main.metric], now, before)
    return [f"{describe_phase(main)}{behind}{describe_other_phases(main, phases)}", *sentences]


def _describe_change(metric: MetricVerdict, before: Prediction, now: Prediction) -> str:
    if metric.metric in WORK:
        return describe_work(metric, before, now)
    assert metric.value is not None
    assert metric.baseline is not None
    value, baseline = int(metric.value), int(metric.baseline)
    more = "more" if value > baseline else "less"
    share = f" ({format_percent(abs(value / baseline - 1), signed=False)})" if baseline else ""
    text = f"{format_bytes(value)} against {format_bytes(baseline)}"
    return f"makes the allocator hold {format_bytes(abs(value - baseline))}{share} {more}, {text}"
