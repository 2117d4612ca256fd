"""Validates a case, and says what is wrong with it in one sentence with its remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records import Case
from pytest_gputrain.utils.suggest import did_you_mean

METHODS: Final = ("full", "lora", "qlora", "pretrain", "sft", "dreambooth")
PRECISIONS: Final = ("fp32", "bf16", "bf16-amp", "fp16-amp")
PARALLELS: Final = ("single", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "ps")
OPTIMIZERS: Final = ("adamw", "adamw-fused", "adam", "momentum", "sgd")
LR_SCHEDULERS: Final = ("constant", "linear", "cosine")
ATTENTIONS: Final = ("", "eager", "sdpa", "sdpa-4.49")
QUANTIZED_COMPUTE: Final = ("", "fp32", "bf16")
COMPILE_MODES: Final = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
VOCABULARY: Final = {
    "method": METHODS,
    "precision": PRECISIONS,
    "parallel": PARALLELS,
    "optimizer": OPTIMIZERS,
    "compile": COMPILE_MODES,
    "lr_scheduler": LR_SCHEDULERS,
    "attention": ATTENTIONS,
    "quantized_compute": QUANTIZED_COMPUTE,
}
"""The words of a field that takes words; an empty one is the field's default."""

_RENAMED: Final = {("precision", "fp16"): "is called 'fp16-amp' (autocast over weights in fp32)"}
"""Words that a field does not take under this name, and the rest of a sentence about each."""

ADAPTING: Final = ("lora", "qlora")
"""Methods that train adapters."""

UPDATING: Final = tuple(parallel for parallel in PARALLELS if parallel != "ps")
"""Parallelisms with one optimizer for everything: tables have theirs on the servers, which know neither the norm of all
gradients nor how far the training is.
"""

_ENGINES_OF_KNOBS: Final = {
    "cpu_offload": ("fsdp",),
    "offload_optimizer": ("zero1", "zero2", "zero3"),
    "offload_param": ("zero3",),
    "pin_memory": ("zero1", "zero2", "zero3"),
    "overlap_comm": ("zero0", "zero1", "zero2", "zero3"),
    "allgather_bucket_size": ("zero0", "zero1", "zero2", "zero3"),
    "reduce_bucket_size": ("zero1", "zero2", "zero3"),
    "stage3_max_live_parameters": ("zero3",),
    "lr_scheduler": UPDATING,
    "lr_warmup_steps": UPDATING,
    "max_grad_norm": UPDATING,
    "servers": ("ps",),
    "asynchronous": ("ps",),
}
"""Knobs of a parallelism, and the ones that know them: DeepSpeed itself ignores some of them silently elsewhere."""

COMPILED: Final = ("single", "ddp", "fsdp")
"""Parallelisms under which a model is compiled: what DeepSpeed and the parameter server do in backward, no graph holds."""


def renamed(field: str, word: object) -> str:
    """``the precision 'fp16', which is called 'fp16-amp' (...)`` for a word that has another name; empty for any other."""
    description = _RENAMED.get((field, word)) if isinstance(word, str) else None
    return f"the {field} {word!r}, which {description}" if description else ""


def problem(case: Case, markers: Sequence[str]) -> str | None:
    """The first thing that makes ``case`` impossible to run, as one sentence with its remedy; None for a sound case.

    Args:
        markers: the platform markers of the catalog, which lies in a higher package.
    """
    complaint = _first_problem(case, markers)
    return None if complaint is None else " ".join(f"the case {case} {complaint}".split())


def _first_problem(case: Case, markers: Sequence[str]) -> str | None:
    platforms: Any = case.platforms
    if isinstance(platforms, str):
        return f"takes a list of platforms: platforms=[{platforms!r}]"
    try:
        msgspec.convert(msgspec.structs.asdict(case), Case)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        return f"has a field of the wrong type: {error}"
    vocabulary: list[tuple[str, str, Iterable[str]]] = [
        *((field, getattr(case, field), VOCABULARY[field]) for field in VOCABULARY if field != "method"),
        *(("platform", platform, markers) for platform in case.platforms),
    ]
    if case.code:
        vocabulary.append(("method", case.method, ("custom",)))
    else:
        if not case.model:
            return f"names no model; known: {', '.join(architectures())}"
        vocabulary.insert(0, ("model", case.model, architectures()))
        vocabulary.insert(1, ("method", case.method, METHODS))
    for field, value, names in vocabulary:
        choices = tuple(names)
        if name := renamed(field, value):
            return f"names {name}; write that"
        if value not in choices:
            hint = did_you_mean(value, choices)
            return f"names the unknown {field} {value!r}{hint}; known: {', '.join(filter(None, choices))}"
    return (
        bad_number(case)
        or (None if case.code else _bad_model(case))
        or _bad_attention(case)
        or _bad_quantized_compute(case)
        or _bad_parallelism(case)
    )


