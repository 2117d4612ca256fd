"""Follows the memory of a training's steps, up to the end of the user's loop if that is asked for."""

from __future__ import annotations

import gc
from typing import Final

from torch import Tensor

from pytest_gputrain.records.step_memory import OfStep, folded
from pytest_gputrain.worker.allocations import AllocationCounter
from pytest_gputrain.worker.case_run import CaseRun
from pytest_gputrain.worker.checks import CheckFailed, LoopEnded
from pytest_gputrain.worker.growth import Growth
from pytest_gputrain.worker.loop import Steps
from pytest_gputrain.worker.trace import taken
from pytest_gputrain.worker.training import OwnCodeTraining

_MOST_STEPS: Final = 1_000
"""The steps of an epoch."""


class StepMemory:
    """The memory of each step so far."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self.counter: AllocationCounter | None = None
        """Tells the memory of a step from the warm-up on; None if the device does, or nobody."""
        self.of_steps: list[OfStep] = []
        self.late_growth = ""
        """The note on what steps keep now and then."""

    def begin_step(self) -> None:
        """Note that a step is to begin."""
        if self.counter:
            self.counter.begin_step()
        else:
            self._run.device.of_step()

    def end_step(self) -> OfStep | None:
        """Note the memory of the step that has ended, and return it."""
        if self.counter:
            gc.collect()
        memory = self.counter.of_step() if self.counter else self._run.device.of_step()
        self.note(memory)
        return memory

    def note(self, memory: OfStep | None) -> None:
        """Record the memory of a step that is over, without the losses that the worker keeps; None if it is unknown."""
        if memory is None:
            return
        losses = self._run.training.losses
        kept = [taken(loss.nbytes, self._run.device.type) for loss in losses if isinstance(loss, Tensor)]
        # The step makes its own loss at its end, so that loss is not in the peak.
        self.of_steps.append(OfStep(memory.peak - sum(kept[:-1]), memory.end - sum(kept)))

    def follow(self, growth: Growth, counter: AllocationCounter) -> Steps:
        """Run as many steps of own code as the case asks for, including those whose tensors were counted.

        Of the others it is counted how much memory they take: a later one may have a larger sample, or begin to keep more.
        """
        run, steps = self._run, self._run.whole_rounds(self._run.case.steps)
        counter.follow_sizes_only()
        gc.freeze()  # Without older objects each collection after a step is fast.
        rounds = (steps - len(self.of_steps)) // run.case.gradient_accumulation
        self.late_growth = yield from growth.follow(run.training, lambda: counter.live_bytes, rounds)
        gc.unfreeze()

    def to_the_end(self, growth: Growth) -> Steps:
        """Run all further steps of the user's loop and record their memory.

        Raises:
            CheckFailed: there are too many; or its steps keep more and more memory, or its optimizer steps otherwise than
                the case says.
        """
        training = self._run.training
        assert isinstance(training, OwnCodeTraining), "an epoch is one of own code"
        training.keeps_losses = False
        training.losses.clear()

        def finish() -> None:
            training.optimizer_steps.check()
            self._run.set(memory_of_steps=folded(self.of_steps))
            self._run.note(growth.judge_ends(len(self.of_steps)))

        # Steps of the checks have no figures, because modes of the checks keep tensors alive.
        self.of_steps += [OfStep(0, 0)] * (training.updates - len(self.of_steps))
        with self._run.may_fail(lambda error: "" if isinstance(error, LoopEnded) else None, finish):
            while training.updates < _MOST_STEPS:
                self.begin_step()
                yield True
                memory = self.end_step()
                growth.note_end(training, memory.end if memory else 0)
            raise CheckFailed(
                f"the loop of {self._run.case.model} has not ended after {_MOST_STEPS:,} steps, and epoch=True follows it "
                "to its end; give it fewer batches, or leave epoch out"
            )
