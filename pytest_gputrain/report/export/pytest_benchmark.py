"""Exports JSON as pytest-benchmark 5 writes it under ``--benchmark-json`` and reads it in ``pytest-benchmark compare``.

A round is a training step. github-action-benchmark (tool ``pytest``) and Bencher (adapter ``python_pytest``) read it, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pytest_gputrain.records import Report, Result
from pytest_gputrain.report.export.points import Point, points
from pytest_gputrain.report.results import verdict_of


def document(report: Report) -> dict[str, Any]:
    """Return the document that ``--benchmark-json`` would write for the report's cases."""
    timed = points(report.results, timed=True)
    return {
        "machine_info": _machine(timed),
        "commit_info": {
            "id": report.commit.removesuffix("+dirty"),
            "dirty": report.commit.endswith("+dirty"),
            "branch": report.branch,
        },
        "benchmarks": [{**entry(point), "options": {}, "stats": stats(point.step_seconds)} for point in timed],
        "datetime": report.created.replace("Z", "+00:00"),
        "version": report.generator,
    }


def entry(point: Point) -> dict[str, Any]:
    """Return the fields of a benchmark in pytest-benchmark's file, except its times.

    Its names tell one run's cases from another's, so they are the case's rather than the test's: a test may measure several.
    """
    result = point.result
    return {
        "group": result.suite,
        "name": result.key,
        "fullname": f"{result.nodeid.partition('::')[0]}::{result.key}",
        "params": result.case.identity(),
        "param": str(result.case),
        "extra_info": _extra(result, point),
    }


def _extra(result: Result, point: Point) -> dict[str, Any]:
    first = point.runs[0]
    assert result.summary is not None
    info = {
        "device": result.device,
        "platform": result.platform,
        "scale": result.scale,
        "verdict": verdict_of(result),
        "processes": len(point.runs),
        "median_step_seconds": point.median_step_seconds,
        "samples_per_second": result.summary.samples_per_second,
        "tokens_per_second": result.summary.tokens_per_second,
        "model_flops_utilization": result.summary.model_flops_utilization,
        "gpu_seconds": result.summary.gpu_seconds,
        "gpu_busy_share": result.summary.gpu_busy_share,
        "peak_allocated_bytes": point.peak_allocated_bytes,
        "peak_reserved_bytes": first.peak_reserved_bytes,
        "model_bytes": first.model_bytes,
        "peak_host_bytes": first.peak_host_bytes,
    }
    return {name: value for name, value in info.items() if value is not None}


def _machine(timed: Sequence[Point]) -> dict[str, Any]:
    """Return the fields of pytest-benchmark's file about the machine. pytest-benchmark warns if they differ between two
    files."""
    if not timed:
        return {}
    environment = timed[0].runs[0].environment
    return {
        "node": environment.host,
        "processor": environment.cpu_model,
        "python_version": environment.python,
        "system": environment.os,
        "cpu": {"brand_raw": environment.cpu_model},
        "device": environment.device_name,
        "driver": environment.driver,
        "runtime": environment.runtime,
        "packages": environment.packages,
    }


def stats(data: Sequence[float]) -> dict[str, Any]:
    """Return all fields of pytest-benchmark's statistics, by its own definitions."""
    ordered = sorted(data)
    q1, q3 = _quartiles(ordered)
    mean = statistics.mean(ordered)
    stddev = statistics.stdev(ordered) if len(ordered) > 1 else 0
    low, high = q1 - 1.5 * (q3 - q1), q3 + 1.5 * (q3 - q1)
    beside_mean = sum(not mean - stddev <= value <= mean + stddev for value in ordered)
    beside_quartiles = sum(not low <= value <= high for value in ordered)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": stddev,
        "rounds": len(ordered),
        "median": statistics.median(ordered),
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": beside_quartiles,
        "stddev_outliers": beside_mean,
        "outliers": f"{beside_mean};{beside_quartiles}",
        "ld15iqr": min(value for value in ordered if value >= low),
        "hd15iqr": max(value for value in ordered if value <= high),
        "ops": len(ordered) / sum(data),
        "total": sum(data),
        "data": list(data),
        "iterations": 1,
    }


def _quartiles(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the quartiles: the medians of both halves, or by method 3 of Wikipedia's article if the number is odd."""
    count = len(ordered)
    if count == 1:
        return ordered[0], ordered[0]
    if count % 2 == 0:
        return statistics.median(ordered[: count // 2]), statistics.median(ordered[count // 2 :])
    n = count // 4
    if count % 4 == 1:
        return (
            0.25 * ordered[n - 1] + 0.75 * ordered[n],
            0.75 * ordered[3 * n] + 0.25 * ordered[3 * n + 1],
        )
    return (
        0.75 * ordered[n] + 0.25 * ordered[n + 1],
        0.25 * ordered[3 * n + 1] + 0.75 * ordered[3 * n + 2],
    )
