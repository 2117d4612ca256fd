"""Makes the target that a case is predicted for: a device of the catalog as `pytest_gputrain.records.Target`."""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_gputrain.hardware.catalog import CPU, PLATFORMS
from pytest_gputrain.records import Target
from pytest_gputrain.utils.units import MiB

CONTEXT_BYTES: Final = 768 * MiB
"""The driver's context with the kernels that a step loads: what nvidia-smi shows of a process beyond the memory that torch
holds. 751 to 775 MiB were measured on an H200 with driver 580 and CUDA 13; tables of the time of CUDA 12 have some 600."""

_LARGE_WORKSPACE: Final = 32 * MiB
_SMALL_WORKSPACE: Final = 2 * 4096 * 1024 + 8 * 16 * 1024


def target_of(marker: str) -> Target:
    """Return the device with that marker, with the defaults of the installed libraries.

    Raises:
        KeyError: the catalog has no such marker.
    """
    if marker == CPU:
        return Target(marker=CPU, kind="cpu")
    platform = PLATFORMS[marker]
    return Target(
        marker=marker,
        kind="cuda",
        memory_bytes=platform.usable_bytes,
        context_bytes=CONTEXT_BYTES,
        capability=platform.capability,
        multiprocessors=platform.multiprocessors,
        # getChosenWorkspaceSize of ATen/cuda/CublasHandlePool.cpp
        workspace_bytes=_LARGE_WORKSPACE if platform.capability >= (9, 0) else _SMALL_WORKSPACE,
        peak_flops=_with_rate_of_convolutions(platform.peak_flops, platform.tf32_flops),
        bandwidth=platform.bandwidth,
    )


def with_tf32(target: Target, allowed: bool | None) -> Target:
    """Return the target of a case that lets fp32 be computed in TF32, or forbids it. None is torch's default: convolutions
    may be."""
    if allowed is None or target.kind == "cpu":
        return target
    replaced = ("tf32", "fp32") if allowed else ("tf32",)
    peaks = {name: peak for name, peak in target.peak_flops.items() if name not in replaced}
    rate = PLATFORMS[target.marker].tf32_flops if target.marker in PLATFORMS else None
    return msgspec.structs.replace(target, peak_flops={"fp32": rate, **peaks} if allowed and rate is not None else peaks)


def _with_rate_of_convolutions(peaks: dict[str, float], rate: float | None) -> dict[str, float]:
    return peaks if rate is None or rate == peaks.get("fp32") else {**peaks, "tf32": rate}
