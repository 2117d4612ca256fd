"""Reads a case's file of further options of DeepSpeed, and refuses those that the case itself decides otherwise."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records import Case
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.reading import UNREADABLE, read_whole

Options = dict[str, Any]
"""Options as in DeepSpeed's JSON: sections in sections."""

_FOREIGN: Final = {
    "optimizer": "which optimizer and learning_rate of the case decide",
    "scheduler": "which lr_scheduler and lr_warmup_steps of the case decide",
    "amp": "which precision of the case decides",
    "torch_autocast": "which precision of the case decides",
    "activation_checkpointing": "which is DeepSpeed's own, where activation_checkpointing of the case is torch's",
    "compile": "which parallel='zero0' to 'zero3' do not do",
}
"""Sections that are refused, and the rest of a sentence about each."""

_ADAMW: Final = ("Adam", "AdamW")
"""The names of AdamW in DeepSpeed: its Adam decays weights as AdamW does by default."""

_ZERO: Final = "zero_optimization"

_DROPPING: Final = (_ZERO, "fp16", "bf16")
"""Sections of which DeepSpeed drops options that are ``"auto"``, and takes its own default."""

_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
"""Keys of a config for what transformers calls ``hidden_size``."""

_OFFLOADED: Final = ("offload_optimizer", "offload_param")
"""Sections of ``zero_optimization`` and knobs of the case."""

_SECTIONS: Final = (
    "zero_optimization",
    "bf16",
    "bfloat16",
    "fp16",
    *(f"zero_optimization.{section}" for section in _OFFLOADED),
)


def with_config(case: Case, root: Path) -> tuple[Case, Options]:
    """Return the case with the digest of its file, and the options of the file that the case does not decide.

    Args:
        case: one that has such a file, with or without a digest from before.
        root: folder that the file is relative to.

    Raises:
        BadCase: there is no such file, it is not what DeepSpeed takes, or it contradicts the case; one sentence.
    """
    name = re.sub(r"#[0-9a-f]{12}$", "", case.deepspeed_config)
    try:
        further = dict(_further(case, _read(root / name, name)))
    except _Wrong as error:
        raise BadCase(f"the case {case} asks for deepspeed_config, but {name} {error}") from None
    options: Options = {}
    for path, value in further.items():
        section = options
        *above, key = path
        for part in above:
            section = section.setdefault(part, {})
        section[key] = value
    digest = hashlib.sha256(msgspec.json.encode(options, order="deterministic")).hexdigest()[:12]
    return case.replace(deepspeed_config=f"{name}#{digest}"), options


class _Wrong(Exception):
    """An error in a file. The message is the rest of a sentence."""


def _read(file: Path, name: str) -> Options:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise _Wrong("does not lie below the root of the project; give a path that is relative to it")
    try:
        content: Any = msgspec.json.decode(read_whole(file))
    except OSError as error:
        raise _Wrong(
            f"cannot be read ({error.strerror}); give a file relative to {file.parents[len(path.parts) - 1]}"
        ) from None
    except UNREADABLE as error:
        raise _Wrong(f"is not JSON ({error}); write it as DeepSpeed's own configuration") from None
    if not isinstance(content, dict):
        raise _Wrong("is not a JSON object; write it as DeepSpeed's own configuration")
    return content


def _further(case: Case, content: Options) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each option that the case does not decide, by its path."""
    decided = _decided(case)
    is_adamw = case.optimizer in ("adamw", "adamw-fused")
    unused = [f"zero_optimization.{section}" for section in _OFFLOADED if not getattr(case, section)]
    for path, value in _leaves(content):
        key = ".".join(path)
        if path[0] == "scheduler" and _is_left_open(content["scheduler"]):
            continue
        if path[0] == "optimizer" and (value == "auto" or (key == "optimizer.type" and value in _ADAMW and is_adamw)):
            continue
        if path[0] in _FOREIGN:
            raise _Wrong(f"has the section {path[0]!r}, {_FOREIGN[path[0]]}; leave it out")
        if key in _SECTIONS:
            raise _Wrong(f"has {key}={_shown(value)}, which is a section; write it as a JSON object, or leave it out")
        if key not in decided and any(key.startswith(f"{section}.") for section in unused):
            continue
        if key not in decided:
            if isinstance(value, str) and _is_number(value):
                raise _Wrong(f"has {key}={_shown(value)}, which is text; write the number without quotes")
            if value != "auto":
                yield path, value
            elif (filled := _filled_in(case, key)) is not None:
                yield path, filled
        elif value not in ("auto", decided[key][1]):
            knob, expected = decided[key]
            raise _Wrong(
                f"has {key}={_shown(value)}, which contradicts the case, whose {knob} makes it {_shown(expected)}; change "
                "the case, or leave it out of the file"
            )


def _is_left_open(scheduler: Any) -> bool:
    """Tell whether transformers fills in all parameters of the scheduler, which is then the Trainer's own."""
    parameters = scheduler.get("params") if isinstance(scheduler, dict) else None
    return bool(parameters) and isinstance(parameters, dict) and set(map(str, parameters.values())) == {"auto"}


