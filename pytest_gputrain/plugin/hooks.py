"""Implements pytest's hooks. Each of them calls the module that does the work."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any, Final

import msgspec
import pytest

from pytest_gputrain.cases import sweep
from pytest_gputrain.cases.identity import suite_of
from pytest_gputrain.execution.executor import Executor
from pytest_gputrain.execution.resume import ResumedReport
from pytest_gputrain.hardware.catalog import CPU, MARKERS, PLATFORMS
from pytest_gputrain.plugin import late_reports
from pytest_gputrain.plugin.deselected import DeselectedTests
from pytest_gputrain.plugin.fixtures import RESULTS, RUNNER, expression_of, gpu, gputrain, gputrain_knobs
from pytest_gputrain.plugin.markers import HELP, terms_of
from pytest_gputrain.plugin.options import OPTIONS
from pytest_gputrain.plugin.settings import read
from pytest_gputrain.records import Case, Result
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.records.tolerance import NO_TERMS, Terms
from pytest_gputrain.report import github
from pytest_gputrain.report.collector import Collector
from pytest_gputrain.report.github import Failure
from pytest_gputrain.report.progress_line import ProgressLine
from pytest_gputrain.session.dry_run.runner import DryRunner
from pytest_gputrain.session.runner import Runner
from pytest_gputrain.session.selection import ExpectedCase, platform_meant, platforms_named, platforms_of
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore
from pytest_gputrain.storage.forecast import Forecast
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.sanitize import shown
from pytest_gputrain.utils.signals import terminable, undisturbed
from pytest_gputrain.utils.suggest import did_you_mean

__all__ = ["gpu", "gputrain", "gputrain_knobs"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gputrain", "GPU training benchmarks")
    for option in OPTIONS:
        if option.switch:
            group.addoption(option.flag, action="store_true", default=None, help=option.help)
        else:
            action = "append" if option.repeated else "store"
            group.addoption(option.flag, action=action, default=None, metavar=option.metavar, help=option.help)
        parser.addini(option.ini, f"as {option.flag}", default="")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        device_title = "a CPU" if marker == CPU else PLATFORMS[marker].title
        config.addinivalue_line("markers", f"{marker}: gputrain: declared for {device_title}")
    for line in HELP:
        config.addinivalue_line("markers", line)
    try:
        settings = read(
            {option.name: config.getoption(option.flag) for option in OPTIONS},
            {option.name: str(config.getini(option.ini)) for option in OPTIONS},
            config.rootpath if config.inipath is None else config.inipath.parent,
        )
        named_platforms = [] if settings.platform is None else [("--gpu-platform", settings.platform)]
        named_platforms += [("--gpu-fleet-args", platform) for platform, _ in settings.fleet_args if platform]
        for option, platform in named_platforms:
            if platform not in MARKERS:
                hint = did_you_mean(platform, MARKERS)
                raise ValueError(f"{option}: {platform!r} is unknown{hint}; known: {', '.join(MARKERS)}")
        on_controller = not hasattr(config, "workerinput")
        if settings.baseline_update != "no" and on_controller and not config.option.collectonly:
            BaselineStore(settings.baseline_dir).check_writable()
        if settings.html is not None and on_controller:
            _check_installed()
        resumed_report = None if settings.resume is None else ResumedReport.read(settings.resume, settings)
        executor = _fleet(config, settings, resumed_report) or Executor(settings, resumed_report)
        runner = _dry_runner(config, settings) if settings.dry_run else Runner(settings, executor)
    except (ValueError, BaselineError) as error:
        raise pytest.UsageError(str(error)) from None
    plugin = GpuTrainPlugin(config, runner, Collector(settings, resumed_report) if on_controller else None)
    config.stash[RUNNER] = runner
    config.pluginmanager.register(plugin, "gputrain-manager")
    config.pluginmanager.register(plugin.deselected, "gputrain-left-out")
    config.add_cleanup(plugin.ending.close)


def _check_installed() -> None:
    """Raises:
    ValueError: what an HTML report needs is not installed; reported now rather than after hours.
    """
    from pytest_gputrain.report.html import page

    if lacking := page.missing():
        raise ValueError(f"--gpu-html: {lacking}")


def _platforms(config: pytest.Config, settings: Settings) -> list[str]:
    """Return the platforms that this run is for, as far as the command line names them."""
    return platforms_named(expression_of(config)) if settings.platform is None else [settings.platform]


def _forecast(config: pytest.Config, settings: Settings) -> Forecast | None:
    """Return the recorded predictions for a run on a GPU at full scale; None where they do not apply."""
    platforms = _platforms(config, settings)
    if settings.dry_run or settings.scale == "tiny" or len(platforms) != 1 or platforms[0] == CPU:
        return None
    return Forecast(settings.baseline_dir, platforms[0])


def _fleet(config: pytest.Config, settings: Settings, resumed_report: ResumedReport | None) -> Executor | None:
    """Return the executor of ``--gpu-fleet``; None where cases run on this machine.

    Raises:
        ValueError: it cannot be used, or several platforms are named.
    """
    if settings.fleet is None:
        return None
    platforms = _platforms(config, settings) or [CPU]
    if len(platforms) != 1:
        raise ValueError(
            f"--gpu-fleet asks for machines of one platform, and -m names {', '.join(platforms)}; name one of them"
        )
    from pytest_gputrain.execution.fleet.durations import Durations
    from pytest_gputrain.execution.fleet.executor import FleetExecutor, scheduler_of

    durations = Durations(platforms[0], settings.history, _forecast(config, settings))
    return FleetExecutor(settings, platforms[0], scheduler_of(settings, platforms[0]), durations.of, resumed_report)


def _dry_runner(config: pytest.Config, settings: Settings) -> DryRunner:
    """Raises:
    ValueError: no platform is named, or several are.
    """
    platforms = _platforms(config, settings)
    if len(platforms) != 1:
        problem = (
            f"-m names {', '.join(platforms)}" if platforms else f"none is named{platform_meant(expression_of(config))}"
        )
        raise ValueError(f"--gpu-dry-run predicts for one platform, and {problem}; add --gpu-platform=h100, or -m h100")
    cache = getattr(config, "cache", None)  # pytest's own plugin for it may be off
    folder = None
    with contextlib.suppress(OSError):  # a folder that cannot be written remembers nothing
        folder = None if cache is None else cache.mkdir("gputrain")
    return DryRunner(settings, platforms[0], folder)


_MOST_ROWS: Final = 500
"""Rows that the tables on the terminal have at most."""
_MAY_NOT_RUN: Final = {"skip", "skipif", "xfail"}


def _cases_of(item: pytest.Item) -> list[Case]:
    """The cases that a test is parametrized with and will ask for."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or "gputrain" not in getattr(item, "fixturenames", ()):
        return []
    knobs = callspec.params.get("gputrain_knobs", {})
    return [sweep.override(case, knobs) for case in callspec.params.values() if isinstance(case, Case)]


