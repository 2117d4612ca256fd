"""Looks up what a case is held to: its baseline, an earlier report, published figures, tolerances and limits."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.messages import OtherSide
from pytest_gputrain.gate.step_times import PRIOR_SD
from pytest_gputrain.gate.suite_noise import prior_of
from pytest_gputrain.records import Baseline, Case, Host, Published, Task
from pytest_gputrain.records.tolerance import NO_TERMS, CountTerms, Terms, Tolerance
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore, SuiteStore
from pytest_gputrain.storage.forecast import Forecast
from pytest_gputrain.storage.published import PublishedStore
from pytest_gputrain.storage.reports import ReportStore
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.git import in_ci

_RECORDED_RUNS: Final = 5
"""Fresh processes of a baseline. On a CPU whose time is not judged one is enough: its memory is exact."""


def records(settings: Settings, *, recorded: bool) -> bool:
    """Tell whether an update option wants the figures of a judged case.

    Args:
        recorded: whether the case has a baseline.
    """
    return settings.baseline_update or (settings.baseline_new and not recorded)


def is_strict(settings: Settings) -> bool:
    """Tell whether a case without a comparable baseline fails."""
    if settings.strict is not None:
        return settings.strict
    # A run in CI is strict, because somebody may have forgotten to record a figure. Nobody records published figures.
    return in_ci() and settings.baseline != "published" and not settings.baseline_update


def refuse_missing_folder(settings: Settings) -> None:
    """Refuse a folder that is not there. A mistyped one would make every case new.

    Raises:
        BadCase: the options name one that is not there.
    """
    if "baseline-dir" in settings.given and not settings.records and not os.path.isdir(settings.baseline_dir):
        raise BadCase(f"the baseline folder {settings.baseline_dir} does not exist; --gpu-baseline-update makes it")


def elsewhere(settings: Settings, store: SuiteStore[Any, Any], suite: str) -> str:
    """Say where baselines are, if pytest was started in the wrong folder and does not find them; empty if there are none.

    Without a configuration file, pytest takes the folder in which it is started for its root.
    """
    if settings.configured or "baseline-dir" in settings.given or store.other_devices("", suite):
        return ""
    for parent in settings.root.parents:
        folder = parent / settings.baseline_dir.name
        if type(store)(folder).other_devices("", suite):
            return (
                f"only {settings.baseline_dir} was searched, and {folder} has baselines of this file: start pytest in "
                f"{parent}, or save an empty pytest.ini there"
            )
    return ""


def tolerance_of(settings: Settings, terms: Terms) -> Tolerance:
    """Return the tolerance of a test: the command line counts before the test's markers, and these before the ini file."""
    time, memory = settings.time_tolerance, settings.memory_tolerance
    if terms.time_tolerance is not None and "time-tolerance" not in settings.typed:
        time = terms.time_tolerance
    if terms.memory_tolerance is not None and "memory-tolerance" not in settings.typed:
        memory = terms.memory_tolerance
    return Tolerance(time=time, memory=memory, cpu_time=settings.judge_cpu_time, host_time=settings.host_time_tolerance)


def count_terms_of(settings: Settings, terms: Terms) -> CountTerms:
    """Return how counts are judged: the tolerances of a test's markers count before those of the ini file."""
    return CountTerms(mode=settings.counts, tolerances={**settings.count_tolerances, **terms.count_tolerances})


def report_of(settings: Settings) -> ReportStore | None:
    """Return the report that ``--gpu-baseline=REPORT`` names; None if it names none.

    Raises:
        BaselineError: it cannot be read.
    """
    return ReportStore(settings.baseline) if isinstance(settings.baseline, Path) else None


def side_of(report: ReportStore | None) -> OtherSide | None:
    """Return the words for the report that cases are compared with; None for stored baselines."""
    return None if report is None else OtherSide.base(report.path.name)


