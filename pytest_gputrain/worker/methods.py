"""What trains, and in which storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from pytest_gputrain.worker.precision import Precision

LORA_RANK: Final = 8
LORA_ALPHA: Final = 16
LORA_DROPOUT: Final = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptation:
    """A model made ready to be trained."""

    model: nn.Module
    trainable_parameters: int | None
    """What the method should leave trainable; None for everything."""


Method = Callable[[nn.Module, Sequence[str], int, Precision], Adaptation]
"""(model, names of the adapted linear layers, trainable count of the adapters, precision) -> adapted model."""


def full(model: nn.Module, targets: Sequence[str], adapters: int, precision: Precision) -> Adaptation:
    """All parameters, in the precision's storage, with optimizer states of the same type (no master copy)."""
    return Adaptation(model=model, trainable_parameters=None)


def lora(model: nn.Module, targets: Sequence[str], adapters: int, precision: Precision) -> Adaptation:
    """LoRA (arXiv:2106.09685) of rank 8, alpha 16, dropout 0.05 on all linear layers of the blocks, by peft.

    peft keeps the adapters of a half-precision model in fp32.
    """
    import peft

    config = peft.LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=LORA_DROPOUT, bias="none", target_modules=list(targets)
    )
    adapted: Any = peft.get_peft_model(model, config)
    return Adaptation(model=adapted, trainable_parameters=adapters)


def qlora(model: nn.Module, targets: Sequence[str], adapters: int, precision: Precision) -> Adaptation:
    """QLoRA (arXiv:2305.14314): LoRA over linear layers stored as NF4 with double quantisation, by bitsandbytes.

    The head and the embeddings keep the precision's storage. Weights are quantised where they lie, one layer after the
    other, so the build needs hardly more than the unquantised model.
    """
    _quantise(model, set(targets), precision.compute)
    # What transformers sets on a model that it loads in 4 bits: peft then takes its own 4-bit layer.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return lora(model, targets, adapters, precision)


def _quantise(model: nn.Module, targets: set[str], compute: torch.dtype) -> None:
    # Names, not layers: whatever holds on to a layer keeps its unquantised weight alive.
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in targets and isinstance(child, nn.Linear)
    ]
    for parent, name in places:
        setattr(parent, name, _quantised(getattr(parent, name), compute))


def _quantised(linear: nn.Linear, compute: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    quantised: nn.Module = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=compute,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    quantised.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=quantised
    )
    if linear.bias is not None:
        quantised.bias = nn.Parameter(linear.bias.data, requires_grad=False)
    # Moving to its device is what makes bitsandbytes quantise a weight.
    return quantised.to(linear.weight.device)


METHODS: Final[dict[str, Method]] = {"full": full, "lora": lora, "qlora": qlora}
