"""One process, nothing spread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gputrain.worker.parallel.engine import Engine, Setting


class Single(Engine):
    """Autocast, scaled loss and optimizer around the plain model: what the engines of torch have in common."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.model = self.spread(model, setting)
        self.updates = 0
        self._precision = setting.precision
        self._device = setting.device
        self._accumulation = setting.case.gradient_accumulation
        self._optimizer = setting.make_optimizer(value for value in self.model.parameters() if value.requires_grad)
        self._scaler = self.scaler(setting)

    def spread(self, model: nn.Module, setting: Setting) -> nn.Module:
        """The model as this engine runs it."""
        return model

    def scaler(self, setting: Setting) -> torch.amp.GradScaler:
        """Scales the loss where the precision wants it."""
        return setting.precision.scaler(setting.device)

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the forward pass."""
        return self._precision.casting(self._device)

    def communicating(self, update: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of a micro-batch: gradients are exchanged only for an update."""
        return contextlib.nullcontext()

    def step(self, loss: Callable[[], Tensor], update: bool) -> Tensor:
        with self.communicating(update):
            with self.casting():
                value = loss()
            self._scaler.scale(value / self._accumulation).backward()
        if update:
            scale = self._scaler.get_scale()
            self._scaler.step(self._optimizer)
            self._scaler.update()
            # The scaler shrinks its scale when it had to drop an update.
            self.updates += self._scaler.get_scale() >= scale
            self._optimizer.zero_grad(set_to_none=True)
        return value.detach()
