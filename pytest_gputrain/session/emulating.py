"""Runs the cases of one pytest process on emulated GPUs instead of real ones."""

from __future__ import annotations

import functools
import shlex

import msgspec

from pytest_gputrain.execution.emulated import EmulatingExecutor
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.gate.count_lines import count_changes
from pytest_gputrain.gate.emulation import judge
from pytest_gputrain.gate.limits import judge_exact
from pytest_gputrain.records import Case, Counts, Emulated, EmulatedRun, LimitVerdict, Task, Verdict
from pytest_gputrain.records.counts import COUNT_FIGURES
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.session.criteria import count_terms_of, records
from pytest_gputrain.session.replies import Watch
from pytest_gputrain.session.request import Request
from pytest_gputrain.session.unmeasured import UnmeasuredRunner
from pytest_gputrain.storage.recorded import EmulationStore
from pytest_gputrain.utils.errors import CannotRun


class EmulatingRunner(UnmeasuredRunner[EmulatedRun]):
    """Answers requests by running cases on emulated GPUs of one platform, each once: nothing there is noisy.

    Growth of what steps ask of the GPU fails a case if a second process confirms it.
    """

    source = "an emulated GPU"
    failing = "figures"
    processes_trained = 1
    result_type = Emulated
    store_type = EmulationStore

    def __init__(
        self, settings: Settings, executor: EmulatingExecutor, environment: SessionEnvironment, watch: Watch
    ) -> None:
        super().__init__(settings, executor, environment, watch, emulated=executor.host.platform)

    def _refuse(self, case: Case) -> None:
        if case.servers:
            raise CannotRun("takes parameter servers, which have to answer, and an emulated GPU runs the first worker alone")

    def _task(self, request: Request) -> Task:
        case = self._tasks.with_steps(request.case)
        return self._tasks.make(case, request.module, growth_bytes=request.terms.growth_bytes)

    def _verdict(
        self, request: Request, task: Task, figures: EmulatedRun, recorded: Recorded[EmulatedRun] | None, title: str
    ) -> Verdict:
        case = task.case
        judge_with = functools.partial(judge, case, figures, recorded, title, count_terms_of(self.settings, request.terms))
        verdict = judge_with()
        fails = any(metric.status == "regressed" and metric.metric in COUNT_FIGURES for metric in verdict.metrics)
        if fails and not records(self.settings, recorded=recorded is not None):
            verdict = judge_with(again=self._counts_again(task))
        if case.method != "script" or verdict.status != "regressed":
            return verdict
        # A worker that runs a script sees the allocator's peaks alone, not what holds them.
        command = shlex.join(["python", case.code, *msgspec.json.decode(case.args or "[]", type=list[str])])
        emulate = f"gputrain emulate --gpu {self.executor.host.platform} -- {command}"
        sentence = f"{verdict.sentence}; {emulate} shows what is allocated at the peak, and where"
        return msgspec.structs.replace(verdict, sentence=sentence)

    def _limits(self, request: Request, task: Task, figures: EmulatedRun) -> tuple[LimitVerdict, ...]:
        judge_with = functools.partial(
            judge_exact,
            request.terms.caps,
            task.case,
            figures.peak_allocated_bytes,
            scale=task.scale,
            what=self.source,
            runs=self.processes_trained,
            counts=figures.counts,
        )
        limits = judge_with()
        if any(limit.status == "over-limit" and limit.metric in COUNT_FIGURES for limit in limits):
            limits = judge_with(again=self._counts_again(task))
        return limits

    def _counts_again(self, task: Task) -> Counts:
        """Count in a second process; without steps if that gives no counts."""
        reply = self._executor.run_again(task, watch=lambda event: self._watch(task.case, event, 2))
        counts = reply.counts if isinstance(reply, EmulatedRun) else None
        return counts or Counts(steps=(), kinds=())

    def _accepted(self, case: Case, figures: EmulatedRun, recorded: Recorded[EmulatedRun]) -> tuple[str, ...]:
        before = recorded.like(figures) or recorded.nearest(figures)
        if before.counts is None or figures.counts is None or recorded.case.identity() != case.identity():
            return ()
        return tuple(count_changes(before.counts, figures.counts))

    def _described(self, figures: EmulatedRun, title: str) -> str:
        return f"these figures of an emulated {title}{'' if figures.fits else f', not fitting {title},'}"
