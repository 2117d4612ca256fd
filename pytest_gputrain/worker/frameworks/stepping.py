"""Resumes a measurement from the callbacks of a framework's trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_gputrain.records import Case
from pytest_gputrain.worker.checks import CheckFailed, ended
from pytest_gputrain.worker.loop import Steps
from pytest_gputrain.worker.loops import See


class Stepping:
    """Connects a trainer's callbacks with the measurement, which is resumed after each micro-batch.

    Args:
        watch: lets the worker know the model.
        note: is called with the loss of each micro-batch.
        see: is called with each batch, before the next one is asked for.
    """

    def __init__(
        self, case: Case, steps: Steps, watch: Callable[[nn.Module], None], note: Callable[[Any], None], see: See
    ) -> None:
        self._case, self._steps, self._watch, self._note = case, steps, watch, note
        self.see = see
        self._wants_more = True
        self._taken = 0

    def begin(self, model: nn.Module) -> bool:
        """Note that the first micro-batch comes next, and return whether it is wanted."""
        self._watch(model)
        return self._resumed()

    def stepped(self, loss: Any) -> bool:
        """Note that a micro-batch is over, and return whether another one is wanted.

        Args:
            loss: as the trainer has divided it by the accumulation; None if it is not known.
        """
        self._taken += 1
        self._note(None if loss is None else loss * self._case.gradient_accumulation)
        return self._resumed()

    def end(self) -> None:
        """Note that the trainer has ended.

        Raises:
            CheckFailed: more micro-batches were wanted.
        """
        if self._wants_more:
            raise ended(self._case.model, self._taken)

    def _resumed(self) -> bool:
        self._wants_more = self._wants_more and next(self._steps, None) is not None
        return self._wants_more


def refuse_other(case: Case, knob: str, theirs: Any, said: str) -> None:
    """Raise an error if a trainer trains with other settings than its case says.

    Args:
        theirs: the trainer's value for the knob.
        said: the trainer's setting, as the beginning of a sentence.

    Raises:
        CheckFailed: the case has something else.
    """
    ours = getattr(case, knob)
    if ours != theirs:
        raise CheckFailed(f"{said}, and its case has {knob}={ours}; give check() {knob}={theirs}")
