"""Exports CSV for Apache Otava: a file for each case, a row for each report, and ``otava.yaml``, which lists the files.

Otava reads one test a file and turns every cell of a metric into a number, so a run in which a case gave none has no row.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytest_gputrain.records import Report
from pytest_gputrain.report.export.points import Point, file_names, points
from pytest_gputrain.utils.sanitize import spreadsheet

CONFIG: Final = "otava.yaml"
_METRICS: Final = ("step_seconds", "peak_allocated_bytes")
_HEADER: Final = ("time", "commit", "branch", *_METRICS)


def export(reports: Sequence[Report]) -> Mapping[str, str]:
    """Texts by file name; ``reports`` in any order."""
    series: defaultdict[str, list[tuple[Report, Point]]] = defaultdict(list)
    for report in sorted(reports, key=lambda report: report.created):
        for point in points(report.results, timed=True):
            series[f"{point.result.device}/{point.name}"].append((report, point))
    files = dict(zip(series, file_names(series, "csv"), strict=True))
    return {files[name]: _csv(rows) for name, rows in series.items()} | {CONFIG: _config(files)}


def _csv(rows: Sequence[tuple[Report, Point]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_HEADER)
    for report, point in rows:
        figures = (point.median_step_seconds, point.peak_allocated_bytes)
        writer.writerow(map(spreadsheet, (report.created, report.commit, report.branch, *figures)))
    return file.getvalue()


def _config(files: Mapping[str, str]) -> str:
    """JSON, which is YAML."""
    smaller: dict[str, Any] = {name: {"column": name, "direction": -1} for name in _METRICS}
    test = {"type": "csv", "time_column": "time", "attributes": ["commit"], "metrics": smaller}
    tests = {name: {**test, "file": file} for name, file in files.items()}
    return json.dumps({"tests": tests}, indent=2) + "\n"
