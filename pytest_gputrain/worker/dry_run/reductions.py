"""The buffer through which blocks of a GPU add up a sum together: ``setReduceConfig`` of ATen/native/cuda/Reduce.cuh.

A sum over rows, as that of a bias's gradient, can take more of it than the summands: 132 MiB for 16384 rows of 4096.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pytest_gputrain.records import Target
from pytest_gputrain.worker.dry_run.operators import Temporaries

_ATEN: Final = torch.ops.aten
_THREADS: Final = 512
"""Of a block, at most."""
_WARP: Final = 32
_MOST_THREADS: Final = 2048
_FEWER_THREADS: Final = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Of a multiprocessor, by the compute capabilities that have fewer than others."""
_VECTOR: Final = 4
_LEAST_VALUES: Final = 16
"""Of a thread, where the values are split among blocks."""
_MOST_VALUES: Final = 256
_ACCUMULATED_IN: Final = 4
"""Bytes of fp32, in which halves are added up too."""


def temporaries(target: Target) -> dict[Any, Temporaries]:
    """Buffers of sums and of what is computed like them, by operator."""
    threads = target.multiprocessors * _FEWER_THREADS.get(target.capability, _MOST_THREADS)

    def over_dimensions(place: int) -> Temporaries:
        def sizes(args: tuple[Any, ...]) -> tuple[int, ...]:
            return _sizes(args[0], args[place] if place < len(args) else None, threads)

        return sizes

    found = {operator: over_dimensions(1) for operator in (_ATEN.sum, _ATEN.mean)}
    return {**found, _ATEN.linalg_vector_norm: over_dimensions(2)}


class _Dimension(NamedTuple):
    stride: int
    size: int


def _sizes(source: Tensor, dimensions: Any, threads: int) -> tuple[int, ...]:
    """Of the buffer and of the counters of finished blocks; none where each block has sums of its own.

    Args:
        threads: that the GPU runs at once.
    """
    if not source.numel() or not source.is_floating_point() or source.itemsize > _ACCUMULATED_IN:
        return ()
    if isinstance(dimensions, int):
        dimensions = [dimensions]
    summed = {place % source.dim() for place in dimensions} if dimensions and source.dim() else set(range(source.dim()))
    reduced = _joined(source, summed)
    kept = _joined(source, set(range(source.dim())) - summed)
    inputs, outputs = math.prod(one.size for one in reduced), math.prod(one.size for one in kept)
    along = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    vector = 1
    if along:
        width, height = inputs, outputs
        if reduced and reduced[0].stride == 1 and width >= 128 and len(reduced) == 1:
            width //= _VECTOR
    else:
        width, height = outputs, inputs
        if kept[0].stride == 1:
            vector = math.gcd(_VECTOR, kept[0].size, *(one.stride for one in (*reduced, *kept[1:])))
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


def _joined(source: Tensor, places: set[int]) -> list[_Dimension]:
    """Those dimensions, the fastest first, and as one where one continues the other."""
    found: list[_Dimension] = []
    for one in sorted(_Dimension(source.stride(place), source.shape[place]) for place in places if source.shape[place] > 1):
        if found and found[-1].stride * found[-1].size == one.stride:
            found[-1] = _Dimension(found[-1].stride, found[-1].size * one.size)
        else:
            found.append(one)
    return found


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """Of threads, in powers of two."""
    widest, highest = (min(threads, 1 << (max(1, side).bit_length() - 1)) for side in (width, height))
    block_height = min(highest, threads // min(widest, _WARP))
    return min(widest, threads // block_height), block_height
