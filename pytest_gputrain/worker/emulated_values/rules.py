"""Gives results of operators with unknown inputs, if they are the same for all inputs or follow from a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .contents import CHOICES, COUNTS, MATCHES, MOST_BYTES, MOST_DEALT_BYTES, Dealt, Known, joined


def compared(name: str, arguments: Sequence[Any]) -> bool | None:
    """Return the result of a check for NaN or infinity, if unknown numbers are taken to be finite; None for other
    comparisons.

    These are isnan, x != x and abs(x) == inf in torch.
    """
    value, other = arguments[0], arguments[-1]
    if not value.dtype.is_floating_point:
        return None
    if name == "isnan":
        return False
    if isinstance(other, Tensor):
        same = other.data_ptr() == value.data_ptr() and other.stride() == value.stride() and other.size() == value.size()
        return name == "eq" if same else None
    return name == "ne" if isinstance(other, float) and not math.isfinite(other) else None


DECIDING: Final[Mapping[str, bool]] = {
    "bitwise_or": True,
    "logical_or": True,
    "bitwise_and": False,
    "logical_and": False,
}
"""Operators of truth values, and the operand that decides the result, whatever the other one is."""


def _ranks(values: Tensor, dim: int, chosen: int) -> Tensor:
    """Return made-up indices that choose all options equally often: each row continues where the row before it ended."""
    options = values.size(dim) if values.dim() else 1
    chosen_in_all = values.numel() // max(options, 1) * chosen
    indices = torch.arange(min(options, chosen_in_all)).repeat(-(-chosen_in_all // max(options, 1)))[:chosen_in_all]
    sizes = list(values.size())
    if not sizes:
        return indices.reshape(())
    dim %= len(sizes)
    others = sizes[:dim] + sizes[dim + 1 :]
    return indices.reshape(*others, chosen).movedim(-1, dim)


def _top(values: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Tensor:
    return _ranks(values, dim, k)


def _extreme(values: Tensor, dim: int | None = None, keepdim: bool = False, **__: Any) -> Tensor:
    if dim is None:
        return torch.zeros(())
    indices = _ranks(values, dim, 1)
    return indices if keepdim or not values.dim() else indices.squeeze(dim)


def _sorted(values: Tensor, *arguments: Any, dim: int | None = None, stable: Any = None, descending: bool = False) -> Tensor:
    if dim is None:
        numbers = [argument for argument in arguments if type(argument) is int]
        dim = numbers[0] if numbers else -1
    return _rotated(values, dim)


def _rotated(values: Tensor, dim: int) -> Tensor:
    options = values.size(dim) if values.dim() else 1
    rows = torch.arange(values.numel() // max(options, 1)).unsqueeze(-1)
    indices = (rows + torch.arange(options)).remainder_(max(options, 1))
    if not values.dim():
        return indices.reshape(())
    sizes = list(values.size())
    dim %= len(sizes)
    return indices.reshape(*sizes[:dim], *sizes[dim + 1 :], options).movedim(-1, dim)


def _drawn(values: Tensor, samples: int, *_: Any, **__: Any) -> Tensor:
    return _ranks(values, -1, samples)


_COUNTING: Final = frozenset((
    "bincount", "count_nonzero", "cumsum", "histc", "index_add", "index_put", "scatter_add", "searchsorted", "sum",
))  # fmt: skip
"""Operators that count how often something was chosen."""


def followed(name: str, arguments: Sequence[Any], known: Sequence[Known]) -> Dealt | None:
    """Return how an operator's results depend on choices that were made up, such as those of experts; None if they do not.

    Args:
        name: without that of its overload.
        known: the known contents of its tensors.
    """
    dealt, base = joined(one.dealt for one in known), name.rstrip("_")
    if dealt is None or dealt.kind != CHOICES:
        return dealt
    if base in _COUNTING:
        return dealt._replace(kind=COUNTS)
    if base in ("eq", "ne") and len(known) == 2 and not all(one.dealt for one in known):
        first, second = arguments[:2]  # The number of an expert may be a plain number, or a tensor of another size.
        return dealt._replace(kind=MATCHES) if first.size() == second.size() else dealt
    return dealt


DEALT: Final[Mapping[str, Callable[..., Tensor]]] = {
    "topk": _top,
    "argmax": _extreme,
    "argmin": _extreme,
    "max.dim": _extreme,
    "min.dim": _extreme,
    "sort": _sorted,
    "sort.stable": _sorted,
    "multinomial": _drawn,
}
"""Operators that choose among scores, and the choices that are dealt where the scores are not known: experts by a router."""


_LEAST: Final = frozenset(("argmin", "min.dim"))
_LEVELS: Final = 16
"""To pack a weight in 4 bits, the nearest of so many levels is chosen for each number, and no size depends on that."""


def deal(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], output: Any) -> Tensor | None:
    """Return made-up indices for an operator that chooses among unknown scores, as a router of experts does. They are on the
    host; None if there are too many."""
    scores = arguments[0]
    if not scores.dtype.is_floating_point:
        return None
    indices = output[-1] if isinstance(output, tuple) else output
    packs = name in _LEAST and scores.numel() <= _LEVELS * indices.numel()
    most = MOST_BYTES if packs else MOST_DEALT_BYTES
    if indices.numel() * indices.itemsize > most or indices.numel() == 0:
        return None
    return DEALT[name](*arguments, **keywords).reshape(indices.size())
