"""Checks that own code updates its weights as often as its case says.

Tensors are counted in two rounds: a step each, or as many as gradients are accumulated over. If no optimizer steps in one of
them, its states, or what is live beside them, are missing from the peak; and the typical time of a step is that of one which
updates nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_gputrain.records import Case
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.loop import Steps

_COUNTED_ROUNDS: Final = 2
_FEW: Final = 8
"""Each of this many optimizers has to step in every round. More are those of single parameters, of which some may get no
gradient."""


class Updates:
    """Records how often each optimizer steps in each round of gradient accumulation. It sees the optimizers of torch, and
    classes derived from them.

    Args:
        counts: whether the peak is that of the counted rounds, and not of all.
    """

    def __init__(self, case: Case, *, counts: bool) -> None:
        self._name = case.model
        self._steps_of_round = case.gradient_accumulation
        self._counts = counts
        self._steps = 0
        self._made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._rounds: weakref.WeakKeyDictionary[Optimizer, Counter[int]] = weakref.WeakKeyDictionary()
        """How often each one stepped in each round."""
        self._captured: weakref.WeakKeyDictionary[Any, list[Optimizer]] = weakref.WeakKeyDictionary()
        """The optimizers that step in each CUDA graph. They do so when it is launched, and not when it is captured."""
        self._capturing: list[Any] = []
        self._running: Optimizer | None = None
        """The optimizer that steps: its class may call the step of the class that it derives from."""
        self.when_updating: Callable[[Optimizer], None] = lambda optimizer: None
        """Is called when an optimizer steps."""

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Provide a context that records the optimizers that are made, and their steps."""
        make = Optimizer.__init__

        def noting(optimizer: Optimizer, *arguments: Any, **options: Any) -> None:
            make(optimizer, *arguments, **options)
            self._made.add(optimizer)

        def see(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._running is optimizer:
                return
            self._running = optimizer
            if self._capturing:
                self._captured.setdefault(self._capturing[-1], []).append(optimizer)
            else:
                self._note(optimizer)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._running = None

        with (
            mock.patch.object(Optimizer, "__init__", noting),
            register_optimizer_step_pre_hook(see),
            register_optimizer_step_post_hook(stepped),
            self._following_graphs(),
        ):
            yield

    @contextlib.contextmanager
    def _following_graphs(self) -> Iterator[None]:
        graph: Any = torch.cuda.CUDAGraph
        begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

        def capture(this: Any, *arguments: Any, **options: Any) -> None:
            begin(this, *arguments, **options)
            self._capturing.append(this)

        def finish(this: Any) -> None:
            if this in self._capturing:
                self._capturing.remove(this)
            end(this)

        def launch(this: Any) -> None:
            replay(this)
            for optimizer in self._captured.get(this, ()):
                self._note(optimizer)

        with mock.patch.multiple(graph, capture_begin=capture, capture_end=finish, replay=launch):
            yield

    def _note(self, optimizer: Optimizer) -> None:
        self._rounds.setdefault(optimizer, Counter())[self._steps // self._steps_of_round] += 1
        self.when_updating(optimizer)

    def during(self, steps: Steps) -> Steps:
        """Yield what ``steps`` yields, and check after the last step how often optimizers stepped.

        Raises:
            CheckFailed: gradients are accumulated over another number of steps than the case says.
        """
        self._rounds.clear()  # Updates that were made so far belong to the build.
        for update in steps:
            yield update
            self._steps += 1
            self._running = None  # An update that has raised an exception may have left this set.
        self.check()

    def check(self) -> None:
        """Check how often optimizers have stepped.

        Raises:
            CheckFailed: as of `during`.
        """
        name, size = self._name, self._steps_of_round
        rounds = range(self._steps // size)
        if not rounds:
            return
        each = [[stepped[number] for number in rounds] for stepped in self._rounds.values()]
        if not any(map(any, each)):
            if not any(map(_has_gradients, self._made)):
                return
            each = [[0] * len(rounds)]
        most = min(map(max, each))
        if size > 1 and most > 1:
            raise CheckFailed(
                f"the optimizer of {name} stepped {most} times in {size} steps, but its case says that gradients are "
                f"accumulated over {size} steps: yield after each micro-batch, or leave gradient_accumulation out"
            )
        for stepped in each if len(each) <= _FEW else [[sum(column) for column in zip(*each, strict=True)]]:
            updating = sum(map(bool, stepped))
            if (self._counts and not all(stepped[:_COUNTED_ROUNDS])) or 2 * updating < len(rounds):
                one = "the" if len(each) == 1 else "an"
                what = "steps" if size == 1 else f"rounds of {size} steps"
                if not updating:
                    raise CheckFailed(
                        f"{one} optimizer of {name} never stepped in {len(rounds)} {what}, so nothing trains: call "
                        "optimizer.step(), or set gradient_accumulation to the number of steps from one update to the next"
                    )
                raise CheckFailed(
                    f"{one} optimizer of {name} stepped in {updating} of {len(rounds)} {what}, so memory and time would not "
                    "be those of steps that train: set gradient_accumulation to the number of steps from one update to the "
                    "next, or yield once for each update"
                )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(value.grad is not None for group in optimizer.param_groups for value in group["params"])
