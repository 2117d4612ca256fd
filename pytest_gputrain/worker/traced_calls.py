"""Describes the calls of operators as the estimate of a step's seconds needs them."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Return a description of one call.

    Args:
        flops: of the call.
        read: bytes that it reads on the GPU; of a view, and of what the host computes, this and ``written`` are 0.
        optimizing: whether an optimizer takes its step.
    """
    name = name_of(func).removeprefix("aten.")
    if not read and not written:
        return TracedCall(operator="view", flags=("view",))
    dtype, shapes = "", tuple[tuple[int, ...], ...]()
    flags = ["optimizer"] if optimizing else []
    if any(isinstance(value, (list, tuple)) and value and _is_tensor(value[0]) for value in args[:1]):
        flags.append("list")
    if name in _COPIES and (not read or not written or any(value.is_cpu for value in args[:2] if _is_tensor(value))):
        flags.append("host")
    if flops:
        dtype = str(type_of(args)).removeprefix("torch.")
    # Operators of other libraries have a dot in their name, and their arguments are in another order.
    if flops and "." not in name:
        tensors = [local(value) for value in args if _is_tensor(value)]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors[:_MOST_SHAPES])
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        flags += _flags(name, args, named, tensors)
    return TracedCall(
        operator=name,
        shapes=shapes,
        dtype=_TYPES.get(dtype, dtype),
        flags=tuple(flags),
        flops=flops,
        read=read,
        written=written,
    )


def _flags(name: str, args: Any, named: dict[str, Any], tensors: list[torch.Tensor]) -> Iterator[str]:
    """Yield what decides, beside shapes, which kernel runs a call."""
    if type_of(args) == torch.float32 and may_use_tf32(name, args):
        yield "tf32"
    if "attention" in name:
        if any(map(named.get, _CAUSAL)):
            yield "causal"
        if any(isinstance(mask, torch.Tensor) and mask.numel() for mask in map(named.get, _MASKS)):
            yield "masked"
    if "convolution" in name:
        images = tensors["backward" in name]
        if images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last):
            yield "channels_last"
        if named.get("groups", 1) > 1:
            yield "grouped"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
