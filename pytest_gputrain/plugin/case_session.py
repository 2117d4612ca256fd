"""Holds what the hooks need once a case is asked for: the runner, the collector, and what reports of tests tell of cases."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from pytest_gputrain.cases import sweep
from pytest_gputrain.cases.identity import suite_of
from pytest_gputrain.cases.model_config import with_model
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.local import LocalExecutor
from pytest_gputrain.execution.resume import ResumedReport
from pytest_gputrain.execution.settings import OPTIONS, Settings
from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.plugin import absence, late_reports
from pytest_gputrain.plugin.case_runners import case_runner, forecast_of
from pytest_gputrain.plugin.case_tests import CaseTests, WholeFiles, outcome_of_skip, skipped
from pytest_gputrain.plugin.fixtures import GpuTrain, lend_gpu
from pytest_gputrain.plugin.items import ASKED_BY_A_CHILD, ENDINGS, FORKED, RESULTS, expression_of, has_cases, on_controller
from pytest_gputrain.plugin.marker_help import ONLY_ON
from pytest_gputrain.plugin.markers import terms_of, why_left_out
from pytest_gputrain.plugin.settings import prepare_outputs, read
from pytest_gputrain.records import Case, Event, Host, Result
from pytest_gputrain.records.tolerance import NO_TERMS, Terms
from pytest_gputrain.report import github
from pytest_gputrain.report.collector import Collector
from pytest_gputrain.report.github import Failure
from pytest_gputrain.report.progress_line import ProgressLine
from pytest_gputrain.session.selection import ExpectedCase, platforms_of
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore
from pytest_gputrain.utils.errors import BadCase, CannotEmulate
from pytest_gputrain.utils.sanitize import shown
from pytest_gputrain.utils.signals import undisturbed

_MOST_ROWS: Final = 500
"""Rows that the tables on the terminal have at most."""
_MAY_NOT_RUN: Final = {"skip", "skipif", "xfail", ONLY_ON}


class CaseSession:
    """The cases of one run of pytest, from their collection to their reports.

    Args:
        environment: the variables that the session began with.

    Raises:
        pytest.UsageError: the options cannot be meant so; one sentence.
    """

    collector: Collector | None
    """Gathers the results; None on an xdist worker, whose results travel to the controller with their reports."""

    def __init__(self, config: pytest.Config, environment: SessionEnvironment) -> None:
        self.config = config
        is_controller = on_controller(config)
        try:
            settings = _settings(config)
            if is_controller and not config.option.collectonly:
                if settings.records:
                    BaselineStore(settings.baseline_dir).check_writable()
                prepare_outputs(settings)
            if settings.html is not None and is_controller:
                _check_installed()
            if settings.baseline_prune and getattr(config.option, "dist", "no") != "no":
                raise ValueError(
                    "--gpu-baseline-prune and -n contradict each other: it has to see every test in one process"
                )
            resumed_report = None if settings.resume is None else ResumedReport.read(settings.resume, settings)
            self.forecast = forecast_of(config, settings)
            self.runner = case_runner(config, settings, environment, self.forecast, resumed_report, self._watch)
        except (ValueError, BaselineError, CannotEmulate) as error:
            raise pytest.UsageError(str(error)) from None
        self.collector = Collector(settings, resumed_report) if is_controller else None
        self._progress_line: ProgressLine | None = None
        self._measured: defaultdict[str, list[Result]] = defaultdict(list)
        self._failed: set[str] = set()
        self._failures: list[Failure] = []
        self._explanations: list[str] | None = None
        """The sentences that explain the tables, once all results are there."""
        self._tests = CaseTests()
        self._files = WholeFiles()
        config.pluginmanager.register(self._files, "gputrain-files")
        self._marks = {marker: getattr(pytest.mark, marker) for marker in MARKERS}

    def gputrain(self, item: pytest.Item, overridden: Mapping[str, Any]) -> GpuTrain:
        """Return the fixture ``gputrain`` for this test, or skip a test that a marker leaves out of this run."""
        if item.get_closest_marker(ONLY_ON):
            with contextlib.suppress(BadCase):  # The test itself fails with this error.
                kind = "emulated" if self.runner.settings.emulate else "gpu" if self.runner.executor.host.gpus else "cpu"
                if reason := why_left_out(item, kind):
                    raise skipped(shown(reason), "left out")
        return GpuTrain(item, self.runner, overridden)

    def gpu(self) -> Iterator[Gpu]:
        """Provide the fixture ``gpu`` until the test is over."""
        return lend_gpu(self.runner.executor)

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a test with cases by the combinations of ``--gpu-set``."""
        if self.runner.settings.sweep:
            metafunc.parametrize("_gputrain_knobs", sweep.combinations(self.runner.settings.sweep), ids=sweep.shown)

    def declare(self, item: pytest.Item) -> None:
        """Add the markers of its platforms to a test that is parametrized with cases, and register their ids."""
        callspec = getattr(item, "callspec", None)
        parameters = {} if callspec is None else callspec.params
        knobs = parameters.get("_gputrain_knobs", {})
        cases = [_with_knobs(item, value, knobs) for value in parameters.values() if isinstance(value, Case)]
        for case in cases:
            for marker in platforms_of(case.platforms):
                item.add_marker(self._marks[marker])
            self.runner.declare(suite_of(item.path), case)
        self._files.note_collected(item, [str(case) for case in cases])

    def order(self, items: list[pytest.Item]) -> None:
        """Sort the tests by recorded emulated runs of their cases."""
        if self.forecast is not None:
            self.forecast.order(items, lambda item: item.path, lambda item: (suite_of(item.path), _cases_of(item)))

    def known_not_to_fit(self, items: Sequence[pytest.Item]) -> str | None:
        """Return a warning about the cases that did not fit an emulated GPU."""
        if self.forecast is None:
            return None
        cases = {str(case): (suite_of(item.path), case) for item in items for case in _cases_of(item)}
        unfit = [name for name, (suite, case) in cases.items() if self.forecast.is_unfit(suite, case)]
        platform = self.forecast.platform
        return f"gputrain: did not fit an emulated {platform}, and run last: {', '.join(unfit)}" if unfit else None

    def taken_for_a_cpu(self, items: Sequence[pytest.Item]) -> str | None:
        """Return a warning if cases will run on the CPU although this machine has GPUs."""
        if self.config.option.collectonly or not any(map(has_cases, items)):
            return None
        return f"gputrain: {self._unseen}" if self._unseen else None

    @functools.cached_property
    def _unseen(self) -> str:
        """Return a sentence on GPUs of this machine that no case can use; empty if there are none, or if cases run
        elsewhere."""
        unseen = self.runner.executor.unseen if isinstance(self.runner.executor, LocalExecutor) else ""
        return f"no GPU is used, this machine counts as a CPU: {unseen}; --gpu-platform=cpu accepts that" if unseen else ""

    def expect(self, items: Sequence[pytest.Item]) -> None:
        """Note the cases of the tests that are about to run."""
        expression = expression_of(self.config)
        expected = []
        for item in items:
            markers = frozenset(mark.name for mark in item.iter_markers())
            if not markers & _MAY_NOT_RUN:
                suite = suite_of(item.path)
                terms = NO_TERMS if self.runner.settings.fleet is None else _terms_of(item)
                expected += [ExpectedCase(suite, case, markers, expression, terms) for case in _cases_of(item)]
        self.runner.expect(expected, submit=self.collector is not None)  # Under xdist the workers submit what they run.

    def _watch(self, case: Case, event: Event, run: int) -> None:
        """Draw the progress of the running case if there is a terminal."""
        terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        if self.collector is None or terminal is None or not terminal.isatty:
            return
        if self._progress_line is None:
            capture: Any = self.config.pluginmanager.get_plugin("capturemanager")
            uncaptured = capture.global_and_fixture_disabled if capture else contextlib.nullcontext
            settings = self.runner.settings
            kind = "emulated" if settings.emulate else ""
            self._progress_line = ProgressLine(self.config.get_terminal_writer().fullwidth, uncaptured, kind)
        self._progress_line.show(case, event, run)

    def complete(self) -> None:
        """Run the cases that still lack runs after the last test, and judge the suite as a whole."""
        if self.runner.waiting and self.collector is not None:
            late_reports.announce(self.config, self.runner.waiting)
        for result in self.runner.complete():
            self._update(result)
        if self.collector is not None:
            regressed, sentence = self.collector.suite_shift()
            if regressed:
                late_reports.fail(self.config, late_reports.ALL_CASES, sentence)

    def _update(self, result: Result) -> None:
        """Replace the result of a case by a later one, which includes a further run for its baseline."""
        if self._progress_line is not None:
            self._progress_line.clear()
        if self.collector is None:
            late_reports.send_to_controller(self.config, result)
            return
        self.collector.update(result)
        if result.verdict is not None and result.verdict.status != "recorded":
            late_reports.fail(self.config, result.nodeid, result.verdict.sentence, result)

    def take_over(self, node: Any) -> None:
        """Add the results that a worker of xdist has sent at its end."""
        for result in late_reports.results_from_worker(node):
            self._update(result)

    def take_unreported(self, item: pytest.Item) -> None:
        """Collect the results of a test that pytest has not reported, because the run was interrupted."""
        if self.collector is not None:
            for result in item.stash.get(RESULTS, []):
                self.collector.add(result, passed=False)

    def attach(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Add to a test's report what the test has measured, and why it was skipped."""
        if report.skipped and has_cases(item):
            report.gputrain_skip = outcome_of_skip(item, call.excinfo.value if call.excinfo else None)  # type: ignore[attr-defined]
        if report.failed:
            self.runner.forget(item.nodeid)
        results = item.stash.get(RESULTS, [])
        endings = item.stash.setdefault(ENDINGS, []) if report.when == "teardown" else []
        if report.when == "teardown" and (shared := item.stash.get(FORKED, None)) is not None and shared[0]:
            endings.append([ASKED_BY_A_CHILD, "failure"])
        if endings:
            report.gputrain_endings = [*endings]  # type: ignore[attr-defined]
            endings.clear()
        # Setup and teardown count, too, because a fixture may measure.
        if results or hasattr(report, "gputrain_endings") or has_cases(item):
            # The result is sent as JSON, because xdist sends only plain attributes of a report from its workers.
            report.gputrain = [msgspec.json.encode(result).decode() for result in results]  # type: ignore[attr-defined]
            results.clear()

    def log(self, report: pytest.TestReport) -> None:
        """Add the results and outcomes in the report of a test."""
        if self._progress_line is not None:
            self._progress_line.clear()
        if self.collector is None:
            return
        self._files.note(report)
        if hasattr(report, "gputrain"):
            self._tests.note(report)
        results = self._measured[report.nodeid]
        results += [msgspec.json.decode(text, type=Result) for text in getattr(report, "gputrain", ())]
        if results:
            report.gputrain = []  # type: ignore[attr-defined]  # pytest keeps every report until its end
        if report.failed:
            self._failed.add(report.nodeid)
            if hasattr(report, "gputrain"):
                self._failures.append(late_reports.failure_of(report, self.config.rootpath))
        if report.when == "teardown":
            with undisturbed():
                for result in self._measured.pop(report.nodeid):
                    passed = report.nodeid not in self._failed
                    self.collector.add(result, passed=passed)
                if report.nodeid not in self._failed:
                    self._tests.note_endings(report.nodeid, getattr(report, "gputrain_endings", ()))

    def close(
        self, session: pytest.Session, exitstatus: int, notes: Sequence[str], without_cases: Set[Path], *, interrupted: bool
    ) -> None:
        """Write what the run has measured. Fail the run if files, cases or baselines are missing. This is called on the
        controller only.

        Args:
            notes: further sentences to show.
            without_cases: the test files that were collected and have no test with cases.
        """
        collector = self.collector
        assert collector is not None, "a worker of xdist keeps no results"
        for results in self._measured.values():  # These tests did not end normally.
            for result in results:
                collector.add(result, passed=False)
        ended = not interrupted and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        absence.note_missing(collector, self._tests, expression_of(self.config), ended=ended)
        ran = bool(self._tests.outcomes or collector.results)
        if (ran or self._failures) and self._unseen:
            collector.notes.append(self._unseen)
            # Only --gpu-strict makes the run fail here, and the variable CI does not: the driver's file that was found may
            # belong to a GPU inside the CPU, which no test can use.
            collector.failed |= self.runner.settings.strict is True
        left = absence.note_unclaimed(collector, self._files, without_cases, self._host if ended else lambda: None)
        collector.notes += notes
        # A status that somebody chose by pytest.exit stays.
        cut_short = interrupted and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        collector.close(
            int(pytest.ExitCode.INTERRUPTED if cut_short else exitstatus),
            ran=ran,
            is_listing=self.config.option.collectonly,
            skipped=self._tests.number_skipped,
            left_out=self._tests.number_left_out,
            unclaimed=left,
        )
        late_reports.join_benchmarks(self.config, collector.results)
        late_reports.break_sentences(self.config)
        if ran or self._failures:
            self._summarise(collector)
        if collector.failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _host(self) -> Host | None:
        """Return the machine that cases run on, if it is known without any result."""
        option = self.config.option
        if self.runner.executor.is_remote or option.collectonly or option.setupplan or option.setuponly:
            return None
        try:
            return self.runner.executor.host
        except BadCase:
            return None

    def _summarise(self, collector: Collector) -> None:
        from pytest_gputrain.report import summary

        try:
            summary.write(self.runner.settings.summary, collector.results, self._failures, self._notes(collector))
        except OSError as error:
            collector.failed = True
            collector.notes.append(f"the summary cannot be written: {error}")

    def stop(self) -> None:
        """End the processes that were kept for later cases."""
        self.runner.close()

    def show(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the tables, notes and annotations below pytest's summary."""
        for command in github.commands(self._failures) if self._annotates() else ():
            terminalreporter.write_line(command)
        if self.collector is None or not (self.collector.results or self.collector.notes):
            return
        from pytest_gputrain.report import explanations, terminal

        writer = self.config.get_terminal_writer()
        terminalreporter.section("gputrain")
        notes = self._notes(self.collector)
        # What the user should do first stands above the table, because the end of a long table is read last.
        first = explanations.advice(self.collector.results) if self.runner.settings.baseline == "measured" else ""
        if first:
            terminalreporter.write_line(late_reports.broken(shown(first), terminalreporter))
        if self.collector.results:
            table = terminal.render(self.collector.results, width=writer.fullwidth, colour=writer.hasmarkup, most=_MOST_ROWS)
            terminalreporter.write_line(table)
        for line in notes:
            if line != first:
                terminalreporter.write_line(late_reports.broken(shown(line), terminalreporter))

    def _annotates(self) -> bool:
        """Tell whether failures become annotations of GitHub, which they do not if another plugin annotates every
        failure."""
        return github.wanted() and not self.config.pluginmanager.hasplugin("pytest_github_actions_annotate_failures")

    def _notes(self, collector: Collector) -> list[str]:
        from pytest_gputrain.report import explanations, studies

        if self._explanations is None:
            self._explanations = [*explanations.explain(collector.results), *studies.explain(collector.results)]
        return [*self._explanations, *collector.notes]


def _settings(config: pytest.Config) -> Settings:
    """Return the settings from the options."""
    return read(
        {option.name: config.getoption(option.flag) for option in OPTIONS if not option.ini_only},
        {option.name: str(config.getini(option.ini)) for option in OPTIONS},
        config.rootpath if config.inipath is None else config.inipath.parent,
        configured=config.inipath is not None,
    )


def _check_installed() -> None:
    """Check at the start of the run, and not after hours, that what the options need is installed."""
    from pytest_gputrain.report.html import page

    if lacking := page.missing():
        raise ValueError(f"--gpu-html: {lacking}")


def _cases_of(item: pytest.Item) -> list[Case]:
    """Return the cases that a parametrized test will ask for."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or not has_cases(item):
        return []
    knobs = callspec.params.get("_gputrain_knobs", {})
    return [_with_knobs(item, case, knobs) for case in callspec.params.values() if isinstance(case, Case)]


def _with_knobs(item: pytest.Item, case: Case, knobs: Mapping[str, Any]) -> Case:
    """Return the case with the knobs that a test sets."""
    case = sweep.override(case, knobs)
    try:
        return with_model(case, item.path.parent)
    except BadCase:  # The test itself fails with this error.
        return case


def _terms_of(item: pytest.Item) -> Terms:
    try:
        return terms_of(item)
    except BadCase:  # The test itself fails with this error.
        return NO_TERMS
