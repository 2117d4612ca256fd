"""Prepares a model for its training method: which parameters train, and how the frozen ones are stored."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from pytest_gputrain.cases.architectures.facts import Architecture, Lora
from pytest_gputrain.cases.validation import ADAPTING
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.worker.precision import PRECISIONS, Precision


def adapt(model: nn.Module, architecture: Architecture, case: Case, precision: Precision) -> nn.Module:
    """Return ``model`` ready to be trained by the case's method.

    ``lora`` and ``qlora`` put adapters on it. Of the others some train what the architecture lists for them and freeze the
    rest; the rest train everything, in the precision's storage, with optimizer states of the same type (no master copy).
    """
    if case.method in ADAPTING:
        assert architecture.lora is not None, "a model with the method has the recipe"
        recipe = architecture.lora
        rank = case.lora_rank or recipe.rank
        if case.method == "lora":
            return _lora(model, recipe, rank)
        return _qlora(model, recipe, rank, PRECISIONS.get(case.quantized_compute, precision).compute)
    trained = architecture.trains.get(case.method)
    if trained is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(trained)))
    return model


def trainable_parameters(architecture: Architecture, case: Case, scale: Scale) -> int | None:
    """Return how many parameters the case's method should leave trainable; None where that is not known."""
    count = architecture.trainable[case.method].get(scale)
    if count is None or architecture.lora is None or not case.lora_rank or case.method not in ADAPTING:
        return count
    return count // architecture.lora.rank * case.lora_rank


def _lora(model: nn.Module, recipe: Lora, rank: int) -> nn.Module:
    """LoRA (arXiv:2106.09685) by peft, which keeps the adapters of a half-precision model in fp32."""
    import peft

    targets = recipe.targets or default_targets(model)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=recipe.alpha * rank // recipe.rank,
        lora_dropout=recipe.dropout,
        bias="none",
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    with warnings.catch_warnings():
        # It tells of names that it has itself translated for experts, and of weights that GPT-2 keeps transposed.
        warnings.filterwarnings("ignore", module=r"peft\.")
        adapted: nn.Module = peft.get_peft_model(model, config)  # type: ignore[no-untyped-call, unused-ignore]
    return adapted


def default_targets(model: nn.Module) -> tuple[str, ...] | str:
    """Return what peft adapts of such a model by default, or else all linear layers but the head."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    config: Any = getattr(model, "config", None)
    return (
        tuple(TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(getattr(config, "model_type", ""), ())) or "all-linear"
    )


def _qlora(model: nn.Module, recipe: Lora, rank: int, compute: torch.dtype) -> nn.Module:
    """QLoRA (arXiv:2305.14314): LoRA over linear layers stored as NF4 with double quantisation, by bitsandbytes.

    The head and the embeddings keep the precision's storage. Weights are quantised where they lie, one layer after the
    other, so the build needs hardly more than the unquantised model.
    """
    _quantise(model, compute)
    # What transformers sets on a model that it loads in 4 bits: peft then takes its own 4-bit layer.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return _lora(model, recipe, rank)


def _quantise(model: nn.Module, compute: torch.dtype) -> None:
    """Pack all linear layers but the head, whatever adapters are on, as transformers does on loading in 4 bits."""
    whole: Any = model
    head = whole.get_output_embeddings()
    # Names, not layers: whatever holds on to a layer keeps its unquantised weight alive.
    layers = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not head
    ]
    del head
    for parent, name in layers:
        setattr(parent, name, _quantised(getattr(parent, name), compute))


def _quantised(linear: nn.Linear, compute: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    quantised: Any = bnb.nn.Linear4bit(
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
    module: nn.Module = quantised.to(linear.weight.device)
    return module
