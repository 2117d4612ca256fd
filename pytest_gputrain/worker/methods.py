"""Prepares a model for its training method: which parameters train, and how the frozen ones are stored."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from pytest_gputrain.cases.architectures.facts import Architecture, Lora
from pytest_gputrain.cases.validation import ALL_LINEAR
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.records.case import ADAPTING
from pytest_gputrain.utils.suggest import did_you_mean
from pytest_gputrain.worker.checks import CheckFailed, described
from pytest_gputrain.worker.precision import PRECISIONS, Precision


def stored(case: Case, precision: Precision) -> torch.dtype:
    """Return the type in which the case's model is built."""
    return precision.weights if case.unquantized_fp32 is None else precision.compute


def adapt(model: nn.Module, architecture: Architecture, case: Case, precision: Precision) -> nn.Module:
    """Return ``model`` ready to be trained by the case's method.

    ``lora`` and ``qlora`` put adapters on it. Of the others some train what the architecture lists for them and freeze the
    rest; the rest train everything, in the precision's storage, with optimizer states of the same type (no master copy).
    """
    if case.method in ADAPTING:
        assert architecture.lora is not None, "a model with the method has the recipe"
        if case.method == "qlora":
            # FSDP2 of older releases of torch converts all weights to the type of its mixed precision. Packed weights must
            # not be converted, so they are stored as that type, which bitsandbytes advises.
            storage = precision.compute if case.parallel == "fsdp" else torch.uint8
            _quantise(model, PRECISIONS.get(case.quantized_compute, precision).compute, storage)
            if case.unquantized_fp32:
                from peft import prepare_model_for_kbit_training

                # The case's own knobs decide whether blocks are recomputed, and by which variant.
                prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        return _with_adapters(model, recipe_of(architecture.lora, case), case)
    trained = architecture.trains.get(case.method)
    if trained is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(trained)))
    return model


def recipe_of(published: Lora, case: Case) -> Lora:
    """Return the recipe of a case: the model's published one, except for what the case sets."""
    rank = case.lora_rank or published.rank
    targets = case.lora_targets if case.lora_targets == ALL_LINEAR else tuple(filter(None, case.lora_targets.split("+")))
    return Lora(
        rank=rank,
        alpha=case.lora_alpha or published.alpha * rank // published.rank,
        dropout=published.dropout if case.lora_dropout is None else case.lora_dropout,
        targets=targets or published.targets,
    )


def trainable_parameters(architecture: Architecture, case: Case, scale: Scale) -> int | None:
    """Return how many parameters the case's method should train; None if that is unknown."""
    count = architecture.trainable[case.method].get(scale)
    if count is None or architecture.lora is None or case.method not in ADAPTING:
        return count
    if case.lora_targets or case.dora:
        return None
    return count // architecture.lora.rank * (case.lora_rank or architecture.lora.rank)


def _with_adapters(model: nn.Module, recipe: Lora, case: Case) -> nn.Module:
    """Add LoRA (arXiv:2106.09685) by peft, which keeps the adapters of a half-precision model in fp32."""
    import peft

    targets = recipe.targets or default_targets(model)
    if case.lora_targets:
        _check_targets(model, targets, case)
    config = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=recipe.dropout,
        bias="none",
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=not_adapted(model) or None,
        use_dora=case.dora,
    )
    with warnings.catch_warnings():
        # peft warns of names that it translates itself for experts, and of weights that GPT-2 keeps transposed.
        warnings.filterwarnings("ignore", module=r"peft\.")
        try:
            adapted: nn.Module = peft.get_peft_model(model, config)  # type: ignore[no-untyped-call, unused-ignore]
        except ValueError as error:
            raise CheckFailed(f"{case} cannot be adapted by peft {peft.__version__}: {described(error)}") from error
    return adapted


_STATE_SPACE: Final = frozenset({"falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h"})
_READ_PAST_THE_LAYER: Final = frozenset({"out_proj", "dt_proj"})
"""Layers whose weights a kernel reads, so that no adapter is in the product. peft refuses the first for most of these
models, and the second would get no gradient."""


