"""Runs the loops of own code: a function that takes one step, a generator that yields after each, a framework's trainer."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from inspect import isgenerator
from pathlib import Path
from types import GeneratorType
from typing import Any, Final, Protocol

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pytest_gputrain.records import Case
from pytest_gputrain.worker.checks import CheckFailed, ended
from pytest_gputrain.worker.first_step import has_begun
from pytest_gputrain.worker.loop import Steps

FRAMEWORKS: Final = {
    "transformers.trainer.Trainer": "transformers",
    "lightning.pytorch.trainer.trainer.Trainer": "lightning",
    "pytorch_lightning.trainer.trainer.Trainer": "lightning",
}
"""Trainers by the full names of their classes, whose subclasses count too, and the module of `frameworks` that runs them."""

Note = Callable[[Any], None]
"""Called after each step with its loss, or with None."""
MOST_BATCHES: Final = 8
"""The batches of an evaluation that a framework's trainer takes, at most, from each of its data sets."""
FIRST_BATCHES: Final = f"the evaluation took the first {MOST_BATCHES} batches alone"
"""A note on an evaluation that has more."""
See = Callable[[object], None]
"""Called with the batch of each step of a framework's trainer."""


@dataclass
class Beside:
    """The evaluation and the checkpoint that a training has set."""

    evaluate: Callable[[], object] | None = None
    """Evaluates the model. None if the training does not, or nobody knows how."""
    prepare: Callable[[], object] = lambda: None
    """Lets go of what a trainer no longer has when it evaluates: the peak of an evaluation begins with what lives then."""
    save: Callable[[Path], object] | None = None
    """Saves a checkpoint in a folder; None if own code has set none."""
    notes: tuple[str, ...] = ()
    """Sentences on what of the evaluation is left out."""


class Loop(Protocol):
    """Runs the steps of a training as long as they are wanted."""

    def run(self, steps: Steps) -> None:
        """Resume ``steps`` before each step and after the last one.

        Raises:
            CheckFailed: the loop ends before ``steps`` does.
        """


def loop_of(
    built: object,
    case: Case,
    processes: int,
    watch: Callable[[nn.Module], None],
    note: Note,
    see: See,
    beside: Beside,
) -> Loop:
    """Return the loop for what a user's function has returned.

    Args:
        processes: of the case.
        watch: lets the worker know the model of a framework's trainer.
        see: lets it know the batches of one.
        beside: gets the evaluation and the checkpoint of a framework's trainer, unless the function has set others.

    Raises:
        CheckFailed: there is no way to train with it.
    """
    name = case.model
    if isgenerator(built):
        return GeneratorLoop(built, name, note)
    if framework := _framework_of(built):
        if processes > 1:
            raise CheckFailed(
                f"{name} returned a Trainer of {framework}, which starts several processes itself; measure one process of "
                "it, or write the loop with torch.distributed"
            )
        module = importlib.import_module(f"pytest_gputrain.worker.frameworks.{framework}")
        loop: Loop = module.TrainerLoop(built, case, watch, note, see, beside)
        return loop
    if not callable(built):
        raise CheckFailed(
            f"{name} returned {type(built).__name__}; it must build everything and return a function that runs one step, "
            f"yield after each step of its own loop, return a Trainer of transformers, or "
            "return (trainer, module, loader) of Lightning"
        )
    if case.epoch:
        raise CheckFailed(
            f"{name} returned a function that trains one step, so nothing tells where its epoch ends; yield after each step "
            "of its loop, or leave epoch out"
        )
    return FunctionLoop(built, note)


def _framework_of(built: object) -> str:
    """Return the framework of a trainer, for Lightning with the module that it fits; empty for anything else. No framework
    is imported."""
    trainer = built[0] if isinstance(built, tuple) and built else built
    names = (FRAMEWORKS.get(f"{kind.__module__}.{kind.__qualname__}") for kind in type(trainer).__mro__)
    framework = next(filter(None, names), "")
    return framework if isinstance(built, tuple) == (framework == "lightning") else ""


class FunctionLoop:
    """Calls a function that takes one step."""

    def __init__(self, step: Callable[[], object], note: Note) -> None:
        self._step, self._note = step, note

    def run(self, steps: Steps) -> None:
        for _ in steps:
            self._note(self._step())


class GeneratorLoop:
    """Resumes a generator that yields after each of its steps. Up to its first yield it builds everything and takes a first
    step, which does not count."""

    def __init__(self, generator: GeneratorType[object, Any, Any], name: str, note: Note) -> None:
        self._generator, self._name, self._note = generator, name, note
        self._taken = 0

    def run(self, steps: Steps) -> None:
        self._take()
        for _ in steps:
            self._note(self._take())
        self._generator.close()

    def first_step_began(self) -> bool | None:
        """Tell whether the generator's first step has begun, on the generator's own thread; None if that is unknown."""
        return has_begun(self._generator)

    def _take(self) -> object:
        modes = _get_current_dispatch_mode_stack()
        try:
            loss = next(self._generator)
        except StopIteration:
            if not self._taken:
                raise CheckFailed(f"the loop of {self._name} never yields; write `yield` after each step") from None
            raise ended(self._name, self._taken) from None
        opened = [mode for mode in _get_current_dispatch_mode_stack() if not any(mode is other for other in modes)]
        if opened:
            with contextlib.suppress(Exception):
                self._generator.close()  # Closing the generator leaves its `with` blocks.
            raise CheckFailed(
                f"the loop of {self._name} yields inside of {type(opened[-1]).__name__}, which would see what the "
                "measurement does; leave that context before the yield"
            )
        self._taken += 1
        return loss
