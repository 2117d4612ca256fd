"""Validates a case, and says what is wrong with it in one sentence with its remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.architectures.facts import Architecture, architectures
from pytest_gputrain.cases.model_config import key_of_positions
from pytest_gputrain.records import Case
from pytest_gputrain.records.case import ADAPTING, KNOBS
from pytest_gputrain.records.knobs import Knob
from pytest_gputrain.utils.suggest import did_you_mean

EIGHT_BIT: Final = ("adamw_8bit", "paged_adamw_8bit")
"""Optimizers of bitsandbytes."""

OF_WHOLE_WEIGHTS: Final = (*EIGHT_BIT, "adafactor")
"""Optimizers whose states have other shapes than the weights, which shards of them do not keep."""

ALL_LINEAR: Final = "all-linear"
"""peft's name for all linear layers but the head."""

_BY_CUDA_GRAPHS: Final = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record CUDA graphs."""

_MASTERS_OF_ENGINES: Final = {
    "ddp": "which parallel='ddp' does not do; choose parallel='zero0', which does the same",
    "fsdp": "which parallel='fsdp' does not do; choose precision='bf16-amp', whose shards are fp32 masters of bf16 weights",
    "ps": "which parallel='ps' does not do; choose precision='bf16-amp'",
}
"""Why a parallelism has no ``master_weights``, as the rest of a sentence."""

SIZES: Final = {name: knob for name, knob in KNOBS.items() if knob.size}
"""Knobs that set the size of a model's inputs."""

_SCALED_LOGITS: Final = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Keys of models that change logits behind the head."""


def problem(case: Case, markers: Sequence[str]) -> str | None:
    """Return one sentence on the first reason why ``case`` cannot run, with its remedy; None if it can.

    Args:
        markers: the platform markers of the catalog, which lies in a higher package.
    """
    found = complaint(case, markers)
    return None if found is None else " ".join(f"the case {case} {found}".split())


def complaint(case: Case, markers: Sequence[str]) -> str | None:
    """Return the sentence of `problem` without its subject, the case."""
    platforms: Any = case.platforms
    if isinstance(platforms, str):
        return f"takes a list of platforms: platforms=[{platforms!r}]"
    try:
        msgspec.convert(msgspec.structs.asdict(case), Case)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        return _wrong_type(case, str(error))
    if case.code:
        for field, knob in _changed(case):
            if knob.own_code:
                return f"asks for {field}, {knob.own_code}, and leave the knob out"
    if case.epoch and (not case.code or case.method == "script" or case.gpus > 1):
        return "asks for epoch, which only own code in one process has an end of; leave epoch out"
    if not case.code and case.args:
        return "has args, but they are for the function of own code; leave them out"
    if not case.code and not case.model:
        return f"names no model; known: {', '.join(architectures())}"
    return (
        _unknown_word(case, markers)
        or bad_value(case)
        or (None if case.code else _bad_model(case))
        or _bad_attention(case)
        or _bad_quantized_compute(case)
        or _bad_unquantized(case)
        or _bad_parallelism(case)
        or _bad_arithmetic(case)
    )


def _unknown_word(case: Case, markers: Sequence[str]) -> str | None:
    """Say which word of the case is unknown."""
    # The script itself decides its precision, so `precision` may be any word.
    own_words = ("method", "precision") if case.code and case.method == "script" else ("method",)
    methods = ("custom", "script") if case.code else KNOBS["method"].words
    method = ("method", case.method, methods)
    vocabulary: list[tuple[str, str, Iterable[str]]] = [
        *([] if case.code else [("model", case.model, architectures()), method]),
        *((name, getattr(case, name), knob.words) for name, knob in KNOBS.items() if knob.words and name not in own_words),
        *(("platform", platform, markers) for platform in case.platforms),
        *([method] if case.code else []),
    ]
    for field, value, names in vocabulary:
        choices = tuple(names)
        if value not in choices:
            hint = did_you_mean(value, choices)
            return f"names the unknown {field} {value!r}{hint}; known: {', '.join(filter(None, choices))}"
    return None


def _changed(case: Case) -> Iterator[tuple[str, Knob]]:
    """Yield the knobs that do not have their defaults."""
    return ((name, knob) for name, knob in KNOBS.items() if getattr(case, name) != knob.default)


_TYPES: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "str": "text",
    "array": "a tuple",
    "null": "None",
}


def _wrong_type(case: Case, error: str) -> str:
    """Say which field has a wrong type, from msgspec's error: ``has steps='ten'; it must be a whole number``."""
    found = re.fullmatch(r"Expected `([^`]*)`, got `[^`]*` - at `\$\.(\w+)(\S*)`", error)
    if found is None:
        return f"has a field of the wrong type: {error}"
    types, field, inside = found.groups()
    wanted = " or ".join(_TYPES.get(name, name) for name in types.split(" | "))
    return f"has {field}={getattr(case, field)!r}; {'each of them' if inside else 'it'} must be {wanted}"


