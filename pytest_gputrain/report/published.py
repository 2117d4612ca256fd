"""Puts published figures beside measured ones: a line for each, with what was printed, what was measured, and the ratio."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gputrain.records import Case, Crashed, Measured, Measurement, Published, Result
from pytest_gputrain.records.published import Figure
from pytest_gputrain.records.reply import failure_of
from pytest_gputrain.report import rich_text
from pytest_gputrain.report.results import FAILURES
from pytest_gputrain.utils.units import GiB, MiB, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

FRAMEWORKS: Final = {"pytorch": "PyTorch", "paddle": "Paddle"}
OUTCOMES: Final = {"out_of_memory": FAILURES["out_of_memory"], "error": "error"}


class Metric(NamedTuple):
    """A figure that a table may print and a run may measure."""

    field: str
    """The field of `pytest_gputrain.records.published.Figures`."""
    title: str
    measured: Callable[[Result], float | None]
    """The measured figure; None if it was not measured."""


class ComparedFigure(NamedTuple):
    """One figure of one case, as text; empty if there is none."""

    metric: str
    framework: str
    published: str
    measured: str
    ratio: str
    """Measured over published, the middle of a range."""


def _peak(field: str) -> Callable[[Result], float | None]:
    def median_peak(result: Result) -> float | None:
        peaks = [
            value
            for reply in result.replies
            if isinstance(reply, Measurement) and (value := getattr(reply, field)) is not None
        ]
        return statistics.median_high(peaks) if peaks else None

    return median_peak


def update_seconds(result: Result) -> float | None:
    """Return the measured time of an optimizer update: the median over the runs of each run's median."""
    measured = [reply for reply in result.replies if isinstance(reply, Measurement)]
    seconds = [run.update_seconds(result.case.gradient_accumulation) for run in measured]
    measured_seconds = [value for value in seconds if value is not None]
    return statistics.median(measured_seconds) if measured_seconds else None


def _samples_per_second(result: Result, parts: int = 1) -> float | None:
    """Return the samples per second over whole updates, as published tables do. Only some micro-batches include the
    optimizer."""
    seconds, accumulation = update_seconds(result), result.case.gradient_accumulation
    if result.summary is None or seconds is None:
        return None
    samples = result.summary.samples_per_second * result.summary.median_step_seconds
    return samples * accumulation / seconds / max(1, parts)


METRICS: Final = (
    Metric("step_seconds", "sec/step", lambda result: result.summary.median_step_seconds if result.summary else None),
    Metric("update_seconds", "sec/update", update_seconds),
    Metric("samples_per_second", "samples/s", _samples_per_second),
    Metric("samples_per_second_per_gpu", "samples/s a GPU", lambda result: _samples_per_second(result, result.case.gpus)),
    Metric("peak_allocated_bytes", "peak allocated", _peak("peak_allocated_bytes")),
    Metric("peak_reserved_bytes", "peak reserved", _peak("peak_reserved_bytes")),
    Metric("device_used_bytes", "device memory", _peak("device_used_bytes")),
    Metric("model_bytes", "model memory", _peak("model_bytes")),
    Metric("peak_host_bytes", "host memory", _peak("peak_host_bytes")),
)
"""The metrics in the order of display. Nothing here measures the time of an epoch; see `epoch_seconds`."""


def epoch_seconds(case: Case, samples: int, update_seconds: float) -> float:
    """Return the time of an epoch of this many samples, from the time of one optimizer update of ``case``."""
    return samples * update_seconds / (case.batch_size * case.gpus * case.gradient_accumulation)


def compared_figures(row: Published, result: Result | None) -> Iterator[ComparedFigure]:
    """Return what ``row`` prints, and what ``result`` measured of it."""
    if row.outcome in OUTCOMES:
        yield ComparedFigure("sec/step", "", OUTCOMES[row.outcome], _shown(METRICS[0], result), "")
    for metric in METRICS:
        for framework, figures in row.figures.items():
            figure: Figure | None = getattr(figures, metric.field)
            if figure is not None:
                value = metric.measured(result) if result else None
                ratio = f"{value / figure.middle:.2f}" if value is not None and figure.middle else ""
                yield ComparedFigure(metric.title, framework, printed(metric, figure), _shown(metric, result, figure), ratio)


def printed(metric: Metric, figure: Figure) -> str:
    """Return a figure with as many digits as its document prints: ``9-11 s``, ``8.0 GiB``."""
    size, unit = 1.0, " s"
    if metric.field.endswith("_bytes"):
        unit, size = _unit(figure)
    elif metric.field.startswith("samples"):
        unit = ""
    last = figure.rounding / size
    decimals = max(0, round(-math.log10(last))) if last > 0 else 0
    ends = [f"{end / size:,.{decimals}f}" for end in dict.fromkeys((figure.low, figure.high))]
    return f"{'-'.join(ends)}{unit}"


def _unit(figure: Figure) -> tuple[str, float]:
    """Return the unit whose digits were rounded, because thousands of MiB are neither GiB nor GB."""
    for unit, size in ((" GiB", GiB), (" GB", 1e9)):
        digits = math.log10(figure.rounding) - math.log10(size) if figure.rounding > 0 else 0
        if abs(digits - round(digits)) < 1e-6:
            return unit, size
    return " MiB", MiB


def _shown(metric: Metric, result: Result | None, beside: Figure | None = None) -> str:
    if result is None:
        return ""
    value = metric.measured(result)
    if value is None:
        return "" if result.summary else outcome(result)
    if metric.field.endswith("_bytes"):
        unit, size = _unit(beside) if beside else ("", GiB)
        return format_bytes(value) if size == GiB else f"{value / size:,.{int(size > MiB)}f}{unit}"
    return (
        format_seconds(value) if metric.field.endswith("seconds") else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
    )


def outcome(result: Result) -> str:
    """Return in one or two words why a case has no figures."""
    if not result.replies or isinstance(reply := result.replies[-1], Measurement):
        return ""
    return FAILURES["refused" if isinstance(reply, Crashed) and reply.refused else failure_of(reply)]


def table(results: Sequence[Measured], verdict: Callable[[Result], Text]) -> Table:
    """Return a line for each case with its verdict, and below it a line for each figure. It fits 80 columns."""
    comparison_table = rich_text.table()
    comparison_table.add_column("Case", overflow="fold")
    for header in ("Published", "Measured", "Ratio"):
        comparison_table.add_column(header, justify="right", no_wrap=True)
    comparison_table.add_column("Verdict", no_wrap=True)
    for result in results:
        row = result.published
        comparison_table.add_row(rich_text.text(str(result.case)), "", "", "", verdict(result))
        several = row is not None and len(row.figures) > 1
        figure_lines = (
            compared_figures(row, result) if row else [ComparedFigure("sec/step", "", "", _shown(METRICS[0], result), "")]
        )
        for line in figure_lines:
            framework = f", {FRAMEWORKS.get(line.framework, line.framework)}" if several and line.framework else ""
            cells = (f"  {line.metric}{framework}", line.published, line.measured, line.ratio)
            comparison_table.add_row(*map(rich_text.text, cells), "")
    return comparison_table
