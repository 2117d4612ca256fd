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
    """The devices that a run may use. All GPUs are of one kind."""

    gpus: tuple[Gpu, ...]
    platform: str
    """Catalog marker, ``cpu``, or ``unknown`` for a GPU that the catalog lacks."""
    unseen: str = ""
    """Why it counts as a CPU although the kernel has GPUs, with the remedy; empty if nothing is amiss."""

    @property
    def device_type(self) -> Literal["cpu", "gpu"]:
        return "gpu" if self.gpus else "cpu"

    @property
    def device_name(self) -> str:
        return self.gpus[0].name if self.gpus else catalog.CPU

    @property
    def slug(self) -> str:
        """The name of the folder of this machine's baselines."""
        # Releases of ROCm give one board several names, and two boards the same one.
        if self.gpus and self.gpus[0].vendor == "amd" and (marker := marker_of(self.gpus[0])) is not None:
            return catalog.slug(f"AMD Instinct {catalog.PLATFORMS[marker].title}")
        return catalog.slug(self.device_name)

    @property
    def host(self) -> Host:
        return Host(name=socket.gethostname(), platform=self.platform, device=self.slug, gpus=len(self.gpus))


def detect(
    *, platform: str | None = None, gpu_ids: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Machine:
    """Return the devices of this machine that ``gpu_ids`` and the vendor's variables show: ``CUDA_VISIBLE_DEVICES``, for AMD
    ``ROCR_VISIBLE_DEVICES`` and, of what that leaves, ``HIP_VISIBLE_DEVICES``.

    Args:
        platform: the marker that this machine must have; a GPU that the catalog lacks passes for it. ``cpu`` leaves GPUs
            alone.

    Raises:
        HardwareError: an unknown GPU, a platform without a GPU, GPUs of several kinds, or a driver that fails.
    """
    if platform == catalog.CPU:
        if gpu_ids:
            raise HardwareError("--gpu-ids names GPUs, but --gpu-platform=cpu uses none")
        return Machine(gpus=(), platform=catalog.CPU)
    listed = drivers.gpus()
    silent = [gpu for gpu in listed if gpu.fault]
    gpus = _visible([gpu for gpu in listed if not gpu.fault], silent, environ)
    if gpu_ids:
        gpus = tuple(dict.fromkeys(_find(gpus, silent, wanted) for wanted in gpu_ids))
    if not gpus:
        unseen = "" if listed else drivers.unseen()
        if platform is not None:
            raise HardwareError(f"--gpu-platform={platform}, but no GPU is visible here{f' ({unseen})' if unseen else ''}")
        return Machine(gpus=(), platform=catalog.CPU, unseen=unseen)
    kinds = {(gpu.name, marker_of(gpu)) for gpu in gpus}
    if len(kinds) > 1:
        names = sorted({name for name, _ in kinds})
        if len(names) == 1:  # The boards differ only in their memory.
            names = sorted(f"{name} ({marker or 'of no marker'})" for name, marker in kinds)
        raise HardwareError(f"GPUs of several kinds are visible ({', '.join(names)}); choose those of one with --gpu-ids")
    ((name, marker),) = kinds
    if platform is not None and marker not in (None, platform):
        raise HardwareError(f"--gpu-platform={platform}, but the GPU here is {marker} ({name})")
    return Machine(gpus=gpus, platform=platform or marker or "unknown")


def marker_of(gpu: Gpu) -> str | None:
    """Return the catalog marker of a GPU; None if the catalog lacks it."""
    return catalog.marker_of(gpu.name, gpu.memory_bytes, gpu.compute_units)


def _find(gpus: Sequence[Gpu], silent: Sequence[Gpu], wanted: str) -> Gpu:
    gpu = _match(gpus, wanted, {gpu.uuid: gpu.index for gpu in gpus})
    if gpu is not None:
        return gpu
    for other in silent:
        if wanted == str(other.index):
            raise HardwareError(
                f"--gpu-ids names GPU {other.index}, which its driver does not describe ({other.fault}); see what "
                "nvidia-smi says, or name others"
            )
    visible = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise HardwareError(f"--gpu-ids: no visible GPU {wanted!r}, or several; visible: {visible}")


def _visible(gpus: Sequence[Gpu], silent: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that the runtimes of their vendors would show.

    Args:
        silent: GPUs of NVIDIA that their driver does not describe.

    Raises:
        HardwareError: a variable shows none of them, and does not say so by being empty or -1, or it is not known which it
            shows.
    """
    of_vendor = {vendor: [gpu for gpu in gpus if gpu.vendor == vendor] for vendor in ("nvidia", "amd")}
    by_index = {gpu.uuid: gpu.index for gpu in gpus}
    _refuse_ambiguous(of_vendor["nvidia"], silent, environ)
    if "CUDA_VISIBLE_DEVICES" in environ:
        nvidias = _visible_by(of_vendor["nvidia"], "CUDA_VISIBLE_DEVICES", environ, by_index)
    else:
        nvidias = _allocated_by_slurm(of_vendor["nvidia"], environ)
    amd_gpus = _visible_by(of_vendor["amd"], "ROCR_VISIBLE_DEVICES", environ, by_index)
    # HIP counts the GPUs that ROCm's variable has left. It also reads CUDA's variable, which belongs to NVIDIA's GPUs if
    # there are any, and takes an empty one for unset.
    name = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") or nvidias else "CUDA_VISIBLE_DEVICES"
    set_variables = {key: value for key, value in environ.items() if value}
    return (
        *nvidias,
        *_visible_by(amd_gpus, name, set_variables, {gpu.uuid: position for position, gpu in enumerate(amd_gpus)}),
    )


def _refuse_ambiguous(gpus: Sequence[Gpu], silent: Sequence[Gpu], environ: Mapping[str, str]) -> None:
    """Raise an error if GPUs cannot be told apart.

    Raises:
        HardwareError: no GPU answers, or ``CUDA_VISIBLE_DEVICES`` has numbers by which CUDA may mean other GPUs than NVML.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if silent and not gpus and not _says_none(variable):
        raise HardwareError(
            f"the NVIDIA driver failed to describe its GPUs ({silent[0].fault}); see what nvidia-smi says, or leave them "
            "alone with --gpu-platform=cpu"
        )
    if variable is None or not any(entry.strip().isdigit() for entry in variable.split(",")):
        return
    remedy = f"CUDA_VISIBLE_DEVICES={variable} has to name GPUs by their UUIDs, as nvidia-smi -L prints them"
    if silent:
        raise HardwareError(
            f"{remedy}: the driver does not describe GPU {silent[0].index} ({silent[0].fault}), and CUDA may not count it"
        )
    kinds = sorted({gpu.name.partition(" MIG ")[0] for gpu in gpus})
    if len(kinds) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise HardwareError(
            f"{remedy}, or CUDA_DEVICE_ORDER=PCI_BUS_ID has to be set: of several kinds ({', '.join(kinds)}) CUDA counts "
            "the fastest first"
        )


def _allocated_by_slurm(gpus: list[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs of the Slurm step or job that this process runs in. Slurm sets ``CUDA_VISIBLE_DEVICES`` only in what
    it starts itself, and not in a shell that joins the job.

    Raises:
        HardwareError: none of them is here.
    """
    name = "SLURM_STEP_GPUS" if environ.get("SLURM_STEP_GPUS") else "SLURM_JOB_GPUS"
    indices = environ.get(name)
    if not indices or not gpus:
        return gpus
    # Slurm numbers device files, even if a container shows only some of them.
    chosen = [gpu for gpu in gpus if str(gpu.index if gpu.minor is None else gpu.minor) in indices.split(",")]
    if not chosen:
        raise HardwareError(
            f"{name}={indices} names none of the {len(gpus)} GPUs here; choose with CUDA_VISIBLE_DEVICES, by UUID, or "
            "unset it"
        )
    return chosen


def _visible_by(gpus: list[Gpu], name: str, environ: Mapping[str, str], numbers: Mapping[str, int]) -> list[Gpu]:
    """Return the GPUs that a variable shows, up to its first entry that names no GPU. The runtimes stop there, too.

    Args:
        numbers: the number of each GPU in the variable, by UUID.
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
    if not chosen and not _says_none(variable):
        raise HardwareError(f"{name}={variable} shows none of the {len(gpus)} GPUs here")
    return list(dict.fromkeys(chosen))


def _says_none(variable: str | None) -> bool:
    """Tell whether a variable that chooses GPUs chooses no GPU."""
    return variable is not None and variable.split(",")[0].strip() in ("", "-1", "NoDevFiles")


def _match(gpus: Sequence[Gpu], name: str, numbers: Mapping[str, int]) -> Gpu | None:
    """Return the GPU with that number, or its first part; else the only GPU whose UUID begins with the name."""
    for gpu in gpus:
        if name in (str(numbers[gpu.uuid]), gpu.uuid):
            return gpu
    begin_so = [gpu for gpu in gpus if name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)]
    return begin_so[0] if len(begin_so) == 1 else None