def bad_value(case: Case) -> str | None:
    """Describe the first impossible value of ``case``, as the rest of a sentence."""
    for field, knob in KNOBS.items():
        value = getattr(case, field)
        if knob.type is int and value < knob.least:
            return f"has {field}={value}; it must be at least {knob.least}"
        if knob.accepts is not None and not knob.accepts(value):
            return f"has {field}={value!r}; it must {knob.must}"
    return None


def _bad_model(case: Case) -> str | None:
    """Say which setting the case's model lacks, or which one it needs."""
    architecture = architectures()[case.model]
    if case.method not in architecture.trainable:
        methods = ", ".join(architecture.trainable)
        return f"asks for the method {case.method!r}, which {case.model} does not have; it has {methods}"
    if complaint := _bad_part(case, architecture) or _bad_adapters(case, architecture):
        return complaint
    if "sequence_length" in architecture.needs and case.sequence_length == 1:
        return "has sequence_length=1; it must be at least 2"
    for field, knob in SIZES.items():
        if field in architecture.needs and not getattr(case, field):
            return f"sets no {field}, which {case.model} needs, as {field}={knob.size!r}"
        if field not in architecture.needs and getattr(case, field) and not (field == "resolution" and case.part == "all"):
            return f"sets {field}, which {case.model} does not have; leave it out"
    facts = architecture.trained_part
    key = None if facts.model_class else key_of_positions(facts.language)
    if key is not None and case.sequence_length > facts.language[key]:
        return (
            f"has sequence_length={case.sequence_length}, more than the {facts.language[key]:,} positions of {case.model} "
            f"({key}); shorten it, or raise that key in the config.json"
        )
    if complaint := _bad_input(case, architecture):
        return complaint
    family, is_of_library = architecture.family, facts.library != "own"
    chunked = family == "language" and is_of_library and not any(map(facts.language.get, _SCALED_LOGITS))
    asked: tuple[tuple[str, object, object], ...] = (
        (f"loss={case.loss!r}", case.loss, family in ("language", "vision_language") and is_of_library),
        ("loss_chunks", case.loss_chunks > 1, chunked),
        ("activation_checkpointing", case.activation_checkpointing, architecture.blocks),
    )
    lacking = next((what for what, is_asked, has in asked if is_asked and not has), None)
    return f"asks for {lacking}, which {case.model} does not have; leave it out" if lacking else None


def _bad_part(case: Case, architecture: Architecture) -> str | None:
    if case.part == "all" and not architecture.is_whole:
        return f"asks for part='all', but {case.model} is not the config.json of a vision-language model; leave part out"
    return None


def _bad_adapters(case: Case, architecture: Architecture) -> str | None:
    for field, knob in _changed(case):
        if knob.methods and case.method not in knob.methods:
            return f"sets {field}, which the method {case.method!r} does not have; choose {' or '.join(knob.methods)}"
    if not case.lora_targets:
        return None
    if architecture.trains:
        return f"sets lora_targets, but {case.model} has layers of these names in its frozen tower, too; leave it out"
    targets = case.lora_targets.split("+")
    if not all(re.fullmatch(r"[\w.-]+", target) for target in targets):
        return f"has lora_targets={case.lora_targets!r}; write names with + between them, as q_proj+v_proj, or all-linear"
    if ALL_LINEAR in targets and len(targets) > 1:
        return f"has lora_targets={case.lora_targets!r}; all-linear stands for all layers, so write no other name with it"
    if case.loss_chunks > 1 and any(target.endswith("lm_head") for target in targets):
        return (
            "asks for loss_chunks, which computes the loss in the place of lm_head, which lora_targets adapts; leave out one"
        )
    return None


def _bad_input(case: Case, architecture: Architecture) -> str | None:
    if case.lengths == "padded" and case.batch_size == 1:
        return "asks for lengths='padded', which pads nothing with batch_size=1; set batch_size=2 or more"
    families = {"padded": ("language", "vision_language"), "packed": ("language",)}.get(case.lengths)
    if families and (architecture.family not in families or architecture.trained_part.library == "own"):
        return f"asks for lengths={case.lengths!r}, which {case.model} does not have; leave it out"
    if case.id_distribution != "uniform" and architecture.family not in ("word_vectors", "click_through"):
        return f"asks for id_distribution={case.id_distribution!r}, which {case.model} does not have; leave it out"
    return None


def _bad_attention(case: Case) -> str | None:
    if not case.attention:
        return None
    architecture = architectures()[case.model]
    facts = architecture.trained_part
    if architecture.family != "language" or facts.library != "transformers":
        return f"asks for attention, which {case.model} does not have; leave it out"
    if case.attention == "sdpa" and facts.language.get("attn_logit_softcapping"):
        return (
            f"asks for attention='sdpa', which cannot cap the scores of {case.model}; choose 'eager', or 'sdpa-4.49', which "
            "leaves the cap out"
        )
    return None


def _bad_quantized_compute(case: Case) -> str | None:
    if case.quantized_compute and case.precision.endswith("-amp"):
        return (
            f"asks for quantized_compute, which autocast of {case.precision!r} overrides; choose precision='bf16' or 'fp32'"
        )
    return None


