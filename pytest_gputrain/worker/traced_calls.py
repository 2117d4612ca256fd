"""Describes the calls of operators as the estimate of a step's seconds needs them."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from pytest_gputrain.records import TracedCall
from pytest_gputrain.worker.allocations import name_of
from pytest_gputrain.worker.checks import local
from pytest_gputrain.worker.flops import may_use_tf32, type_of

_TYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The names of rates in the catalog."""
_MOST_SHAPES: Final = 4
_COPIES: Final = ("copy_", "_to_copy")
_CAUSAL: Final = ("is_causal", "custom_mask_type")
_MASKS: Final = ("attn_bias", "attn_mask", "bias")


def describe(func: Any, args: Any, kwargs: Any, flops: int, read: int, written: int, *, optimizing: bool) -> TracedCall:
    """Describe one call.

    Args:
        flops: of the call.
        read: bytes that it reads on the GPU; of a view, and of what the host computes, this and ``written`` are 0.
        optimizing: whether an optimizer takes its step.
    """
    name = name_of(func).removeprefix("aten.")
    if not read and not written:
        return _VIEW
    dtype = str(type_of(args)).removeprefix("torch.")
    flags = ["optimizer"] if optimizing else []
    if any(isinstance(value, (list, tuple)) and value and _is_tensor(value[0]) for value in args[:1]):
        flags.append("list")
    if name in _COPIES and (not read or not written or any(value.is_cpu for value in args[:2] if _is_tensor(value))):
        flags.append("host")
    shapes: tuple[tuple[int, ...], ...] = ()
    if flops and "." not in name:  # which operators of other libraries have, whose arguments are in another order
        tensors = [local(value) for value in args if _is_tensor(value)]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors[:_MOST_SHAPES])
        flags += _flags(func, name, args, kwargs, tensors)
    return TracedCall(
        operator=name,
        shapes=shapes,
        dtype=_TYPES.get(dtype, dtype) if flops else "",
        flags=tuple(flags),
        flops=flops,
        read=read,
        written=written,
    )


_VIEW: Final = TracedCall(operator="view", flags=("view",))


def _flags(func: Any, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> list[str]:
    flags = []
    if type_of(args) == torch.float32 and may_use_tf32(name, args):
        flags.append("tf32")
    if "attention" in name:
        if any(_argument(func, args, kwargs, causal) for causal in _CAUSAL):
            flags.append("causal")
        masks = (_argument(func, args, kwargs, mask) for mask in _MASKS)
        if any(_is_tensor(mask) and mask.numel() for mask in masks):
            flags.append("masked")
    if "convolution" in name:
        images = tensors["backward" in name]
        if images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last):
            flags.append("channels_last")
        if (_argument(func, args, kwargs, "groups") or 1) > 1:
            flags.append("grouped")
    return flags


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    place, default = _places(func).get(name, (len(args), None))
    return args[place] if place < len(args) else kwargs.get(name, default)


@functools.cache
def _places(func: Any) -> dict[str, tuple[int, Any]]:
    """Return place and default of each argument of an operator."""
    return {argument.name: (place, argument.default_value) for place, argument in enumerate(func._schema.arguments)}
