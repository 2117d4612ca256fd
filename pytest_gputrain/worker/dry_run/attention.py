"""Which kernel of scaled dot product attention a GPU takes, and the memory inside of kernels that no operator shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gputrain.records import Target

_HALVES = (torch.float16, torch.bfloat16)


def chooser(target: Target) -> Callable[..., Tensor]:
    """``scaled_dot_product_attention`` by the rules of ATen/native/transformers/cuda/sdp_utils.cpp.

    Flash where it can (halves, no mask, heads of up to 256, compute capability 8.0); else the memory-efficient kernel, which
    knows no grouped queries and wants aligned heads; else plain products, which hold the scores. cuDNN's kernel, which torch
    since 2.7 prefers to flash on 9.0 and 10.0, takes and keeps the same tensors as flash, and counts as it. Dropout
    in a fused kernel is drawn again in the backward pass.
    """
    aten = torch.ops.aten

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
        fused = query.dim() == key.dim() == value.dim() == 4
        modern = target.capability >= (8, 0)
        half = query.dtype in _HALVES
        grouped = enable_gqa and key.shape[1] != query.shape[1]
        result: tuple[Tensor, ...]
        if fused and modern and attn_mask is None and half and width == height <= 256:
            # Heads are padded to a multiple of 8; the scale stays that of their true width.
            parts = [functional.pad(part, [0, -width % 8]) if width % 8 else part for part in (query, key, value)]
            scale = 1 / math.sqrt(width) if scale is None else scale
            result = aten._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, False, scale=scale)
            return result[0][..., :width] if width % 8 else result[0]
        aligned = 8 if half else 4 if modern else 1
        if fused and not grouped and not width % aligned and not height % aligned and _knows(target, query.dtype):
            bias = _as_bias(attn_mask, query)
            recorded = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
            result = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, recorded, dropout_p, is_causal, scale=scale
            )
            return result[0]
        result = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return result[0]

    return attention


def _knows(target: Target, dtype: torch.dtype) -> bool:
    """Whether the memory-efficient kernel is there for the type."""
    return dtype in (torch.float32, torch.float16) or (dtype == torch.bfloat16 and target.capability >= (8, 0))


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """GPT-2's attention as it was written before there was a kernel, the softmax of halves in fp32 as under autocast."""
    scores = query @ key.transpose(-1, -2)
    scores = scores / math.sqrt(query.shape[-1]) if scale is None else scores * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(seen, scores, -1e4)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).type(value.dtype)
    return functional.dropout(weights, dropout) @ value


def _as_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as what is added to the scores, over all heads."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    batch, heads, length, _ = query.shape
    keys = mask.shape[-1]
    if keys % 16:
        # The kernel reads 16 at a time.
        mask = functional.pad(mask, [0, -keys % 16])[..., :keys]
    return mask.expand(batch, heads, length, mask.shape[-1])


def temporaries() -> dict[Any, Callable[[tuple[Any, ...]], int]]:
    """Bytes that CUDA's kernels take and give back, by operator."""
    aten = torch.ops.aten
    found: dict[Any, Callable[[tuple[Any, ...]], int]] = {
        aten._scaled_dot_product_flash_attention_backward: _flash_backward,
        aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    }
    four_bits = getattr(torch.ops, "bitsandbytes", None)
    if four_bits is not None and hasattr(four_bits, "gemm_4bit"):
        found[four_bits.gemm_4bit] = _unpacked
    return found


def _flash_backward(args: tuple[Any, ...]) -> int:
    """fp32 sums of the query's gradient, rows padded to 128; keys' and values' gradients for each head that shares them."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = -(-length // 128) * 128
    lanes = -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
    size = 4 * batch * heads * rows * (lanes + 1)
    if key.shape[1] != heads:
        size += 2 * batch * heads * key.shape[2] * width * query.element_size()
    return int(size)


def _efficient_backward(args: tuple[Any, ...]) -> int:
    """fp32 sums of the query's gradient, where it is stored in halves."""
    query = args[1]
    return 0 if query.dtype == torch.float32 else 4 * query.numel()


def _unpacked(args: tuple[Any, ...]) -> int:
    """The weight in the arithmetic of the product: a kernel for many rows unpacks it first."""
    left, shape = args[0], args[2]
    return int(math.prod(shape) * left.element_size())
