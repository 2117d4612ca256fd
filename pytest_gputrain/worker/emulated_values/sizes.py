"""Tells operators how many results there are where their output's size depends on values, known or not.

Unknown values are assumed to differ from each other and from zero, as far as their type has as many values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .contents import is_small, on_host

Answers = Sequence[tuple[int, int]]
"""The answers to an operator's reads from the device, in their order: each is a number, or a structure of two."""

_MOST_NONZERO: Final = 1 << 30
"""The most elements of which `nonzero` reads one count. It reads an array of counts for more."""


_MOST_IN_A_BLOCK: Final = 2048
"""The most elements among which one kernel finds the most frequent."""


def _numbers(*values: int) -> Answers:
    return [(value, 0) for value in values]


def _distinct(tensor: Tensor, count: int) -> int:
    """Return how many of this many values can differ."""
    return count if tensor.dtype.is_complex else min(count, 1 << min(8 * tensor.itemsize, 62))


def repeated_nonzero(tensor: Tensor) -> int | None:
    """Count the elements that are not zero of a known tensor which is large only because `expand` repeats its elements."""
    once = tensor[tuple(slice(None) if stride else slice(1) for stride in tensor.stride())]
    if not is_small(once) or tensor.numel() > _MOST_NONZERO:
        return None
    return int(on_host(once).count_nonzero()) * (tensor.numel() // max(once.numel(), 1))


def _nonzero(arguments: Sequence[Any], result: Any, value: Tensor | None) -> Answers:
    source = arguments[0]
    if source.numel() > _MOST_NONZERO:
        return ()
    if result is not None:
        return _numbers(result.size(0))
    return _numbers(source.numel() if value is None or value.item() else 0)


def _unique(arguments: Sequence[Any], result: Any, value: Tensor | None) -> Answers:
    source = arguments[0]
    if source.dtype == torch.bool:  # For booleans torch asks for the number of true elements.
        if result is not None:
            kinds = result[0].tolist()
            return _numbers(source.numel() if kinds == [True] else len(kinds) - 1)
        return _numbers(1 if value is None else source.numel() * bool(value.item()))
    if result is not None:
        return _numbers(result[0].numel())
    return _numbers(_distinct(source, source.numel()) if value is None else 1)


def _unique_consecutive(arguments: Sequence[Any], result: Any, value: Tensor | None) -> Answers:
    source, *others = arguments
    dim = others[2] if len(others) > 2 else None
    if result is not None:
        return _numbers(result[0].numel() if dim is None else result[0].size(dim))
    if value is not None:
        return _numbers(1)
    return _numbers(source.numel() if dim is None else source.size(dim))


def _unique_slices(arguments: Sequence[Any], result: Any, value: Tensor | None) -> Answers:
    source, dim = arguments[:2]
    if result is not None:
        return _numbers(result[0].size(dim))
    return _numbers(source.size(dim) if value is None else 1)


def _repeat_interleave(arguments: Sequence[Any], result: Any, value: Tensor | None) -> Answers:
    repeats = arguments[0]
    once = 1 if value is None else int(value.item())
    # the second answer says that no number is negative
    return _numbers(result.size(0) if result is not None else repeats.numel() * once, 1)


def _mode(arguments: Sequence[Any], result: Any, value: Tensor | None) -> Answers:
    """Answer for each long row how many neighbours and values differ, the most frequent value, and its place."""
    source, *others = arguments
    if not source.dim():
        return ()
    dim = others[0] if others else -1
    size = source.size(dim)
    if size <= _MOST_IN_A_BLOCK:
        return ()
    rows = source.numel() // size
    if source.dtype == torch.bool:
        return [(0, 0), (1, 0)] * rows
    if result is not None:
        distinct = [row.unique().numel() for row in on_host(source).movedim(dim, -1).reshape(-1, size)]
    else:
        distinct = [size if value is None else 1] * rows
    return [answer for count in distinct for answer in ((count - 1, 0), (count, 0), (0, 0), (0, 0), (1, 0), (0, 0))]


SIZED: Final[Mapping[str, Callable[[Sequence[Any], Any, Tensor | None], Answers]]] = {
    "nonzero": _nonzero,
    "_unique": _unique,
    "_unique2": _unique,
    "unique_consecutive": _unique_consecutive,
    "unique_dim": _unique_slices,
    "unique_dim_consecutive": _unique_slices,
    "repeat_interleave": _repeat_interleave,
    "mode": _mode,
}
"""For each operator that reads from the device how many results there are, or how many values differ: a function that
returns the answers from its arguments, its result on the host if that is known, and the value of all elements if they are
equal."""
