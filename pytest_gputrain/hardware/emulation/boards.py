"""Describes the GPUs of the catalog as their drivers do, to the stand-ins that emulate them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Final, NamedTuple

from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.records.emulation import OtherKernels
from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.suggest import did_you_mean
from pytest_gputrain.utils.units import KiB, MiB, format_bytes

UUID_PREFIX: Final = bytes.fromhex("656d756c")
"""Begins the UUID of each emulated GPU (``emul`` in ASCII), so that it is never taken for a real one, in a lease say."""

MOST_DEVICES: Final = 16

CONTEXT_BYTES: Final = 768 * MiB
"""The driver's context with the kernels that a step loads: what nvidia-smi shows of a process beyond the memory that torch
holds. 751 to 775 MiB were measured on an H200 with driver 580 and CUDA 13; tables of the time of CUDA 12 have some 600."""


class _Multiprocessor(NamedTuple):
    """The properties of a compute capability, from the table of technical specifications in CUDA's programming guide."""

    shared_kib: int
    """Shared memory."""
    shared_block_kib: int
    """The shared memory of a block."""
    threads: int
    blocks: int
    l2_mib: int
    """The level-2 cache of one such device: not in that table, and no operator of torch reads it."""


_MULTIPROCESSORS: Final = {
    (7, 0): _Multiprocessor(96, 96, 2048, 32, 6),
    (7, 5): _Multiprocessor(64, 64, 1024, 16, 4),
    (8, 0): _Multiprocessor(164, 163, 2048, 32, 40),
    (8, 6): _Multiprocessor(100, 99, 1536, 16, 6),
    (8, 9): _Multiprocessor(100, 99, 1536, 24, 72),
    (9, 0): _Multiprocessor(228, 227, 2048, 32, 50),
    (10, 0): _Multiprocessor(228, 227, 2048, 32, 126),
    (10, 3): _Multiprocessor(228, 227, 2048, 32, 126),
    (12, 0): _Multiprocessor(100, 99, 1536, 24, 96),
    (12, 1): _Multiprocessor(100, 99, 1536, 24, 24),
}

_UNNAMED: Final = "NVIDIA Graphics Device"
"""The name that NVIDIA's driver has for a board that it does not know. A board that runs on kernels for another one gets it,
so that no library takes it for a board with other kernels."""


class Board(NamedTuple):
    """A model of GPU to emulate."""

    marker: str
    title: str
    name: str
    """The name that NVIDIA's driver reports; empty for an AMD device."""
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int


def board(marker: str) -> Board:
    """Return the model of GPU that the catalog has under this marker.

    Raises:
        CannotEmulate: the catalog has no such GPU.
    """
    if marker not in PLATFORMS:
        listed = ", ".join(PLATFORMS)
        raise CannotEmulate(f"the catalog has no GPU {marker!r}{did_you_mean(marker, PLATFORMS)}; it has {listed}")
    platform = PLATFORMS[marker]
    return Board(
        marker,
        platform.title,
        platform.driver_name,
        platform.usable_bytes,
        platform.capability,
        platform.multiprocessors,
    )


def computed_capacity(chosen: Board) -> str:
    """Say that the capacity of a board was computed; empty if a driver has reported it."""
    platform = PLATFORMS[chosen.marker]
    if not platform.usable_is_computed:
        return ""
    return (
        f"no report of a driver about the memory of {chosen.title} is known: {format_bytes(chosen.memory_bytes)} are "
        f"computed from the {format_bytes(platform.memory_bytes)} that it is sold with, rather too low than too high"
    )


def find_kernels(chosen: Board, architectures: Iterable[str], torch_version: str) -> int:
    """Return which of torch's kernels the GPU runs: 86 stands for those that were compiled for ``sm_86``.

    They are those for its compute capability, or else for the newest older one of its generation. A GPU that torch has no
    such kernels for gets those of the nearest capability.

    Raises:
        CannotEmulate: torch does not say which it has.
    """
    compiled = [int(name.removeprefix("sm_")) for name in architectures if re.fullmatch(r"sm_\d+", name)]
    if own := [number for number in compiled if _runs(chosen, number)]:
        return max(own)
    major, minor = chosen.capability
    known = [number for number in compiled if divmod(number, 10) in _MULTIPROCESSORS]
    if not known:
        raise CannotEmulate(f"torch {torch_version} does not say for which GPUs it has kernels; install PyPI's build of it")
    return min(known, key=lambda number: abs(number - 10 * major - minor))


def _runs(chosen: Board, kernels: int) -> bool:
    """Tell whether the real GPU runs these kernels of torch."""
    major, minor = divmod(kernels, 10)
    return bool(chosen.name) and major == chosen.capability[0] and minor <= chosen.capability[1]


def other_kernels(chosen: Board, kernels: int) -> OtherKernels | None:
    """Return a description of a GPU that runs another GPU's kernels; None for a GPU that has its own.

    Args:
        kernels: the kernels that run on the GPU, from `find_kernels`.
    """
    return None if _runs(chosen, kernels) else OtherKernels(title=chosen.title, kernels=kernels, is_amd=not chosen.name)


def describe(chosen: Board, *, kernels: int, devices: int = 1) -> str:
    """Return a description of the GPU for the stand-ins, which is the value of the variable ``GPUTRAIN_EMULATED_DEVICE``.

    Each call describes GPUs of its own, with UUIDs that no other has.

    Args:
        kernels: the kernels that run on the GPU, from `find_kernels`. CUB chooses its algorithms by them.
    """
    # If the libraries have no kernels for this GPU, it reports the capability whose kernels it runs. Otherwise a library
    # would choose kernels that are missing.
    other = other_kernels(chosen, kernels)
    name, capability = (_UNNAMED, divmod(kernels, 10)) if other else (chosen.name, chosen.capability)
    multiprocessor = _MULTIPROCESSORS[capability]
    # The last byte of a UUID is the number of the GPU, which the stand-in sets.
    identity = UUID_PREFIX + uuid.uuid4().bytes[len(UUID_PREFIX) : -1] + b"\0"
    fields = {
        "devices": devices,
        "memory": chosen.memory_bytes,
        "context": CONTEXT_BYTES,
        "major": capability[0],
        "minor": capability[1],
        "kernels": kernels,
        "multiprocessors": chosen.multiprocessors,
        "shared_per_multiprocessor": multiprocessor.shared_kib * KiB,
        "shared_per_block": multiprocessor.shared_block_kib * KiB,
        "threads_per_multiprocessor": multiprocessor.threads,
        "blocks_per_multiprocessor": multiprocessor.blocks,
        "l2_bytes": multiprocessor.l2_mib * MiB,
        "uuid": identity.hex(),
        "name": name,
        **(other.fields() if other else {}),
    }
    return ",".join(f"{name}={value}" for name, value in fields.items())
