"""Implements pytest's hooks, and defines the fixtures.

pytest imports this module in every project of an environment that has the plugin. So it knows options, markers and fixtures
only; `case_session`, which imports all the rest, is imported when the first case is asked for, or an option is given.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.settings import OPTIONS
from pytest_gputrain.plugin import marker_help
from pytest_gputrain.plugin.deselected import DeselectedTests
from pytest_gputrain.plugin.items import expression_of, has_cases, has_parameters, on_controller
from pytest_gputrain.plugin.without_cases import FilesWithoutCases
from pytest_gputrain.utils.signals import terminable, undisturbed

if TYPE_CHECKING:
    from pytest_gputrain.hardware.devices import Gpu
    from pytest_gputrain.plugin.case_session import CaseSession
    from pytest_gputrain.plugin.fixtures import GpuTrain

__all__ = ["gpu", "gputrain"]

_PLUGIN: Final[pytest.StashKey[GpuTrainPlugin]] = pytest.StashKey()
"""The key of the plugin in the configuration, for the fixtures."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gputrain", "gputrain: GPU training benchmarks")
    for option in OPTIONS:
        parser.addini(option.ini, option.help if option.ini_only else f"as {option.flag}", default="")
        if option.ini_only:
            group.addoption(option.flag, action=_IniOnly, nargs="?", help=argparse.SUPPRESS)
            continue
        help_text = option.help.replace("%", "%%")
        if option.switch:
            group.addoption(option.flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        else:
            action = "append" if option.repeated else "store"
            group.addoption(option.flag, action=action, default=None, metavar=option.metavar, help=help_text)


class _IniOnly(argparse.Action):
    """Refuses a setting that only the ini file has as a flag. It also takes the next word, which pytest would collect as a
    path."""

    def __call__(self, _parser: object, _namespace: object, value: object, option_string: str | None = None) -> None:
        option = next(option for option in OPTIONS if option.flag == option_string)
        raise pytest.UsageError(option.refused_flag(None if value is None else str(value)))


@pytest.hookimpl(tryfirst=True)  # This runs before conftest.py files, because they may import torch.
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Make torch importable under ``--gpu-emulate`` without NVIDIA's libraries.

    Raises:
        pytest.UsageError: this needs stand-ins, and they cannot be built.
    """
    if not _emulates(early_config):
        return
    from pytest_gputrain.hardware.emulation import importable, libraries
    from pytest_gputrain.utils.errors import CannotEmulate

    try:
        torch = libraries.find_torch()
    except CannotEmulate:
        return  # The session reports the error.
    if torch.environment is not None:
        return  # tests import the user's CPU build of torch, which needs no stand-ins
    try:
        importable.make_importable(torch)
    except CannotEmulate as error:
        raise pytest.UsageError(str(error)) from None


def _emulates(config: pytest.Config) -> bool:
    (option,) = (option for option in OPTIONS if option.name == "emulate")
    typed = getattr(config.known_args_namespace, option.ini)
    try:
        return bool(option.parse(str(typed) if typed is not None else config.getini(option.ini) or "false"))
    except ValueError:
        return False  # The session reports the error.


def pytest_configure(config: pytest.Config) -> None:
    for line in marker_help.lines(printed=config.getoption("markers")):
        config.addinivalue_line("markers", line)
    _refuse_unknown_settings(config)
    plugin = GpuTrainPlugin(config)
    given = [config.getoption(option.flag) is not None for option in OPTIONS if not option.ini_only]
    if any(given) or any(config.getini(option.ini) for option in OPTIONS):
        settings = plugin.cases.runner.settings  # Reading the settings refuses a wrong value before any test runs.
        plugin.without_cases = FilesWithoutCases(settings.baseline_dir)
    config.stash[_PLUGIN] = plugin
    config.pluginmanager.register(plugin, "gputrain-manager")
    config.pluginmanager.register(plugin.deselected, "gputrain-deselected")
    config.pluginmanager.register(plugin.without_cases, "gputrain-without-cases")
    config.add_cleanup(plugin.ending.close)


def _refuse_unknown_settings(config: pytest.Config) -> None:
    """Raise an error for a misspelt ``-o gpu_name=value``. Depending on its version, pytest ignores it or only warns."""
    for override in config.getoption("override_ini") or ():
        name = override.partition("=")[0]
        if name.startswith("gpu_"):
            try:
                config.getini(name)
            except ValueError:
                from pytest_gputrain.utils.suggest import did_you_mean

                hint = did_you_mean(name, [option.ini for option in OPTIONS])
                raise pytest.UsageError(f"-o {override}: there is no setting of this name{hint}") from None


@pytest.fixture
def _gputrain_knobs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return one combination of ``--gpu-set``, which replaces knobs of cases. The plugin parametrizes tests with this
    fixture."""
    if request.config.stash[_PLUGIN].cases.runner.settings.sweep:
        pytest.fail(
            "--gpu-set cannot reach a test that asks for gputrain while it runs; name it as an argument", pytrace=False
        )
    return {}


@pytest.fixture
def gputrain(request: pytest.FixtureRequest, _gputrain_knobs: dict[str, Any]) -> GpuTrain:
    """Measure training cases in processes of their own, and judge them against stored baselines."""
    item = request.node
    assert isinstance(item, pytest.Item)
    return item.config.stash[_PLUGIN].cases.gputrain(item, _gputrain_knobs)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """Reserve a GPU for this test alone, across xdist workers and pytest runs of this host; skip if there is none."""
    yield from request.config.stash[_PLUGIN].cases.gpu()


class GpuTrainPlugin:
    """The hooks of one run. They call `CaseSession` once a test has cases."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.environment = SessionEnvironment()
        self.deselected = DeselectedTests(expression_of(config))
        beside = config.rootpath if config.inipath is None else config.inipath.parent
        # This is the default, if no option names another folder.
        self.without_cases = FilesWithoutCases(beside / "baselines")
        self.ending = contextlib.ExitStack()
        self._is_terminable = False
        self._is_ending = False
        self._interrupted = False

    @functools.cached_property
    def cases(self) -> CaseSession:
        """The session that measures, judges and collects cases.

        Raises:
            pytest.UsageError: the options cannot be meant so.
        """
        from pytest_gputrain.plugin.case_session import CaseSession

        return CaseSession(self.config, self.environment)

    @property
    def cases_so_far(self) -> CaseSession | None:
        """`cases` if it exists already; else None."""
        return self.__dict__.get("cases")

    @pytest.hookimpl(trylast=True)  # The ids end with what the command line adds, so this runs last.
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if self.cases_so_far and "gputrain" in metafunc.fixturenames:
            self.cases_so_far.parametrize(metafunc)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if has_cases(item) or has_parameters(item):
            self.cases.declare(item)

    @pytest.hookimpl(tryfirst=True)  # `--stepwise` continues at a place in this order, so this runs first.
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.cases_so_far:
            self.cases_so_far.order(items)

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        cases = self.cases_so_far
        return list(filter(None, (cases.taken_for_a_cpu(items), cases.known_not_to_fit(items)))) if cases else []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.environment.collected(elsewhere=bool(self.cases_so_far and self.cases_so_far.runner.executor.is_remote))
        if self.cases_so_far:
            self.cases_so_far.expect(session.items)

    # This runs last: what other plugins set at their start must not look like a change by a test.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.environment.begin()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        ended = yield
        is_stopped = session.shouldfail or session.shouldstop  # xdist tells its workers to stop in this way.
        if self.cases_so_far and not is_stopped:
            self.cases_so_far.complete()
        return ended

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if self.cases_so_far:  # Reports of this worker may have sent cases before.
            self.cases_so_far.take_over(node)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if has_cases(item):
            self._be_terminable()
        try:
            return (yield)
        finally:
            if self.cases_so_far:
                self.cases_so_far.take_unreported(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self.cases_so_far or has_cases(item):
            self.cases.attach(item, call, report)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_ours = hasattr(report, "gputrain")  # Under xdist a report is the first sign of a case.
        if is_ours and on_controller(self.config):
            self._be_terminable()
        if self.cases_so_far or is_ours:
            self.cases.log(report)

    def _be_terminable(self) -> None:
        """Handle signals from the first case on, and not before. Runs without cases end as they would without this
        plugin."""
        if not self._is_terminable:
            self._is_terminable = True
            self.ending.enter_context(terminable())

    def _end_undisturbed(self) -> None:
        """Ignore all signals until the end of the run, because a second one must not interrupt the handling of the first."""
        if self._is_terminable and not self._is_ending:
            self._is_ending = True
            self.ending.enter_context(undisturbed(to_the_end=True))

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        self._interrupted = True  # pytest notes it only later, and never if a second Ctrl-C comes
        self._end_undisturbed()

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # pytest-benchmark saves in a wrapper, too, and this one comes before it
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        self._end_undisturbed()
        if on_controller(self.config):
            with undisturbed(to_the_end=True):
                notes = self.deselected.notes()
                without_cases = self.without_cases.paths
                if self.cases_so_far or notes or without_cases:
                    self.cases.close(session, exitstatus, notes, without_cases, interrupted=self._interrupted)
        return (yield)

    def pytest_unconfigure(self) -> None:
        if self.cases_so_far:
            with undisturbed(to_the_end=True):
                self.cases_so_far.stop()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.cases_so_far:
            self.cases_so_far.show(terminalreporter)
