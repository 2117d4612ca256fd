"""Sizes the buffer through which blocks of a GPU add up a sum: ``setReduceConfig`` of ATen/native/cuda/Reduce.cuh.

A sum over rows, as that of a bias's gradient, can take more of it than the summands: 132 MiB for 16384 rows of 4096.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pytest_gputrain.records import Target
from pytest_gputrain.worker.prediction.operators import Temporaries

_ATEN: Final = torch.ops.aten
_THREADS: Final = 512
"""The most threads of a block."""
_WARP: Final = 32
_MOST_THREADS: Final = 2048
_FEWER_THREADS: Final = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""The threads of a multiprocessor, by the compute capabilities that have fewer than others."""
_VECTOR: Final = 4
_LEAST_VALUES: Final = 16
"""The least values of a thread, if the values are split among blocks."""
_MOST_VALUES: Final = 256
_ACCUMULATED_IN: Final = 4
"""Bytes of fp32, in which halves are added up too."""


def temporaries(target: Target) -> dict[Any, Temporaries]:
    """Return by operator the buffers of sums and of what is computed like them."""
    threads = target.multiprocessors * _FEWER_THREADS.get(target.capability, _MOST_THREADS)

    def over_dimensions(position: int) -> Temporaries:
        def sizes(args: tuple[Any, ...]) -> tuple[int, ...]:
            return _sizes(args[0], args[position] if position < len(args) else None, threads)

        return sizes

    sizes_of = {operator: over_dimensions(1) for operator in (_ATEN.sum, _ATEN.mean)}
    return {**sizes_of, _ATEN.linalg_vector_norm: over_dimensions(2)}


class _Dimension(NamedTuple):
    stride: int
    size: int


def _sizes(source: Tensor, dimensions: Any, threads: int) -> tuple[int, ...]:
    """Return the sizes of the buffer and of the counters of finished blocks; none where each block has sums of its own.

    Args:
        threads: that the GPU runs at once.
    """
    if not source.numel() or not source.is_floating_point() or source.itemsize > _ACCUMULATED_IN:
        return ()
    if isinstance(dimensions, int):
        dimensions = [dimensions]
    summed = (
        {position % source.dim() for position in dimensions} if dimensions and source.dim() else set(range(source.dim()))
    )
    reduced = _joined(source, summed)
    remaining = _joined(source, set(range(source.dim())) - summed)
    inputs, outputs = (
        math.prod(dimension.size for dimension in reduced),
        math.prod(dimension.size for dimension in remaining),
    )
    along = not remaining or (bool(reduced) and reduced[0].stride < remaining[0].stride)
    vector = 1
    if along:
        width, height = inputs, outputs
        if reduced and reduced[0].stride == 1 and width >= 128 and len(reduced) == 1:
            width //= _VECTOR
    else:
        width, height = outputs, inputs
        if remaining[0].stride == 1:
            vector = math.gcd(_VECTOR, remaining[0].size, *(dimension.stride for dimension in (*reduced, *remaining[1:])))
            width //= vector
    block_width, block_height = _block(width, height, _THREADS // vector)
    step_input, step_output = (block_width, 1) if along else (1, block_width)
    if -(-inputs // step_input) < min(block_height * 16, _MOST_VALUES):
        return ()
    step_input *= block_height
    values = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    most = threads // (block_width * block_height)
    if values < _MOST_VALUES or grid > most:
        return ()
    blocks = max(min(-(-most // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if blocks == 1:
        return ()
    size = _ACCUMULATED_IN * outputs * blocks
    return (size if along else size * block_width * vector, 4 * grid)


def _joined(source: Tensor, positions: set[int]) -> list[_Dimension]:
    """Return those dimensions, the fastest first, and joined where one continues the other."""
    joined: list[_Dimension] = []
    for dimension in sorted(
        _Dimension(source.stride(position), source.shape[position]) for position in positions if source.shape[position] > 1
    ):
        if joined and joined[-1].stride * joined[-1].size == dimension.stride:
            joined[-1] = _Dimension(joined[-1].stride, joined[-1].size * dimension.size)
        else:
            joined.append(dimension)
    return joined


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """Return width and height of a block of threads, in powers of two."""
    widest, highest = (min(threads, 1 << (max(1, side).bit_length() - 1)) for side in (width, height))
    block_height = min(highest, threads // min(widest, _WARP))
    return min(widest, threads // block_height), block_height
