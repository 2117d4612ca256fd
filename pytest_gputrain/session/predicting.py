"""Predicts the cases of one pytest process instead of training them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import msgspec

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.predicted import PredictingExecutor, PredictionReply
from pytest_gputrain.gate.limits import judge_exact, with_limits
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.gate.prediction import judge
from pytest_gputrain.hardware import catalog
from pytest_gputrain.records import Case, Predicted, Prediction, Result, Scale, Task, Verdict
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.session.criteria import records, refuse_missing_folder, tolerance_of
from pytest_gputrain.session.declared import DeclaredCases
from pytest_gputrain.session.remedies import remedy
from pytest_gputrain.session.replies import Watch
from pytest_gputrain.session.request import Request
from pytest_gputrain.session.selection import ExpectedCase, refuse_unfit
from pytest_gputrain.session.tasks import TaskMaker
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.predictions import PredictionStore
from pytest_gputrain.utils.errors import BadCase, CannotRun


class PredictingRunner:
    """Answers requests by predicting for one platform. Of the machine it asks nothing but a core.

    Args:
        executor: predicts the cases.
        environment: variables of the session.
        watch: called with each progress event.
    """

    waiting = 0

    def __init__(
        self,
        settings: Settings,
        executor: PredictingExecutor,
        environment: SessionEnvironment,
        watch: Watch = lambda case, event, run: None,
    ) -> None:
        self.settings = settings
        self._executor = executor
        self._tasks = TaskMaker(settings, lambda: executor.host, environment, executor.target)
        self._watch = watch
        self._declared = DeclaredCases(settings.root)
        self._store = PredictionStore(settings.baseline_dir)

    def scale(self) -> Scale:
        return self._tasks.scale()

    def declare(self, suite: str, case: Case) -> Case:
        return self._declared.declare(suite, case)

    def expect(self, cases: Sequence[ExpectedCase], *, submit: bool) -> None:
        """Do nothing: a prediction takes seconds."""

    def forget(self, nodeid: str) -> None:
        """Do nothing: no baseline waits for further runs."""

    def complete(self) -> Iterator[Result]:
        return iter(())

    def close(self) -> None:
        self._executor.close()

    def run(self, request: Request) -> Result:
        """Predict the case, unless this session did already, and compare it with what is recorded if asked."""
        case, host, settings = request.case, self._executor.host, self.settings
        refuse_unfit(case, request.markers, request.expression, host, settings)
        if case.compile != "off":
            raise CannotRun("is compiled, and a prediction does not know what a compiler makes of it")
        if request.inline:
            raise CannotRun("runs inline, but a prediction needs a process of its own")
        self._declared.refuse_same_id(request.suite, case)
        task = self._tasks.make(case, request.module)
        case = task.case
        recorded = self._recorded(request, task) if request.judged else None
        self._declared.refuse_namesake(request.suite, case, recorded.case if recorded else None)
        reply, verdict, helps = self._reply(task), None, ""
        if isinstance(reply, Prediction):
            if request.judged:
                verdict, helps = self._judged(request, task, reply, recorded)
            caps, peak = request.terms.caps, reply.peak_allocated_bytes
            limits = judge_exact(caps, case, peak, scale=task.scale, what="a prediction")
            verdict = with_limits(case, verdict, limits)
        elif request.judged:
            verdict = Verdict(status="failed", sentence=f"{case} {describe_failure(reply, 'prediction')}")
        return Predicted(
            nodeid=request.nodeid,
            suite=request.suite,
            key=key_of(case, task.scale),
            case=case,
            scale=task.scale,
            platform=host.platform,
            device=host.device,
            reply=reply,
            variables=tuple(task.variables),
            variables_digest=task.variables_digest,
            remedy=helps,
            verdict=verdict,
        )

    def _recorded(self, request: Request, task: Task) -> Recorded | None:
        """Look up the recorded predictions of the case.

        Raises:
            BadCase: what is recorded cannot be read.
        """
        refuse_missing_folder(self.settings)
        try:
            return self._store.get(self._executor.host.platform, request.suite, key_of(task.case, task.scale))
        except BaselineError as error:
            raise BadCase(str(error)) from None

    def _reply(self, task: Task) -> PredictionReply:
        return self._executor.run(task, watch=lambda event: self._watch(task.case, event, 1))

    def _judged(
        self, request: Request, task: Task, prediction: Prediction, recorded: Recorded | None
    ) -> tuple[Verdict, str]:
        """Judge the prediction, and say what helps where the case does not fit."""
        case, platform = task.case, catalog.PLATFORMS.get(self._executor.host.platform)
        title = platform.title if platform else self._executor.host.platform
        verdict = judge(case, prediction, recorded, tolerance_of(self.settings, request.terms).memory, title)
        if records(self.settings, recorded=recorded is not None):
            unfit = "" if prediction.fits is not False else f", which does not fit {title},"
            instead = f"; before, {verdict.sentence}" if recorded is not None and verdict.status != "pass" else ""
            sentence = f"{case} has this prediction{unfit} as its baseline now{instead}"
            return msgspec.structs.replace(verdict, status="recorded", sentence=sentence, before=verdict.status), ""
        if prediction.fits is not False or verdict.status not in ("failed", "regressed"):
            return verdict, ""
        helps = remedy(case, prediction, functools.partial(self._predicted, task))
        return msgspec.structs.replace(verdict, sentence=f"{verdict.sentence}; {helps}"), helps

    def _predicted(self, task: Task, changed: Case) -> Prediction | None:
        """Predict a changed case; None where there is no prediction."""
        try:
            reply = self._reply(self._tasks.make(changed, task.module))
        except BadCase:  # which its file of options for DeepSpeed contradicts
            return None
        return reply if isinstance(reply, Prediction) else None
