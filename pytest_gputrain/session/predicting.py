"""Predicts the cases of one pytest process instead of training them."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.predicted import PredictingExecutor
from pytest_gputrain.gate.fit import Need
from pytest_gputrain.gate.prediction import judge, needed_bytes
from pytest_gputrain.records import Case, Predicted, Prediction, Task, Verdict
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.session.criteria import tolerance_of
from pytest_gputrain.session.remedies import remedy
from pytest_gputrain.session.replies import Watch
from pytest_gputrain.session.request import Request
from pytest_gputrain.session.unmeasured import UnmeasuredRunner
from pytest_gputrain.storage.recorded import PredictionStore
from pytest_gputrain.utils.errors import BadCase, CannotRun


class PredictingRunner(UnmeasuredRunner[Prediction]):
    """Answers requests by predicting for one platform. Of the machine it asks nothing but a core."""

    source = "a prediction"
    failing = "prediction"
    processes_trained = 0
    result_type = Predicted
    store_type = PredictionStore

    def __init__(
        self, settings: Settings, executor: PredictingExecutor, environment: SessionEnvironment, watch: Watch
    ) -> None:
        super().__init__(settings, executor, environment, watch, target=executor.target)

    def _refuse(self, case: Case) -> None:
        if case.compile != "off":
            raise CannotRun("is compiled, and a prediction does not know the compiled code")

    def _task(self, request: Request) -> Task:
        return self._tasks.make(request.case, request.module)

    def _verdict(
        self, request: Request, task: Task, figures: Prediction, recorded: Recorded[Prediction] | None, title: str
    ) -> Verdict:
        return judge(task.case, figures, recorded, tolerance_of(self.settings, request.terms).memory, title)

    def _described(self, figures: Prediction, title: str) -> str:
        return "this prediction" if figures.fits is not False else f"this prediction, which does not fit {title},"

    def _advised(self, task: Task, figures: Prediction, verdict: Verdict) -> tuple[Verdict, dict[str, Any]]:
        if figures.fits is not False or verdict.status not in ("failed", "regressed"):
            return verdict, {}
        helps = remedy(task.case, figures, functools.partial(self._predicted, task))
        return msgspec.structs.replace(verdict, sentence=f"{verdict.sentence}; {helps}"), {"remedy": helps}

    def _predicted(self, task: Task, changed: Case) -> Need | None:
        """Predict the memory of a changed case; None where there is no prediction."""
        try:
            reply = self._reply(self._tasks.make(changed, task.module))
        except BadCase:  # which its file of options for DeepSpeed contradicts
            return None
        return Need(bool(reply.fits), needed_bytes(reply)) if isinstance(reply, Prediction) else None
