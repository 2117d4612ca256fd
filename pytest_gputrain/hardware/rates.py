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


@functools.cache
def rates_of(marker: str) -> Rates | None:
    """Return the rates of the GPU with that marker; None where they are not known.

    Raises:
        KeyError: the catalog has no such marker, or the file no such source.
    """
    file: dict[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    platform, board = PLATFORMS[marker], file["boards"].get(marker)
    if board is None:
        return None
    kinds: dict[str, float] = {}
    for figures in board["from"].values():
        kinds |= figures
    tf32 = {"tf32": platform.tf32_flops} if platform.tf32_flops else {}
    return Rates(
        board=marker,
        flops=platform.peak_flops | tf32,
        bandwidth=platform.bandwidth,
        multiprocessors=platform.multiprocessors,
        kinds=kinds,
        measured=any(file["sources"][source].get("measured", False) for source in board["from"]),
    )
