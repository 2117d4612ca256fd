"""Exports to Bencher Metric Format v0, adapter ``json``: https://bencher.dev/docs/reference/bencher-metric-format.

``latency`` is Bencher's own measure, in nanoseconds; ``peak-memory`` is created by the first report that has it, in bytes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from pytest_gputrain.records import Report
from pytest_gputrain.report.export.points import Point, points

_NANOSECONDS = 1e9


def export(reports: Sequence[Report]) -> str:
    """Return the text for the one report of ``reports``."""
    (report,) = reports
    return json.dumps({point.name: _measures(point) for point in points(report.results)}, indent=2) + "\n"


def _measures(point: Point) -> dict[str, Any]:
    if not point.runs:
        return {"predicted-peak-memory": {"value": point.peak_allocated_bytes}}
    peaks = [run.peak_allocated_bytes for run in point.runs]
    median = point.median_step_seconds
    low, high = _quartiles(point.step_seconds)
    return {
        "latency": {
            "value": median * _NANOSECONDS,
            "lower_value": min(low, median) * _NANOSECONDS,
            "upper_value": max(high, median) * _NANOSECONDS,
        },
        "peak-memory": {"value": point.peak_allocated_bytes, "lower_value": min(peaks), "upper_value": max(peaks)},
    }


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high
