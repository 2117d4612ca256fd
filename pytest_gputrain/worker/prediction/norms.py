"""Computes norms and softmax on fakes as CUDA does, in one kernel each, where a CPU takes them apart into several
operators.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_ATEN: Final = torch.ops.aten


class _RmsNorm(torch.autograd.Function):
    """The kernel keeps its input and one number for each row; taken apart, it would keep copies in fp32."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result, deviation = _ATEN._fused_rms_norm.default(source, shape, weight, eps)
        ctx.save_for_backward(source, weight, deviation)
        ctx.shape = shape
        normed: Tensor = result
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        source, weight, deviation = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            source_gradient, weight_gradient = _ATEN._fused_rms_norm_backward.default(
                grad, source, ctx.shape, deviation, weight, wanted
            )
        return source_gradient, None, weight_gradient, None


def rms_norm(source: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Stand in for `torch.rms_norm` of CUDA, which takes a weight of another type apart as a CPU does."""
    fused = weight is None or weight.dtype == source.dtype
    norm: Any = _RmsNorm.apply if fused else _ATEN.rms_norm.default.decompose
    result: Tensor = norm(source, shape, weight, eps)
    return result


def group_norm(source: Tensor, *others: Any) -> Tensor:
    """Stand in for `torch.group_norm` of CUDA, which copies a source that is laid out with its channels last, and keeps the
    copy.
    """
    result: Tensor = _ATEN.group_norm.default.decompose(source.contiguous(), *others)
    return result


def softmax(source: Tensor, dimension: int, dtype: torch.dtype | None = None) -> Tensor:
    """Stand in for ``softmax.int`` of CUDA, which reads fp16 and writes fp32 without a copy."""
    return _of_fp16(_ATEN._softmax, _ATEN.softmax.int, source, dimension, dtype)


def log_softmax(source: Tensor, dimension: int, dtype: torch.dtype | None = None) -> Tensor:
    """Stand in for ``log_softmax.int`` of CUDA, likewise."""
    return _of_fp16(_ATEN._log_softmax, _ATEN.log_softmax.int, source, dimension, dtype)


def _of_fp16(kernel: Any, otherwise: Any, source: Tensor, dimension: int, dtype: torch.dtype | None) -> Tensor:
    if source.dtype == torch.float16 and dtype == torch.float32:
        result: Tensor = kernel(source, dimension, True)
    else:
        result = otherwise.decompose(source, dimension, dtype)
    return result
