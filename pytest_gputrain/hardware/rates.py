"""Finds what a GPU of the catalog sustains in practice, by kind of kernel.

The figures stand in ``rates.toml``, each with its source.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Final

from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.records import Rates

FILE: Final = Path(__file__).with_name("rates.toml")


_BASES: Final = {
    "products_tf32": "products_16bit",
    "convolutions_16bit": "products_16bit",
    "convolutions_fp32": "products_fp32",
    "convolutions_tf32": "products_tf32",
    "attention_": "products_16bit",
    "reductions": "pointwise",
    "gathers": "pointwise",
    "thin_products": "pointwise",
}
"""Beginnings of kinds, with the kind to which they have the same ratio on a board as on the one that it is like."""


@functools.cache
def rates_of(marker: str, like: str = "") -> Rates | None:
    """Return the rates of the GPU with that marker; None if they are unknown.

    Args:
        like: the board that it is like where the file has nothing of it.

    Raises:
        KeyError: the catalog has no such marker, or the file no such source.
    """
    file: dict[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    platform, board = PLATFORMS[marker], file["boards"].get(marker, {"like": like} if like else None)
    if board is None:
        return None
    tf32 = platform.tf32_flops if not platform.lacks("bf16") else None  # Tensor cores that lack bf16 lack TF32 as well.
    sources = [file["sources"][source] for source in board.get("from", {})]
    return Rates(
        board=marker,
        flops=platform.peak_flops | ({"tf32": tf32} if tf32 else {}),
        bandwidth=platform.bandwidth,
        multiprocessors=platform.multiprocessors,
        kinds=_kinds(file["boards"], board),
        measured=any(source.get("measured", False) for source in sources),
    )


def _kinds(boards: dict[str, Any], board: dict[str, Any]) -> dict[str, float]:
    """Return the rates of a board. A rate that nobody published is derived from a similar board's."""
    kinds: dict[str, float] = {}
    for figures in board.get("from", {}).values():
        kinds |= figures
    if "like" in board:
        like = _kinds(boards, boards[board["like"]])
        # Rates of products come first, because other rates are derived from them.
        for kind in sorted(like.keys() - kinds.keys() - {"link_gb"}, key=lambda kind: not kind.startswith("products")):
            base = next((base for begin, base in _BASES.items() if kind.startswith(begin)), "")
            kinds[kind] = like[kind] * (kinds[base] / like[base] if base in kinds and base in like else 1)
    return kinds
