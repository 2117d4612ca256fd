"""Implements the engine ddp, torch's DistributedDataParallel: a whole model in each process, gradients averaged."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.parallel.engine import EngineOptions
from pytest_gputrain.worker.parallel.single import Single


class DataParallel(Single):
    """The engine ddp with torch's default size of buckets. Gradients are exchanged only for an update."""

    forward_is_local = True

    def spread(self, model: nn.Module, options: EngineOptions) -> nn.Module:
        return averaged(model, options.group)

    def communicating(self, update: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if update else self.model.no_sync()  # type: ignore[operator]


def averaged(model: nn.Module, group: Group) -> DistributedDataParallel:
    """Return the model with gradients averaged over the processes that train."""
    # Broadcasting buffers would make each process wait for the first one in every forward pass, although buffers are not
    # trained.
    return DistributedDataParallel(model, process_group=group.trainers, broadcast_buffers=False)