def _filled_in(case: Case, key: str) -> int | None:
    """Return what transformers fills in for an option that is ``"auto"``; None if DeepSpeed uses its default.

    Raises:
        _Wrong: neither does anything of the kind, or the model has no hidden size.
    """
    sizes: dict[str, Callable[[int], int]] = {f"{_ZERO}.reduce_bucket_size": lambda hidden: hidden * hidden}
    if case.parallel == "zero3":
        sizes[f"{_ZERO}.stage3_prefetch_bucket_size"] = lambda hidden: int(0.9 * hidden * hidden)
        sizes[f"{_ZERO}.stage3_param_persistence_threshold"] = lambda hidden: 10 * hidden
    if key in sizes:
        hidden = _hidden_size(architectures()[case.model].trained_part.language)
        if hidden is None:
            raise _Wrong(
                f"has {key}='auto', which transformers computes from the hidden size, and the config of {case.model} names "
                "none; write the value"
            )
        return sizes[key](hidden)
    if key.partition(".")[0] not in _DROPPING:
        raise _Wrong(f"has {key}='auto', which neither transformers nor DeepSpeed fills in; write its value")
    return None


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    """Return the hidden size as transformers reads it for DeepSpeed, the largest of several."""
    sizes = [config.get(key) for key in _HIDDEN]
    several = config.get("hidden_sizes")
    sizes += [max(several)] if isinstance(several, list) and several else []
    return next((size for size in sizes if isinstance(size, int)), None)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _decided(case: Case) -> dict[str, tuple[str, Any]]:
    """Return the options that fields of the case decide, each with its value and the names of the fields."""
    zero = _ZERO
    samples = case.batch_size * case.gradient_accumulation
    options: dict[str, tuple[str, Any]] = {
        "train_micro_batch_size_per_gpu": ("batch_size", case.batch_size),
        "gradient_accumulation_steps": ("gradient_accumulation", case.gradient_accumulation),
        "train_batch_size": ("batch_size x gradient_accumulation x gpus", samples * case.gpus),
        "gradient_clipping": ("max_grad_norm", case.max_grad_norm),
        "bf16.enabled": ("precision", case.precision == "bf16"),
        "bfloat16.enabled": ("precision", case.precision == "bf16"),
        "fp16.enabled": ("precision", case.precision == "fp16-amp"),
        f"{zero}.stage": ("parallel", int(case.parallel.removeprefix("zero"))),
        f"{zero}.cpu_offload": ("offload_optimizer", case.offload_optimizer),
        f"{zero}.cpu_offload_param": ("offload_param", case.offload_param),
    }
    for section in _OFFLOADED:
        if getattr(case, section):
            options[f"{zero}.{section}.pin_memory"] = ("pin_memory", case.pin_memory)
        options[f"{zero}.{section}.device"] = (section, "cpu" if getattr(case, section) else "none")
    if case.overlap_comm is not None:
        options[f"{zero}.overlap_comm"] = ("overlap_comm", case.overlap_comm)
    for knob in ("allgather_bucket_size", "reduce_bucket_size", "stage3_max_live_parameters"):
        if getattr(case, knob):
            options[f"{zero}.{knob}"] = (knob, getattr(case, knob))
    return options


def _leaves(options: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in options.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def merge(options: Options, further: Options) -> None:
    """Merge ``further`` options into their sections. They replace options of the same name."""
    for key, value in further.items():
        if isinstance(value, dict) and isinstance(options.get(key), dict):
            merge(options[key], value)
        else:
            options[key] = value
