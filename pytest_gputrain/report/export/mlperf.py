"""Exports to ``:::MLLOG`` lines of MLPerf training, as ``mlperf_logging.mllog`` prints them.

One namespace a case. The keys are MLPerf's own where it has one. ``time_ms`` begins with the session and counts the timed
steps of a case only: ``run_stop`` less ``run_start`` is what they took. No submission, as nothing is trained to a quality.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_gputrain.records import Report
from pytest_gputrain.report.export.points import Point, points


def export(reports: Sequence[Report]) -> str:
    """Return the text for the one report of ``reports``."""
    (report,) = reports
    begin = datetime.datetime.fromisoformat(report.created).timestamp()
    lines = [line for point in points(report.results, timed=True) for line in _lines(point, begin)]
    return "".join(f":::MLLOG {json.dumps(line)}\n" for line in lines)


def _lines(point: Point, begin: float) -> Iterator[dict[str, Any]]:
    case, run = point.result.case, point.middle_run
    now = begin

    def line(key: str, value: Any, event_type: str = "POINT_IN_TIME", **metadata: Any) -> dict[str, Any]:
        fields = {
            "namespace": point.name,
            "time_ms": round(now * 1000),
            "event_type": event_type,
            "key": key,
            "value": value,
        }
        return {**fields, "metadata": metadata}

    yield line("submission_benchmark", case.model)
    yield line("submission_platform", point.result.device)
    yield line("global_batch_size", run.batch_size * case.gradient_accumulation)
    yield line("gradient_accumulation_steps", case.gradient_accumulation)
    if run.sequence_length:
        yield line("max_sequence_length", run.sequence_length)
    yield line("opt_name", case.optimizer)
    yield line("opt_base_learning_rate", case.learning_rate)
    yield line("run_start", None, "INTERVAL_START")
    for step, seconds in enumerate(run.step_seconds, 1):
        now += seconds
        loss = {"train_loss": run.losses[step - 1]} if len(run.losses) == len(run.step_seconds) else {}
        yield line("tracked_stats", {"train_step_time": seconds, **loss}, step=step)
    final = {"throughput": run.samples_per_second, "peak_allocated_bytes": run.peak_allocated_bytes}
    yield line("tracked_stats", final, step=len(run.step_seconds))
    yield line("run_stop", None, "INTERVAL_END", status="success", samples_count=run.batch_size * len(run.step_seconds))
