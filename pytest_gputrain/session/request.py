"""Defines what a test asks of a case, and what answers it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gputrain.cases.identity import identity_of, key_of
from pytest_gputrain.execution.executor import Executor
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.records import Case, Host, Result, Scale, Task, Verdict
from pytest_gputrain.records.tolerance import NO_TERMS, Terms
from pytest_gputrain.session.declared import DeclaredCases
from pytest_gputrain.session.selection import ExpectedCase
from pytest_gputrain.session.tasks import TaskMaker


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The request of a test for a case."""

    nodeid: str
    suite: str
    case: Case
    markers: frozenset[str] = frozenset()
    """Names of all markers of the test."""
    expression: str = ""
    """The expression of ``-m``."""
    judged: bool
    scaling: bool = False
    """Whether a case of several processes is compared with one worker alone, too."""
    inline: bool = False
    """Whether it runs in this process."""
    builder: Any = None
    """The user's function itself, for an inline run that has no address."""
    module: str = ""
    """Name under which this process imported the file of ``case.code``."""
    terms: Terms = NO_TERMS
    """Limits, which count for a case that is only measured, too, and tolerances of the test."""
    measured_for: str = ""
    """The test of this run whose figures answer the request; empty if the case is measured for it."""


class CaseRunner:
    """Answers the requests of the tests of one pytest process, by measuring or by emulating.

    Args:
        executor: runs the cases.
        tasks: makes the tasks of cases.
    """

    def __init__(self, settings: Settings, executor: Executor[Any], tasks: TaskMaker) -> None:
        self.settings = settings
        self.executor = executor
        self._tasks = tasks
        self._declared = DeclaredCases(settings.root)
        self._first_tests: dict[bytes, str] = {}
        """The tests that tasks were first run for, by what tells tasks apart."""

    def scale(self) -> Scale:
        """Return the scale of the cases.

        Raises:
            BadCase: the hardware is not what the options ask for.
        """
        return self._tasks.scale()

    def declare(self, suite: str, case: Case) -> Case:
        """Register ``case`` under its id in ``suite``, and return the first case with this id."""
        return self._declared.declare(suite, case)

    def run(self, request: Request) -> Result:
        """Return the result of a request.

        Raises:
            BadCase: it cannot be meant so, or the baseline cannot be read; one sentence.
            CannotRun: the case is not for this machine; the test skips.
        """
        raise NotImplementedError

    def _prepared(self, request: Request) -> tuple[Request, Task]:
        """Return the task of a request, and note in the request which test's figures answer it.

        Raises:
            BadCase: the suite has another case of that id, or there can be no such task.
        """
        self._declared.refuse_same_id(request.suite, request.case)
        case, growth = self._tasks.with_steps(request.case), request.terms.growth_bytes
        task = self._tasks.make(case, request.module, growth_bytes=growth, inline=request.inline)
        first = "" if request.builder is not None else self._first_tests.get(identity_of(task, request.inline), "")
        return dataclasses.replace(request, measured_for=first), task

    def _note_answered(self, request: Request, task: Task) -> None:
        """Note that a request has its figures."""
        self._first_tests.setdefault(identity_of(task, request.inline), request.nodeid)

    def expect(self, cases: Sequence[ExpectedCase], *, submit: bool) -> None:
        """Note the cases of the collected tests.

        Args:
            submit: whether a fleet is to begin with them.
        """

    def forget(self, nodeid: str) -> None:
        """Drop the cases of a test that failed: they become no baselines."""

    @property
    def waiting(self) -> int:
        """The number of cases whose baselines wait for further runs, because their figures are noisy."""
        return 0

    def complete(self) -> Iterator[Result]:
        """Measure the further runs that baselines need. After each run, yield the case's result with all its runs so far."""
        return iter(())

    def close(self) -> None:
        """End the processes that were kept for later cases."""
        self.executor.close()


def result_fields(request: Request, task: Task, host: Host, verdict: Verdict | None) -> dict[str, Any]:
    """Return the fields that the results of all kinds have."""
    return {
        "nodeid": request.nodeid,
        "suite": request.suite,
        "key": key_of(task.case, task.scale),
        "case": task.case,
        "scale": task.scale,
        "platform": host.platform,
        "device": host.device,
        "measured_for": request.measured_for,
        "variables": tuple(task.variables),
        "variables_digest": task.variables_digest,
        "verdict": verdict,
    }
