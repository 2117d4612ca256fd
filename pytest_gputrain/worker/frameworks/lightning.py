"""Runs the loop of Lightning's Trainer, of the package lightning or pytorch_lightning."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from pytest_gputrain.records import Case
from pytest_gputrain.worker.frameworks.stepping import Stepping, refuse_other
from pytest_gputrain.worker.loop import Steps
from pytest_gputrain.worker.loops import FIRST_BATCHES, MOST_BATCHES, Beside, See

_LEFT_OUT: Final = (
    "Checkpoint",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelSummary",
    "ProgressBar",
    "Timer",
)
"""Callbacks that do no training, or end it; classes that derive from them count, too. Some fail without a logger, or without
validation."""


class TrainerLoop:
    """Runs a Trainer of Lightning until no more steps are wanted. A step is one micro-batch.

    Args:
        fit: the Trainer, and then the arguments of its ``fit``.
    """

    def __init__(
        self,
        fit: tuple[Any, ...],
        case: Case,
        watch: Callable[[nn.Module], None],
        note: Callable[[Any], None],
        see: See,
        beside: Beside,
    ) -> None:
        self._trainer, *self._arguments = fit
        self._case, self._watch, self._note, self._see = case, watch, note, see
        theirs = self._trainer.accumulate_grad_batches
        said = f"{case.model} returned a Trainer with accumulate_grad_batches={theirs}"
        refuse_other(case, "gradient_accumulation", theirs, said)
        self._beside = beside

    def run(self, steps: Steps) -> None:
        trainer = self._trainer
        if saving := trainer.checkpoint_callbacks:
            weights_only = getattr(saving[0], "save_weights_only", False)
            save = functools.partial(trainer.save_checkpoint, weights_only=weights_only)
            self._beside.save = self._beside.save or (lambda folder: save(folder / "last.ckpt"))
        self._silence(trainer)
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None
        trainer.fit_loop.max_epochs = 1 if self._case.epoch else -1
        trainer.fit_loop.epoch_loop.max_steps = -1
        stepping = Stepping(self._case, steps, self._watch, self._note, self._see)
        trainer.callbacks.append(_callback(trainer, self._case, stepping, self._begin))
        trainer.fit(*self._arguments)
        stepping.end()

    @staticmethod
    def _silence(trainer: Any) -> None:
        """Switch off all that is not training: logs, checkpoints, validation and progress bars."""
        trainer.loggers = []
        trainer.check_val_every_n_epoch = sys.maxsize
        trainer.val_check_interval = 1.0
        trainer._val_check_time_interval = None
        trainer.num_sanity_val_steps = 0
        trainer.callbacks[:] = [
            callback
            for callback in trainer.callbacks
            if not any(kind.__name__ in _LEFT_OUT for kind in type(callback).__mro__)
        ]

    def _begin(self) -> None:
        """Note that the training begins, and whether the trainer validates."""
        if self._trainer.enable_validation and self._beside.evaluate is None:
            self._beside.evaluate, self._beside.prepare = self._validate, self._let_gradients_go

    def _let_gradients_go(self) -> None:
        """Free the gradients before a validation, as the trainer does."""
        if not self._trainer.fit_loop.epoch_loop._should_accumulate():
            self._trainer.lightning_module.on_validation_model_zero_grad()

    def _validate(self) -> None:
        """Validate as the trainer does between two steps, on the first batches of each loader."""
        trainer = self._trainer
        loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
        loop.setup_data()
        if any(number > MOST_BATCHES for number in loop._max_batches):
            self._beside.notes = (FIRST_BATCHES,)
            loop._max_batches = [min(number, MOST_BATCHES) for number in loop._max_batches]
        first_iteration = connector._first_loop_iter
        trainer.validating = True
        loop.run()
        trainer.training = True
        connector._first_loop_iter = first_iteration


def _callback(trainer: Any, case: Case, stepping: Stepping, begin: Callable[[], None]) -> Any:
    """Return a callback from the same package as the trainer.

    Args:
        begin: is called when the training begins.
    """
    package = type(trainer).__module__.partition(".")[0]
    module = "lightning.pytorch" if package == "lightning" else "pytorch_lightning"
    base: Any = importlib.import_module(module).Callback

    class SteppingCallback(base):  # type: ignore[misc]  # which is known when the trainer is
        """Resumes the measurement after each micro-batch, and ends the training when it is over."""

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            theirs = getattr(trainer.train_dataloader, "batch_size", None)
            if theirs is not None:
                refuse_other(case, "batch_size", theirs, f"the loader of {case.model} has batches of {theirs}")
            begin()
            trainer.should_stop |= not stepping.begin(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            stepping.see(batch)
            trainer.should_stop |= not stepping.stepped(loss)

    return SteppingCallback()
