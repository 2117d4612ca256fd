"""Reports to other plugins of pytest what is known only after the tests, and sends results to xdist's controller."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest

from pytest_gputrain.gate.messages import count
from pytest_gputrain.gate.summary import detail_of
from pytest_gputrain.records import Result
from pytest_gputrain.report.github import Failure
from pytest_gputrain.utils.sanitize import shown

ALL_CASES: Final = "gputrain::all_cases_together"
"""Id of the failure of a suite that is slower as a whole."""

_OUTPUT: Final = "gputrain"


def announce(config: pytest.Config, baselines: int) -> None:
    """Write why the run continues after the last test."""
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.ensure_newline()
        terminal.write_line(f"gputrain: further runs of {count(baselines, 'baseline')}, one of each in turn")


def fail(config: pytest.Config, nodeid: str, sentence: str, result: Result | None = None) -> None:
    """Add a failure to those of the tests. It counts, is shown, and has an entry of its own in JUnit's XML.

    Args:
        nodeid: of a test that passed, or of none.
    """
    path, _, name = nodeid.partition("::")
    detail = detail_of(result) if result is not None else ""
    report = pytest.TestReport(
        nodeid=nodeid,
        location=(path, None, name.replace("::", ".")),
        keywords={},
        outcome="failed",
        longrepr=shown(sentence),
        when="call",
        sections=[(f"worker of {result.case}", detail)] if result is not None and detail else [],
    )
    report.gputrain = []  # type: ignore[attr-defined]  # ours, as those of tests are
    config.hook.pytest_runtest_logreport(report=report)


def failure_of(report: pytest.TestReport, root: Path) -> Failure:
    """Return the failure in the report of a test.

    Args:
        root: pytest's own, which the report's path is in.
    """
    path, line, name = report.location
    crash = getattr(report.longrepr, "reprcrash", None)  # This attribute has the exception without a traceback.
    text = report.longreprtext if crash is None else crash.message.removeprefix("Failed: ")
    file = root / path
    is_file = file.is_file()
    return Failure(
        file if is_file else None, line + 1 if is_file and line is not None else None, name, text.partition("\n")[0]
    )


def broken(line: str, reporter: Any) -> str:
    """Return the text wrapped between words to the width of the terminal. Text that goes to a file stays one line."""
    if not reporter.isatty:
        return line
    return textwrap.fill(
        line, reporter.config.get_terminal_writer().fullwidth, break_long_words=False, break_on_hyphens=False
    )


def break_sentences(config: pytest.Config) -> None:
    """Break the sentences of failed cases into lines for pytest's section of failures. Files keep them on one line."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    for report in reporter.stats.get("failed", ()) if reporter is not None else ():
        if hasattr(report, "gputrain"):
            for entry in getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ()):
                if entry.style == "value":  # An entry of this style is the sentence alone, without a traceback.
                    entry.lines = [broken(line, reporter) for line in entry.lines]


def join_benchmarks(config: Any, results: Sequence[Result]) -> None:
    """Add the cases to the benchmarks that pytest-benchmark saves or compares, if it is used.

    This is done under xdist, too, which turns off pytest-benchmark's own benchmarks: a case has its devices to itself,
    whichever worker runs its test.
    """
    session = getattr(config, "_benchmarksession", None)
    if session is None or not (session.json or session.save or session.autosave or session.compare):
        return
    if config.getoption("benchmark_disable") and not config.getoption("benchmark_enable"):
        return
    from pytest_benchmark.stats import Metadata

    from pytest_gputrain.report.export.points import points
    from pytest_gputrain.report.export.pytest_benchmark import entry

    for point in points(results, timed=True):
        fixture = SimpleNamespace(**entry(point), cprofile_stats=None, has_error=False)
        benchmark = Metadata(fixture, iterations=1, options={})
        for seconds in point.step_seconds:
            benchmark.update(seconds)
        session.benchmarks.append(benchmark)


def send_to_controller(config: Any, result: Result) -> None:
    """Send the latest result of a case to xdist's controller. This is called on a worker of xdist."""
    outputs = config.workeroutput.setdefault(_OUTPUT, {})
    outputs[f"{result.nodeid} {result.key} {result.variables_digest}"] = msgspec.json.encode(result).decode()


def results_from_worker(node: Any) -> Iterator[Result]:
    """Yield the results that a worker of xdist has sent; none for one that crashed. This is called on the controller."""
    for text in getattr(node, "workeroutput", {}).get(_OUTPUT, {}).values():
        yield msgspec.json.decode(text, type=Result)
