"""The results of a whole run, gathered where there is one view of them: the only process, or xdist's controller."""

from __future__ import annotations

import functools
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.baselines import BaselineError, Store, to_baseline
from pytest_gputrain.cases import same_id
from pytest_gputrain.dry_run.store import FOLDER, PredictionStore, Recorded
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.records import Baseline, Case, Measurement, Report, Result
from pytest_gputrain.report import document
from pytest_gputrain.session import Session
from pytest_gputrain.settings import Settings
from pytest_gputrain.stats import SHIFT_TOLD
from pytest_gputrain.suites import Suites
from pytest_gputrain.units import format_percent

_SAVE_EVERY_SECONDS: Final = 30.0


class Book:
    """Collects results, stores baselines under the update options, writes the report.

    Baselines are saved now and then and at the end, so that a run that is ended loses half a minute at most.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.results: list[Result] = []
        self.notes: list[str] = []
        self.failed = False
        """Whether something could not be saved, or the suite regressed as a whole."""
        self._session: Session | None = None
        self._pending: defaultdict[tuple[str, str], dict[str, Baseline]] = defaultdict(dict)
        self._predicted: defaultdict[tuple[str, str], dict[str, Recorded]] = defaultdict(dict)
        self._recorded: dict[Path, int] = {}
        self._stored: dict[tuple[str, str, str], Case] = {}
        self._saved_at = time.monotonic()

    @property
    def session(self) -> Session:
        """Looked up with the first result: a run without any needs no git."""
        if self._session is None:
            self._session = Session.begin(self.settings.root)
        return self._session

    def add(self, result: Result, *, passed: bool) -> None:
        """Take in the next result.

        Args:
            passed: whether its test did; figures of a test that failed otherwise become no baseline.
        """
        self.results.append(result)
        if result.verdict is not None and result.verdict.status == "recorded":
            if passed:
                self._record(result)
            else:
                self.notes.append(f"not recorded: {result.case}, because its test failed")
        if time.monotonic() - self._saved_at > _SAVE_EVERY_SECONDS:
            self._save_baselines()

    def _record(self, result: Result) -> None:
        first = self._stored.setdefault((result.device, result.suite, result.key), result.case)
        if first.identity() != result.case.identity():
            # One process tells this before it measures; the workers of xdist do not know of each other.
            self.failed = True
            self.notes.append(f"not recorded: {same_id(result.suite, first, result.case)}")
            return
        if result.prediction is not None:
            case = Case(**result.case.identity())
            entry = Recorded(case=case, scale=result.scale, predictions=(result.prediction,))
            self._predicted[result.platform, result.suite][result.key] = entry
            return
        session = self.session
        baseline = to_baseline(result, date=session.created, session=session.id, commit=session.commit)
        self._pending[result.device, result.suite][result.key] = baseline

    def close(self, exit_status: int) -> None:
        """Save what is to be saved; what cannot be is told in `notes` and kept aside, and sets `failed`."""
        self._save_baselines()
        self._tell_shift()
        exit_status = exit_status or int(self.failed)
        for path, count in self._recorded.items():
            self.notes.append(
                f"{count} baseline{'' if count == 1 else 's'} recorded in {path}; review the difference in git"
            )
        if any(path.parent.name != CPU and path.parent.parent.name != FOLDER for path in self._recorded):
            self.notes.append("all runs of these baselines are of this session, so they do not tell how much days differ")
        if self.settings.json is None:
            return
        report = self._report(exit_status)
        try:
            document.write(report, self.settings.json)
        except OSError as error:
            self._keep_aside(f"the report {self.settings.json} cannot be written: {error.strerror}", report)

    def _tell_shift(self) -> None:
        """Tell of a suite that is slower as a whole; its cases are not, each for itself."""
        suites = Suites()
        for result in self.results:
            metric = result.verdict.metric("step_seconds") if result.verdict else None
            first = next((reply for reply in result.replies if isinstance(reply, Measurement)), None)
            if first and metric and metric.baseline and metric.baseline_runs:
                suites.add(result.suite, result.key, math.log(first.median_step_seconds / metric.baseline))
        if abs(suites.shift) <= SHIFT_TOLD or self.settings.baseline_update == "all":
            return
        shift = format_percent(math.expm1(suites.shift))
        if suites.shift > math.log1p(self.settings.time_tolerance):
            self.failed = True
            self.notes.append(
                f"all cases together regressed: the median case is {shift} off its baseline; what do all share?"
            )
        else:
            self.notes.append(f"the median case is {shift} off its baseline: the machine rather than a case")

    def _save_baselines(self) -> None:
        self._saved_at = time.monotonic()
        measured, predicted = Store(self.settings.baseline_dir), PredictionStore(self.settings.baseline_dir)
        pending, self._pending = self._pending, defaultdict(dict)
        for (device, suite), entries in pending.items():
            self._save(functools.partial(measured.update, device, suite, entries), len(entries))
        foretold, self._predicted = self._predicted, defaultdict(dict)
        for (platform, suite), recorded in foretold.items():
            self._save(functools.partial(predicted.update, platform, suite, recorded), len(recorded))

    def _save(self, update: Callable[[], Path], count: int) -> None:
        try:
            path = update()
        except BaselineError as error:
            self._keep_aside(str(error), self._report(1))
        else:
            self._recorded[path] = self._recorded.get(path, 0) + count

    def _keep_aside(self, trouble: str, report: Report) -> None:
        """Write ``report``, which holds every figure, somewhere else."""
        self.failed = True
        aside = Path(tempfile.gettempdir()) / f"gputrain-{report.session}.json"
        try:
            document.write(report, aside)
        except OSError as error:
            self.notes.append(f"{trouble}; nor could the figures be kept in {aside}: {error.strerror}")
        else:
            self.notes.append(f"{trouble}; all figures are in {aside}")

    def _report(self, exit_status: int) -> Report:
        settings = msgspec.to_builtins(self.settings, enc_hook=str)
        return Report(
            generator=document.generator(),
            created=self.session.created,
            session=self.session.id,
            commit=self.session.commit,
            branch=self.session.branch,
            arguments=tuple(sys.argv[1:]),
            settings=settings,
            exit_status=exit_status,
            notes=tuple(self.notes),
            results=tuple(self.results),
        )
