"""Predicts the cases of one pytest process instead of training them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from pytest_gputrain.cases.identity import key_of, same_id
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.execution.executor import Executor
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.local import describe_refusal
from pytest_gputrain.gate.limits import judge_prediction, with_limits
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.gate.prediction import judge
from pytest_gputrain.hardware import catalog
from pytest_gputrain.hardware.lease import lease_cores
from pytest_gputrain.hardware.targets import target_of
from pytest_gputrain.records import Case, Crashed, Event, OutOfMemory, Prediction, Result, Scale, Task, TimedOut, Verdict
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.records.tolerance import NO_TERMS, MemoryTolerance, Terms
from pytest_gputrain.session.prediction.cache import Cache
from pytest_gputrain.session.prediction.remedies import remedy
from pytest_gputrain.session.runner import Runner
from pytest_gputrain.session.selection import platforms_of, what_lacks, why_skipped
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.predictions import FOLDER, PredictionStore
from pytest_gputrain.utils.errors import BadCase, CannotRun
from pytest_gputrain.utils.git import in_ci

Failure = OutOfMemory | Crashed | TimedOut


class PredictingRunner(Runner):
    """A `Runner` whose results hold predictions for one platform. Of the machine it asks nothing but a core."""

    def __init__(
        self, settings: Settings, platform: str, cache: Path | None, environment: SessionEnvironment | None = None
    ) -> None:
        """
        Args:
            platform: catalog marker to predict for.
            cache: folder for predictions to be found again in; None for none.
            environment: the variables of the session; those of this moment by default.
        """
        super().__init__(settings, Executor(settings, environment=environment))
        self._platform = platform
        self._target = target_of(platform)
        self._cache = Cache(cache)
        self._predictions: dict[bytes, Prediction | Failure] = {}
        self.recorded = PredictionStore(settings.baseline_dir)

    @property
    def _title(self) -> str:
        platform = catalog.PLATFORMS.get(self._platform)
        return platform.title if platform else self._platform

    def check_selection(self, case: Case, markers: set[str], expression: str, *, scaling: bool = False) -> None:
        wrong = problem(case, catalog.MARKERS)
        if wrong:
            raise BadCase(wrong)
        declared = platforms_of(case.platforms) if case.platforms else ()
        if why_skipped(markers | set(declared), expression, self._platform, case.gpus):
            raise CannotRun(f"not declared for {self._platform}, which this run predicts for")
        if self._platform == catalog.CPU:
            lacking = what_lacks(case, gpus=0, most_nodes=1, most_processes=self.settings.processes, all_of_them=False)
            if lacking:
                raise CannotRun(lacking)
        if case.compile != "off":
            raise CannotRun("is compiled, and a prediction does not know what a compiler makes of it")

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
        """Predict ``case``, unless this session did already, and compare it with what is recorded if asked.

        Raises:
            BadCase: the id is another case's, or what is recorded cannot be read.
            CannotRun: the case is bound to this process.
        """
        if inline:
            raise CannotRun("runs inline, but a prediction takes a process of its own")
        first = self.declare(suite, case)
        if first.identity() != case.identity():
            raise BadCase(same_id(suite, first, case))
        updates = self.settings.baseline_update != "no"
        if self.settings.baseline_dir_named and not updates and not self.settings.baseline_dir.is_dir():
            # Mistyped, it would make every case new, which passes unless strict.
            raise BadCase(f"the baseline folder {self.settings.baseline_dir} does not exist; --gpu-baseline-update makes it")
        key = key_of(case, self.scale())
        try:
            recorded = self.recorded.get(self._platform, suite, key) if judged else None
        except BaselineError as error:
            raise BadCase(str(error)) from None
        self.refuse_namesake(suite, case, recorded.case if recorded else None)
        task = self._task(case, module)
        reply = self._predict(task)
        prediction = reply if isinstance(reply, Prediction) else None
        failed = () if isinstance(reply, Prediction) else (reply,)
        verdict, helps = None, ""
        if judged and failed:
            verdict = Verdict(status="failed", sentence=f"{case} {describe_failure(failed[0], 'prediction')}")
        elif judged and prediction is not None:
            verdict, helps = self._judged(task, prediction, recorded, self.criteria.tolerance(terms).memory)
        if prediction is not None:
            verdict = with_limits(case, verdict, judge_prediction(terms.caps, case, prediction, scale=self.scale()))
        return Result(
            nodeid=nodeid,
            suite=suite,
            key=key,
            case=case,
            scale=self.scale(),
            platform=self._platform,
            device=f"{FOLDER}/{self._platform}",
            replies=failed,
            variables=tuple(task.variables),
            variables_digest=task.variables_digest,
            prediction=prediction,
            remedy=helps,
            verdict=verdict,
        )

    def is_strict(self, device: str) -> bool:
        if self.settings.strict is not None:
            return self.settings.strict
        return in_ci() and self.recorded.has_device(self._platform)

    def scale(self) -> Scale:
        if self.settings.scale != "auto":
            return self.settings.scale
        return "tiny" if self._platform == catalog.CPU else "full"

    def _judged(
        self, task: Task, prediction: Prediction, recorded: Recorded | None, tolerance: MemoryTolerance
    ) -> tuple[Verdict, str]:
        """The verdict, and what helps where it is that the case does not fit."""
        case = task.case
        verdict = judge(case, prediction, recorded, tolerance, self._title)
        if self.settings.baseline_update == "all" or (self.settings.baseline_update == "new-only" and recorded is None):
            unfit = "" if prediction.fits is not False else f", which does not fit {self._title},"
            instead = f"; before, {verdict.sentence}" if recorded is not None and verdict.status != "pass" else ""
            sentence = f"{case} has this prediction{unfit} as its baseline now{instead}"
            return msgspec.structs.replace(verdict, status="recorded", sentence=sentence), ""
        if prediction.fits is not False or verdict.status not in ("failed", "regressed"):
            return verdict, ""

        def predict(changed: Case) -> Prediction | None:
            reply = self._predict(self._task(changed, task.module))
            return reply if isinstance(reply, Prediction) else None

        helps = remedy(case, prediction, predict)
        return msgspec.structs.replace(verdict, sentence=f"{verdict.sentence}; {helps}"), helps

    def _predict(self, task: Task) -> Prediction | Failure:
        identity = msgspec.json.encode((task.case.identity(), task.scale, task.processes, task.servers, task.variables))
        if identity not in self._predictions:
            cached = self._cache.get(task)
            reply = self._run_worker(task) if cached is None else cached
            if cached is None and isinstance(reply, Prediction):
                self._cache.put(task, reply)
            self._predictions[identity] = reply
        return self._predictions[identity]

    def _run_worker(self, task: Task) -> Prediction | Failure:
        def watch(event: Event) -> None:
            self.executor.watch(task.case, event, 1)

        try:
            with lease_cores(1):
                return launcher.predict(
                    task,
                    timeout_seconds=self.settings.timeout_seconds,
                    watch=watch,
                    fork_server=self.executor.fork_server,
                    environ=self.executor.environment.began,
                )
        except OSError as error:
            raise BadCase(describe_refusal(task.case, error)) from None

    def _task(self, case: Case, module: str) -> Task:
        on_gpus = self._platform != catalog.CPU
        most = max(case.gpus, case.servers) if on_gpus else self.settings.processes
        task = Task(
            case=case,
            scale=self.scale(),
            device_type="cpu",
            processes=min(case.gpus, most),
            servers=min(case.servers, most),
            root=str(self.settings.root),
            module=module,
            import_paths=tuple(path for path in sys.path if path),
            target=self._target,
        )
        return self.executor.in_environment(task)
