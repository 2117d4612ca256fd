"""Floating-point operations of a step, those that activation checkpointing repeats counted apart."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

_counting: ContextVar[FlopCount | None] = ContextVar("_counting", default=None)
"""The counter at work, for the recomputation that happens deep inside of backward."""


class FlopCount:
    """Result of `count_flops`."""

    def __init__(self) -> None:
        self._counter = FlopCounterMode(display=False, custom_mapping=_formulas())
        self.recomputed = 0

    @property
    def total(self) -> int:
        return int(self._counter.get_total_flops())


@contextlib.contextmanager
def count_flops() -> Iterator[FlopCount]:
    """Counts matrix multiplications, convolutions and attention, by the formulas of torch.utils.flop_counter."""
    count = FlopCount()
    token = _counting.set(count)
    try:
        with count._counter:
            yield count
    finally:
        _counting.reset(token)


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """``context_fn`` of `torch.utils.checkpoint.checkpoint`: tells the counter what is recomputation."""
    return contextlib.nullcontext(), _recomputing()


@contextlib.contextmanager
def _recomputing() -> Iterator[None]:
    count = _counting.get()
    before = count.total if count else 0
    try:
        yield
    finally:
        if count:
            count.recomputed += count.total - before


def _formulas() -> dict[Any, Any]:
    """Operators that torch's own counter lacks: the CPU's fused attention and bitsandbytes' fused 4-bit product."""
    formulas: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
    }
    if "bitsandbytes" in sys.modules:
        for name in ("gemm_4bit", "gemv_4bit"):
            if hasattr(torch.ops.bitsandbytes, name):
                formulas[getattr(torch.ops.bitsandbytes, name)] = _product_with_4bit
    return formulas


def _sdpa_forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _sdpa_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _product_with_4bit(left: Any, packed: Any, shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """``left`` (..., in) times the transpose of a weight whose unpacked ``shape`` is (out, in)."""
    return int(2 * math.prod(left) * shape[0])
