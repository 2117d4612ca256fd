"""Runs the loop of transformers' Trainer, and so those of TRL, which derive from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

from torch import nn
from torch.utils.data import IterableDataset, Subset
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
)

from pytest_gputrain.records import Case
from pytest_gputrain.worker.frameworks.stepping import Stepping, refuse_other
from pytest_gputrain.worker.loop import Steps
from pytest_gputrain.worker.loops import FIRST_BATCHES, MOST_BATCHES, Beside, See

_ROUNDS_OF_CHECKS: Final = 12
"""Rounds of the accumulation that are taken, at most, beside those of the warm-up, of the timed steps, and of as many whose
memory is followed: counted ones, and those that look for memory that is kept."""
_SILENCED: Final = ("logging_strategy", "save_strategy", "eval_strategy")


class TrainerLoop:
    """Runs a Trainer of transformers until no more steps are wanted. A step is one micro-batch."""

    def __init__(
        self,
        trainer: Trainer,
        case: Case,
        watch: Callable[[nn.Module], None],
        note: Callable[[Any], None],
        see: See,
        beside: Beside,
    ) -> None:
        self._trainer, self._case, self._watch, self._note, self._see = trainer, case, watch, note, see
        arguments = trainer.args
        for knob, theirs in (
            ("gradient_accumulation", arguments.gradient_accumulation_steps),
            ("batch_size", arguments.per_device_train_batch_size),
        ):
            refuse_other(case, knob, theirs, f"{case.model} returned a Trainer with {knob} {theirs}")
        self._beside = beside
        if arguments.eval_strategy != "no" and trainer.eval_dataset is not None:
            beside.evaluate = beside.evaluate or self._evaluate
        if arguments.save_strategy != "no":
            beside.save = beside.save or self._save

    def run(self, steps: Steps) -> None:
        trainer, case = self._trainer, self._case
        self._silence()
        if case.epoch:
            trainer.args.num_train_epochs = 1
        updates = -1 if case.epoch else -(-(case.warmup + 2 * case.steps) // case.gradient_accumulation) + _ROUNDS_OF_CHECKS
        trainer.args.max_steps = max(trainer.args.max_steps, updates)
        stepping = Stepping(case, steps, self._watch, self._note, self._see)
        trainer.add_callback(_Callback(trainer, stepping))
        trainer.train()
        stepping.end()

    def _silence(self) -> None:
        """Switch off all that is not training: logs, checkpoints, evaluation, progress bars, and reports to other
        services."""
        trainer = self._trainer
        for strategy in _SILENCED:
            setattr(trainer.args, strategy, "no")
        trainer.args.load_best_model_at_end = False
        for callback in tuple(trainer.callback_handler.callbacks):
            reports = type(callback).__module__.startswith("transformers.integrations")
            if reports or isinstance(callback, (PrinterCallback, ProgressCallback, EarlyStoppingCallback)):
                trainer.remove_callback(callback)

    def _evaluate(self) -> None:
        """Evaluate as the Trainer does between two steps, on the first batches of each data set."""
        trainer, most = self._trainer, MOST_BATCHES * self._trainer.args.eval_batch_size
        first = _first_samples(trainer.eval_dataset, most)
        if first is not trainer.eval_dataset:
            self._beside.notes = (FIRST_BATCHES,)
        with mock.patch.object(trainer, "eval_dataset", first):
            trainer.evaluate()

    def _save(self, folder: Path) -> None:
        """Save a checkpoint as the Trainer does, in this folder."""
        trainer = self._trainer
        with mock.patch.multiple(trainer.args, output_dir=str(folder), push_to_hub=False):
            trainer._save_checkpoint(trainer.model, trial=None)


def _first_samples(dataset: Any, most: int) -> Any:
    """Return the first samples of a data set, or of each one in a mapping. A data set that is short or cannot be cut stays
    as it is."""
    if isinstance(dataset, dict):
        firsts = {name: _first_samples(part, most) for name, part in dataset.items()}
        return firsts if any(firsts[name] is not part for name, part in dataset.items()) else dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        if hasattr(dataset, "take"):
            return dataset.take(most)
        return _First(dataset, most) if isinstance(dataset, IterableDataset) else dataset
    if len(dataset) <= most:
        return dataset
    return dataset.select(range(most)) if hasattr(dataset, "select") else Subset(dataset, range(most))


class _First(IterableDataset):  # type: ignore[type-arg]
    """The first samples of an iterable data set."""

    def __init__(self, dataset: Any, most: int) -> None:
        self._dataset, self._most = dataset, most

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, self._most)


class _Callback(TrainerCallback):  # type: ignore[misc]  # of a library without types
    """Resumes the measurement after each micro-batch, and ends the training when it is over."""

    def __init__(self, trainer: Trainer, stepping: Stepping) -> None:
        self._trainer, self._stepping = trainer, stepping
        self._loss: Any = None
        take_step = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            stepping.see((args, kwargs))
            self._loss = take_step(*args, **kwargs)
            return self._loss

        trainer.training_step = training_step

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **others: Any) -> None:
        control.should_training_stop |= not self._stepping.begin(self._trainer.model)

    def on_substep_end(self, args: Any, state: Any, control: TrainerControl, **others: Any) -> None:
        loss, self._loss = self._loss, None
        control.should_training_stop |= not self._stepping.stepped(loss)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **others: Any) -> None:
        self.on_substep_end(args, state, control)
