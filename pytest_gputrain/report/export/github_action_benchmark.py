"""Exports peak memory to github-action-benchmark, tool ``customSmallerIsBetter`` (`BenchmarkResult` in its ``extract.ts``).

Time goes there as pytest-benchmark's file, tool ``pytest``: an alert threshold of the action is for one kind of figure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pytest_gputrain.records import (
    Predicted,
    Report,
)
from pytest_gputrain.report.export.points import Point, points
from pytest_gputrain.report.results import verdict_of
from pytest_gputrain.utils.units import MiB


def export(reports: Sequence[Report]) -> str:
    """Return the text for the one report of ``reports``."""
    (report,) = reports
    return json.dumps([_entry(point) for point in points(report.results)], indent=2) + "\n"


def _entry(point: Point) -> dict[str, Any]:
    metric = "predicted peak memory" if isinstance(point.result, Predicted) else "peak memory"
    result = point.result
    entry = {
        "name": f"{point.name}: {metric}",
        "unit": "MiB",  # whatever the size: the action compares numbers
        "value": point.peak_allocated_bytes / MiB,
        "extra": f"device: {result.device}\nscale: {result.scale}\nverdict: {verdict_of(result)}",
    }
    if len(point.runs) > 1:
        peaks = [run.peak_allocated_bytes for run in point.runs]
        entry["range"] = f"± {(max(peaks) - min(peaks)) / 2 / MiB}"
    return entry
