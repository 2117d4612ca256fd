"""Checks own code: that all of it is counted, that it trains as its case says, and that it keeps no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from pytest_gputrain.records import Task
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.flops import FlopCount
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.growth import Growth
from pytest_gputrain.worker.loads_and_updates import LoadsAndUpdates
from pytest_gputrain.worker.precision import check_precision, weights_by_type
from pytest_gputrain.worker.seeds import Seeds
from pytest_gputrain.worker.thread_operators import ThreadOperators, started_processes
from pytest_gputrain.worker.threads import countable_threads
from pytest_gputrain.worker.training import Trainable

_BLIND: Final = (
    "other threads were not searched for operators that are not counted, because the step uses torch's profiler itself"
)
_PROCESSES: Final = "memory and FLOPs of processes that the code starts, such as those of a DataLoader, are not counted"


class Checked(NamedTuple):
    """The results of the checks that passed."""

    notes: tuple[str, ...]
    """Sentences on what was not counted."""
    knows_flops: bool = True


class OwnCode:
    """Checks a case of own code, from its build to its last step.

    Args:
        counts_memory: whether its tensors are counted one by one; an allocator counts those of all threads.
        group: the processes of the case.
        inline: whether it runs in pytest's process, whose random numbers are the user's.
    """

    def __init__(self, task: Task, group: Group, *, counts_memory: bool, inline: bool = False) -> None:
        self._case = task.case
        self._counts_memory = counts_memory
        self._alone = group.size == 1
        self.growth = Growth(task, group)
        self.asked = LoadsAndUpdates()
        self.seeds = Seeds(of_python=not inline)
        self._processes: list[str] = []
        self._thread_operators = ThreadOperators()

    @contextlib.contextmanager
    def running(self) -> Iterator[OwnCode]:
        """Provide a context for the build, the steps and the checks."""
        with (
            countable_threads(),
            self.growth.following(),
            self.asked.following(),
            self.seeds.following(),
            started_processes() as self._processes,
        ):
            yield self

    def recording_threads(self) -> contextlib.AbstractContextManager[None]:
        """Provide a context that records which operators run on threads, for the step whose FLOPs are counted."""
        return self._thread_operators.recording()

    def check(self, flops: FlopCount, training: Trainable) -> Checked:
        """Check the step whose FLOPs were counted.

        Raises:
            CheckFailed: tensors were not counted, or the case trains in another precision than it says.
        """
        products = {str(operator).replace(".", "::") for operator in flops.formulas}
        missed = self._thread_operators.missed(
            flops.threads,
            matters=lambda name: self._counts_memory or name in products,
            # With several processes, threads that exchange tensors run operators as well. So only a single process looks at
            # all threads.
            others=self._alone,
        )
        name = self._case.model
        if missed and self._counts_memory:
            raise CheckFailed(
                f"a step of {name} {missed}: start this thread by Python's threading or concurrent.futures, inside of the "
                "step or of the function that builds it"
            )
        weights = weights_by_type(training.model) if training.model is not None else {}
        unknown = bool(missed or flops.trouble) or flops.launches_graphs
        check_precision(name, self._case.precision, weights, {} if unknown else flops.by_type)
        notes = [
            _BLIND if flops.threads and self._thread_operators.are_unknown else "",
            f"FLOPs are not known, because a step {missed}; a pool of concurrent.futures is counted" if missed else "",
            "FLOPs are not known, because a step launches CUDA graphs" if flops.launches_graphs else "",
            _PROCESSES if self._processes else "",
        ]
        return Checked(tuple(filter(None, notes)), not unknown)
