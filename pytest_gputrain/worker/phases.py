"""Follows which phase of training runs, for memory that is counted on a CPU and on an emulated GPU alike."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pytest_gputrain.records import TrainingPhase
from pytest_gputrain.worker.emulated_values.autograd_lines import is_in_backward


class Phases:
    """Finds the phase of training that runs. It is called before each operator.

    Optimizers are those of torch and what derives from them. An optimizer that steps inside of a backward pass is the
    optimizer's phase; a backward pass inside of an optimizer's step (its closure) is the backward phase.

    Args:
        entered: gets each phase when it begins.

    Attributes:
        current: the phase that runs.
        thread: the thread that trains.
        in_steps: whether a step has begun whose memory is judged.
        first_step_began: tells whether a generator takes the step before its first ``yield``, which is not judged; None
            if that is not known. There is none for other code, which takes its first step in `begin_step`.
    """

    def __init__(self, entered: Callable[[TrainingPhase], None]) -> None:
        self.current: TrainingPhase = "build"
        self._entered = entered
        self.thread = threading.get_ident()
        self.in_steps = False
        self.first_step_began: Callable[[], bool | None] | None = None
        self._is_beside_steps = False
        """Whether something runs beside the steps, all of which is one phase."""
        self._outside: TrainingPhase = "forward"
        """The phase outside of backward passes and optimizers."""
        self._task = (-1, False)
        """The number of the last backward pass in a thread of autograd, and whether it is that of the thread that trains."""
        self._optimizers: list[int] = []
        """The optimizers that step now, by the backward pass that they step in."""

    def __enter__(self) -> Phases:
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin_step(self) -> None:
        """Note that a step of training starts in this thread."""
        self.thread = threading.get_ident()
        self.in_steps = True
        self._is_beside_steps = False
        self._outside = "forward"
        self._optimizers.clear()
        self._enter("forward")

    def begin_beside_steps(self, phase: TrainingPhase) -> None:
        """Note that an evaluation or a checkpoint runs from now on, until another step or phase begins."""
        self._is_beside_steps = True
        self._enter(phase)

    def follow(self) -> None:
        """Update the phase that runs. Operators of other threads belong to the phase of the thread that trains."""
        if self._is_beside_steps or not self._is_training() or (self.current == "build" and not self._has_begun()):
            return
        # torch has one number for a whole backward pass, also between the nodes of the pass.
        backward = torch._C._current_graph_task_id()
        phase = self._outside
        if self._optimizers and self._optimizers[-1] == backward:
            phase = "optimizer"
        elif backward != -1:
            phase, self._outside = "backward", "between"
        if phase != self.current:
            self._enter(phase)

    def _has_begun(self) -> bool:
        """Tell whether the build is over. If nothing else tells, it ends when a gradient is computed or applied."""
        if self.first_step_began is None:
            return False
        if threading.get_ident() == self.thread and (began := self.first_step_began()) is not None:
            return began
        return bool(self._optimizers) or torch._C._current_graph_task_id() != -1

    def _enter(self, phase: TrainingPhase) -> None:
        self.current = phase
        self._entered(phase)

    def _optimizer_begins(self, *_: Any) -> None:
        if self._is_training():
            self._optimizers.append(torch._C._current_graph_task_id())

    def _optimizer_ends(self, *_: Any) -> None:
        if self._is_training() and self._optimizers:
            self._optimizers.pop()

    def _is_training(self) -> bool:
        """Tell whether this is the thread that trains, or the one in which autograd runs its backward pass on a GPU."""
        thread, task = threading.get_ident(), torch._C._current_graph_task_id()
        if thread == self.thread:
            return True
        if task == -1 or _is_pythons(thread):
            return False
        if task != self._task[0]:
            self._task = task, is_in_backward(sys._current_frames().get(self.thread))
        return self._task[1]


def _is_pythons(thread: int) -> bool:
    """Tell whether Python started the thread of this number."""
    known = threading._active.get(thread)  # type: ignore[attr-defined]
    return known is not None and not isinstance(known, threading._DummyThread)
