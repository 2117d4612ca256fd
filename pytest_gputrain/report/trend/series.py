"""Turns the figures of a history into levels and changes, each with its commits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Final

from pytest_gputrain.gate.count_lines import format_count
from pytest_gputrain.gate.counts import most_without_growth
from pytest_gputrain.records import Case, Change, Course, HistoryLine, Moment
from pytest_gputrain.records.history import COUNT_KEYS, knobs
from pytest_gputrain.report.trend.reading import History
from pytest_gputrain.utils.units import format_bytes, format_percent, format_seconds

DEFAULT_METRICS: Final = ("median_step_seconds", "peak_allocated_bytes", *COUNT_KEYS)
"""The metrics that are analysed if nobody asks for others."""

HIGHER_IS_BETTER: Final = (
    "samples_per_second",
    "tokens_per_second",
    "scaling_efficiency",
    "model_flops_utilization",
    "clock_mhz",
    "gpu_utilization",
    "gpu_busy_share",
)
"""The metrics of which more is better. Of all others less is better."""

_NOISY: Final = (*HIGHER_IS_BETTER, "_seconds", "joules_per_sample", "power_watts")


def analyse(history: History, metrics: Iterable[str]) -> Iterator[Course]:
    """Yield the course of each metric of each case that has enough figures in the history.

    Raises:
        HistoryError: a file changed meanwhile.
    """
    from pytest_gputrain.gate.change_points import LEAST_SD, exact_levels, levels
    from pytest_gputrain.gate.step_times import PRIOR_SD

    for subject, series in history.series.items():
        for metric in metrics:
            figures, offsets = series.figures_of(metric)
            if not figures:
                continue
            if metric in COUNT_KEYS:
                segments = exact_levels(figures, functools.partial(most_without_growth, COUNT_KEYS[metric]))
            else:
                segments = levels(figures, PRIOR_SD if metric.endswith(_NOISY) else LEAST_SD)
            ends = [*segments.starts[1:], len(figures)]
            changes = []
            for level, start in enumerate(segments.starts[1:], 1):
                base, first = history.line(offsets[start - 1]), history.line(offsets[start])
                before, after = segments.medians[level - 1 : level + 1]
                change = Change(
                    before=before,
                    after=after,
                    share=after / before - 1 if before else None,
                    worse=(after < before) == (metric in HIGHER_IS_BETTER),
                    base=_moment(base),
                    first=_moment(first),
                    runs=ends[level] - start,
                    runs_since=len(figures) - start,
                    differences=tuple(_differences(base, first)),
                )
                changes.append(change)
            yield Course(
                suite=subject.suite,
                key=subject.key,
                device=subject.device,
                metric=metric,
                runs=len(figures),
                level=segments.medians[-1],
                since=_moment(history.line(offsets[segments.starts[-1]])),
                noise=segments.sd,
                latest=figures[-1],
                last=_moment(history.line(offsets[-1])),
                changes=tuple(changes),
            )


def format_share(change: Change) -> str:
    """Return a change as a share; empty for a change from 0."""
    return "" if change.share is None else format_percent(change.share)


def is_told(course: Course) -> bool:
    """Tell whether a course is shown by default. A count is shown only if it has changed, because there are many."""
    return bool(course.changes) or course.metric not in COUNT_KEYS


def shown(metric: str, value: float) -> str:
    """Return a figure with its unit."""
    if metric in COUNT_KEYS:
        return format_count(COUNT_KEYS[metric], value)
    if metric.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if metric.endswith("_seconds") else f"{value:.4g}"


def _moment(line: dict[str, Any]) -> Moment:
    return Moment(date=str(line["date"]), commit=str(line.get("commit", "")), session=str(line.get("session", "")))


_YOUNGER: Final = ("cores", "host_memory_bytes", "nics", "version_cudnn", "version_nccl")
"""Keys that lines of earlier versions lack, which is no change."""
_CIRCUMSTANCES: Final = tuple(
    name
    for name in HistoryLine.__struct_fields__
    if name.startswith("version_")
    or name in Case.__struct_fields__
    or name in ("device_name", "device_count", "device_memory_bytes", "topology", "host", "cpu_model", "os", "threads")
    or name in _YOUNGER
)


_DEFAULTS: Final = knobs(Case())
"""The values of knobs for lines that are older than a knob."""


def _differences(base: dict[str, Any], first: dict[str, Any]) -> Iterator[str]:
    for name in _CIRCUMSTANCES:
        before, after = (line.get(name, _DEFAULTS.get(name)) for line in (base, first))
        if before == after or (name in _YOUNGER and None in (before, after)):
            continue
        texts = [
            "absent" if value is None else format_bytes(value) if name.endswith("memory_bytes") else str(value)
            for value in (before, after)
        ]
        if texts[0] != texts[1]:
            yield f"{name.removeprefix('version_').removesuffix('_bytes').replace('_', ' ')} {' -> '.join(texts)}"
