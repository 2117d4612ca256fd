"""Detects which devices of this machine a run may use, and which platform they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gputrain.hardware import catalog, drivers
from pytest_gputrain.hardware.devices import Gpu, HardwareError
from pytest_gputrain.records import Host


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The devices a run may use; GPUs of one kind only."""

    gpus: tuple[Gpu, ...]
    platform: str
    """Catalog marker, ``cpu``, or ``unknown`` for a GPU that the catalog lacks."""
    unseen: str = ""
    """Why it counts as a CPU although the kernel has GPUs, with the remedy; empty where nothing is amiss."""

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

    @property
    def host(self) -> Host:
        return Host(name=socket.gethostname(), platform=self.platform, device=self.slug, gpus=len(self.gpus))


def detect(
    *, platform: str | None = None, gpu_ids: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Machine:
    """Detect the devices here, within ``gpu_ids`` and what the vendor's runtime shows: ``CUDA_VISIBLE_DEVICES``, for AMD
    ``ROCR_VISIBLE_DEVICES`` and, of what that leaves, ``HIP_VISIBLE_DEVICES``.

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
    every_gpu = drivers.gpus()
    gpus = _visible(every_gpu, environ)
    if gpu_ids:
        gpus = tuple(dict.fromkeys(_find(gpus, wanted) for wanted in gpu_ids))
    if not gpus:
        unseen = "" if every_gpu else drivers.unseen()
        if platform is not None:
            raise HardwareError(f"--gpu-platform={platform}, but no GPU is visible here{f' ({unseen})' if unseen else ''}")
        return Machine(gpus=(), platform=catalog.CPU, unseen=unseen)
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise HardwareError(f"GPUs of several kinds are visible ({', '.join(names)}); choose those of one with --gpu-ids")
    marker = catalog.marker_of(names[0])
    if platform is not None and marker not in (None, platform):
        raise HardwareError(f"--gpu-platform={platform}, but the GPU here is {marker} ({names[0]})")
    return Machine(gpus=gpus, platform=platform or marker or "unknown")


def _find(gpus: Sequence[Gpu], wanted: str) -> Gpu:
    gpu = _match(gpus, wanted, {gpu.uuid: gpu.index for gpu in gpus})
    if gpu is not None:
        return gpu
    visible = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise HardwareError(f"--gpu-ids: no visible GPU {wanted!r}; visible: {visible}")


def _visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that the runtimes of their vendors would show.

    Raises:
        HardwareError: a variable shows none of them, and does not say so by being empty or -1.
    """
    of_vendor = {vendor: [gpu for gpu in gpus if gpu.vendor == vendor] for vendor in ("nvidia", "amd")}
    by_index = {gpu.uuid: gpu.index for gpu in gpus}
    nvidias = _visible_by(of_vendor["nvidia"], "CUDA_VISIBLE_DEVICES", environ, by_index)
    amd_gpus = _visible_by(of_vendor["amd"], "ROCR_VISIBLE_DEVICES", environ, by_index)
    # HIP counts what ROCm left to it. It heeds CUDA's name for its own variable, which is another vendor's beside NVIDIA's
    # GPUs, and takes an empty one for unset.
    name = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") or nvidias else "CUDA_VISIBLE_DEVICES"
    set_variables = {key: value for key, value in environ.items() if value}
    return (
        *nvidias,
        *_visible_by(amd_gpus, name, set_variables, {gpu.uuid: position for position, gpu in enumerate(amd_gpus)}),
    )


def _visible_by(gpus: list[Gpu], name: str, environ: Mapping[str, str], numbers: Mapping[str, int]) -> list[Gpu]:
    """The GPUs that a variable shows, up to its first entry that names none (the runtimes stop there too).

    Args:
        numbers: by UUID, what the variable calls them.
    """
    variable = environ.get(name)
    if variable is None or not gpus:
        return gpus
    chosen: list[Gpu] = []
    for entry in map(str.strip, variable.split(",")):
        match = _match(gpus, entry, numbers)
        if match is None:
            break
        chosen.append(match)
    said_none = variable.split(",")[0].strip() in ("", "-1", "NoDevFiles")
    if not chosen and not said_none:
        raise HardwareError(f"{name}={variable} shows none of the {len(gpus)} GPUs here")
    return list(dict.fromkeys(chosen))


def _match(gpus: Sequence[Gpu], name: str, numbers: Mapping[str, int]) -> Gpu | None:
    """The GPU of that number, the first of its parts, or the one whose UUID begins so."""
    return next(
        (
            gpu
            for gpu in gpus
            if name == str(numbers[gpu.uuid]) or (name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name))
        ),
        None,
    )
