"""Keeps which bytes of an emulated GPU's memory hold the same unknown values, by address.

Values that nobody computed have no contents, but an origin: a number. Two ranges of bytes with the same origin hold the
same values, as a tensor and its clone do. What is written to gets another origin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from torch import Tensor

_MOST: Final = 256
"""The most pieces of a block. One that has more is taken as written to."""

Origin = tuple[int, int, int]
"""Bytes of unknown values: the number of what they come from, the first byte's place there, and how many they are."""


class Pieces:
    """The origins of the bytes of each block that was looked at.

    Args:
        watch: gives the number of the block at an address, which it has until torch frees it.
        is_watched: tells whether a block still has this number.

    Attributes:
        blocks: by their first address, the number of each block and the origins by the first address of the piece. torch may
            have freed a block since.
    """

    def __init__(self, watch: Callable[[int], int], is_watched: Callable[[int, int], int]) -> None:
        self._watch, self._is_watched = watch, is_watched
        self.blocks: dict[int, tuple[int, dict[int, Origin]]] = {}
        self._fresh = itertools.count(1)

    def any_in(self, tensor: Tensor) -> bool:
        """Tell whether the block of a tensor holds values of a known origin."""
        base = _base(tensor)
        block = self.blocks.get(base)
        if block is None:
            return False
        if not self._is_watched(base, block[0]):
            del self.blocks[base]  # a new block has this address now
            return False
        return True

    def fresh(self) -> int:
        """Return the number of a new origin."""
        return next(self._fresh)

    def of(self, tensor: Tensor, bytes_: int) -> tuple[Origin, ...]:
        """Return where this many bytes of a tensor come from. What was not looked at before gets an origin."""
        pieces = self._pieces(_base(tensor))
        low = tensor.data_ptr()
        piece = pieces.get(low)
        if piece is not None and piece[2] == bytes_:
            return (piece,)
        high, at, found = low + bytes_, low, []
        within = [(start, piece) for start, piece in pieces.items() if start < high and low < start + piece[2]]
        for start, (origin, place, length) in sorted(within):
            if at < start:
                found.append(self._add(pieces, at, start - at))
            first, end = max(start, low), min(start + length, high)
            found.append((origin, place + first - start, end - first))
            at = end
        if at < high:
            found.append(self._add(pieces, at, high - at))
        return tuple(found)

    def put(self, tensor: Tensor, bytes_: int, origins: tuple[Origin, ...]) -> None:
        """Note where the values of a tensor come from, whose bytes have no gaps."""
        at = tensor.data_ptr()
        pieces = self._pieces(_base(tensor))
        if pieces:
            self._cut(pieces, at, at + bytes_)
        if len(pieces) + len(origins) > _MOST:
            pieces.clear()
        for origin in origins:
            pieces[at] = origin
            at += origin[2]

    def drop(self, base: int, low: int, high: int) -> None:
        """Note that these addresses of a block were written to."""
        block = self.blocks.get(base)
        if block is None:
            return
        pieces = block[1]
        self._cut(pieces, low, high)
        if not pieces:
            del self.blocks[base]

    def _cut(self, pieces: dict[int, Origin], low: int, high: int) -> None:
        if (piece := pieces.get(low)) is not None and low + piece[2] == high:
            del pieces[low]
            return
        for start, (origin, place, length) in list(pieces.items()):
            end = start + length
            if end <= low or start >= high:
                continue
            del pieces[start]
            if start < low:
                pieces[start] = origin, place, low - start
            if end > high:
                pieces[high] = origin, place + high - start, end - high

    def _pieces(self, base: int) -> dict[int, Origin]:
        block = self.blocks.get(base)
        if block is None or not self._is_watched(base, block[0]):
            block = self.blocks[base] = self._watch(base), {}
        return block[1]

    def _add(self, pieces: dict[int, Origin], start: int, length: int) -> Origin:
        pieces[start] = origin = self.fresh(), 0, length
        return origin


def _base(tensor: Tensor) -> int:
    return int(tensor.data_ptr()) - int(tensor.storage_offset()) * tensor.itemsize
