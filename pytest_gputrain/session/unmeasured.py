"""Answers the requests of one pytest process with figures that are the same in every process, each from one run."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Generic, cast

import msgspec

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.unmeasured import UnmeasuredExecutor
from pytest_gputrain.gate.limits import judge_exact, with_limits
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.hardware import catalog
from pytest_gputrain.records import (
    Case,
    Emulated,
    EmulatedRun,
    LimitVerdict,
    Predicted,
    Prediction,
    Result,
    Target,
    Task,
    Verdict,
)
from pytest_gputrain.records.recorded import FiguresT, Recorded
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.session.criteria import records, refuse_missing_folder
from pytest_gputrain.session.replies import Watch
from pytest_gputrain.session.request import CaseRunner, Request, result_fields
from pytest_gputrain.session.selection import refuse_unfit
from pytest_gputrain.session.tasks import TaskMaker
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.recorded import RecordedStore
from pytest_gputrain.utils.errors import BadCase, CannotRun


class UnmeasuredRunner(CaseRunner, abc.ABC, Generic[FiguresT]):
    """Answers requests for one platform, whose GPUs are not there.

    Args:
        executor: gives the figures.
        environment: variables of the session.
        watch: called with each progress event.
        target, emulated: as of `TaskMaker`.
    """

    source: ClassVar[str]
    """The source of the figures, in a sentence: ``a prediction``."""
    failing: ClassVar[str]
    """The name of the answer that a failed process did not give."""
    processes_trained: ClassVar[int]
    """The number of processes that trained for one answer."""
    result_type: ClassVar[type[Predicted | Emulated]]
    store_type: ClassVar[type[RecordedStore[Any]]]

    def __init__(
        self,
        settings: Settings,
        executor: UnmeasuredExecutor[Any],
        environment: SessionEnvironment,
        watch: Watch = lambda case, event, run: None,
        *,
        target: Target | None = None,
        emulated: str = "",
    ) -> None:
        super().__init__(settings, executor, TaskMaker(settings, lambda: executor.host, environment, target, emulated))
        self._executor = executor
        self._watch = watch
        self._store = self.store_type(settings.baseline_dir)

    def run(self, request: Request) -> Result:
        """Find the case's figures, unless this session did already, and compare them with what is recorded if asked."""
        host = self.executor.host
        refuse_unfit(request.case, request.markers, request.expression, host, self.settings)
        self._refuse(request.case)
        if request.inline:
            raise CannotRun(f"runs inline, but {self.source} needs a process of its own")
        self._declared.refuse_same_id(request.suite, request.case)
        task = self._task(request)
        case = task.case
        recorded = self._recorded(request, task) if request.judged else None
        self._declared.refuse_namesake(request.suite, case, recorded.case if recorded else None)
        reply, verdict = self._reply(task), None
        further: dict[str, Any] = {}
        if isinstance(reply, Prediction | EmulatedRun):
            figures = cast("FiguresT", reply)
            if request.judged:
                verdict, further = self._judged(request, task, figures, recorded)
            verdict = with_limits(case, verdict, self._limits(request, task, figures))
        elif request.judged:
            verdict = Verdict(status="failed", sentence=f"{case} {describe_failure(reply, self.failing)}")
        return self.result_type(**result_fields(request, task, host, verdict), reply=reply, **further)

    def _recorded(self, request: Request, task: Task) -> Recorded[FiguresT] | None:
        """Look up what is recorded of the case.

        Raises:
            BadCase: what is recorded cannot be read.
        """
        refuse_missing_folder(self.settings)
        try:
            return self._store.get(self.executor.host.platform, request.suite, key_of(task.case, task.scale))
        except BaselineError as error:
            raise BadCase(str(error)) from None

    def _reply(self, task: Task) -> Any:
        return self.executor.run(task, watch=lambda event: self._watch(task.case, event, 1))

    def _judged(
        self, request: Request, task: Task, figures: FiguresT, recorded: Recorded[FiguresT] | None
    ) -> tuple[Verdict, dict[str, Any]]:
        """Judge the figures; return fields of the result beside the verdict, too."""
        title = catalog.title_of(self.executor.host.platform)
        verdict = self._verdict(request, task, figures, recorded, title)
        if not records(self.settings, recorded=recorded is not None):
            return self._advised(task, figures, verdict)
        instead = f"; before, {verdict.sentence}" if recorded is not None and verdict.status != "pass" else ""
        accepted = self._accepted(task.case, figures, recorded) if recorded is not None else ()
        sentence = f"{task.case} has {self._described(figures, title)} as its baseline now{instead}"
        verdict = msgspec.structs.replace(
            verdict, status="recorded", sentence=sentence, before=verdict.status, accepted=accepted
        )
        return verdict, {}

    def _accepted(self, case: Case, figures: FiguresT, recorded: Recorded[FiguresT]) -> tuple[str, ...]:
        """Name each count that an update changes, before and after."""
        return ()

    def _limits(self, request: Request, task: Task, figures: FiguresT) -> tuple[LimitVerdict, ...]:
        """Judge the figures against the limits of the test."""
        caps, peak, runs = request.terms.caps, figures.peak_allocated_bytes, self.processes_trained
        return judge_exact(caps, task.case, peak, scale=task.scale, what=self.source, runs=runs)

    def _advised(self, task: Task, figures: FiguresT, verdict: Verdict) -> tuple[Verdict, dict[str, Any]]:
        """Add what helps where the case does not fit."""
        return verdict, {}

    @abc.abstractmethod
    def _refuse(self, case: Case) -> None:
        """Refuse a case.

        Raises:
            CannotRun: there can be no such figures of it.
        """

    @abc.abstractmethod
    def _task(self, request: Request) -> Task:
        """Make the task that gives the figures."""

    @abc.abstractmethod
    def _verdict(
        self, request: Request, task: Task, figures: FiguresT, recorded: Recorded[FiguresT] | None, title: str
    ) -> Verdict:
        """Judge the figures against what is recorded."""

    @abc.abstractmethod
    def _described(self, figures: FiguresT, title: str) -> str:
        """Describe the figures in the sentence that records them."""
