"""Defines the interface of engines: what every way of spreading a training offers to the loop."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gputrain.records import Case
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.precision import Precision

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """All that an engine is made from, except the model."""

    case: Case
    precision: Precision
    device: torch.device
    group: Group
    shrinkage: float
    """Parameters of the model over those at full size: communication buffers shrink with it."""
    blocks: list[nn.Module]
    """The model's repeated blocks, first to last: what sharding treats as units."""
    deepspeed: Mapping[str, Any]
    """Further options of the engines of DeepSpeed."""
    make_optimizer: MakeOptimizer
    """The function that makes the optimizer from the parameters that train."""


class Engine(abc.ABC):
    """Runs the steps of a model.

    Attributes:
        model: the module that the loss calls.
        updates: optimizer updates so far.
        remote_tensors: trained tensors of the model that other processes hold, and check.
        forward_is_local: whether the forward pass needs no other process.
    """

    model: nn.Module
    updates: int
    remote_tensors: int = 0
    forward_is_local: bool = False

    @abc.abstractmethod
    def __init__(self, model: nn.Module, options: EngineOptions) -> None:
        """Take the model as its method left it, on the device."""

    @abc.abstractmethod
    def step(self, loss: Callable[[], Tensor], update: bool) -> Tensor:
        """Train on one micro-batch and return its detached loss.

        Args:
            loss: runs the forward pass of ``model``.
            update: let the optimizer act at the end.
        """

    def leave(self) -> None:  # noqa: B027 - most engines have nobody to tell
        """End the training: no more steps will come.

        Raises:
            CheckFailed: a tensor that another process holds was not trained.
        """
