"""Lists the formats that reports are exported to, for people and for other tools. A new one is a function and an entry."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pytest_gputrain.records import FAILING, Emulated, Report, Result
from pytest_gputrain.records.case import knob_text
from pytest_gputrain.records.counts import MAIN
from pytest_gputrain.records.history import COUNT_KEYS, KNOB_KEYS, knobs
from pytest_gputrain.report import explanations, studies, summary, terminal
from pytest_gputrain.report.export import pytest_benchmark
from pytest_gputrain.report.export.points import Point, file_names, points
from pytest_gputrain.report.github import Failure
from pytest_gputrain.report.results import counts_of, latest, verdict_of
from pytest_gputrain.report.tables import csv_text
from pytest_gputrain.utils import console
from pytest_gputrain.utils.units import MiB

Export = Callable[[Sequence[Report]], str | Mapping[str, str]]
"""Returns one text; or texts by file name, for consumers that read a file for each case."""


class Format(NamedTuple):
    """A format in which reports are exported."""

    export: Export
    reads: str
    """The tool that reads the format, for the help."""
    timed: bool = False
    """Whether it has no form for cases without times."""
    many: bool = False
    """Whether it takes any number of reports, rather than one."""
    complete: bool = False
    """Whether it has a row for cases without figures, too."""


def _json(document: Callable[[Report], object]) -> Export:
    """Return an export function that writes the ``document`` of one report as JSON."""

    def export(reports: Sequence[Report]) -> str:
        (report,) = reports
        return json.dumps(document(report), indent=2) + "\n"

    return export


def _terminal(reports: Sequence[Report]) -> str:
    """Return the tables that pytest prints at the end of a run."""
    width, colour = console.standard_output()
    return "\n".join(f"{terminal.render(report.results, width=width, colour=colour)}\n" for report in reports)


def _markdown(reports: Sequence[Report]) -> str:
    """Return the summary that pytest writes for the page of a CI job, with the commit and the date of each run."""
    return "\n".join("\n".join(_summary(report)) for report in reports)


def _summary(report: Report) -> list[str]:
    failures = [
        Failure(None, None, result.key, result.verdict.sentence)
        for result in latest(report.results)
        if result.verdict and result.verdict.status in FAILING
    ]
    notes = [*explanations.explain(report.results), *studies.explain(report.results), *report.notes]
    return summary.lines(report.results, failures, notes, _run(report))


def _run(report: Report) -> str:
    return f"Run of {report.commit} on {report.created}" if report.commit else f"Run on {report.created}"


_OF_REPORT: Final = ("created", "session", "commit", "branch")
_OF_CASE: Final = ("model", "method", "precision", "parallel", "gpus", "batch_size")
_OF_SUMMARY: Final = (
    "samples_per_second",
    "tokens_per_second",
    "model_flops_utilization",
    "gpu_seconds",
    "gpu_busy_share",
)
_OF_RUN: Final = ("peak_reserved_bytes", "model_bytes", "peak_host_bytes")
CSV_HEADERS: Final = (
    *(*_OF_REPORT, "suite", "case", "device", "scale", *_OF_CASE, "verdict", "processes"),
    *("step_seconds", *_OF_SUMMARY, "peak_allocated_bytes", *_OF_RUN),
    *(name for name in KNOB_KEYS if name not in _OF_CASE),
    *COUNT_KEYS,
)


def _csv(reports: Sequence[Report]) -> str:
    """Return a row for each case and report: figures in seconds, bytes, samples and tokens per second, and every knob."""
    rows = []
    for report in reports:
        figures = {id(point.result): point for point in points(report.results)}
        rows += [_csv_row(report, result, figures.get(id(result))) for result in latest(report.results)]
    return csv_text(CSV_HEADERS, rows)


def _csv_row(report: Report, result: Result, point: Point | None) -> list[object]:
    run = point.runs[0] if point and point.runs else None
    figures, counts = run or result.figures, counts_of(result)
    case = {name: knob_text(value) if isinstance(value, bool) else value for name, value in knobs(result.case).items()}
    return [
        *(getattr(report, name) for name in _OF_REPORT),
        *(result.suite, result.key, result.device, result.scale),
        *(case[name] for name in _OF_CASE),
        *(verdict_of(result), len(result.replies)),
        point.median_step_seconds if point and run else None,
        *(getattr(result.summary, name) if run else None for name in _OF_SUMMARY),
        point.peak_allocated_bytes if point else None,
        *(getattr(figures, name, None) for name in _OF_RUN),
        *(value for name, value in case.items() if name not in _OF_CASE),
        *(counts.get(figure) for figure in COUNT_KEYS.values()),
    ]


def _kind(result: Result) -> str:
    """Return the prefix for the name of a figure that was not measured."""
    return "emulated " if isinstance(result, Emulated) else ""


def _peak(point: Point) -> dict[str, Any]:
    """Return the peak memory in the form of github-action-benchmark, a `BenchmarkResult` of its ``extract.ts``.

    Time goes there as pytest-benchmark's file, because an alert threshold of the action is for one kind of figure.
    """
    result = point.result
    entry = {
        "name": f"{point.name}: {_kind(result)}peak memory",
        "unit": "MiB",  # The GitHub action compares numbers, so all figures have one unit.
        "value": point.peak_allocated_bytes / MiB,
        "extra": f"device: {result.device}\nscale: {result.scale}\nverdict: {verdict_of(result)}",
    }
    if len(point.runs) > 1:
        peaks = [run.peak_allocated_bytes for run in point.runs]
        entry["range"] = f"± {(max(peaks) - min(peaks)) / 2 / MiB}"
    return entry


def _measures(point: Point) -> dict[str, Any]:
    """Return the measures of a case in the Bencher Metric Format v0:
    https://bencher.dev/docs/reference/bencher-metric-format.

    ``latency`` is Bencher's own, in nanoseconds; ``peak-memory`` is created by the first report that has it, in bytes, and
    so are the waits and the work of a step on an emulated GPU, and the reads and the operators of a step on a CPU.
    """
    kind, asked = _kind(point.result).replace(" ", "-"), counts_of(point.result)
    counts = {f"{kind}{name}": {"value": asked[name]} for name in MAIN if name in asked}
    if not point.runs:
        return {f"{kind}peak-memory": {"value": point.peak_allocated_bytes}, **counts}
    peaks = [run.peak_allocated_bytes for run in point.runs]
    median, steps = point.median_step_seconds, point.step_seconds
    low, _, high = statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else (steps[0],) * 3
    figures = {"value": median, "lower_value": min(low, median), "upper_value": max(high, median)}
    return {
        "latency": {name: seconds * 1e9 for name, seconds in figures.items()},
        "peak-memory": {"value": point.peak_allocated_bytes, "lower_value": min(peaks), "upper_value": max(peaks)},
        **counts,
    }


_OTAVA_METRICS: Final = ("step_seconds", "peak_allocated_bytes")
_OTAVA_TEST: Final = {
    "type": "csv",
    "time_column": "time",
    "attributes": ["commit"],
    "metrics": {name: {"column": name, "direction": -1} for name in _OTAVA_METRICS},
}


def _otava(reports: Sequence[Report]) -> Mapping[str, str]:
    """Return a CSV file for each case, and ``otava.yaml``, which lists them. That file is JSON, which is valid YAML.

    Otava turns every cell of a metric into a number, so a run in which a case gave none has no row.
    """
    series: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
    for report in sorted(reports, key=lambda report: report.created):
        for point in points(report.results, timed=True):
            row = (report.created, report.commit, report.branch, point.median_step_seconds, point.peak_allocated_bytes)
            series[f"{point.result.device}/{point.name}"].append(row)
    files = dict(zip(series, file_names(series, "csv"), strict=True))
    config = {"tests": {name: {**_OTAVA_TEST, "file": file} for name, file in files.items()}}
    headers = ("time", "commit", "branch", *_OTAVA_METRICS)
    return {
        **{files[name]: csv_text(headers, rows) for name, rows in series.items()},
        "otava.yaml": json.dumps(config, indent=2) + "\n",
    }


FORMATS: Final = {
    "terminal": Format(_terminal, "people: the tables at the end of a run (default)", many=True, complete=True),
    "markdown": Format(_markdown, "people: the step summary of a CI job", many=True, complete=True),
    "csv": Format(_csv, "anything: a row for each case and report", many=True, complete=True),
    "pytest-benchmark": Format(
        _json(pytest_benchmark.document), "pytest-benchmark compare; github-action-benchmark, tool pytest", timed=True
    ),
    "github-action-benchmark": Format(
        _json(lambda report: list(map(_peak, points(report.results)))), "peak memory, tool customSmallerIsBetter"
    ),
    "bencher": Format(
        _json(lambda report: {point.name: _measures(point) for point in points(report.results)}), "Bencher, adapter json"
    ),
    "otava": Format(_otava, "Apache Otava: a CSV for each case, and otava.yaml", timed=True, many=True),
}