def default_targets(model: nn.Module) -> tuple[str, ...] | str:
    """Return the layers that peft adapts by default in such a model; else all linear layers but the head."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    # If a language model was taken out of a vision-language model, the same layers are adapted as in that model.
    targets = known.get(kind) or known.get(kind.removesuffix("_text"))
    if isinstance(targets, str):
        pattern = targets
        targets = [
            name
            for name, _ in model.named_modules()
            if any(re.fullmatch(pattern, place) for place in (name, name.replace("model.", "model.language_model.", 1)))
        ]
    if targets:
        return tuple(targets)
    if kind not in _STATE_SPACE:
        return ALL_LINEAR
    whole: Any = model
    head = whole.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return tuple(sorted(linear - _READ_PAST_THE_LAYER))


_OF_TRANSFORMERS: Final = "transformers.models."


def left_as_they_are(model: nn.Module, architecture: Architecture, case: Case) -> tuple[str, ...]:
    """Say which linear layers get no adapters although the case adapts all, and which are not packed in 4 bits."""
    if case.method not in ADAPTING or architecture.lora is None:
        return ()
    notes = []
    all_adapted = (recipe_of(architecture.lora, case).targets or default_targets(model)) == ALL_LINEAR
    if all_adapted and (names := _without_numbers(not_adapted(model))):
        packed = " and are not packed in 4 bits" if case.method == "qlora" else ""
        notes.append(f"{names} get no adapters{packed}, because these layers are more than one matrix product")
    if case.method == "qlora" and (names := _without_numbers(_read_by_code(model))):
        notes.append(
            f"{names} are not packed in 4 bits, because the code of the model computes with their weights itself; list them "
            "in llm_int8_skip_modules of BitsAndBytesConfig"
        )
    return tuple(notes)


def _without_numbers(names: Sequence[str]) -> str:
    """Return names of layers without the numbers of their blocks, each once."""
    return ", ".join(dict.fromkeys(".".join(part for part in name.split(".") if not part.isdigit()) for name in names))


def not_adapted(model: nn.Module) -> list[str]:
    """Return the linear layers that can have neither adapters nor 4 bits, because they compute more than one product.

    The routers of Llama 4 give more than the product, the grouped projections of DeepSeek-V4 multiply each part of the
    input by another part of the weight, and the layer above the routers of DeepSeek-V2 reads their weight itself (in
    transformers 5.0; later releases have no linear layer there).
    """
    reads_weight = getattr(getattr(model, "config", None), "model_type", "") == "deepseek_v2"
    return [
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
        and ((reads_weight and name.endswith(".gate")) or (_is_of_a_model(each) and not _is_one_product(each)))
    ]


def _read_by_code(model: nn.Module) -> list[str]:
    """Return the linear layers whose weights the model's own code reads, as Gemma 3n clamps some."""
    found: list[str] = []
    sources: dict[type, str] = {}
    for prefix, parent in model.named_modules():
        layers = [name for name, child in parent.named_children() if isinstance(child, nn.Linear)]
        kind = type(parent)
        if layers and _is_of_a_model(parent):
            source = sources.get(kind) or inspect.getsource(kind)
            sources[kind] = source
            # Code that reads only the type or the shape of a weight also works with a packed weight.
            read = re.findall(r"self\.(\w+)\.weight\.(?!dtype|device|shape)", source)
            found += [f"{prefix}.{name}" for name in layers if name in read]
    return found


def _kept_by_transformers(model: nn.Module) -> list[str]:
    """Return the linear layers that transformers never packs, because their model class keeps them in fp32."""
    preferred = getattr(model, "_keep_in_fp32_modules", None) or ()
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    return [
        name
        for name in names
        if any(re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(key) for key in preferred)
    ]


def _is_of_a_model(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_OF_TRANSFORMERS)


def _is_one_product(layer: nn.Linear) -> bool:
    """Tell whether the output of a custom layer has the shape that `nn.Linear` would return. The values of its weights are
    not needed."""
    weights = {name: torch.empty_like(value, device="meta") for name, value in layer.named_parameters()}
    rows = torch.empty(1, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        product = torch.func.functional_call(layer, weights, (rows,))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return isinstance(product, torch.Tensor) and product.shape == (1, layer.out_features)


def _check_targets(model: nn.Module, targets: Sequence[str], case: Case) -> None:
    """Check that these names are names of linear layers.

    Raises:
        CheckFailed: no linear layer has one of these names. peft is content where one of several is found.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in () if targets == ALL_LINEAR else targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            known = sorted({last for name in names if not (last := name.rpartition(".")[2]).isdigit()})
            raise CheckFailed(
                f"{case} adapts {target!r}, but {case.model} has no linear layer of that name"
                f"{did_you_mean(target, known)}; it has {', '.join(known)}, and all-linear stands for all but the head"
            )


def _quantise(model: nn.Module, compute: torch.dtype, storage: torch.dtype) -> None:
    """Store all linear layers but the head as NF4 with double quantisation, by bitsandbytes, as QLoRA (arXiv:2305.14314).

    It does not matter which of them get adapters: transformers, too, packs all when it loads in 4 bits.

    The head and the embeddings keep the precision's storage. Weights are quantised where they lie, one layer after the
    other, so the build needs hardly more than the unquantised model.
    """
    from transformers import PreTrainedModel

    whole: Any = model
    head = whole.get_output_embeddings()
    unchanged = {*not_adapted(model), *_read_by_code(model), *_kept_by_transformers(model)}
    # The list has names and no layers, because a reference to a layer keeps its unquantised weight alive.
    layers = [
        (parent, name)
        for prefix, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not head and f"{prefix}.{name}" not in unchanged
    ]
    del head
    for parent, name in layers:
        setattr(parent, name, _quantised(getattr(parent, name), compute, storage))
    # transformers sets this when it loads a model in 4 bits. peft then takes its own 4-bit layer, and state-space models
    # call their layers instead of reading packed weights.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = True


def _quantised(linear: nn.Linear, compute: torch.dtype, storage: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    quantised: Any = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=compute,
        compress_statistics=True,
        quant_type="nf4",
        quant_storage=storage,
        device="meta",
    )
    quantised.weight = bnb.nn.Params4bit(
        linear.weight.data,
        requires_grad=False,
        compress_statistics=True,
        quant_type="nf4",
        quant_storage=storage,
        module=quantised,
    )
    if linear.bias is not None:
        quantised.bias = nn.Parameter(linear.bias.data, requires_grad=False)
    # bitsandbytes quantises a weight when it is moved to a device.
    module: nn.Module = quantised.to(linear.weight.device)
    return module
