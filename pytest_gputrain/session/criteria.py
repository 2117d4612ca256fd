"""Looks up what a case is judged against (baselines, an earlier report, published figures, limits), and calls the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.gate.contention import why_not_recorded
from pytest_gputrain.gate.limits import JudgedLimits, judge_limits
from pytest_gputrain.gate.published import judge_published, why_not_comparable
from pytest_gputrain.gate.regression import Circumstances, GateResult, judge
from pytest_gputrain.gate.step_times import AGREEING, PRIOR_SD
from pytest_gputrain.gate.suite_noise import SuiteNoise
from pytest_gputrain.records import Baseline, Case, Host, Measurement, OutOfMemory, Published, Reply, Task, Verdict
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.records.tolerance import NO_TERMS, Terms, Tolerance
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore
from pytest_gputrain.storage.published import PublishedStore
from pytest_gputrain.storage.reports import ReportStore
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.git import in_ci

_RECORDED_RUNS: Final = 5
"""Fresh processes of a baseline. On a CPU whose time is not judged one is enough: its memory is exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseCriteria:
    """What one test judges a case by."""

    suite: str
    key: str
    task: Task
    host: Host
    """The machine that the figures are of."""
    judged: bool
    records: bool
    """Whether its figures become a baseline."""
    wanted: int
    """Fresh processes to begin with; a case in doubt takes more."""
    baseline: Baseline | None
    hint: str
    terms: Terms


