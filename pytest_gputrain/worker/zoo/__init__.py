"""The models: one module a family, built from architecture facts with random weights (nothing is downloaded)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from pytest_gputrain.architectures import Architecture
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.worker.zoo import language


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How the models of one family are built, fed and scored."""

    build: Callable[[Architecture, Case, Scale], nn.Module]
    """On the default device and in the default dtype that the caller has set, in training mode, not yet adapted."""
    batch: Callable[[nn.Module, Case, Scale, torch.device], dict[str, Tensor]]
    """One batch on the device; every step trains on it."""
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
    """Scalar loss of a batch."""


FAMILIES: Final = {"language": Family(build=language.build, batch=language.batch, loss=language.loss)}
