"""Makes the optimizers that a case can name, each by its library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from pytest_gputrain.worker.device import is_gpu

MakeOptimizer = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
"""From the parameters that train and their learning rate."""


def _adamw_8bit(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """AdamW with states of 8 bits in blocks of 256; those of less than 4,096 elements are in fp32."""
    import bitsandbytes

    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=rate)
    return optimizer


def _paged_adamw_8bit(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """The same with states in CUDA's unified memory; on a CPU, which has none, bitsandbytes warns and does not page."""
    import bitsandbytes

    if not any(is_gpu(value.device) for value in parameters):
        return _adamw_8bit(parameters, rate)
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.PagedAdamW8bit(parameters, lr=rate)
    return optimizer


def _adafactor(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Adafactor as transformers' Trainer makes it: its steps are of the learning rate, not relative to the weights."""
    from transformers.optimization import Adafactor

    optimizer: Any = Adafactor(parameters, lr=rate, scale_parameter=False, relative_step=False)
    return optimizer  # type: ignore[no-any-return]


OPTIMIZERS: Final[dict[str, MakeOptimizer]] = {
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
    "adamw-fused": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, fused=True),
    "adamw_8bit": _adamw_8bit,
    "paged_adamw_8bit": _paged_adamw_8bit,
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "adafactor": _adafactor,
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-4),
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
}
"""By the case's ``optimizer``."""
