"""Sizes the memory inside of CUDA's kernels: what each allocates beside its results, which no operator shows.

Every rule was measured: the operator ran in torch's CUDA build (2.13) under its own caching allocator, for several shapes
and types, and the history of that allocator was read. `tests/worker/test_prediction_kernels.py` has the figures.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from pytest_gputrain.records import Target
from pytest_gputrain.worker.prediction import attention, cudnn, reductions
from pytest_gputrain.worker.prediction.operators import Temporaries

_ATEN: Final = torch.ops.aten
_UNSORTED_ROWS: Final = 3072
"""Up to so many rows, the gradient of an embedding is added up without sorting them."""
_OFTEN: Final = 32
"""The uses of each row of a table from which the parts are added up in place."""
_SORTING: Final = 1279
"""Bytes of a scan."""
_SEGMENT_ROWS: Final = 10
"""Sorted rows that one thread adds up."""


def temporaries(target: Target) -> dict[Any, Temporaries]:
    """Return by operator what kernels allocate and free."""
    sizes_of: dict[Any, Temporaries] = {
        _ATEN._softmax: _copies_of_strided,
        _ATEN._softmax_backward_data: _softmax_backward,
        _ATEN.native_layer_norm: _copies_of_strided,
        _ATEN.native_layer_norm_backward: _norm_backward,
        _ATEN._fused_rms_norm: _copies_of_strided,
        _ATEN._fused_rms_norm_backward: _norm_backward,
        _ATEN.native_group_norm: _group_norm,
        _ATEN.native_group_norm_backward: _group_norm_backward,
        _ATEN.convolution: functools.partial(_convolution, cudnn.known(target)),
        _ATEN.upsample_nearest2d: _copies_in_own_format,
        _ATEN.upsample_nearest2d_backward: _copies_in_own_format,
        _ATEN.embedding_dense_backward: _embedding_backward,
        _ATEN.mse_loss: _loss,
        _ATEN.smooth_l1_loss: _loss,
    }
    sums = reductions.temporaries(target)
    sizes_of |= sums
    sizes_of[_ATEN.convolution_backward] = functools.partial(_convolution_backward, cudnn.known(target), sums[_ATEN.sum])
    sizes_of |= attention.temporaries(target)
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        sizes_of[torch.ops.bitsandbytes.gemm_4bit] = _unpacked
    return sizes_of


def _copied(*tensors: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> tuple[int, ...]:
    """Return the sizes of contiguous copies, of the tensors that are not contiguous."""
    return tuple(tensor.nbytes for tensor in tensors if not tensor.is_contiguous(memory_format=memory_format))


def _copies_of_strided(args: tuple[Any, ...]) -> tuple[int, ...]:
    return _copied(args[0])


def _copies_in_own_format(args: tuple[Any, ...]) -> tuple[int, ...]:
    return _copied(args[0], memory_format=suggest_memory_format(args[0]))


def _convolution(known: bool, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size copies in the format that torch gives to cuDNN, of what is laid out otherwise, and cuDNN's workspace if known."""
    memory_format = _format_of_convolution(*args[:2])
    last = memory_format != torch.contiguous_format
    workspace = (cudnn.of_convolution(args, channels_last=last),) if known else ()
    return (*_copied(*args[:2], memory_format=memory_format), *workspace)


def _convolution_backward(known: bool, sums: Temporaries, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size the copies of what the wanted gradients are made of, with cuDNN's workspace, or the buffer that the bias's is
    added up in.

    The copy of the weight is gone when the gradient of its size is made, and all copies are when the bias's is.
    """
    grad, source, weight = args[:3]
    for_source, for_weight, for_bias = args[-1]
    read = [grad, source] if for_weight else [grad, weight] if for_source else [grad]
    memory_format = _format_of_convolution(source, weight)
    copies = _copied(*read, memory_format=memory_format)
    if known and (for_source or for_weight):
        last = memory_format != torch.contiguous_format
        copies = (*copies, cudnn.of_convolution_backward(args, channels_last=last))
    buffers = sums((grad, [0, *range(2, grad.dim())])) if for_bias else ()
    return max(copies, buffers, key=sum)


def _format_of_convolution(source: Tensor, weight: Tensor) -> torch.memory_format:
    """Return that with the channels last, if either has it."""
    formats = [suggest_memory_format(tensor) for tensor in (source, weight)]
    return next((found for found in formats if found != torch.contiguous_format), torch.contiguous_format)


def _norm_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    return _copied(args[0], args[1])


def _softmax_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size the gradient times the result."""
    grad, result = args[0], args[1]
    return (grad.nbytes, *_copied(grad, result))


def _group_norm(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size a factor and a summand for each channel, in fp32; of halves, mean and deviation in fp32 too."""
    source, _, _, samples, channels, _, groups = args[:7]
    statistics = (4 * samples * groups,) * 2 if source.itemsize < 4 else ()
    return (*statistics, *(4 * samples * channels,) * 2)


def _group_norm_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size two sums and a factor for each channel, two for each group, in fp32."""
    samples, channels, groups = args[5], args[6], args[8]
    return (4 * samples * channels,) * 3 + (4 * samples * groups,) * 2


def _embedding_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size what many rows take: sorted with their places, the begins of rows and of parts, sums in fp32, two counts."""
    grad, rows, table = args[:3]
    count = rows.numel()
    if count <= _UNSORTED_ROWS:
        return ()
    segments = min(count, table)
    parts = count // _SEGMENT_ROWS + segments
    width = grad.shape[-1]
    if count >= _OFTEN * segments:
        sums = 8 * parts + (4 * segments * width if grad.itemsize < 4 else 0)
    else:
        sums = 4 * parts * width
    sorting = (8 * count, _SORTING)
    adding = (8 * segments, 8 * segments, 8 * parts, sums, 8)
    return (8 * count, 8 * count, 8 * count, 8, *max(sorting, adding, key=sum))


def _loss(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size the loss of every element, once more than the result's storage has it."""
    source, target = args[:2]
    reduced = len(args) < 3 or args[2] != 0
    elements = math.prod(torch.broadcast_shapes(source.shape, target.shape))
    return (elements * torch.promote_types(source.dtype, target.dtype).itemsize,) if reduced else ()


def _unpacked(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size the weight in the arithmetic of the product: a kernel for many rows unpacks it first."""
    left, shape = args[0], args[2]
    return (math.prod(shape) * left.itemsize,)
