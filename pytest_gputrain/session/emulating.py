"""Answers the requests of one pytest process by running its cases on emulated GPUs instead of real ones."""

from __future__ import annotations

import functools
import shlex

import msgspec

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.execution.emulated import NO_SERVERS, EmulatedReply, EmulatingExecutor
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.gate.count_lines import count_changes
from pytest_gputrain.gate.emulation import judge
from pytest_gputrain.gate.limits import judge_exact, with_limits
from pytest_gputrain.gate.messages import REPLACED, describe_failure
from pytest_gputrain.hardware import catalog
from pytest_gputrain.hardware.rates import rates_of
from pytest_gputrain.records import Case, Counts, Emulated, EmulatedRun, LimitVerdict, Recorded, Result, Task, Verdict
from pytest_gputrain.records.counts import COUNT_FIGURES
from pytest_gputrain.session.criteria import (
    count_terms_of,
    elsewhere,
    records,
    refuse_missing_folder,
    report_of,
    side_of,
)
from pytest_gputrain.session.replies import Watch
from pytest_gputrain.session.request import CaseRunner, Request, result_fields
from pytest_gputrain.session.selection import refuse_unfit
from pytest_gputrain.session.tasks import TaskMaker
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.emulated import EmulationStore
from pytest_gputrain.utils.errors import BadCase, CannotRun


