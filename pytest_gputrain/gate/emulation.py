"""Judges runs on an emulated GPU against recorded ones. Pure.

Nothing here is noisy: the same code allocates, and asks the driver for, the same bytes in every process. So every growth is
a regression, whatever the tolerances say: of the peak, of the peak of each phase, of reserved memory, and of FLOPs. Bytes
moved may grow a little. Time is not judged, because there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pytest_gputrain.gate.memory import PHASES, describe_memory, is_memory_metric
from pytest_gputrain.gate.messages import describe_metric
from pytest_gputrain.gate.unmeasured import Sentences, comparable
from pytest_gputrain.gate.work import WORK, describe_work
from pytest_gputrain.records import Case, EmulatedRun, MetricName, MetricVerdict, Status, Verdict
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.utils.units import format_bytes, format_percent

_CHANGED: Final[tuple[Status, ...]] = ("regressed", "improved")
_MOVED_RATIO: Final = 0.01
"""Growth of the bytes that operators read and write that passes, because one cheap operator more is no regression."""
_RECORD: Final = "record it with --gpu-emulate --gpu-baseline-update"


def judge(case: Case, run: EmulatedRun, recorded: Recorded[EmulatedRun] | None, title: str) -> Verdict:
    """Judge ``run`` against what is recorded of its case.

    Args:
        title: of the platform, as sentences name it.
    """
    before = comparable(
        case,
        run,
        recorded,
        title,
        Sentences(
            record=_RECORD,
            never_recorded=f"was never recorded on an emulated {title}",
            other_case=f"is not what was recorded on an emulated {title}",
            unchanged="its memory is the same",
        ),
        does_not_fit=lambda did: _what_does_not_fit(run, title, "no longer fits" if did else "does not fit"),
        changes=lambda nearest: _changes(list(_metrics(nearest, run)), _CHANGED, nearest, run),
    )
    if isinstance(before, Verdict):
        return before
    if before.fits and not run.fits:
        sentence = f"{case} {_what_does_not_fit(run, title, 'no longer fits')}; if that is expected, {_RECORD}"
        return Verdict(status="regressed", sentence=sentence)
    if run.fits and not before.fits:
        return Verdict(status="improved", sentence=f"{case} fits {title} now; {_RECORD}")
    metrics = tuple(_metrics(before, run))
    worse, better = (_changes(metrics, (status,), before, run) for status in _CHANGED)
    phases = before.phase_peak_bytes.keys() - run.phase_peak_bytes.keys() - {"between"}
    if gone := sorted(phases) if run.phase_peak_bytes else []:
        worse.insert(0, f"no longer trains: it has no {' and no '.join(gone)}")
    not_compared = "".join(f"; {what}" for what in _not_compared(before, run))
    if worse:
        return Verdict(status="regressed", sentence=f"{case} {'; '.join(worse)}{not_compared}", metrics=metrics)
    if better:
        sentence = f"{case} {'; '.join(better)}{not_compared}; {_RECORD}"
        return Verdict(status="improved", sentence=sentence, metrics=metrics)
    if before.bytes_per_step and not run.bytes_per_step:
        return Verdict(status="not-comparable", sentence=f"{case} takes the recorded memory{not_compared}", metrics=metrics)
    notes = [f"the bytes that it moves {metric.note}" for metric in metrics if metric.note]
    sentence = f"{case} takes the recorded memory{''.join(f'; {note}' for note in notes)}{not_compared}"
    return Verdict(status="pass", sentence=sentence, metrics=metrics)


def _not_compared(before: EmulatedRun, now: EmulatedRun) -> Iterator[str]:
    """Name the figures that one side lacks."""
    if now.phase_peak_bytes and not before.phase_peak_bytes:
        yield f"its peaks of phases were not recorded, so they are not compared; {_RECORD}"
    if before.bytes_per_step and not now.bytes_per_step:
        yield "its FLOPs and the bytes that it moves are not compared, because they were not counted"
    elif now.bytes_per_step and not before.bytes_per_step and before.phase_peak_bytes:
        yield f"the bytes that it moves were not recorded, so they are not compared; {_RECORD}"


def _what_does_not_fit(run: EmulatedRun, title: str, what: str) -> str:
    """Say what does not fit, to follow the case in a sentence: ``does not fit H100 (79.1 GiB): CUDA out of memory. ...``."""
    return f"{what} {title} ({format_bytes(run.device_memory_bytes)}): {run.refused.rstrip('.')}"


def _metrics(before: EmulatedRun, now: EmulatedRun) -> Iterator[MetricVerdict]:
    if not (before.fits and now.fits):
        return
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        yield _compared(name, getattr(before, name), getattr(now, name))
    for name, phase in PHASES.items():
        if phase in before.phase_peak_bytes and phase in now.phase_peak_bytes:
            yield _compared(name, before.phase_peak_bytes[phase], now.phase_peak_bytes[phase])
    for name in WORK:
        value, baseline = getattr(now, name), getattr(before, name)
        if value is not None and baseline is not None:
            yield _compared(name, baseline, value, _MOVED_RATIO if name == "bytes_per_step" else 0.0)


def _compared(name: MetricName, baseline: int, value: int, ratio: float = 0.0) -> MetricVerdict:
    limit, least = baseline * (1 + ratio), baseline / (1 + ratio)
    status: Status = "regressed" if value > limit else "improved" if value < least else "pass"
    changed = name == "bytes_per_step" and status == "pass" and value != baseline
    note = f"changed by {format_percent(value / baseline - 1)}, within the limit" if changed else ""
    return MetricVerdict(metric=name, status=status, value=value, baseline=baseline, limit=limit, note=note)


def _changes(
    metrics: Sequence[MetricVerdict], statuses: Sequence[Status], before: EmulatedRun, now: EmulatedRun
) -> list[str]:
    """Describe the metrics of these statuses; of the phases, one in full."""
    chosen = [metric for metric in metrics if metric.status in statuses]
    others = [
        describe_work(metric, before, now) if metric.metric in WORK else describe_metric(metric)
        for metric in chosen
        if not is_memory_metric(metric)
    ]
    return [*describe_memory(chosen, now, [before]), *others]
