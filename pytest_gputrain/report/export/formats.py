"""Lists the formats of other tools that reports are exported to. A new format is a module and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from pytest_gputrain.records import Report
from pytest_gputrain.report.export import bencher, github_action_benchmark, megatron, mlperf, otava, pytest_benchmark, tables


class Format(NamedTuple):
    """A way to write reports."""

    export: Callable[[Sequence[Report]], str | Mapping[str, str]]
    """One text; or texts by file name, for consumers that read a file for each case."""
    reads: str
    """Which tool reads the format, for the help."""
    timed: bool = False
    """Whether it has no form for predicted cases."""
    many: bool = False
    """Whether it takes any number of reports, rather than one."""
    complete: bool = False
    """Whether it has a row for cases without figures, too."""


FORMATS: Final = {
    "pytest-benchmark": Format(
        pytest_benchmark.export, "pytest-benchmark compare; github-action-benchmark, tool pytest", timed=True
    ),
    "github-action-benchmark": Format(github_action_benchmark.export, "peak memory, tool customSmallerIsBetter"),
    "bencher": Format(bencher.export, "Bencher, adapter json"),
    "otava": Format(otava.export, "Apache Otava: a CSV for each case, and otava.yaml", timed=True, many=True),
    "megatron": Format(megatron.export, "golden values of Megatron-LM, a JSON for each case", timed=True),
    "mlperf": Format(mlperf.export, ":::MLLOG lines", timed=True),
    "csv": Format(tables.to_csv, "a row for each case and report", many=True, complete=True),
    "markdown": Format(tables.to_markdown, "a table for each report", many=True, complete=True),
}
