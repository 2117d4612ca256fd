"""Exports every case of each report as a row, as CSV and as Markdown; a missing figure is an empty cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Final

from pytest_gputrain.records import Report, Result
from pytest_gputrain.report.export.points import Point, points
from pytest_gputrain.report.results import latest, verdict_of
from pytest_gputrain.utils import markdown
from pytest_gputrain.utils.sanitize import spreadsheet
from pytest_gputrain.utils.units import format_bytes, format_seconds

HEADER: Final = (
    "created",
    "session",
    "commit",
    "branch",
    "suite",
    "case",
    "device",
    "scale",
    "model",
    "method",
    "precision",
    "parallel",
    "gpus",
    "batch_size",
    "verdict",
    "processes",
    "step_seconds",
    "samples_per_second",
    "tokens_per_second",
    "model_flops_utilization",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "model_bytes",
    "peak_host_bytes",
)


def to_csv(reports: Sequence[Report]) -> str:
    """Units are in the header: seconds, bytes, samples and tokens per second."""
    file = io.StringIO()
    writer = csv.DictWriter(file, HEADER, lineterminator="\n")
    writer.writeheader()
    for report in reports:
        figures = _points(report)
        rows = (_row(report, result, figures.get(id(result))) for result in latest(report.results))
        writer.writerows({name: spreadsheet(cell) for name, cell in row.items()} for row in rows)
    return file.getvalue()


def _points(report: Report) -> dict[int, Point]:
    return {id(point.result): point for point in points(report.results)}


def _row(report: Report, result: Result, point: Point | None) -> dict[str, object]:
    case = result.case
    row: dict[str, object] = {
        "created": report.created,
        "session": report.session,
        "commit": report.commit,
        "branch": report.branch,
        "suite": result.suite,
        "case": result.key,
        "device": result.device,
        "scale": result.scale,
        **{name: getattr(case, name) for name in ("model", "method", "precision", "parallel", "gpus", "batch_size")},
        "verdict": verdict_of(result),
        "processes": len(result.replies),
    }
    if point is None:
        return row
    row["peak_allocated_bytes"] = point.peak_allocated_bytes
    if point.runs and result.summary is not None:
        names = ("samples_per_second", "tokens_per_second", "model_flops_utilization")
        memories = ("peak_reserved_bytes", "model_bytes", "peak_host_bytes")
        row["step_seconds"] = point.median_step_seconds
        row |= {name: getattr(result.summary, name) for name in names}
        row |= {name: getattr(point.runs[0], name) for name in memories}
    return row


def to_markdown(reports: Sequence[Report]) -> str:
    """A table for each report, with units that people read."""
    return "\n".join(map(_markdown, reports))


def _markdown(report: Report) -> str:
    figures = _points(report)
    headers = ("Suite", "Case", "Device", "Sec/step", "Samples/s", "Peak memory", "Verdict")
    rows = []
    for result in latest(report.results):
        point = figures.get(id(result))
        timed = point is not None and bool(point.runs) and result.summary is not None
        rows.append(
            (
                result.suite,
                result.key,
                result.device,
                format_seconds(point.median_step_seconds) if point and timed else "",
                f"{result.summary.samples_per_second:.3g}" if result.summary and timed else "",
                format_bytes(point.peak_allocated_bytes) if point else "",
                verdict_of(result),
            )
        )
    title = f"Run of {report.commit} on {report.created}" if report.commit else f"Run on {report.created}"
    return "\n".join([f"## {markdown.escaped(title)}", "", *markdown.table(headers, rows), ""])
