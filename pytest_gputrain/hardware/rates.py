"""Finds the peak rates of a GPU of the catalog for a case: FLOP/s by arithmetic, and the bandwidth of its memory."""

from __future__ import annotations

from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.records import Rates


def rates_of(marker: str, tf32: bool | None) -> Rates:
    """Return the peak rates of the GPU with that marker.

    Args:
        tf32: whether the case lets fp32 be computed in TF32, or forbids it. None is torch's default: convolutions may be.

    Raises:
        KeyError: the catalog has no such marker.
    """
    platform = PLATFORMS[marker]
    flops, rate = dict(platform.peak_flops), platform.tf32_flops
    if tf32:
        del flops["fp32"]
        flops |= {} if rate is None else {"fp32": rate}
    elif tf32 is None and rate not in (None, flops["fp32"]):
        flops["tf32"] = rate
    return Rates(flops=flops, bandwidth=platform.bandwidth)
