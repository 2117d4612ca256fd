"""Sizes the workspaces of cuDNN's convolutions and attention on GPUs of compute capability 9.0.

The rules were measured on an H200 with cuDNN 9.19: convolutions and attention of 150 shapes ran there, and the history of
torch's caching allocator was read. Nothing is known for other compute capabilities. `hardware/emulation/c/cudnn.c` has the
same rules.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from pytest_gputrain.records import Target

_MEASURED: Final = (9, 0)
_SEMAPHORE: Final = 256
"""Bytes that each kernel of attention takes."""
_ADDED: Final = 16
"""Bytes that come with the copies of a convolution."""
_LARGEST: Final = 2**31
"""The numbers of a tensor that a kernel takes at once. Batches that have more are taken in parts."""
_FEW: Final = 4
"""Up to so many channels, a kernel reads images (and latents) as they are."""


def known(target: Target) -> bool:
    return target.capability == _MEASURED


def of_attention() -> int:
    return _SEMAPHORE


def of_attention_backward(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the bytes of the gradients of keys and values for each head of the queries, if several share one."""
    batch, heads = query.shape[:2]
    if key.shape[1] == heads:
        return _SEMAPHORE
    return _SEMAPHORE + batch * heads * key.shape[2] * (key.shape[3] + value.shape[3]) * query.itemsize


def of_convolution(args: tuple[Any, ...], *, channels_last: bool) -> int:
    """Return the bytes that ``aten.convolution`` with these arguments takes."""
    source, weight, _, strides, padding, dilation, transposed, added, groups = args
    sides = _sides(source, weight, strides, padding, dilation, added if transposed else None)
    result = (len(source), weight.shape[1] * groups if transposed else len(weight), *sides)
    shapes = (tuple(source.shape), result)
    if transposed:  # It is computed as the gradient of a convolution's source.
        return _workspace(*shapes[::-1], weight, strides, groups, forward=False, channels_last=channels_last)
    return _workspace(*shapes, weight, strides, groups, forward=True, channels_last=channels_last)


def of_convolution_backward(args: tuple[Any, ...], *, channels_last: bool) -> int:
    """Return the bytes that ``aten.convolution_backward`` takes for either gradient."""
    grad, source, weight, _, strides, _, _, transposed, _, groups = args[:10]
    shapes = (tuple(source.shape), tuple(grad.shape))
    return _workspace(
        *(shapes[::-1] if transposed else shapes), weight, strides, groups, forward=False, channels_last=channels_last
    )


def _workspace(
    source: tuple[int, ...],
    result: tuple[int, ...],
    weight: Tensor,
    strides: Any,
    groups: int,
    *,
    forward: bool,
    channels_last: bool,
) -> int:
    """Size the copies of what does not lie as the kernels read and write it: channels last, of halves eight at a time.

    What kernels add to split sums is left out; it was at most 16 MiB in nineteen of twenty.
    """
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return 0
    size = weight.itemsize
    channels, made = source[1], result[1]
    strided = max(strides) > 1
    if (groups > 1 and groups == channels) or (channels <= _FEW and not strided and (forward or size > 2)):
        return 0
    step = 8 if size == 2 else 4
    read, written = channels, made
    if size == 2 and groups == 1:
        read, written = (-(-count // step) * step for count in (channels, made))
    pixels = math.prod(source[2:])
    window = math.prod(weight.shape[2:])
    largest = max(read * pixels, written * math.prod(result[2:]), 1)
    samples = min(source[0], _LARGEST // largest or source[0])
    of_source = samples * read * pixels * size
    of_weight = written * (read // groups) * window * size
    of_result = samples * written * math.prod(result[2:]) * size
    if channels_last:
        unaligned = groups == 1 and bool(channels % step or made % step)
        copies_result = made % step or (size > 2 and not forward)
        return unaligned * (of_weight + bool(channels % step) * of_source + bool(copies_result) * of_result + _ADDED)
    if window == 1 and not strided:
        return of_source + of_result + _ADDED if pixels % (4 if forward else step) else 0
    return of_source + of_weight + of_result + _ADDED


def _sides(source: Tensor, weight: Tensor, strides: Any, padding: Any, dilation: Any, added: Any) -> tuple[int, ...]:
    """Return the height and width of the result, by the formulas of `torch.nn.Conv2d` and `torch.nn.ConvTranspose2d`.

    Args:
        added: the output padding of a transposed convolution; None of another.
    """
    sides = []
    for i, (side, window) in enumerate(zip(source.shape[2:], weight.shape[2:], strict=True)):
        stride, pad, spread = (each[i] if len(each) > 1 else each[0] for each in (strides, padding, dilation))
        reach = spread * (window - 1)
        if added is None:
            sides.append((side + 2 * pad - reach - 1) // stride + 1)
        else:
            sides.append((side - 1) * stride - 2 * pad + reach + (added[i] if len(added) > 1 else added[0]) + 1)
    return tuple(sides)
