"""Runs the loop of Lightning's Trainer, of the package lightning or pytorch_lightning."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from pytest_gputrain.records import Case
from pytest_gputrain.worker.frameworks.stepping import Stepping, refuse_other
from pytest_gputrain.worker.loop import Steps
from pytest_gputrain.worker.loops import See

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
    """Has a Trainer take steps until no more are asked for. A step is one micro-batch.

    Args:
        fit: the Trainer, and then the arguments of its ``fit``.
    """

    def __init__(
        self, fit: tuple[Any, ...], case: Case, watch: Callable[[nn.Module], None], note: Callable[[Any], None], see: See
    ) -> None:
        self._trainer, *self._arguments = fit
        self._case, self._watch, self._note, self._see = case, watch, note, see
        theirs = self._trainer.accumulate_grad_batches
        said = f"{case.model} returned a Trainer with accumulate_grad_batches={theirs}"
        refuse_other(case, "gradient_accumulation", theirs, said)

    def run(self, steps: Steps) -> None:
        trainer = self._trainer
        self._silence(trainer)
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None
        trainer.fit_loop.max_epochs = -1
        trainer.fit_loop.epoch_loop.max_steps = -1
        stepping = Stepping(self._case, steps, self._watch, self._note, self._see)
        trainer.callbacks.append(_callback(trainer, self._case, stepping))
        trainer.fit(*self._arguments)
        stepping.end()

    @staticmethod
    def _silence(trainer: Any) -> None:
        """Leave out what is no training: logs, checkpoints, validation and progress bars."""
        trainer.loggers = []
        trainer.limit_val_batches = 0
        trainer.num_sanity_val_steps = 0
        trainer.callbacks[:] = [
            callback
            for callback in trainer.callbacks
            if not any(kind.__name__ in _LEFT_OUT for kind in type(callback).__mro__)
        ]


def _callback(trainer: Any, case: Case, stepping: Stepping) -> Any:
    """Return a callback, of the package that the trainer is of."""
    package = type(trainer).__module__.partition(".")[0]
    module = "lightning.pytorch" if package == "lightning" else "pytorch_lightning"
    base: Any = importlib.import_module(module).Callback

    class SteppingCallback(base):  # type: ignore[misc]  # which is known when the trainer is
        """Resumes the measurement after each micro-batch, and ends the training when it is over."""

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            theirs = getattr(trainer.train_dataloader, "batch_size", None)
            if theirs is not None:
                refuse_other(case, "batch_size", theirs, f"the loader of {case.model} has batches of {theirs}")
            trainer.should_stop |= not stepping.begin(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            stepping.see(batch)
            trainer.should_stop |= not stepping.stepped(loss)

    return SteppingCallback()
