"""Interleaves the runs of new baselines: the second run of every case, then the third of every case, and so on.

A machine drifts while a suite is recorded. Five runs of a case one after the other would all share one state of it,
and those of the next case another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.execution.executor import Executor
from pytest_gputrain.records import Measured, Reply, Task, Verdict
from pytest_gputrain.utils.errors import BadCase


@dataclass(kw_only=True, slots=True)
class _Waiting:
    result: Measured
    task: Task
    wanted: int
    again: Callable[[int], Measured]


class Interleaver:
    """Cases of one pytest process whose baselines wait for further runs.

    Args:
        executor: runs them.
    """

    def __init__(self, executor: Executor[Reply]) -> None:
        self._executor = executor
        self._waiting: list[_Waiting] = []

    def add(self, result: Measured, task: Task, wanted: int, again: Callable[[int], Measured]) -> Measured:
        """Take over a case after its first runs, and return its result with the number of runs that are still to come.

        Args:
            wanted: the number of runs that its baseline needs.
            again: measures the case until it has the given number of runs, and judges them all.
        """
        waiting = _Waiting(result=_with_runs_to_come(result, wanted), task=task, wanted=wanted, again=again)
        if waiting.result.to_come:
            self._waiting.append(waiting)
        else:
            self._drop([task])
        return waiting.result

    def forget(self, nodeid: str) -> None:
        """Drop the cases of a test that failed: they become no baselines."""
        self._stop_waiting(lambda waiting: waiting.result.nodeid == nodeid)

    def __len__(self) -> int:
        return len(self._waiting)

    def complete(self) -> Iterator[Measured]:
        """Measure the runs that are missing, in rounds of one run for each case. After each run, yield the case's result
        with all its runs so far."""
        self._executor.only(waiting.task for waiting in self._waiting)
        while self._waiting:
            for waiting in list(self._waiting):
                try:
                    result = waiting.again(len(waiting.result.replies) + 1)
                except BadCase as error:
                    verdict = Verdict(status="failed", sentence=str(error))
                    result = msgspec.structs.replace(waiting.result, verdict=verdict)
                waiting.result = _with_runs_to_come(result, waiting.wanted)
                yield waiting.result
            self._stop_waiting(lambda waiting: not waiting.result.to_come)

    def _stop_waiting(self, over: Callable[[_Waiting], bool]) -> None:
        """Stop waiting for the cases that are over."""
        gone = [waiting for waiting in self._waiting if over(waiting)]
        self._waiting = [waiting for waiting in self._waiting if not over(waiting)]
        self._drop(waiting.task for waiting in gone)

    def _drop(self, tasks: Iterable[Task]) -> None:
        """Cancel the runs of these tasks in a fleet, unless another test waits for them, too."""
        if unwanted := list(tasks):
            wanted = {identity_of(waiting.task) for waiting in self._waiting}
            for task in unwanted:
                if identity_of(task) not in wanted:
                    self._executor.drop(task)


def _with_runs_to_come(result: Measured, wanted: int) -> Measured:
    recorded = result.verdict is not None and result.verdict.status == "recorded"
    return msgspec.structs.replace(result, to_come=max(0, wanted - len(result.replies)) if recorded else 0)
