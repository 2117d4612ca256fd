"""Makes the optimizers that a case can name, each by its library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.device import is_gpu

MakeOptimizer = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
"""A function that makes an optimizer from the parameters that train and their learning rate."""


def _adamw_8bit(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Return AdamW with states of 8 bits in blocks of 256. States of less than 4,096 elements are in fp32."""
    import bitsandbytes

    _check_release(parameters)
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=rate)
    return optimizer


def _check_release(parameters: list[nn.Parameter]) -> None:
    """Check that bitsandbytes can update on this device.

    Raises:
        CheckFailed: without a GPU, the installed bitsandbytes cannot update: earlier releases called CUDA's functions
            themselves, and registered no operator with torch.
    """
    import bitsandbytes

    name = "optimizer_update_8bit_blockwise"
    if any(value.is_cuda for value in parameters):
        return
    known = hasattr(torch.ops.bitsandbytes, name)
    if not known or not torch._C._dispatch_has_kernel_for_dispatch_key(f"bitsandbytes::{name}", "CPU"):
        raise CheckFailed(
            f"bitsandbytes {bitsandbytes.__version__} has optimizers for GPUs only, so a CPU cannot use "
            "them; install 0.50.2 or newer"
        )


def _paged_adamw_8bit(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Return AdamW of 8 bits with its states in CUDA's unified memory, or in plain memory on a CPU."""
    import bitsandbytes

    if not any(is_gpu(value.device) for value in parameters):
        return _adamw_8bit(parameters, rate)
    _check_release(parameters)
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.PagedAdamW8bit(parameters, lr=rate)
    return optimizer


def _adafactor(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Return Adafactor as transformers' Trainer makes it, with steps of the learning rate and not relative to the
    weights."""
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
"""The functions by the case's ``optimizer``."""
