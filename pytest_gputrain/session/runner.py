"""Measures and judges the cases of one pytest process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.execution.executor import Executor
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.resume import ResumedReport
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.judge import comparable_row, judge
from pytest_gputrain.gate.regression import first_ratio
from pytest_gputrain.gate.suite_noise import SuiteNoise
from pytest_gputrain.gate.summary import summarise
from pytest_gputrain.records import BatchSearch, Case, LossStudy, Measured, Reply, Result, Task
from pytest_gputrain.session.criteria import CriteriaLookup
from pytest_gputrain.session.interleave import Interleaver
from pytest_gputrain.session.prefetch import ExpectedTask, Prefetcher
from pytest_gputrain.session.replies import Replies, Watch
from pytest_gputrain.session.request import CaseRunner, Request, result_fields
from pytest_gputrain.session.selection import ExpectedCase, refuse_unfit
from pytest_gputrain.session.studies import record_losses, search_batch
from pytest_gputrain.session.tasks import TaskMaker
from pytest_gputrain.utils.errors import BadCase, CannotRun


class Runner(CaseRunner):
    """Answers requests by measuring. A case is measured once, however many tests ask for it.

    Args:
        executor: runs the cases.
        environment: variables of the session.
        resumed_report: an earlier one, whose figures hold for this run, too.
        watch: called with each progress event.

    Raises:
        BaselineError: the report or the published tables to compare with cannot be read.
    """

    def __init__(
        self,
        settings: Settings,
        executor: Executor[Reply],
        environment: SessionEnvironment,
        resumed_report: ResumedReport | None = None,
        watch: Watch = lambda case, event, run: None,
    ) -> None:
        super().__init__(settings, executor, TaskMaker(settings, lambda: executor.host, environment))
        self._replies = Replies(executor, self._tasks, resumed_report, watch)
        self._lookup = CriteriaLookup(settings)
        self._suite_noise = SuiteNoise()
        self._interleaver = Interleaver(executor)
        self._expected: Sequence[ExpectedCase] = ()

    def expect(self, cases: Sequence[ExpectedCase], *, submit: bool) -> None:
        self._expected = cases
        if submit and self.executor.is_remote and not self._is_study:
            self._replies.expect(self._prefetcher)

    def forget(self, nodeid: str) -> None:
        self._interleaver.forget(nodeid)

    @property
    def waiting(self) -> int:
        return len(self._interleaver)

    def complete(self) -> Iterator[Result]:
        return self._interleaver.complete()

    def run(self, request: Request) -> Result:
        """Return the result of a request. The case is measured at most once, and judged if the test asks for that."""
        host = self.executor.host
        scaling = request.scaling and not self._is_study
        refuse_unfit(request.case, request.markers, request.expression, host, self.settings, scaling=scaling)
        if inline := request.inline or self.settings.isolation == "inline":
            self._refuse_inline(request.case)
            request = dataclasses.replace(request, inline=True)
        request, task = self._prepared(request)
        # A study runs other cases than the declared one, so the host of these cases is known only afterwards.
        host = host if self._is_study else self._replies.host_of(task, inline)
        # The baseline is read before the case runs for minutes, so that a broken file is reported at once.
        judged = request.judged and not self._is_study
        criteria = self._lookup.of(request.suite, task, host, request.terms, judged=judged)
        self._declared.refuse_namesake(request.suite, task.case, criteria.baseline.case if criteria.baseline else None)
        if self._is_study:
            return self._study(request, task)
        if criteria.wanted > 1:
            self._replies.want(request.suite, task, criteria.wanted)
        # A closure may fail once its test is over, so it is measured at once.
        if not criteria.records or inline:
            return self._measure(request, task, criteria, criteria.wanted)
        again = functools.partial(self._measure, request, task, criteria)
        return self._interleaver.add(again(1), task, criteria.wanted, again)

    @property
    def _is_study(self) -> bool:
        """Whether an option asks for a search for batches, or for loss curves, instead of the cases' own figures."""
        return self.settings.find_batch or self.settings.loss_steps is not None

    def _refuse_inline(self, case: Case) -> None:
        """Raise an error if a case cannot run inline."""
        if self.settings.gpu_ids:
            raise BadCase("an inline case runs on the first visible GPU; choose it by CUDA_VISIBLE_DEVICES, not --gpu-ids")
        if self._is_study:
            raise BadCase(f"{case} runs inline, but --gpu-find-batch and --gpu-loss need fresh processes; deselect its test")
        processes = self._tasks.processes(case.gpus) + self._tasks.processes(case.servers) + case.loader_workers
        if processes > 1:
            raise BadCase(f"the case {case} has {processes} processes, so it cannot run inline; leave out inline")
        if case.parallel != "single":
            raise BadCase(f"the case {case} needs a process group, which an inline run does not have; leave out inline")

    def _measure(self, request: Request, task: Task, criteria: Criteria, runs: int) -> Measured:
        """Measure a case in this many fresh processes, and in further ones until the verdict is decided."""
        take = functools.partial(self._replies.take, task, inline=request.inline, builder=request.builder)
        replies, key, looked = take(runs), key_of(task.case, task.scale), False
        while True:
            shown, no_scaling = replies, ""
            if request.scaling and criteria.compares_stored and task.processes > 1:
                shown, no_scaling = self._replies.with_one_worker(task, replies)
            first = first_ratio(criteria, shown)
            self._suite_noise.add(request.suite, key, first)
            judgement = judge(criteria, shown, self._suite_noise.shift, no_scaling)
            if judgement.settled:
                break
            if judgement.asks_suite and first is not None and not looked:
                looked = True
                self._measure_other_cases()
                continue
            # These replies lack the seconds of one worker. They are added below.
            self._replies.want(request.suite, task, criteria.next_runs(len(replies)), soon=True)
            replies = take(len(replies) + 1, before=replies)
        host = self._replies.host_of(task, request.inline)
        self._note_answered(request, task)
        return Measured(
            **result_fields(request, task, host, judgement.verdict),
            inline=request.inline,
            replies=shown,
            resumed=self._replies.resumed(task, request.inline, request.builder).origins,
            summary=summarise(task.case, host.platform, shown),
            published=comparable_row(criteria) if criteria.judged else None,
        )

    def _study(self, request: Request, task: Task) -> Result:
        """Run the study of the case that an option asks for. Each of its tasks runs once."""

        def launch(task: Task) -> Reply:
            return self._replies.take(task, 1)[0]

        if self.settings.find_batch:
            studied, reply, search = search_batch(task, self.settings.find_batch_max, launch)
            return BatchSearch(search=search, **self._studied(request, task, studied, reply))
        assert self.settings.loss_steps is not None, "nothing else is a study"
        studied, reply, curves = record_losses(task, self.settings.loss_steps, self.executor.host.platform, launch)
        return LossStudy(loss_curves=curves, **self._studied(request, task, studied, reply))

    def _studied(self, request: Request, task: Task, studied: Task, reply: Reply) -> dict[str, Any]:
        """Return the fields of the result of a study. Its figures are those of ``studied``, not of the declared case."""
        host = self._replies.host_of(studied)
        return {
            **result_fields(request, task, host, None),
            "case": studied.case,
            "replies": (reply,),
            "summary": summarise(studied.case, host.platform, (reply,)),
        }

    def _measure_other_cases(self) -> None:
        """Measure the first run of enough other cases to tell whether only this case is slower today, or all are.

        Their tests find the figures and go on from them. Where there are not enough cases, nothing is measured.
        """
        noise = self._suite_noise
        if not noise.lacking or self.settings.isolation == "inline":
            return
        scale = self._tasks.scale()
        others = [other for other in self._expected if not noise.knows(other.suite, key_of(other.case, scale))]
        if noise.lacking > len(others):
            return
        for suite, task, terms in self._expected_tasks(others):
            if not noise.lacking:
                return
            try:
                criteria = self._lookup.of(suite, task, self._replies.host_of(task), terms)
            except BadCase:
                continue  # The test of this case reports the error.
            if criteria.baseline is not None and criteria.baseline.case.identity() == task.case.identity():
                replies = self._replies.take(task, criteria.wanted)
                noise.add(suite, key_of(task.case, task.scale), first_ratio(criteria, replies))

    def _prefetcher(self) -> Prefetcher:
        return Prefetcher(self._lookup, self._expected_tasks(self._expected), self.executor.host)

    def _expected_tasks(self, expected: Iterable[ExpectedCase]) -> Iterator[ExpectedTask]:
        """Return the tasks of the expected cases that may run here."""
        for suite, case, markers, expression, terms in expected:
            with contextlib.suppress(CannotRun, BadCase):
                refuse_unfit(case, markers, expression, self.executor.host, self.settings)
                task = self._tasks.make(self._tasks.with_steps(case), growth_bytes=terms.growth_bytes, prefetched=True)
                yield ExpectedTask(suite, task, terms)