class EmulatingRunner(CaseRunner):
    """Answers requests by running cases on emulated GPUs of one platform, each once: nothing there is noisy.

    Growth of the counts of steps fails a case if a second process confirms it.

    Args:
        executor: gives the figures.
        environment: variables of the session.
        watch: called with each progress event.
    """

    def __init__(
        self,
        settings: Settings,
        executor: EmulatingExecutor,
        environment: SessionEnvironment,
        watch: Watch = lambda case, event, run: None,
    ) -> None:
        tasks = TaskMaker(settings, lambda: executor.host, environment, executor.host.platform)
        super().__init__(settings, executor, tasks)
        self._executor = executor
        self._watch = watch
        self._store = EmulationStore(settings.baseline_dir)
        self._report = report_of(settings)

    def run(self, request: Request) -> Result:
        """Return the result of a request. The case runs at most once, and is compared with its recorded figures if the test
        asks for that."""
        host = self.executor.host
        refuse_unfit(request.case, request.markers, request.expression, host, self.settings)
        if request.case.servers:
            raise CannotRun(NO_SERVERS)
        if request.inline:
            raise CannotRun("runs inline, but an emulated GPU needs a process of its own")
        request, task = self._prepared(request)
        case, recorded = task.case, self._recorded(request, task) if request.judged else None
        self._declared.refuse_namesake(request.suite, case, recorded.case if recorded else None)
        reply, verdict = self._reply(task), None
        self._note_answered(request, task)
        if isinstance(reply, EmulatedRun):
            verdict = self._judged(request, task, reply, recorded) if request.judged else None
            verdict = with_limits(case, verdict, self._limits(request, task, reply))
        elif request.judged:
            verdict = Verdict(status="failed", sentence=f"{case} {describe_failure(reply, 'figures')}")
        return Emulated(**result_fields(request, task, host, verdict), reply=reply)

    def _recorded(self, request: Request, task: Task) -> Recorded | None:
        """Return the recorded runs of the case; None if there are none."""
        of = self.executor.host.platform, request.suite, key_of(task.case, task.scale)
        if self._report is not None:
            return self._report.recorded(*of, task.variables_digest)
        refuse_missing_folder(self.settings)
        try:
            return self._store.get(*of)
        except BaselineError as error:
            raise BadCase(str(error)) from None

    def _reply(self, task: Task) -> EmulatedReply:
        return self._executor.run(task, watch=lambda event: self._watch(task.case, event, 1))

    def _judged(self, request: Request, task: Task, figures: EmulatedRun, recorded: Recorded | None) -> Verdict:
        """Judge the figures, or record them."""
        title = catalog.title_of(self.executor.host.platform)
        verdict = self._verdict(request, task, figures, recorded)
        if not records(self.settings, recorded=recorded is not None):
            return verdict
        instead = f"{REPLACED}{verdict.sentence}" if recorded is not None and verdict.status != "pass" else ""
        accepted = _accepted(task.case, figures, recorded) if recorded is not None else ()
        described = f"these figures of an emulated {title}{'' if figures.fits else f', not fitting {title},'}"
        sentence = f"{task.case} has {described} as its baseline now{instead}"
        return msgspec.structs.replace(
            verdict, status="recorded", sentence=sentence, before=verdict.status, accepted=accepted
        )

    def _verdict(self, request: Request, task: Task, figures: EmulatedRun, recorded: Recorded | None) -> Verdict:
        """Return the verdict on a run against the recorded runs of the case."""
        case = task.case
        platform = self.executor.host.platform
        terms, rates = count_terms_of(self.settings, request.terms), rates_of(platform)
        where = "" if recorded else elsewhere(self.settings, self._store, request.suite)
        judge_with = functools.partial(
            judge, case, recorded=recorded, platform=platform, terms=terms, rates=rates, elsewhere=where
        )
        if (side := side_of(self._report)) is not None:
            judge_with = functools.partial(judge_with, side=side)
        verdict = judge_with(run=figures)
        regressed = {metric.metric for metric in verdict.metrics if metric.status == "regressed"}
        if regressed & {*COUNT_FIGURES, "heap_growth"} and not records(self.settings, recorded=recorded is not None):
            again = self._again(task)
            if again is not None and figures.heap_growth is not None and again.heap_growth is not None:
                # The host's heap is real memory, and one process may keep more by chance. So the smaller growth of two
                # processes counts.
                figures = msgspec.structs.replace(figures, heap_growth=min(figures.heap_growth, again.heap_growth))
            verdict = judge_with(run=figures, again=_counts_of(again))
        if case.method != "script" or verdict.status != "regressed":
            return verdict
        # A worker that runs a script knows only the allocator's peaks, not the tensors, so the sentence names the command
        # that does.
        command = shlex.join(["python", case.code, *msgspec.json.decode(case.args or "[]", type=list[str])])
        emulate = f"gputrain emulate --gpu {platform} -- {command}"
        sentence = f"{verdict.sentence}; {emulate} shows what each line allocates and asks of the GPU"
        return msgspec.structs.replace(verdict, sentence=sentence)

    def _limits(self, request: Request, task: Task, figures: EmulatedRun) -> tuple[LimitVerdict, ...]:
        """Judge the figures against the limits of the test."""
        peak = figures.peak_allocated_bytes
        judge_with = functools.partial(
            judge_exact, request.terms.caps, task.case, peak, scale=task.scale, counts=figures.counts
        )
        limits = judge_with()
        if any(limit.status == "over-limit" and limit.metric in COUNT_FIGURES for limit in limits):
            limits = judge_with(again=_counts_of(self._again(task)))
        return limits

    def _again(self, task: Task) -> EmulatedRun | None:
        """Return the figures of the case from a second process; None if that process gave none."""
        reply = self._executor.run_again(task, watch=lambda event: self._watch(task.case, event, 2))
        return reply if isinstance(reply, EmulatedRun) else None


def _counts_of(again: EmulatedRun | None) -> Counts:
    """Return the counts of a second process, without any steps if that process gave none."""
    return (again and again.counts) or Counts(steps=(), kinds=())


def _accepted(case: Case, figures: EmulatedRun, recorded: Recorded) -> tuple[str, ...]:
    """Name each count that an update changes, before and after."""
    before = recorded.like(figures) or recorded.nearest(figures)
    if before.counts is None or figures.counts is None or recorded.case.identity() != case.identity():
        return ()
    return tuple(count_changes(before.counts, figures.counts))
