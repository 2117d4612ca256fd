"""Defines the records of a GPU of any vendor and of its state, which `nvidia` and `amd` fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pytest_gputrain.records import Holder
from pytest_gputrain.utils.sanitize import OneLineError

Vendor = Literal["nvidia", "amd"]


class HardwareError(OneLineError):
    """The hardware is not what the options ask for, or its driver fails. The message is one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as its driver describes it, or a part of a partitioned GPU."""

    index: int
    """The index in the order of nvidia-smi, or of HIP. The parts of a partitioned NVIDIA GPU (MIG) have the index of their
    GPU."""
    uuid: str
    """A unique id, which ``CUDA_VISIBLE_DEVICES`` or ``ROCR_VISIBLE_DEVICES`` accepts."""
    name: str
    """The name that the driver reports."""
    memory_bytes: int
    """The memory of the GPU. 0 if the driver does not report it, as for GPUs that share the host's memory."""
    driver: str
    """The version of the driver."""
    vendor: Vendor = "nvidia"
    """The vendor."""
    power_limit_watts: float | None = None
    """The power limit in force. None if the driver does not report one, or if the GPU is a part of one."""
    compute_units: int | None = None
    """The number of compute units, if the driver reports it. It tells boards apart that share a name."""
    pci_address: str = ""
    """The PCI address as the kernel writes it, ``0000:1b:00.0``. Empty if unknown. The parts of a GPU have that of their
    GPU."""
    minor: int | None = None
    """The number in the name of its device file, by which Slurm counts."""
    fault: str = ""
    """The error of the driver, if it could not describe the GPU. Then all fields but ``index`` and ``driver`` are empty."""


class Occupancy(NamedTuple):
    """The other processes on GPUs, and the free memory."""

    free_bytes: int | None
    """The free memory of the GPU that has least; None if the driver does not report it."""
    holders: tuple[Holder, ...] | None
    """Other processes that compute on any of the GPUs; None if the driver does not report them."""


class Reading(NamedTuple):
    """The state of a GPU at one moment. A value is None if the driver does not report it."""

    energy_joules: float | None = None
    """The energy since a moment that only the driver knows."""
    power_watts: float | None = None
    clock_mhz: int | None = None
    """The clock of its multiprocessors or compute units."""
    utilization: float | None = None
    """Share of a short time before in which a kernel ran."""
    throttling: frozenset[str] | None = None
    """Why its clock is lower than it could be, in the vendor's words; idling and clocks that the user set are no reasons."""


class Driver(Protocol):
    """An open driver library of a vendor. Its errors are raised as `HardwareError`, and a value that a GPU does not support
    is None."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every GPU, or part of one, in the order of `Gpu.index`."""

    def occupancy(self, gpu: Gpu) -> Occupancy:
        """Return the processes and the free memory of a GPU now. The processes include this one and its children."""

    def read(self, gpu: Gpu) -> Reading:
        """Return the present state of a GPU."""

    def paths(self, gpus: Sequence[Gpu]) -> tuple[tuple[str, ...], ...]:
        """Return the paths between GPUs, as a matrix in the order of ``gpus``: ``X`` for a GPU itself, ``N/A`` for an
        unknown path."""


SELF = "X"
UNKNOWN = "N/A"
