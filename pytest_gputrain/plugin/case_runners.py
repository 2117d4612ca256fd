"""Makes the runner of a pytest process, which measures cases here or by a scheduler, or runs them on emulated GPUs."""

from __future__ import annotations

import pytest

from pytest_gputrain.execution.emulated import EmulatingExecutor
from pytest_gputrain.execution.executor import Executor, conditions_of
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.execution.local import LocalExecutor
from pytest_gputrain.execution.resume import ResumedReport
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.plugin.items import expression_of
from pytest_gputrain.records import Reply
from pytest_gputrain.session.emulating import EmulatingRunner
from pytest_gputrain.session.replies import Watch
from pytest_gputrain.session.request import CaseRunner
from pytest_gputrain.session.runner import Runner
from pytest_gputrain.session.selection import platform_meant, platforms_named
from pytest_gputrain.storage.forecast import Forecast


def case_runner(
    config: pytest.Config,
    settings: Settings,
    environment: SessionEnvironment,
    forecast: Forecast | None,
    resumed_report: ResumedReport | None,
    watch: Watch,
) -> CaseRunner:
    """Return the runner that answers the requests of the tests.

    Args:
        environment: variables of the session.
        watch: called with each progress event.

    Raises:
        ValueError: the options cannot be meant so; one sentence.
        BaselineError: the report or the published tables to compare with cannot be read.
        CannotEmulate: the platform is none that can be emulated with what is installed.
    """
    if settings.emulate:
        return EmulatingRunner(settings, _emulating_executor(config, settings, environment), environment, watch)
    executor = _fleet_executor(config, settings, forecast) or LocalExecutor(
        conditions_of(settings), _fork_server(settings), environment.began
    )
    return Runner(settings, executor, environment, resumed_report, watch)


def platforms_of_run(config: pytest.Config, settings: Settings) -> list[str]:
    """Return the platforms that the command line names for this run."""
    return platforms_named(expression_of(config)) if settings.platform is None else [settings.platform]


def forecast_of(config: pytest.Config, settings: Settings) -> Forecast | None:
    """Return the recorded emulated runs, for a run on a GPU at full scale; None for other runs."""
    platforms = platforms_of_run(config, settings)
    if settings.emulate or settings.scale == "tiny" or len(platforms) != 1 or platforms[0] == CPU:
        return None
    return Forecast(settings.baseline_dir, platforms[0])


def _fork_server(settings: Settings) -> ForkServer | None:
    return ForkServer() if settings.isolation == "auto" else None


def _fleet_executor(config: pytest.Config, settings: Settings, forecast: Forecast | None) -> Executor[Reply] | None:
    """Return the executor that runs cases as jobs of a scheduler; None if cases run on this machine.

    Raises:
        ValueError: it cannot be used, or several platforms are named.
    """
    if settings.fleet is None:
        return None
    platforms = platforms_of_run(config, settings) or [CPU]
    if len(platforms) != 1:
        raise ValueError(
            f"--gpu-executor={settings.fleet} asks for machines of one platform, and -m names {', '.join(platforms)}; "
            "name one of them"
        )
    from pytest_gputrain.execution.fleet.durations import Durations
    from pytest_gputrain.execution.fleet.executor import FleetExecutor, scheduler_of

    durations = Durations(platforms[0], settings.history, forecast)
    return FleetExecutor(settings, platforms[0], scheduler_of(settings, platforms[0]), durations.of)


def _emulating_executor(config: pytest.Config, settings: Settings, environment: SessionEnvironment) -> EmulatingExecutor:
    """Return the executor that runs cases on emulated GPUs of the platform.

    Raises:
        ValueError: no platform is named, or several are.
        CannotEmulate: it is none that can be emulated with what is installed.
    """
    platforms = platforms_of_run(config, settings)
    if len(platforms) != 1:
        problem = (
            f"-m names {', '.join(platforms)}" if platforms else f"none is named{platform_meant(expression_of(config))}"
        )
        raise ValueError(f"--gpu-emulate emulates one platform, and {problem}; add --gpu-platform=h100, or -m h100")
    return EmulatingExecutor(platforms[0], settings.timeout_seconds, environment.began, _fork_server(settings))
