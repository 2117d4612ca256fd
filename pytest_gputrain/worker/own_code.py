"""What a user's own code is asked besides: is all of it counted, is it what its case says, and does it keep memory?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from pytest_gputrain.records import Task
from pytest_gputrain.worker.flops import FlopCount
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.growth import Growth
from pytest_gputrain.worker.precision import check_precision, weights_by_type
from pytest_gputrain.worker.recipe import Trainable
from pytest_gputrain.worker.threads import countable_threads
from pytest_gputrain.worker.witness import Witness, started_processes

_PROCESSES: Final = "what processes hold and compute that it starts itself, such as a DataLoader's, is not counted"


class OwnCode:
    """A case of own code, from its build to its checks.

    Args:
        counts_memory: whether its tensors are counted one by one; an allocator counts those of all threads.
        group: the processes of the case.
    """

    def __init__(self, task: Task, group: Group, *, counts_memory: bool) -> None:
        self._case = task.case
        self._counts_memory = counts_memory
        self._alone = group.size == 1
        self.growth = Growth(task, group)
        self._processes: list[str] = []
        self._witness = Witness()

    @contextlib.contextmanager
    def running(self) -> Iterator[OwnCode]:
        """A context for all of it."""
        with countable_threads(), started_processes() as self._processes:
            yield self

    def witnessed(self) -> contextlib.AbstractContextManager[None]:
        """A context for the step whose FLOPs are counted."""
        return self._witness.watching()

    def check(self, flops: FlopCount, training: Trainable, allocated: Callable[[], int | None]) -> tuple[str, ...]:
        """Sentences on what was not counted.

        Args:
            flops: of the witnessed step.
            allocated: bytes in tensors now, where an allocator knows.

        Raises:
            CheckFailed: it belongs to what the case is about, the case trains in another precision than it says, or it keeps
                more and more memory.
        """
        products = {str(operator).replace(".", "::") for operator in flops.formulas}
        unseen = self._witness.check(
            flops.threads,
            self._case.model,
            matters=lambda name: self._counts_memory or name in products,
            # Of several processes the threads that exchange tensors run operators, too.
            others=self._alone,
        )
        weights = weights_by_type(training.model) if training.model is not None else {}
        check_precision(self._case.model, self._case.precision, weights, flops.by_type)
        grown = self.growth.check(training, allocated)
        return tuple(filter(None, [unseen, _PROCESSES if self._processes else "", grown]))
