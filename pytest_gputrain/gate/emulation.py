"""Judges runs on an emulated GPU against recorded ones. Pure.

Nothing here is noisy: the same code allocates, and asks the driver for, the same bytes in every process. So every growth is
a regression, whatever the tolerances say; but for compiled cases. Time is not judged, because there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pytest_gputrain.cases.identity import differences
from pytest_gputrain.gate.messages import count, describe_metric
from pytest_gputrain.records import Case, EmulatedRun, MetricName, MetricVerdict, Status, Verdict
from pytest_gputrain.records.emulated import RecordedRuns, conditions_of
from pytest_gputrain.utils.units import format_bytes

_JUDGED: Final[tuple[MetricName, ...]] = ("peak_allocated_bytes", "peak_reserved_bytes", "flops_per_step")
_COMPILED_RATIO: Final = 0.001
"""Growth that passes where torch.compile is used: a case allocates up to 64 KiB more when its code comes from the disk."""
_RECORD: Final = "record it with --gpu-emulate --gpu-baseline-update"


def judge(case: Case, run: EmulatedRun, recorded: RecordedRuns | None, title: str) -> Verdict:
    """Judge ``run`` against what is recorded of its case.

    Args:
        title: of the platform, as sentences name it.
    """
    same = recorded is not None and recorded.case.identity() == case.identity()
    before = recorded.like(run) if recorded is not None and same else None
    nearest = before or (_nearest(recorded, run) if recorded is not None and same else None)
    if not run.fits and (nearest is None or nearest.fits):
        verb = "does not fit" if nearest is None else "no longer fits"
        sentence = f"{case} {what_does_not_fit(run, title, verb)}; if that is expected, {_RECORD}"
        return Verdict(status="failed" if before is None else "regressed", sentence=sentence)
    if recorded is None:
        return Verdict(status="new", sentence=f"{case} was never recorded on an emulated {title}; {_RECORD}-new-only")
    if nearest is None:
        change = differences(recorded.case, case)
        sentence = f"{case} is not what was recorded on an emulated {title} ({change}); {_RECORD}"
        return Verdict(status="not-comparable", sentence=sentence)
    if before is None:
        moved = (
            "; ".join(_changes(list(_metrics(case, nearest, run)), ("regressed", "improved"))) or "its memory is the same"
        )
        changed = ", ".join(_changed_conditions(nearest, run))
        sentence = f"{case} was recorded under other conditions ({changed}); {moved}; {_RECORD}"
        return Verdict(status="not-comparable", sentence=sentence)
    if run.fits and not before.fits:
        return Verdict(status="improved", sentence=f"{case} fits {title} now; {_RECORD}")
    metrics = tuple(_metrics(case, before, run))
    if worse := _changes(metrics, ("regressed",)):
        return Verdict(status="regressed", sentence=f"{case} {'; '.join(worse)}", metrics=metrics)
    if better := _changes(metrics, ("improved",)):
        return Verdict(status="improved", sentence=f"{case} {'; '.join(better)}; {_RECORD}", metrics=metrics)
    return Verdict(status="pass", sentence=f"{case} takes what is recorded", metrics=metrics)


def what_does_not_fit(run: EmulatedRun, title: str, what: str = "does not fit") -> str:
    """Say what does not fit, to follow the case in a sentence: ``does not fit H100 (79.1 GiB): CUDA out of memory. ...``."""
    return f"{what} {title} ({format_bytes(run.device_memory_bytes)}): {run.refused.rstrip('.')}"


def _nearest(recorded: RecordedRuns, run: EmulatedRun) -> EmulatedRun:
    """Return the recorded run whose libraries are most alike, and of several the latest."""
    return max(reversed(recorded.runs), key=lambda candidate: len(candidate.packages.items() & run.packages.items()))


def _metrics(case: Case, before: EmulatedRun, now: EmulatedRun) -> Iterator[MetricVerdict]:
    if not (before.fits and now.fits):
        return
    ratio = 0.0 if case.compile == "off" else _COMPILED_RATIO
    for name in _JUDGED:
        value, baseline = getattr(now, name), getattr(before, name)
        if value is None or baseline is None:
            continue
        limit, least = baseline * (1 + ratio), baseline / (1 + ratio)
        status: Status = "regressed" if value > limit else "improved" if value < least else "pass"
        yield MetricVerdict(metric=name, status=status, value=value, baseline=baseline, limit=limit)


def _changes(metrics: Sequence[MetricVerdict], statuses: Sequence[Status]) -> list[str]:
    return [_describe(metric) for metric in metrics if metric.status in statuses]


def _describe(metric: MetricVerdict) -> str:
    """Describe a change, of which a few bytes count: with all digits where the two would look alike."""
    assert metric.value is not None
    assert metric.baseline is not None
    if metric.metric == "flops_per_step" or format_bytes(metric.value) != format_bytes(metric.baseline):
        return describe_metric(metric)
    change, kind = int(metric.value - metric.baseline), metric.metric.removeprefix("peak_").removesuffix("_bytes")
    more = "more" if change > 0 else "less"
    return f"needs {count(abs(change), 'byte')} {more} memory: {metric.value:,.0f} against {metric.baseline:,.0f} {kind}"


def _changed_conditions(before: EmulatedRun, now: EmulatedRun) -> Iterator[str]:
    for name in sorted({*before.packages, *now.packages}):
        if before.packages.get(name) != now.packages.get(name):
            yield f"{name} {before.packages.get(name, 'absent')} -> {now.packages.get(name, 'absent')}"
    old, new = conditions_of(before), conditions_of(now)
    for field in ("device_name", "device_memory_bytes", "runtime"):
        if getattr(old, field) != getattr(new, field):
            yield f"{field.replace('_', ' ')} {getattr(old, field)} -> {getattr(new, field)}"
