"""Makes the target that a case is predicted for: a device of the catalog as `pytest_gputrain.records.Target`."""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_gputrain.hardware.catalog import CPU, PLATFORMS
from pytest_gputrain.records import Target
from pytest_gputrain.utils.units import MiB

CONTEXT_BYTES: Final = 600 * MiB
"""The driver's context with the kernels that a step loads, on CUDA 12: what nvidia-smi shows of a process beyond the memory
that torch holds. See docs/prediction-accuracy.md."""

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
        peak_flops=platform.peak_flops,
        bandwidth=platform.bandwidth,
    )


def allowing_tf32(target: Target) -> Target:
    """Return the target of a case that computes its fp32 in TF32."""
    rate = PLATFORMS[target.marker].tf32_flops if target.marker in PLATFORMS else None
    peaks = {name: peak for name, peak in target.peak_flops.items() if name != "fp32"}
    return msgspec.structs.replace(target, peak_flops=peaks if rate is None else {"fp32": rate, **peaks})