class CriteriaLookup:
    """Looks up the baselines, limits and tolerances of the cases of a pytest process.

    Raises:
        BaselineError: the report or the published tables to compare with cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._store = BaselineStore(settings.baseline_dir)
        self._published = PublishedStore.beside(settings.baseline_dir) if settings.baseline == "published" else None
        self._report = report_of(settings)
        self._priors: dict[tuple[str, str], float] = {}
        self._forecasts: dict[str, Forecast] = {}

    def of(self, suite: str, task: Task, host: Host, terms: Terms = NO_TERMS, *, judged: bool = True) -> Criteria:
        """Return the baseline, limits and tolerances of a case.

        Args:
            host: machine that runs the task.

        Raises:
            BadCase: the baseline cannot be read.
        """
        key, case, compares_stored = key_of(task.case, task.scale), task.case, judged and self._published is None
        baseline, hint = self._baseline(suite, key, task, host) if compares_stored else (None, "")
        is_recorded = judged and records(self.settings, recorded=baseline is not None)
        wanted = self.wanted(host, records=is_recorded)
        emulated = None
        if compares_stored and baseline is None and self._report is None and host.gpus and task.scale == "full":
            emulated = self._forecast(host.platform).of(suite, case)
            emulated = emulated if emulated is not None and emulated.fits else None
        row, published_for = None, None
        if compares_stored and baseline is None and emulated is None and self._report is None and host.gpus:
            row = self._fallback_row(host.platform, suite, case)
        if self._published is not None:
            row = self._published.get(host.platform, suite, str(case))
            published_for = tuple(self._published.platforms_of(suite, str(case)))
        return Criteria(
            case=case,
            scale=task.scale,
            judged=judged,
            records=is_recorded,
            caps=terms.caps,
            tolerance=tolerance_of(self.settings, terms),
            counts=count_terms_of(self.settings, terms),
            baseline=baseline,
            hint=hint,
            elsewhere=elsewhere(self.settings, self._store, suite) if compares_stored and baseline is None else "",
            emulated=emulated,
            variables=tuple(task.variables),
            prior=PRIOR_SD if baseline is None else self._prior(host.device, suite),
            row=row,
            published_for=published_for,
            other_side=side_of(self._report),
            wanted=wanted,
            most=max(wanted, 1 + self.settings.reruns),
        )

    def _fallback_row(self, platform: str, suite: str, case: Case) -> Published | None:
        """Return the published row of a case that has neither a baseline nor an emulated run; None if there is none."""
        return None if self._fallback is None else self._fallback.get(platform, suite, str(case))

    @functools.cached_property
    def _fallback(self) -> PublishedStore | None:
        """The published tables; None if they cannot be read."""
        try:
            return PublishedStore.beside(self.settings.baseline_dir)
        # --gpu-baseline=published reports this error. A comparison with baselines does not need the tables.
        except BaselineError:
            return None

    def _forecast(self, platform: str) -> Forecast:
        if platform not in self._forecasts:
            self._forecasts[platform] = Forecast(self.settings.baseline_dir, platform)
        return self._forecasts[platform]

    def wanted(self, host: Host, *, records: bool) -> int:
        """Return how many fresh processes a case starts with."""
        if self.settings.runs is not None:
            return self.settings.runs
        time_counts = host.gpus or self.settings.judge_cpu_time
        return _RECORDED_RUNS if records and time_counts else 1

    def _prior(self, device: str, suite: str) -> float:
        if (device, suite) not in self._priors:
            stored: Mapping[str, Baseline] = (self._report or self._store).suite(device, suite)
            self._priors[device, suite] = prior_of(stored.values())
        return self._priors[device, suite]

    def _baseline(self, suite: str, key: str, task: Task, host: Host) -> tuple[Baseline | None, str]:
        """Return the case's baseline, or a sentence on what exists in its place."""
        device = host.device
        if self._report is not None:
            return self._report.get(device, suite, key, task.variables_digest), ""
        refuse_missing_folder(self.settings)
        try:
            baseline = self._store.get(device, suite, key)
        except BaselineError as error:
            raise BadCase(str(error)) from None
        others = [] if baseline else self._store.other_devices(device, suite)
        return baseline, f"this machine is {device}; there are some for {', '.join(others)}" if others else ""
