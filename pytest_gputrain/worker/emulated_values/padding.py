"""Has Inductor pad no matrix product because of a time, and tells which ones it would have measured."""

from __future__ import annotations

import math
import weakref
from typing import Any

from torch import Tensor


class Padding:
    """The matrix products that Inductor pads on a GPU if that is faster there, which nothing measures here."""

    def __init__(self) -> None:
        self._measured = False
        self._kinds: set[str] = set()
        self._seen: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self._products: dict[tuple[str, int], int] = {}

    def follow(self, module: Any) -> None:
        """Answer for the measurements of Inductor's pass."""
        name = "should_pad" if hasattr(module, "should_pad") else "should_pad_bench"  # Older versions of torch call it so.
        decide = getattr(module, name)

        def answer(key: str) -> bool:
            self._measured = True
            return False

        def decide_and_note(match: Any, mat1: Tensor, mat2: Tensor, op: Any, input: Tensor | None = None) -> bool:
            self._measured = False
            padded: bool = decide(match, mat1, mat2, op, input)
            kind = f"{op} {mat1.shape} {mat1.stride()} {mat2.shape} {mat2.stride()} {mat1.dtype} {mat1.device.type}"
            if self._measured:
                self._kinds.add(kind)  # Inductor decides once for equal products.
            nodes = (match.kwargs["mat1"], match.kwargs["mat2"])
            seen = self._seen.setdefault(nodes[0].graph, set())
            if not padded and kind in self._kinds and str(nodes) not in seen:
                # Inductor asks for a product several times, because several of its patterns contain it.
                seen.add(str(nodes))
                self._note(module, mat1, mat2, op, input)
            return padded

        module.get_cached_should_pad = answer
        setattr(module, name, decide_and_note)

    def _note(self, module: Any, mat1: Tensor, mat2: Tensor, op: Any, input: Tensor | None) -> None:
        sizes = [_known(length) for length in (*mat1.shape, mat2.shape[-1])]
        alignment = module.get_alignment_size(mat1)
        more = [module.get_padded_length(length, alignment) for length in (*mat1.shape[-2:], mat2.shape[-1])]
        *batch, m, k, n = sizes
        rows, inner, columns = m + more[0], k + more[1], n + more[2]
        elements = rows * columns - m * n
        elements += rows * inner if more[0] or more[1] else 0
        elements += inner * columns if more[1] or more[2] else 0
        elements += rows * columns if input is not None and input.dim() == 2 and (more[0] or more[2]) else 0
        dtype = str(mat1.dtype).removeprefix("torch.")
        what = f"{op.__name__} of {m} x {k} and {k} x {n}, {dtype}"
        product = (what, math.prod(batch) * elements * mat1.element_size())
        self._products[product] = self._products.get(product, 0) + 1

    def rows(self) -> list[dict[str, str | int]]:
        """Return the products with the bytes of the padded copies of each, the largest first."""
        ordered = sorted(self._products.items(), key=lambda one: -one[0][1] * one[1])
        return [{"product": what, "bytes": bytes_, "count": count} for (what, bytes_), count in ordered]


def _known(length: Any) -> int:
    """Return a length, or what it was when the code was compiled."""
    return length if isinstance(length, int) else length.node.hint or 0