def _bad_unquantized(case: Case) -> str | None:
    if case.unquantized_fp32 is not None and case.precision == "fp32":
        return "sets unquantized_fp32, but precision='fp32' stores all weights in fp32 that are not packed; leave it out"
    return None


def _bad_parallelism(case: Case) -> str | None:
    for field, knob in _changed(case):
        if knob.parallel and case.parallel not in knob.parallel:
            choose = " or ".join(f"parallel={engine!r}" for engine in knob.parallel)
            return f"asks for {field}, which parallel={case.parallel!r} does not do; choose {choose}"
    if case.optimizer in OF_WHOLE_WEIGHTS and case.parallel not in ("single", "ddp") and not case.code:
        return (
            f"asks for optimizer={case.optimizer!r}, whose states are of whole weights, which parallel={case.parallel!r} "
            "does not have; choose parallel='ddp', or the optimizer 'adamw'"
        )
    if complaint := _bad_compilation(case) or _bad_chunks(case):
        return complaint
    if case.pin_memory and not (case.offload_optimizer or case.offload_param):
        return "asks for pin_memory, but offloads nothing; set offload_optimizer, or leave it out"
    if case.max_grad_norm and case.cpu_offload:
        return "asks for max_grad_norm, whose norm nccl does not add up on the host; leave out it or cpu_offload"
    if case.parallel == "ps":
        return _bad_parameter_server(case)
    if case.parallel == "single" and case.gpus > 1:
        if case.code:
            return (
                f"asks for {case.gpus} GPUs, but parallel='single' uses one; choose parallel='ddp', under which "
                "torch.distributed is ready for what your code exchanges"
            )
        return f"asks for {case.gpus} GPUs, but parallel='single' uses one; choose a parallelism"
    return None


def _bad_compilation(case: Case) -> str | None:
    if case.compile == "off":
        return None
    if case.compile in _BY_CUDA_GRAPHS and case.parallel.startswith("zero"):
        return (
            f"asks for compile={case.compile!r}, whose CUDA graphs overwrite gradients that DeepSpeed may still reduce; "
            "choose default or max-autotune-no-cudagraphs"
        )
    if case.compile in _BY_CUDA_GRAPHS and case.gradient_accumulation > 1:
        return (
            f"asks for compile={case.compile!r}, whose CUDA graphs overwrite gradients that are accumulated; choose "
            "default or max-autotune-no-cudagraphs"
        )
    if not case.warmup:
        return "asks for compile without a step of warm-up, in which it happens; set warmup=1 or more"
    return None


def _bad_arithmetic(case: Case) -> str | None:
    if case.tf32 is not None and case.precision != "fp32":
        return f"sets tf32, which precision={case.precision!r} does not compute in; choose precision='fp32', or leave it out"
    if case.reentrant_checkpointing and not case.activation_checkpointing:
        return "asks for reentrant_checkpointing, but recomputes nothing; set activation_checkpointing=True"
    if case.reentrant_checkpointing and case.compile != "off":
        return "asks for reentrant_checkpointing, which torch.compile does not take into a graph; leave out it or compile"
    if complaint := _bad_policy(case):
        return complaint
    if not case.master_weights:
        return None
    if case.parallel.startswith("zero"):
        return f"asks for master_weights, which parallel={case.parallel!r} has in any case; leave it out"
    if case.parallel in _MASTERS_OF_ENGINES:
        return f"asks for master_weights, {_MASTERS_OF_ENGINES[case.parallel]}"
    if case.precision != "bf16":
        return f"asks for master_weights, but precision={case.precision!r} stores weights in fp32; choose precision='bf16'"
    if case.method in ADAPTING:
        return f"asks for master_weights, but the adapters of {case.method!r} are in fp32 anyway; leave it out"
    return None


def _bad_policy(case: Case) -> str | None:
    if not case.activation_checkpointing_policy:
        return None
    if not case.activation_checkpointing:
        return "asks for activation_checkpointing_policy, but recomputes nothing; set activation_checkpointing=True"
    if case.reentrant_checkpointing:
        return "asks for activation_checkpointing_policy, which torch's reentrant variant does not have; leave out one"
    if case.compile != "off":
        return "asks for activation_checkpointing_policy, but torch.compile has its own; leave out it or compile"
    if case.activation_checkpointing_policy == "save-attention" and not case.code:
        capped = architectures()[case.model].trained_part.language.get("attn_logit_softcapping")
        if (case.attention or ("eager" if capped else "")) == "eager":
            return "asks to save-attention, but eager attention is plain products; choose save-matmuls"
    return None


def _bad_chunks(case: Case) -> str | None:
    if case.loss_chunks > 1 and case.parallel == "zero3":
        return "asks for loss_chunks, whose head parallel='zero3' has taken away again in backward; choose parallel='fsdp'"
    return None


def _bad_parameter_server(case: Case) -> str | None:
    if case.code:
        return "asks for parallel='ps', which own code does not have; choose parallel='ddp'"
    if case.servers == 0:
        return "asks for parallel='ps', but has no servers; set servers=1 or more"
    if case.precision == "fp16-amp":
        return "asks for precision='fp16-amp', whose scaled loss parallel='ps' does not do; choose precision='bf16-amp'"
    return None
