"""Describes the GPUs of the catalog as their drivers do, to the stand-ins that emulate them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Final, NamedTuple

from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.hardware.targets import CONTEXT_BYTES
from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.suggest import did_you_mean
from pytest_gputrain.utils.units import KiB, MiB

UUID_PREFIX: Final = bytes.fromhex("656d756c")
"""Begins the UUID of each emulated GPU (``emul`` in ASCII), so that it is never taken for a real one, in a lease say."""

MOST_DEVICES: Final = 16


class _Multiprocessor(NamedTuple):
    """The properties of a compute capability in CUDA's programming guide, in its table of technical specifications."""

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

_NAMES: Final = {
    "a10": "NVIDIA A10",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100_40gb": "NVIDIA A100-SXM4-40GB",
    "a100_pcie": "NVIDIA A100 80GB PCIe",
    "a100_pcie_40gb": "NVIDIA A100-PCIE-40GB",
    "a10g": "NVIDIA A10G",
    "a800": "NVIDIA A800-SXM4-80GB",
    "a800_pcie": "NVIDIA A800 80GB PCIe",
    "b200": "NVIDIA B200",
    "b300": "NVIDIA B300 SXM6 AC",
    "gb10": "NVIDIA GB10",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
    "gh200": "NVIDIA GH200 480GB",
    "gh200_144gb": "NVIDIA GH200 144G HBM3e",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100_nvl": "NVIDIA H100 NVL",
    "h100_pcie": "NVIDIA H100 PCIe",
    "h20": "NVIDIA H20",
    "h200": "NVIDIA H200",
    "h200_nvl": "NVIDIA H200 NVL",
    "h20_3e": "NVIDIA H20-3e",
    "h800": "NVIDIA H800",
    "h800_pcie": "NVIDIA H800 PCIe",
    "l4": "NVIDIA L4",
    "l40": "NVIDIA L40",
    "l40s": "NVIDIA L40S",
    "rtx_3090": "NVIDIA GeForce RTX 3090",
    "rtx_4090": "NVIDIA GeForce RTX 4090",
    "rtx_5090": "NVIDIA GeForce RTX 5090",
    "rtx_6000_ada": "NVIDIA RTX 6000 Ada Generation",
    "rtx_a6000": "NVIDIA RTX A6000",
    "rtx_pro_6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "rtx_pro_6000_maxq": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "rtx_pro_6000_server": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "t4": "Tesla T4",
    "v100": "Tesla V100-SXM2-16GB",
    "v100_32gb": "Tesla V100-SXM2-32GB",
    "v100_pcie": "Tesla V100-PCIE-16GB",
    "v100_pcie_32gb": "Tesla V100-PCIE-32GB",
    "v100s": "Tesla V100S-PCIE-32GB",
}
"""The boards' names by marker, as the driver reports them. An AMD device has none: torch's CUDA build has no kernels for
it."""


class Board(NamedTuple):
    """A model of GPU to emulate."""

    marker: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int


def board(marker: str) -> Board:
    """Find the model of GPU in the catalog.

    Raises:
        CannotEmulate: the catalog has no such NVIDIA GPU.
    """
    if marker not in PLATFORMS:
        raise CannotEmulate(f"the catalog has no GPU {marker!r}{did_you_mean(marker, PLATFORMS)}; it has {_listed()}")
    if marker not in _NAMES:
        raise CannotEmulate(f"{marker} is not an NVIDIA GPU that can be emulated; the catalog has {_listed()}")
    platform = PLATFORMS[marker]
    return Board(marker, _NAMES[marker], platform.usable_bytes, platform.capability, platform.multiprocessors)


def emulated_markers() -> list[str]:
    """Return the markers of the GPUs that can be emulated, given a torch that has kernels for them."""
    return [marker for marker in PLATFORMS if marker in _NAMES]


def _listed() -> str:
    return ", ".join(emulated_markers())


def find_kernels(chosen: Board, architectures: Iterable[str], torch_version: str) -> int:
    """Find which of torch's kernels the GPU would run: 86 for those that were compiled for ``sm_86``.

    They are those for its compute capability, or else for the newest older one of its generation.

    Raises:
        CannotEmulate: torch has none, and would fail on the real GPU.
    """
    major, minor = chosen.capability
    names = list(architectures)
    if not names:
        raise CannotEmulate(f"torch {torch_version} does not say for which GPUs it has kernels; install PyPI's build of it")
    compiled = [int(name.removeprefix("sm_")) for name in names if name.startswith("sm_") and name[-1].isdigit()]
    fitting = [number for number in compiled if number // 10 == major and number % 10 <= minor]
    if not fitting:
        raise CannotEmulate(
            f"torch {torch_version} has no kernels for {chosen.name} (sm_{major}{minor}), only for {' '.join(names)}; "
            "it would fail on the real one, too: choose another GPU, or a torch that was built for this one"
        )
    return max(fitting)


def describe(chosen: Board, *, kernels: int, devices: int = 1) -> str:
    """Describe the GPU to the stand-ins, in the variable ``GPUTRAIN_EMULATED_DEVICE``.

    Each call describes GPUs of its own, with UUIDs that no other has.

    Args:
        kernels: those that run on it, from `find_kernels`. CUB chooses its algorithms by them.
    """
    multiprocessor = _MULTIPROCESSORS[chosen.capability]
    # The last byte counts devices.
    identity = UUID_PREFIX + uuid.uuid4().bytes[len(UUID_PREFIX) : -1] + b"\0"
    fields = {
        "devices": devices,
        "memory": chosen.memory_bytes,
        "context": CONTEXT_BYTES,
        "major": chosen.capability[0],
        "minor": chosen.capability[1],
        "kernels": kernels,
        "multiprocessors": chosen.multiprocessors,
        "shared_per_multiprocessor": multiprocessor.shared_kib * KiB,
        "shared_per_block": multiprocessor.shared_block_kib * KiB,
        "threads_per_multiprocessor": multiprocessor.threads,
        "blocks_per_multiprocessor": multiprocessor.blocks,
        "l2_bytes": multiprocessor.l2_mib * MiB,
        "uuid": identity.hex(),
        "name": chosen.name,
    }
    return ",".join(f"{name}={value}" for name, value in fields.items())
