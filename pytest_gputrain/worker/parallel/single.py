"""Implements the engine single: one process, nothing spread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gputrain.worker.learning_rate import is_scheduled, scheduler
from pytest_gputrain.worker.parallel.engine import Engine, EngineOptions
from pytest_gputrain.worker.parallel.master_weights import MasterWeights


class Single(Engine):
    """The part that the engines of torch share: autocast, a scaled loss and an optimizer around the plain model."""

    def __init__(self, model: nn.Module, options: EngineOptions) -> None:
        self.model = self.spread(model, options)
        self.updates = 0
        self._precision = options.precision
        self._device = options.device
        self._accumulation = options.case.gradient_accumulation
        trained = [value for value in self.model.parameters() if value.requires_grad]
        self._masters = MasterWeights(trained) if options.case.master_weights else None
        self._optimizer = options.make_optimizer(self._masters.parameters if self._masters else trained)
        self._scaler = self.scaler(options)
        self._rate = scheduler(options.case, self._optimizer) if is_scheduled(options.case) else None
        self._most_norm = options.case.max_grad_norm
        # The scaler does not call an optimizer whose update it drops, so this counts updates that are made. Only a fused
        # optimizer is called and drops the update itself. Comparing the scale before and after would make the host wait for
        # the GPU.
        self._optimizer.register_step_post_hook(self._count_update)

    def _count_update(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        self.updates += 1

    def spread(self, model: nn.Module, options: EngineOptions) -> nn.Module:
        """Return the model in the wrapper of this engine."""
        return model

    def scaler(self, options: EngineOptions) -> torch.amp.GradScaler:
        """Return the scaler of the loss that the precision needs."""
        return options.precision.scaler(options.device)

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass."""
        return self._precision.casting(self._device)

    def communicating(self, update: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a micro-batch. Gradients are exchanged only for an update."""
        return contextlib.nullcontext()

    def step(self, loss: Callable[[], Tensor], update: bool) -> Tensor:
        with self.communicating(update):
            with self.casting():
                value = loss()
            self._scaler.scale(value / self._accumulation).backward()
        if update:
            before = self.updates
            if self._most_norm:
                self._clip()
            self._scaler.step(self._optimizer)
            self._scaler.update()
            if self._masters:
                self._masters.round()
            if self.updates > before and self._rate is not None:
                self._rate.step()
            self._optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def _clip(self) -> None:
        self._scaler.unscale_(self._optimizer)
        trained = [value for group in self._optimizer.param_groups for value in group["params"]]
        nn.utils.clip_grad_norm_(trained, self._most_norm)
