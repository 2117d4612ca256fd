"""Implements the engine single: one process, nothing spread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gputrain.worker.parallel.engine import Engine, EngineOptions


class Single(Engine):
    """Autocast, scaled loss and optimizer around the plain model: what the engines of torch have in common."""

    def __init__(self, model: nn.Module, options: EngineOptions) -> None:
        self.model = self.spread(model, options)
        self.updates = 0
        self._precision = options.precision
        self._device = options.device
        self._accumulation = options.case.gradient_accumulation
        self._optimizer = options.make_optimizer(value for value in self.model.parameters() if value.requires_grad)
        self._scaler = self.scaler(options)

    def spread(self, model: nn.Module, options: EngineOptions) -> nn.Module:
        """The model as this engine runs it."""
        return model

    def scaler(self, options: EngineOptions) -> torch.amp.GradScaler:
        """Scales the loss where the precision wants it."""
        return options.precision.scaler(options.device)

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
