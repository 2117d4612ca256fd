"""Exports golden values as Megatron-LM's functional tests read them, a file for each case.

``tests/functional_tests/python_test_utils/common.py`` there has the form (`GoldenValues`). An iteration is a step, one
micro-batch, and the first is the first timed one, after the warm-up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gputrain.records import Report
from pytest_gputrain.report.export.points import Point, file_names, points


def export(reports: Sequence[Report]) -> Mapping[str, str]:
    """Texts by file name, of the one report of ``reports``."""
    (report,) = reports
    timed = points(report.results, timed=True)
    files = file_names((point.name for point in timed), "json")
    return {file: json.dumps(_golden(point), indent=4) + "\n" for file, point in zip(files, timed, strict=True)}


def _golden(point: Point) -> dict[str, Any]:
    run = point.middle_run
    metrics: dict[str, Sequence[float]] = {
        "iteration-time": run.step_seconds,
        "mem-max-allocated-bytes": [float(run.peak_allocated_bytes)] * len(run.step_seconds),
    }
    if len(run.losses) == len(run.step_seconds):  # own code may return none
        metrics["lm loss"] = run.losses
    return {name: _metric(values) for name, values in metrics.items()}


def _metric(values: Sequence[float]) -> dict[str, Any]:
    steps = {str(step): value for step, value in enumerate(values, 1)}
    return {"start_step": 1, "end_step": len(values), "step_interval": 1, "values": steps}
