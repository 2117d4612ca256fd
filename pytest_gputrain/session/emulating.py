"""Runs the cases of one pytest process on emulated GPUs instead of real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from pytest_gputrain.cases.identity import identity_of, key_of
from pytest_gputrain.execution.emulated import EmulatedReply, EmulatingExecutor
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.gate import emulation
from pytest_gputrain.gate.limits import judge_exact, with_limits
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.hardware import catalog
from pytest_gputrain.records import Case, Emulated, EmulatedRun, Result, Scale, Task, Verdict
from pytest_gputrain.records.emulated import RecordedRuns
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.session.criteria import records, refuse_missing_folder
from pytest_gputrain.session.declared import DeclaredCases
from pytest_gputrain.session.replies import Watch
from pytest_gputrain.session.request import Request
from pytest_gputrain.session.selection import ExpectedCase, refuse_unfit
from pytest_gputrain.session.tasks import TaskMaker
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.emulations import EmulationStore
from pytest_gputrain.utils.errors import BadCase, CannotRun


class EmulatingRunner:
    """Answers requests by running cases on emulated GPUs of one platform, each once: nothing there is noisy.

    Args:
        executor: runs the cases.
        environment: variables of the session.
        watch: called with each progress event.
    """

    waiting = 0

    def __init__(
        self,
        settings: Settings,
        executor: EmulatingExecutor,
        environment: SessionEnvironment,
        watch: Watch = lambda case, event, run: None,
    ) -> None:
        self.settings = settings
        self._executor = executor
        self._tasks = TaskMaker(settings, lambda: executor.host, environment, emulated=executor.host.platform)
        self._watch = watch
        self._declared = DeclaredCases(settings.root)
        self._store = EmulationStore(settings.baseline_dir)
        self._replies: dict[bytes, EmulatedReply] = {}

    def scale(self) -> Scale:
        return self._tasks.scale()

    def declare(self, suite: str, case: Case) -> Case:
        return self._declared.declare(suite, case)

    def expect(self, cases: Sequence[ExpectedCase], *, submit: bool) -> None:
        """Do nothing: no fleet runs them."""

    def forget(self, nodeid: str) -> None:
        """Do nothing: no baseline waits for further runs."""

    def complete(self) -> Iterator[Result]:
        return iter(())

    def close(self) -> None:
        self._executor.close()

    def run(self, request: Request) -> Result:
        """Run the case, unless this session did already, and compare it with what is recorded if asked."""
        host = self._executor.host
        refuse_unfit(request.case, request.markers, request.expression, host, self.settings)
        if request.case.servers:
            raise CannotRun("takes parameter servers, which have to answer, and an emulated GPU runs the first worker alone")
        if request.inline:
            raise CannotRun("runs inline, but an emulated GPU needs a process of its own")
        self._declared.refuse_same_id(request.suite, request.case)
        task = self._tasks.make(
            self._tasks.with_steps(request.case), request.module, growth_bytes=request.terms.growth_bytes
        )
        case = task.case
        recorded = self._recorded(request, task) if request.judged else None
        self._declared.refuse_namesake(request.suite, case, recorded.case if recorded else None)
        reply, verdict = self._reply(task), None
        if isinstance(reply, EmulatedRun):
            if request.judged:
                verdict = self._judged(case, reply, recorded)
            caps, peak = request.terms.caps, reply.peak_allocated_bytes
            limits = judge_exact(caps, case, peak, scale=task.scale, what="an emulated GPU", runs=1)
            verdict = with_limits(case, verdict, limits)
        elif request.judged:
            verdict = Verdict(status="failed", sentence=f"{case} {describe_failure(reply, 'figures')}")
        return Emulated(
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
            verdict=verdict,
        )

    def _recorded(self, request: Request, task: Task) -> RecordedRuns | None:
        """Look up the recorded runs of the case.

        Raises:
            BadCase: what is recorded cannot be read.
        """
        refuse_missing_folder(self.settings)
        try:
            return self._store.get(self._executor.host.platform, request.suite, key_of(task.case, task.scale))
        except BaselineError as error:
            raise BadCase(str(error)) from None

    def _reply(self, task: Task) -> EmulatedReply:
        identity = identity_of(task)
        if identity not in self._replies:
            self._replies[identity] = self._executor.run(task, watch=lambda event: self._watch(task.case, event, 1))
        return self._replies[identity]

    def _judged(self, case: Case, run: EmulatedRun, recorded: RecordedRuns | None) -> Verdict:
        platform = catalog.PLATFORMS.get(self._executor.host.platform)
        title = platform.title if platform else self._executor.host.platform
        verdict = emulation.judge(case, run, recorded, title)
        if not records(self.settings, recorded=recorded is not None):
            return verdict
        unfit = "" if run.fits else f", not fitting {title},"
        instead = f"; before, {verdict.sentence}" if recorded is not None and verdict.status != "pass" else ""
        sentence = f"{case} has these figures of an emulated {title}{unfit} as its baseline now{instead}"
        return msgspec.structs.replace(verdict, status="recorded", sentence=sentence, before=verdict.status)
