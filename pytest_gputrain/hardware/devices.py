"""Describes one GPU of any vendor and what its driver tells: the records that `nvidia` and `amd` fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pytest_gputrain.records import Holder
from pytest_gputrain.utils.sanitize import OneLineError

Vendor = Literal["nvidia", "amd"]


class HardwareError(OneLineError):
    """The hardware is not what was asked for, or its driver fails; one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as its driver describes it, or a part of one that is partitioned."""

    index: int
    """In the order of nvidia-smi, or of HIP. The parts of a partitioned NVIDIA GPU (MIG) have that of the GPU."""
    uuid: str
    """Unique, and accepted by ``CUDA_VISIBLE_DEVICES``, or by ``ROCR_VISIBLE_DEVICES``."""
    name: str
    memory_bytes: int
    """0 where the driver does not tell, as of GPUs that share the host's."""
    driver: str
    vendor: Vendor = "nvidia"
    power_limit_watts: float | None = None
    """That is enforced; None where the driver has no such figure, or the GPU is a part of one."""
    compute_units: int | None = None
    """Where the driver tells: they tell boards apart that share a name."""
    pci_address: str = ""
    """As the kernel writes it, ``0000:1b:00.0``; empty where it is not known. The parts of a GPU have that of the GPU."""
    minor: int | None = None
    """Number in the name of its device file, by which Slurm counts."""
    fault: str = ""
    """What the driver says instead of describing it, which leaves all but ``index`` and `driver` empty; mostly nothing."""


class Occupancy(NamedTuple):
    """What else is on GPUs."""

    free_bytes: int | None
    """Of the one that has least; None where nobody tells."""
    holders: tuple[Holder, ...] | None
    """Other processes that compute on any of them; None likewise."""


class Reading(NamedTuple):
    """A GPU at one moment; None for what the driver does not tell of it."""

    energy_joules: float | None = None
    """Since a moment that only the driver knows."""
    power_watts: float | None = None
    clock_mhz: int | None = None
    """Of its multiprocessors, or compute units."""
    utilization: float | None = None
    """Share of a short time before in which a kernel ran."""
    throttling: frozenset[str] | None = None
    """Why its clock is lower than it could be, in the vendor's words; idling and clocks that the user set are no reasons."""


class Driver(Protocol):
    """A vendor's library, opened. Its errors come out as `HardwareError`; what a GPU does not support is None."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every GPU, or part of one, in the order of `Gpu.index`."""

    def occupancy(self, gpu: Gpu) -> Occupancy:
        """Return what is on a GPU now, processes of this one included."""

    def read(self, gpu: Gpu) -> Reading:
        """Tell how a GPU is now."""

    def paths(self, gpus: Sequence[Gpu]) -> tuple[tuple[str, ...], ...]:
        """Return a row for each of several GPUs, in their order, of its paths to all: ``X`` to itself, ``N/A`` for
        unknown."""


SELF = "X"
UNKNOWN = "N/A"