def _terms_of(item: pytest.Item) -> Terms:
    try:
        return terms_of(item)
    except BadCase:  # its test will fail with it
        return NO_TERMS


class GpuTrainPlugin:
    """The hooks of one run.

    Args:
        collector: gathers the results; None on an xdist worker, whose results travel to the controller with their reports.
    """

    def __init__(self, config: pytest.Config, runner: Runner, collector: Collector | None) -> None:
        self.config = config
        self.runner = runner
        self.collector = collector
        self._progress_line: ProgressLine | None = None
        self._measured: defaultdict[str, list[Result]] = defaultdict(list)
        self._failed: set[str] = set()
        self._failures: list[Failure] = []
        self._explanations: list[str] | None = None
        """The sentences that explain the tables, once all results are there."""
        self._interrupted = False
        self.deselected = DeselectedTests(expression_of(config))
        self.ending = contextlib.ExitStack()
        self._is_terminable = False
        self._skipped = False
        """Whether any test with cases was skipped."""
        self.forecast = _forecast(config, runner.settings)
        self._marks = {marker: getattr(pytest.mark, marker) for marker in MARKERS}

    @pytest.hookimpl(trylast=True)  # ids end in what the command line adds
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if self.runner.settings.sweep and "gputrain" in metafunc.fixturenames:
            metafunc.parametrize("gputrain_knobs", sweep.combinations(self.runner.settings.sweep), ids=sweep.shown)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        callspec = getattr(item, "callspec", None)
        if callspec is None:
            return
        knobs = callspec.params.get("gputrain_knobs", {})
        for value in callspec.params.values():
            if isinstance(value, Case):
                for marker in platforms_of(value.platforms):
                    item.add_marker(self._marks[marker])
                self.runner.declare(suite_of(item.path), sweep.override(value, knobs))

    @pytest.hookimpl(tryfirst=True)  # --stepwise goes on from the place in the order where the last run stopped
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.forecast is not None:
            self.forecast.order(items, lambda item: item.path, lambda item: (suite_of(item.path), _cases_of(item)))

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> str | None:
        """A warning of what is predicted not to fit."""
        if self.forecast is None:
            return None
        cases = {str(case): (suite_of(item.path), case) for item in items for case in _cases_of(item)}
        unfit = [name for name, (suite, case) in cases.items() if self.forecast.is_unfit(suite, case)]
        return (
            f"gputrain: predicted not to fit {self.forecast.platform}, and run last: {', '.join(unfit)}" if unfit else None
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        expression = expression_of(self.config)
        expected = []
        for item in session.items:
            markers = frozenset(mark.name for mark in item.iter_markers())
            if not markers & _MAY_NOT_RUN:
                suite = suite_of(item.path)
                terms = NO_TERMS if self.runner.settings.fleet is None else _terms_of(item)
                expected += [ExpectedCase(suite, case, markers, expression, terms) for case in _cases_of(item)]
        self.runner.expect(expected)
        if self.collector is not None:  # a worker of xdist submits what it runs
            self.runner.prefetch()

    @pytest.hookimpl(trylast=True)  # what other plugins set when they begin, no test has changed
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.runner.executor.environment.begin()
        terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        capture: Any = self.config.pluginmanager.get_plugin("capturemanager")
        if self.collector is None or terminal is None or not terminal.isatty:
            return
        uncaptured = capture.global_and_fixture_disabled if capture else contextlib.nullcontext
        self._progress_line = ProgressLine(self.config.get_terminal_writer().fullwidth, uncaptured)
        self.runner.executor.watch = self._progress_line.show

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        ended = yield
        if session.shouldfail or session.shouldstop:  # a worker of xdist was told to stop
            return ended
        if self.runner.interleaver and self.collector is not None:
            late_reports.announce(self.config, self.runner.interleaver)
        for result in self.runner.interleaver.complete():
            self._update(result)
        if self.collector is not None:
            regressed, sentence = self.collector.suite_shift()
            if regressed:
                late_reports.fail(self.config, late_reports.ALL_CASES, sentence)
        return ended

    def _update(self, result: Result) -> None:
        """Take in a result again, with a further run of its baseline."""
        if self._progress_line is not None:
            self._progress_line.clear()
        if self.collector is None:
            late_reports.send_to_controller(self.config, result)
            return
        self.collector.update(result)
        if result.verdict is not None and result.verdict.status != "recorded":
            late_reports.fail(self.config, result.nodeid, result.verdict.sentence, result)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for result in late_reports.results_from_worker(node):
            self._update(result)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if "gputrain" in getattr(item, "fixturenames", ()):
            self._be_terminable()
        try:
            return (yield)
        finally:
            # No report has what a test had measured before it was interrupted.
            if self.collector is not None:
                for result in item.stash.get(RESULTS, []):
                    self.collector.add(result, passed=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            self.runner.interleaver.forget(item.nodeid)
        results = item.stash.get(RESULTS, [])
        if results or "gputrain" in getattr(item, "fixturenames", ()):  # of whatever phase: a fixture may measure too
            # An attribute of plain JSON travels from an xdist worker with the report.
            report.gputrain = [msgspec.json.encode(result).decode() for result in results]  # type: ignore[attr-defined]
            results.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._progress_line is not None:
            self._progress_line.clear()
        if self.collector is None:
            return
        if hasattr(report, "gputrain"):  # under xdist, the first that is heard of a case
            # In its call: a mark that skips, or expects a failure, is somebody's decision.
            self._skipped |= report.when == "call" and report.skipped and not hasattr(report, "wasxfail")
            self._be_terminable()
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
                    self.collector.add(result, passed=report.nodeid not in self._failed)

    def _be_terminable(self) -> None:
        """Take signals from the first case on, and not before: runs without cases end as they would without this plugin."""
        if not self._is_terminable:
            self._is_terminable = True
            self.ending.enter_context(terminable())

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        self._interrupted = True  # pytest notes it later, and not at all if a second one comes meanwhile

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-benchmark saves, which is a wrapper, too
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        if self.collector is not None:
            with undisturbed(to_the_end=True):
                self._close(self.collector, session, exitstatus)
        return (yield)

    def _close(self, collector: Collector, session: pytest.Session, exitstatus: int) -> None:
        for results in self._measured.values():  # of tests that did not come to their end
            for result in results:
                collector.add(result, passed=False)
        if self.runner.settings.dry_run and self._skipped and not collector.results and exitstatus == pytest.ExitCode.OK:
            collector.notes.append("nothing was predicted: every case was skipped; -rs tells why")
            collector.failed |= self.runner.is_strict("")
        collector.notes += self.deselected.notes()
        # What somebody chose by pytest.exit stays.
        cut_short = self._interrupted and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        collector.close(int(pytest.ExitCode.INTERRUPTED if cut_short else exitstatus))
        late_reports.join_benchmarks(self.config, collector.results)
        if collector.results or self._failures:
            self._summarise(collector)
        if collector.failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _summarise(self, collector: Collector) -> None:
        from pytest_gputrain.report import summary

        try:
            summary.write(self.runner.settings.summary, collector.results, self._failures, self._notes(collector))
        except OSError as error:
            collector.failed = True
            collector.notes.append(f"the summary cannot be written: {error}")

    def pytest_unconfigure(self) -> None:
        with undisturbed(to_the_end=True):
            self.runner.executor.close()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for command in github.commands(self._failures) if self._annotates() else ():
            terminalreporter.write_line(command)
        if self.collector is None or not (self.collector.results or self.collector.notes):
            return
        from pytest_gputrain.report import terminal

        writer = self.config.get_terminal_writer()
        terminalreporter.section("gputrain")
        if self.collector.results:
            table = terminal.render(self.collector.results, width=writer.fullwidth, colour=writer.hasmarkup, most=_MOST_ROWS)
            terminalreporter.write_line(table)
        for line in self._notes(self.collector):
            terminalreporter.write_line(shown(line))

    def _annotates(self) -> bool:
        """Return whether failures become annotations of GitHub; not if another plugin annotates every failure."""
        return github.wanted() and not self.config.pluginmanager.hasplugin("pytest_github_actions_annotate_failures")

    def _notes(self, collector: Collector) -> list[str]:
        from pytest_gputrain.report import studies, terminal

        if self._explanations is None:
            self._explanations = [*terminal.explain(collector.results), *studies.explain(collector.results)]
        return [*self._explanations, *collector.notes]
