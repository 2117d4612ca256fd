"""This machine as the cases see it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gputrain.hardware import catalog, nvidia
from pytest_gputrain.hardware.devices import Gpu, HardwareError


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The devices a run may use; GPUs of one kind only."""

    gpus: tuple[Gpu, ...]
    platform: str
    """Catalog marker, ``cpu``, or ``unknown`` for a GPU that the catalog lacks."""

    @property
    def device_type(self) -> Literal["cpu", "gpu"]:
        return "gpu" if self.gpus else "cpu"

    @property
    def device_name(self) -> str:
        return self.gpus[0].name if self.gpus else catalog.CPU

    @property
    def slug(self) -> str:
        """Folder of this machine's baselines."""
        return catalog.slug(self.device_name)


def detect(
    *, platform: str | None = None, gpu_ids: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Machine:
    """What is here, within ``CUDA_VISIBLE_DEVICES`` and ``gpu_ids``.

    Args:
        platform: the marker that this machine must have; a GPU that the catalog lacks passes for it. ``cpu`` leaves GPUs
            alone.

    Raises:
        HardwareError: an unknown GPU, a platform without a GPU, GPUs of several kinds, or a driver that fails.
    """
    if platform == catalog.CPU:
        if gpu_ids:
            raise HardwareError("--gpu-ids names GPUs, but --gpu-platform=cpu leaves them alone")
        return Machine(gpus=(), platform=catalog.CPU)
    gpus = _visible(nvidia.gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    if gpu_ids:
        gpus = tuple(dict.fromkeys(_find(gpus, wanted) for wanted in gpu_ids))
    if not gpus:
        if platform is not None:
            raise HardwareError(f"--gpu-platform={platform}, but no GPU is visible here")
        return Machine(gpus=(), platform=catalog.CPU)
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise HardwareError(f"GPUs of several kinds are visible ({', '.join(names)}); choose those of one with --gpu-ids")
    marker = catalog.marker_of(names[0])
    if platform is not None and marker not in (None, platform):
        raise HardwareError(f"--gpu-platform={platform}, but the GPU here is {marker} ({names[0]})")
    return Machine(gpus=gpus, platform=platform or marker or "unknown")


def _find(gpus: Sequence[Gpu], wanted: str) -> Gpu:
    found = _match(gpus, wanted)
    if found is not None:
        return found
    visible = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise HardwareError(f"--gpu-ids: no visible GPU {wanted!r}; visible: {visible}")


def _visible(gpus: Sequence[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would show: by index or UUID, up to the first entry that names none (CUDA stops there too).

    Raises:
        HardwareError: the variable shows none of them, and does not say so by being empty or -1.
    """
    if variable is None or not gpus:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in map(str.strip, variable.split(",")):
        match = _match(gpus, entry)
        if match is None:
            break
        chosen.append(match)
    said_none = variable.split(",")[0].strip() in ("", "-1", "NoDevFiles")
    if not chosen and not said_none:
        mig = "; MIG slices are not supported" if "MIG-" in variable else ""
        raise HardwareError(f"CUDA_VISIBLE_DEVICES={variable} shows none of the {len(gpus)} GPUs here{mig}")
    return tuple(dict.fromkeys(chosen))


def _match(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    """The GPU of that index, or whose UUID begins so."""
    return next(
        (gpu for gpu in gpus if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))), None
    )
