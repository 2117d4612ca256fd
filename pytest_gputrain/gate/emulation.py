"""Judges runs on an emulated GPU against recorded ones. Pure.

Nothing here is noisy: the same code allocates, and asks the driver for, the same bytes in every process. So every growth is
a regression, whatever the tolerances say. Time is not judged, because there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pytest_gputrain.gate.messages import count, describe_metric
from pytest_gputrain.gate.unmeasured import Sentences, comparable
from pytest_gputrain.records import Case, EmulatedRun, MetricName, MetricVerdict, Status, Verdict
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.utils.units import format_bytes

_JUDGED: Final[tuple[MetricName, ...]] = ("peak_allocated_bytes", "peak_reserved_bytes", "flops_per_step")
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
        changes=lambda nearest: _changes(list(_metrics(nearest, run)), ("regressed", "improved")),
    )
    if isinstance(before, Verdict):
        return before
    if before.fits and not run.fits:
        sentence = f"{case} {_what_does_not_fit(run, title, 'no longer fits')}; if that is expected, {_RECORD}"
        return Verdict(status="regressed", sentence=sentence)
    if run.fits and not before.fits:
        return Verdict(status="improved", sentence=f"{case} fits {title} now; {_RECORD}")
    metrics = tuple(_metrics(before, run))
    if worse := _changes(metrics, ("regressed",)):
        return Verdict(status="regressed", sentence=f"{case} {'; '.join(worse)}", metrics=metrics)
    if better := _changes(metrics, ("improved",)):
        return Verdict(status="improved", sentence=f"{case} {'; '.join(better)}; {_RECORD}", metrics=metrics)
    return Verdict(status="pass", sentence=f"{case} takes the recorded memory", metrics=metrics)


def _what_does_not_fit(run: EmulatedRun, title: str, what: str) -> str:
    """Say what does not fit, to follow the case in a sentence: ``does not fit H100 (79.1 GiB): CUDA out of memory. ...``."""
    return f"{what} {title} ({format_bytes(run.device_memory_bytes)}): {run.refused.rstrip('.')}"


def _metrics(before: EmulatedRun, now: EmulatedRun) -> Iterator[MetricVerdict]:
    if not (before.fits and now.fits):
        return
    for name in _JUDGED:
        value, baseline = getattr(now, name), getattr(before, name)
        if value is None or baseline is None:
            continue
        status: Status = "regressed" if value > baseline else "improved" if value < baseline else "pass"
        yield MetricVerdict(metric=name, status=status, value=value, baseline=baseline, limit=baseline)


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
