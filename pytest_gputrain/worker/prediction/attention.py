"""Chooses the kernel that a GPU takes for scaled dot product attention, and sizes the memory inside of these kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gputrain.records import Target
from pytest_gputrain.worker.prediction import cudnn
from pytest_gputrain.worker.prediction.operators import Temporaries

_HALVES = (torch.float16, torch.bfloat16)
_CUDNN = ((9, 0), (10, 0))
"""Compute capabilities on which cuDNN's kernel comes first."""


def chooser(target: Target) -> Callable[..., Tensor]:
    """Return ``scaled_dot_product_attention`` by the rules of ATen/native/transformers/cuda/sdp_utils.cpp.

    cuDNN's kernel on 9.0 and 10.0 (halves, no dropout, more than one key, aligned heads of up to 256, masks too), where
    attention is that of today: torch prefers it since 2.7. Else flash where it can (halves, no mask, heads of up to 256, as
    many queries as keys if causal, compute capability 8.0); else the memory-efficient kernel, which knows no grouped queries
    and wants aligned heads; else plain products, which hold the scores. So do all where the numbers of a head do not lie
    beside each other. Dropout in a fused kernel is drawn again in the backward pass.
    """
    aten = torch.ops.aten
    prefers_cudnn = target.attention == "current" and target.capability in _CUDNN

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if target.attention == "unfused":
            return _unfused(query, key, value, attn_mask, dropout_p, is_causal, scale)
        width, height = query.shape[-1], value.shape[-1]
        dense = all(part.stride(-1) == 1 for part in (query, key, value, attn_mask) if part is not None)
        fused = query.dim() == key.dim() == value.dim() == 4 and dense
        modern = target.capability >= (8, 0)
        half = query.dtype in _HALVES
        grouped = enable_gqa and key.shape[1] != query.shape[1]
        result: tuple[Tensor, ...]
        recorded = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        learned = attn_mask is not None and attn_mask.requires_grad  # of which cuDNN's kernel has no gradient
        cudnn = prefers_cudnn and fused and half and not dropout_p and not learned and key.shape[2] > 1
        if cudnn and max(width, height) <= 256 and not width % 8 and not height % 8:
            bias = None if attn_mask is None else _added(attn_mask, query.dtype)
            if bias is not None:
                bias = bias.expand(*query.shape[:3], key.shape[2])
            result = aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, recorded, dropout_p, is_causal, False, scale=scale
            )
            return result[0]
        even = not is_causal or query.shape[2] == key.shape[2]
        if fused and modern and attn_mask is None and half and width == height <= 256 and even:
            # Heads are padded to a multiple of 8; the scale stays that of their true width.
            parts = [functional.pad(part, [0, -width % 8]) if width % 8 else part for part in (query, key, value)]
            scale = 1 / math.sqrt(width) if scale is None else scale
            result = aten._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, False, scale=scale)
            return result[0][..., :width] if width % 8 else result[0]
        aligned = 8 if half else 4 if modern else 1
        if fused and not grouped and not width % aligned and not height % aligned and _supports(target, query.dtype):
            bias = _as_bias(attn_mask, query)
            result = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, recorded, dropout_p, is_causal, scale=scale
            )
            return result[0]
        result = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return result[0]

    return attention


def _supports(target: Target, dtype: torch.dtype) -> bool:
    """Tell whether there is a memory-efficient kernel for the type."""
    return dtype in (torch.float32, torch.float16) or (dtype == torch.bfloat16 and target.capability >= (8, 0))


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Compute GPT-2's attention as it was written before there was a kernel, the softmax of halves in fp32 as under
    autocast."""
    scores = query @ key.transpose(-1, -2)
    scores = scores / math.sqrt(query.shape[-1]) if scale is None else scores * scale
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(visible, scores, -1e4)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).type(value.dtype)
    return functional.dropout(weights, dropout) @ value


def _as_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask as what is added to the scores, over all heads."""
    if mask is None:
        return None
    mask = _added(mask, query.dtype)
    batch, heads, length, _ = query.shape
    keys = mask.shape[-1]
    if keys % 8:
        # The kernel reads 8 at a time.
        mask = functional.pad(mask, [0, -keys % 8])[..., :keys]
    return mask.expand(batch, heads, length, mask.shape[-1])


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as what is added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    zero, minus_infinity = (mask.new_full((), value, dtype=dtype) for value in (0.0, -math.inf))
    return torch.where(mask, zero, minus_infinity)


def temporaries(target: Target) -> dict[Any, Temporaries]:
    """Return by operator what kernels of attention allocate and free."""
    aten = torch.ops.aten
    measured = {aten._scaled_dot_product_cudnn_attention: _cudnn} if cudnn.known(target) else {}
    return measured | {
        aten._scaled_dot_product_efficient_attention: _efficient,
        aten._scaled_dot_product_flash_attention: _flash,
        aten._scaled_dot_product_flash_attention_backward: _flash_backward,
        aten._scaled_dot_product_cudnn_attention_backward: _cudnn_backward,
        aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    }


def _flash(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return what the dropout is drawn from."""
    return (8,) if len(args) > 3 and args[3] else ()


def _flash_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size fp32 sums of the query's gradient, rows padded to 128; keys' and values' gradients for each head that shares
    them."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = -(-length // 128) * 128
    lanes = -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
    sums = 4 * batch * heads * rows
    shared = () if key.shape[1] == heads else (batch * heads * key.shape[2] * width * query.itemsize,) * 2
    strided = [part for part in (args[0], args[4]) if not part.transpose(1, 2).is_contiguous()]
    return (*(part.nbytes for part in strided), sums, sums * lanes, *shared)


def _cudnn(args: tuple[Any, ...]) -> tuple[int, ...]:
    return (cudnn.of_attention(),)


def _cudnn_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size fp32 sums of the query's gradient, by cuDNN's frontend, and the workspace of its engine."""
    query, key, value = args[1:4]
    batch, heads, length, width = query.shape
    return (4 * batch * heads * length * (width + 1) + cudnn.of_attention_backward(query, key, value),)


def _efficient(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size the result in fp32, of wide halves."""
    query, value = args[0], args[2]
    return (4 * query.shape[:3].numel() * value.shape[-1],) if query.itemsize < 4 and value.shape[-1] > 128 else ()


def _efficient_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Size fp32 sums of the query's gradient in blocks of 64; of wide halves, of the keys' and the values' too."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows, keys = (-(-count // 64) for count in (length, key.shape[2]))
    block = 4 * 64 * (-(-width // 64) * 64)
    sums = batch * heads * rows * (block + 16)
    if query.itemsize < 4:
        shared = 2 * batch * heads * keys * block if width > 128 else 0
        return (4 * batch * heads * length, sums + shared)
    # The result times its gradient, and the sums of its rows, are there before.
    return (4 * batch * heads * length, max(sums, 4 * batch * heads * length * (args[5].shape[-1] + 1)))
