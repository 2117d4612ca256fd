"""Replaces operators whose results torch lays out on fakes otherwise than its kernels do.

Found by comparing, operator by operator, the results of real steps of every case with those of fakes of the same arguments:
size, strides, type and storage of all others are alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pytest_gputrain.records import Target

_ATEN: Final = torch.ops.aten

Layout = Callable[..., Any]
"""Takes the place of an operator."""


def layouts(target: Target) -> dict[Any, Layout]:
    """Return by operator what to call instead."""
    replacements: dict[Any, Layout] = {
        operator: _view_by_kernel(operator) for operator in (_ATEN.view.default, _ATEN._unsafe_view.default)
    }
    for operator in (_ATEN.mse_loss.default, _ATEN.smooth_l1_loss.default):
        replacements[operator] = _reduced_loss(operator)
    for operator in (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor):
        replacements[operator] = _strided_as_source(operator)
    replacements[_ATEN.clone.default] = _clone
    replacements[_ATEN.convolution.default] = _convolution
    if target.kind == "cpu":
        # Autocast of a CPU leaves norms alone: halves meet weights of fp32. Of a GPU it runs them in fp32.
        replacements[_ATEN.native_layer_norm.default] = _layer_norm
        replacements[_ATEN.native_group_norm.default] = _group_norm
        replacements[_ATEN.native_group_norm_backward.default] = _group_norm_backward
    else:
        replacements[_ATEN.native_layer_norm.default] = _layer_norm_of_gpu
        replacements[_ATEN._fused_rms_norm.default] = _fused_rms_norm
        replacements[_ATEN._fused_rms_norm_backward.default] = _fused_rms_norm_backward
        replacements[_ATEN._scaled_dot_product_efficient_attention.default] = _efficient_attention
    return replacements


def _view_by_kernel(operator: Any) -> Layout:
    """Stride dimensions of one element as the kernel does: later operators take their memory format from them, and C++
    differs."""

    def view(source: Any, shape: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            bare = torch.empty((0,), dtype=source.dtype, device="meta")
            bare.set_(source.untyped_storage(), source.storage_offset(), source.shape, source.stride())
            element = operator(bare, shape)
        return FakeTensor(source.fake_mode, element, source.fake_device)

    return view


def _strided_as_source(operator: Any) -> Layout:
    """Keep the strides of a tensor that a number is added to or the like, also those of dimensions of one element: later
    operators take its memory format from them, and fakes tidy them up."""

    def with_number(source: Any, other: Any, **options: Any) -> Any:
        result = operator(source, other, **options)
        if isinstance(other, Tensor) or not isinstance(source, Tensor) or source.stride() == result.stride():
            return result
        varying = [size > 1 for size in source.shape]
        if [*itertools.compress(source.stride(), varying)] != [*itertools.compress(result.stride(), varying)]:
            return result
        return result.new_empty_strided(source.shape, source.stride())

    return with_number


def _reduced_loss(operator: Any) -> Layout:
    """Make the result as the kernel does, which allocates the loss of every element and shrinks the result to one number,
    but not its storage."""

    def loss(source: Tensor, target: Tensor, reduction: int = 1, *more: Any) -> Any:
        if reduction == 0:
            return operator(source, target, reduction, *more)
        elements = torch.broadcast_shapes(source.shape, target.shape)
        return source.new_empty(elements, dtype=torch.promote_types(source.dtype, target.dtype)).resize_(())

    return loss


def _clone(source: Tensor, **options: Any) -> Any:
    """Clone a sparse fake, which has no elements."""
    if source.layout is not torch.sparse_coo:
        return _ATEN.clone.default(source, **options)
    indices, values = source._indices().clone(), source._values().clone()
    return torch.sparse_coo_tensor(indices, values, source.shape, is_coalesced=source.is_coalesced(), check_invariants=False)


def _convolution(source: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
    """Refuse tensors of two devices, which a fake convolution takes as no other operator does."""
    if source.device != weight.device or (bias is not None and bias.device != weight.device):
        raise RuntimeError("Expected all tensors to be on the same device, but found two at a convolution")
    result: Tensor = _ATEN.convolution.default(source, weight, bias, *others)
    return result


def _layer_norm(source: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    result, *statistics = _ATEN.native_layer_norm.default(source, shape, weight, bias, eps)
    return (result, *(_in_type_of(weight, part) for part in statistics))


def _group_norm(source: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> Any:
    result, *statistics = _ATEN.native_group_norm.default(source, weight, bias, *sizes)
    return (result, *(_in_type_of(weight, part) for part in statistics))


def _group_norm_backward(grad: Tensor, source: Tensor, *others: Any) -> Any:
    result, *parameters = _ATEN.native_group_norm_backward.default(grad, source, *others)
    return (None if result is None else _in_type_of(source, result), *parameters)


def _in_type_of(model: Tensor | None, tensor: Tensor) -> Tensor:
    return tensor if model is None or model.dtype == tensor.dtype else tensor.to(model.dtype)


def _layer_norm_of_gpu(source: Tensor, *others: Any) -> Any:
    """Keep mean and deviation in fp32."""
    result, *statistics = _ATEN.native_layer_norm.default(source, *others)
    return (
        result,
        *(part if part.itemsize >= 4 else part.new_empty(part.shape, dtype=torch.float32) for part in statistics),
    )


def _efficient_attention(*args: Any, **options: Any) -> Any:
    """Put seed and offset of the dropout on the host."""
    *results, seed, offset = _ATEN._scaled_dot_product_efficient_attention.default(*args, **options)
    return (*results, *(number.new_empty((), device="cpu") for number in (seed, offset)))


def _fused_rms_norm(source: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
    rows = [*source.shape[: source.dim() - len(shape)], *[1] * len(shape)]
    statistics_type = torch.float32 if source.itemsize < 4 else source.dtype
    return source.new_empty(source.shape), source.new_empty(rows, dtype=statistics_type)


def _fused_rms_norm_backward(
    grad: Tensor, source: Tensor, shape: Any, deviation: Tensor, weight: Tensor | None, wanted: Any
) -> Any:
    source_gradient = source.new_empty(source.shape) if wanted[0] else None
    weight_gradient = weight.new_empty(weight.shape) if wanted[1] and weight is not None else None
    return source_gradient, weight_gradient