def bad_number(case: Case) -> str | None:
    """The first number of ``case`` that cannot be, as the rest of a sentence."""
    least = {
        "gpus": 1,
        "servers": 0,
        "batch_size": 1,
        "gradient_accumulation": 1,
        "steps": 1,
        "warmup": 0,
        "sequence_length": 0,
        "frames": 0,
        "lora_rank": 0,
        "loss_chunks": 1,
        "lr_warmup_steps": 0,
        "allgather_bucket_size": 0,
        "reduce_bucket_size": 0,
        "stage3_max_live_parameters": 0,
    }
    for field, bound in least.items():
        if getattr(case, field) < bound:
            return f"has {field}={getattr(case, field)}; it must be at least {bound}"
    if not 0 <= case.activation_checkpointing <= 1:
        return f"has activation_checkpointing={case.activation_checkpointing}; it must be true, false or a share from 0 to 1"
    for field in ("learning_rate", "max_grad_norm"):
        if not (math.isfinite(getattr(case, field)) and getattr(case, field) >= 0):
            return f"has {field}={getattr(case, field)}; it must be a finite number of at least 0"
    if case.resolution and not re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d{0,4}", case.resolution):
        return f"has resolution={case.resolution!r}; write it as WIDTHxHEIGHT in pixels, as 512x512"
    return None


def _bad_model(case: Case) -> str | None:
    """What the case's model does not have or lacks."""
    architecture = architectures()[case.model]
    if case.method not in architecture.trainable:
        methods = ", ".join(architecture.trainable)
        return f"asks for the method {case.method!r}, which {case.model} does not have; it has {methods}"
    if case.lora_rank and case.method not in ADAPTING:
        return f"sets lora_rank, which the method {case.method!r} does not have; choose lora or qlora"
    if "sequence_length" in architecture.needs and case.sequence_length == 1:
        return "has sequence_length=1; it must be at least 2"
    examples = {"sequence_length": "sequence_length=512", "resolution": "resolution='512x512'", "frames": "frames=9"}
    for field in ("sequence_length", "resolution", "frames"):
        if field in architecture.needs and not getattr(case, field):
            return f"sets no {field}, which {case.model} needs, as {examples[field]}"
        if field not in architecture.needs and getattr(case, field):
            return f"sets {field}, which {case.model} does not have; leave it out"
    if case.loss_chunks > 1:
        facts = architecture.trained_part
        if architecture.family != "language" or facts.library == "own" or facts.config.get("final_logit_softcapping"):
            return f"asks for loss_chunks, which {case.model} does not have; leave it out"
    if case.activation_checkpointing and not architecture.blocks:
        return f"asks for activation_checkpointing, which {case.model} does not have; leave it out"
    return None


def _bad_attention(case: Case) -> str | None:
    if not case.attention:
        return None
    if case.code:
        return "asks for attention, which own code chooses by itself; leave the knob out"
    architecture = architectures()[case.model]
    facts = architecture.trained_part
    if architecture.family != "language" or facts.library != "transformers":
        return f"asks for attention, which {case.model} does not have; leave it out"
    if case.attention == "sdpa" and facts.config.get("attn_logit_softcapping"):
        return (
            f"asks for attention='sdpa', which cannot cap the scores of {case.model}; choose 'eager', or 'sdpa-4.49', which "
            "leaves the cap out"
        )
    return None


def _bad_quantized_compute(case: Case) -> str | None:
    if not case.quantized_compute:
        return None
    if case.method != "qlora":
        return f"asks for quantized_compute, which the method {case.method!r} does not have; choose qlora, or leave it out"
    if case.precision.endswith("-amp"):
        return (
            f"asks for quantized_compute, which autocast of {case.precision!r} overrides; choose precision='bf16' or 'fp32'"
        )
    return None


def _bad_parallelism(case: Case) -> str | None:
    for knob, engines in _ENGINES_OF_KNOBS.items():
        if getattr(case, knob) not in (None, False, 0, "constant") and case.parallel not in engines:
            choose = " or ".join(f"parallel={engine!r}" for engine in engines)
            return f"asks for {knob}, which parallel={case.parallel!r} does not do; choose {choose}"
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
    if case.code:
        return "asks for compile, which own code does by itself; call torch.compile in it, and leave the knob out"
    if case.parallel not in COMPILED:
        return f"asks for compile, which parallel={case.parallel!r} does not do; choose {' or '.join(COMPILED)}"
    if case.compile in ("reduce-overhead", "max-autotune") and case.gradient_accumulation > 1:
        return (
            f"asks for compile={case.compile!r}, whose CUDA graphs overwrite gradients that are accumulated; choose "
            "default or max-autotune-no-cudagraphs"
        )
    if not case.warmup:
        return "asks for compile without a step of warm-up, in which it happens; set warmup=1 or more"
    return None


def _bad_chunks(case: Case) -> str | None:
    if case.loss_chunks > 1 and case.code:
        return "asks for loss_chunks, which own code does not have; leave it out"
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
