"""Measures and judges the cases of one pytest process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gputrain.cases.identity import key_of, same_id, suite_of
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.execution.executor import Executor
from pytest_gputrain.gate.limits import with_limits
from pytest_gputrain.gate.suite_noise import SuiteNoise
from pytest_gputrain.gate.summary import summarise
from pytest_gputrain.hardware import catalog
from pytest_gputrain.records import (
    BatchSearch,
    Case,
    LimitVerdict,
    LossStudy,
    Measured,
    Reply,
    Result,
    Scale,
    Task,
    Verdict,
)
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.records.tolerance import NO_TERMS, Terms
from pytest_gputrain.session.criteria import CaseCriteria, Criteria
from pytest_gputrain.session.interleave import Interleaver
from pytest_gputrain.session.prefetch import ExpectedTask, Prefetcher
from pytest_gputrain.session.selection import ExpectedCase, platforms_of, what_lacks, why_skipped
from pytest_gputrain.session.studies import Study, record_losses, search_batch
from pytest_gputrain.utils.errors import BadCase, CannotRun


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What a test asks of a case."""

    nodeid: str
    case_criteria: CaseCriteria
    scaling: bool
    inline: bool
    builder: Any


class Runner:
    """Runs cases for the tests of one pytest process; a case is measured once however many tests ask for it."""

    def __init__(self, settings: Settings, executor: Executor | None = None) -> None:
        """
        Args:
            executor: runs the cases; on this machine by default.

        Raises:
            BaselineError: the report or the published tables to compare with cannot be read.
        """
        self.settings = settings
        self.executor = executor or Executor(settings)
        self.criteria = Criteria(settings)
        self._keys: dict[tuple[str, str], Case] = {}
        self._suite_noise = SuiteNoise()
        self.interleaver = Interleaver(self.executor)
        self._expected: Sequence[ExpectedCase] = ()

    def expect(self, cases: Sequence[ExpectedCase]) -> None:
        """Take notice of what the tests that were collected are parametrized with."""
        self._expected = cases

    def declare(self, suite: str, case: Case) -> Case:
        """Remember that ``case`` goes by its id in ``suite``, and return the first case that did."""
        return self._keys.setdefault((suite, str(case)), case)

    def refuse_namesake(self, suite: str, case: Case, baseline_case: Case | None) -> None:
        """Refuse files of one name in two folders, which would replace each other's baselines.

        Args:
            baseline_case: the case whose baseline there is.

        Raises:
            BadCase: that one is another file's, which is still there.
        """
        theirs, ours = (
            "" if owner is None else owner.code.partition("::")[0].removeprefix("inline:") for owner in (baseline_case, case)
        )
        # Code of a module that a test imports may move.
        are_tests = suite_of(Path(theirs)) == suite == suite_of(Path(ours))
        if are_tests and theirs != ours and (self.settings.root / theirs).is_file():
            raise BadCase(
                f"{case} of {ours} would share its baseline with that of {theirs}: both are the suite {suite}; rename a file"
            )

    def scale(self) -> Scale:
        """The scale of the cases.

        Raises:
            BadCase: the hardware is not what the options ask for.
        """
        return self.executor.scale()

    def check_selection(self, case: Case, markers: set[str], expression: str, *, scaling: bool = False) -> None:
        """Args:
            scaling: the test wants to know how the case scales.

        Raises:
            BadCase: the case names something unknown.
            CannotRun: this machine is not what the test was selected for, or lacks the devices.
        """
        wrong = problem(case, catalog.MARKERS)
        if wrong:
            raise BadCase(wrong)
        declared = platforms_of(case.platforms) if case.platforms else ()
        reason = why_skipped(markers | set(declared), expression, self.executor.host.platform, case.gpus)
        if reason:
            raise CannotRun(reason)
        lacking = what_lacks(
            case,
            gpus=self.executor.host.gpus,
            most_nodes=self.settings.nodes,
            most_processes=self.settings.processes,
            all_of_them=scaling and not self.is_study,
        )
        if lacking:
            raise CannotRun(lacking)

    def run(
        self,
        nodeid: str,
        suite: str,
        case: Case,
        *,
        judged: bool,
        scaling: bool = False,
        inline: bool = False,
        builder: Any = None,
        module: str = "",
        terms: Terms = NO_TERMS,
    ) -> Result:
        """Measure ``case``, unless this session did already, and judge it if asked and if its own figures were wanted.

        Args:
            scaling: compare a case of several processes with one worker alone, too.
            inline: run in this process.
            builder: the user's function itself, for an inline run that has no address.
            module: name under which this process imported the file of ``case.code``.
            terms: limits, which count for a case that is only measured, too, and tolerances of the test.

        Raises:
            BadCase: the id is another case's, the baseline cannot be read, or an inline run cannot have its GPU or the
                processes that a study takes.
        """
        judged = judged and not self.is_study
        first = self.declare(suite, case)
        if first.identity() != case.identity():
            raise BadCase(same_id(suite, first, case))
        case = self.executor.with_steps(case)
        inline = inline or self.settings.isolation == "inline"
        if inline and self.settings.gpu_ids:
            raise BadCase("an inline case runs on the first visible GPU; choose it by CUDA_VISIBLE_DEVICES, not --gpu-ids")
        if inline and self.is_study:
            raise BadCase(f"{case} runs inline, but --gpu-find-batch and --gpu-loss need fresh processes; deselect its test")
        processes, servers = self.executor.processes(case.gpus), self.executor.processes(case.servers)
        if inline and processes + servers > 1:
            raise BadCase(f"the case {case} has {processes + servers} processes, so it cannot run inline; leave inline out")
        if inline and case.parallel != "single":
            raise BadCase(f"the case {case} needs a process group, which an inline run has not; leave inline out")
        task = self.executor.task(case, module, growth_bytes=terms.growth_bytes, inline=inline)
        # What a study runs on is known when it has: the case as it is declared would be measured for nothing.
        host = self.executor.host if self.is_study else self.executor.host_of(task, inline)
        # Read before the case has run for minutes, where its machine is known: a broken file is better told at once.
        case_criteria = self.criteria.for_case(suite, task, host, terms, judged=judged)
        self.refuse_namesake(suite, case, case_criteria.baseline.case if case_criteria.baseline else None)
        request = _Request(nodeid=nodeid, case_criteria=case_criteria, scaling=scaling, inline=inline, builder=builder)
        if not self.is_study and case_criteria.wanted > 1:
            self.executor.expect(task, case_criteria.wanted)
        # A closure may be of no use when its test is over.
        if not case_criteria.records or inline:
            return self._result(request, case_criteria.wanted)
        return self.interleaver.add(
            self._result(request, 1), task, case_criteria.wanted, functools.partial(self._result, request)
        )

    def _result(self, request: _Request, runs: int) -> Result:
        """Judge so many fresh processes of a case, and those that it takes further."""
        case_criteria, study = request.case_criteria, self._study(request, runs)
        case, replies, host = study.task.case, study.replies, self.executor.host_of(study.task, request.inline)
        limits: tuple[LimitVerdict, ...] = ()
        while case_criteria.terms.caps and not self.is_study:
            limits, settled = self.criteria.judge_limits(case_criteria, replies)
            if settled:
                break
            replies = self._with_another_run(request, replies)
        verdict = row = None
        if case_criteria.judged and self.criteria.are_published:
            row, verdict = self.criteria.against_published(case_criteria, case, replies)
        elif case_criteria.judged:
            replies, verdict = self._verdict(request, replies)
        common: dict[str, Any] = {
            "nodeid": request.nodeid,
            "suite": case_criteria.suite,
            "key": case_criteria.key,
            "case": case,
            "scale": case_criteria.task.scale,
            "platform": host.platform,
            "device": host.device,
            "replies": replies,
            "inline": request.inline,
            "variables": tuple(case_criteria.task.variables),
            "variables_digest": case_criteria.task.variables_digest,
            "summary": summarise(case, host.platform, replies),
            "verdict": with_limits(case, verdict, limits),
        }
        if study.search is not None:
            return BatchSearch(search=study.search, **common)
        if study.loss_curves:
            return LossStudy(loss_curves=study.loss_curves, **common)
        resumed = self.executor.resumed(case_criteria.task, request.inline, request.builder).origins
        return Measured(resumed=resumed, published=row, **common)

    @property
    def is_study(self) -> bool:
        """Whether an option wants to know something else than the cases' own figures."""
        return self.settings.find_batch or self.settings.loss_steps is not None

    def _study(self, request: _Request, runs: int) -> Study:
        """The case's own figures, or what an option wants to know instead. A process is started for each task once."""
        task, inline, builder = request.case_criteria.task, request.inline, request.builder

        def launch(task: Task) -> Reply:
            return self.executor.measure(task, inline, builder, 1)[0]

        if self.settings.find_batch:
            return search_batch(task, self.settings.find_batch_max, launch)
        if self.settings.loss_steps is not None:
            return record_losses(task, self.settings.loss_steps, request.case_criteria.host.platform, launch)
        return Study(task=task, replies=self.executor.measure(task, inline, builder, runs))

    def _verdict(self, request: _Request, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], Verdict]:
        """Judge the replies, after further fresh processes where the verdict is in doubt."""
        case_criteria = request.case_criteria
        most = len(replies) if case_criteria.records else max(len(replies), self.criteria.most(case_criteria))
        looked = False
        while True:
            measured, no_scaling = replies, ""
            if request.scaling and case_criteria.task.processes > 1:
                measured, no_scaling = self.executor.with_one_worker(case_criteria.task, replies)
            outcome = self.criteria.judge(case_criteria, measured, self._suite_noise, most, no_scaling)
            self._suite_noise.add(case_criteria.suite, case_criteria.key, outcome.first)
            outcome = self.criteria.judge(case_criteria, measured, self._suite_noise, most, no_scaling)
            if outcome.settled:
                verdict = outcome.verdict
                return measured, self.criteria.as_recorded(
                    case_criteria, verdict, measured, no_scaling
                ) if case_criteria.records else verdict
            if outcome.first is not None and not looked:
                looked = True
                self._measure_other_cases()
                continue
            # Not those of the replies with one worker's seconds: these are found anew.
            replies = self._with_another_run(request, replies)

    def _with_another_run(self, request: _Request, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        """Add the reply of a further process to those of a case in doubt."""
        task, have = request.case_criteria.task, len(replies)
        self.executor.expect(task, self.criteria.next_runs(request.case_criteria, have), soon=True)
        return self.executor.measure(task, request.inline, request.builder, have + 1, replies)

    def _measure_other_cases(self) -> None:
        """Measure so many other cases once that one can tell whether this one is slower or everything is, today.

        Their tests find the figures and go on from them. Where there are not enough cases, nothing is measured.
        """
        if not self._suite_noise.lacking:
            return
        others = [
            expected
            for expected in self._expected
            if not self._suite_noise.knows(expected.suite, key_of(expected.case, self.executor.scale()))
        ]
        if self._suite_noise.lacking > len(others) or self.settings.isolation == "inline":
            return
        for suite, task, terms in self.expected_tasks(others):
            if not self._suite_noise.lacking:
                return
            try:
                case_criteria = self.criteria.for_case(suite, task, self.executor.host_of(task), terms)
            except BadCase:
                continue  # its own test will tell
            if case_criteria.baseline is not None and case_criteria.baseline.case.identity() == task.case.identity():
                replies = self.executor.measure(task, False, None, case_criteria.wanted)
                self._suite_noise.add(
                    suite,
                    case_criteria.key,
                    self.criteria.judge(case_criteria, replies, self._suite_noise, case_criteria.wanted).first,
                )

    def prefetch(self) -> None:
        """Tell a fleet which runs the tests of this session will ask for."""
        if self.is_study:
            return

        @functools.cache  # found out when the first case runs: collecting needs none of it
        def prefetcher() -> Prefetcher:
            return Prefetcher(self.criteria, self.expected_tasks(self._expected), self.executor.host)

        self.executor.expected_runs = lambda: prefetcher().first()
        self.executor.further_runs = lambda task, replies, host: prefetcher().further(task, replies, host)

    def expected_tasks(self, expected: Iterable[ExpectedCase]) -> Iterator[ExpectedTask]:
        """The tasks of those cases that may run."""
        for suite, case, markers, expression, terms in expected:
            with contextlib.suppress(CannotRun, BadCase):
                self.check_selection(case, set(markers), expression)
                growth, stepped = terms.growth_bytes, self.executor.with_steps(case)
                yield ExpectedTask(suite, self.executor.task(stepped, "", growth_bytes=growth, prefetched=True), terms)

    def is_strict(self, device: str) -> bool:
        """Whether a case without a comparable baseline fails that ran on ``device``."""
        return self.criteria.is_strict(device)