class Criteria:
    """What the cases of a pytest process are judged by.

    Raises:
        BaselineError: the report or the published tables to compare with cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = BaselineStore(settings.baseline_dir)
        published, report = settings.baseline == "published", settings.baseline not in ("measured", "published")
        self._published = PublishedStore.beside(settings.baseline_dir) if published else None
        self._report = ReportStore(Path(settings.baseline)) if report else None

    def for_case(self, suite: str, task: Task, host: Host, terms: Terms = NO_TERMS, *, judged: bool = True) -> CaseCriteria:
        """Args:
            host: machine that runs the task.

        Raises:
            BadCase: the baseline cannot be read.
        """
        key = key_of(task.case, task.scale)
        baseline, hint = self._baseline(suite, key, task, host) if judged and self._published is None else (None, "")
        records = judged and self._records(baseline)
        return CaseCriteria(
            suite=suite,
            key=key,
            task=task,
            host=host,
            judged=judged,
            records=records,
            wanted=self.wanted(host, records=records),
            baseline=baseline,
            hint=hint,
            terms=terms,
        )

    @property
    def records_all(self) -> bool:
        """Whether the figures of every judged case become a baseline, whatever there is of it."""
        return self._settings.baseline_update == "all"

    def wanted(self, host: Host, *, records: bool) -> int:
        """Fresh processes that a case starts with."""
        if self._settings.runs is not None:
            return self._settings.runs
        time_counts = host.gpus or self._settings.judge_cpu_time
        return _RECORDED_RUNS if records and time_counts else 1

    def most(self, case_criteria: CaseCriteria) -> int:
        """The most fresh processes of a case in doubt."""
        return max(case_criteria.wanted, 1 + self._settings.reruns)

    def next_runs(self, case_criteria: CaseCriteria, have: int) -> int:
        """Fresh processes that a case takes which ``have`` of them leave in doubt: so many at least that they can agree."""
        return min(max(AGREEING, have + 1), self.most(case_criteria))

    def judge_limits(self, case_criteria: CaseCriteria, replies: Sequence[Reply]) -> JudgedLimits:
        """Judge the replies against the limits of the test."""
        cpu_time, case = self._settings.judge_cpu_time, case_criteria.task.case
        return judge_limits(
            case_criteria.terms.caps,
            case,
            replies,
            scale=case_criteria.task.scale,
            cpu_time=cpu_time,
            most=self.most(case_criteria),
        )

    def judge(
        self, case_criteria: CaseCriteria, replies: Sequence[Reply], noise: SuiteNoise, most: int, no_scaling: str = ""
    ) -> GateResult:
        """Judge the replies against the baseline.

        Args:
            noise: noise and shift of the suite's other cases.
            most: processes that there may be.
            no_scaling: why the scaling efficiency, which was asked for, is not known.
        """
        device, prior = case_criteria.host.device, PRIOR_SD
        if case_criteria.baseline is not None:  # a case without one must not stand for a suite without any
            prior = noise.prior(
                device, case_criteria.suite, (self._report or self._store).suite(device, case_criteria.suite)
            )
        circumstances = Circumstances(
            most=most, prior=prior, shift=noise.shift, variables=tuple(case_criteria.task.variables)
        )
        tolerance = self.tolerance(case_criteria.terms)
        return judge(
            case_criteria.task.case,
            replies,
            case_criteria.baseline,
            tolerance,
            case_criteria.hint,
            no_scaling,
            circumstances,
        )

    @property
    def are_published(self) -> bool:
        """Whether cases are compared with published figures, and not with a baseline."""
        return self._published is not None

    def against_published(
        self, case_criteria: CaseCriteria, case: Case, replies: tuple[Reply, ...]
    ) -> tuple[Published | None, Verdict]:
        """Judge the replies against published figures, and give the row that the case can be compared with."""
        assert self._published is not None
        scale, elsewhere = case_criteria.task.scale, self._published.platforms_of(case_criteria.suite, str(case))
        row = self._published.get(case_criteria.host.platform, case_criteria.suite, str(case))
        verdict = judge_published(case, replies, row, self.tolerance(case_criteria.terms), scale=scale, elsewhere=elsewhere)
        return None if why_not_comparable(case, row, scale) else row, verdict

    def as_recorded(
        self, case_criteria: CaseCriteria, verdict: Verdict, replies: tuple[Reply, ...], no_scaling: str
    ) -> Verdict:
        """Turn the verdict into ``recorded`` where these figures can be stored."""
        case = case_criteria.task.case
        with_figures = [
            reply for reply in replies if isinstance(reply, Measurement | OutOfMemory) and reply.environment is not None
        ]
        if len(with_figures) < len(replies):
            return verdict
        if why_not := why_not_recorded(with_figures, case_criteria.baseline):
            return msgspec.structs.replace(verdict, status="failed", sentence=f"{case} {why_not}")
        what = "running out of memory" if isinstance(with_figures[0], OutOfMemory) else "today's figures"
        what += f", without a scaling efficiency ({no_scaling})," if no_scaling else ""
        before = f"; before, {verdict.sentence}" if case_criteria.baseline is not None else ""
        return msgspec.structs.replace(verdict, status="recorded", sentence=f"{case} has {what} as its baseline now{before}")

    def tolerance(self, terms: Terms) -> Tolerance:
        """The tolerance of a test: the command line counts before the test's markers, and these before the ini file."""
        time, memory, typed = self._settings.time_tolerance, self._settings.memory_tolerance, self._settings.typed
        if terms.time_tolerance is not None and "time-tolerance" not in typed:
            time = terms.time_tolerance
        if terms.memory_tolerance is not None and "memory-tolerance" not in typed:
            memory = terms.memory_tolerance
        return Tolerance(time=time, memory=memory, cpu_time=self._settings.judge_cpu_time)

    def is_strict(self, device: str) -> bool:
        """Whether a case without a comparable baseline fails that ran on ``device``."""
        if self._settings.strict is not None:
            return self._settings.strict
        if self._published is not None:
            return False  # Strictness by itself is for figures that somebody forgot to record; nobody records these.
        return in_ci() and (self._report is not None or self._store.has_device(device))

    def _baseline(self, suite: str, key: str, task: Task, host: Host) -> tuple[Baseline | None, str]:
        """Find the case's baseline, and for a missing one say what else there is.

        Raises:
            BadCase: the baseline file cannot be read.
        """
        device, folder = host.device, self._store.folder
        if self._report is not None:
            return self._report.get(device, suite, key, task.variables_digest), f"not in {self._report.path.name}"
        if self._settings.baseline_dir_named and self._settings.baseline_update == "no" and not folder.is_dir():
            # Mistyped, it would make every case new, which passes unless strict.
            raise BadCase(f"the baseline folder {folder} does not exist; --gpu-baseline-update makes it")
        try:
            baseline = self._store.get(device, suite, key)
        except BaselineError as error:
            raise BadCase(str(error)) from None
        others = [] if baseline else self._store.other_devices(device, suite)
        return baseline, f"this machine is {device}; there are some for {', '.join(others)}" if others else ""

    def _records(self, baseline: Baseline | None) -> bool:
        """Whether an update option wants the case's figures."""
        return self.records_all or (self._settings.baseline_update == "new-only" and baseline is None)
