"""Lists the models of GPUs, known without having one: marker, memory, peak arithmetic and bandwidth of each.

The figures stand in ``boards.toml``, each under the document that it is from. A device is matched to its marker by what its
driver says: the name, the memory and, where they are told, the compute units. A marker stands for one board, not for a
family, since a time on another board is no baseline.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_gputrain.utils.units import GiB

BOARDS: Final = Path(__file__).with_name("boards.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """A board, or a part of a board that a driver shows as a device."""

    marker: str
    """Name of the pytest marker, a Python identifier."""
    title: str
    pattern: str
    """Regular expression for the driver's name of such a device, case ignored."""
    driver_name: str
    """The name that NVIDIA's driver reports of it; empty for an AMD device."""
    memory_bytes: int
    """The nominal memory of the board."""
    usable_bytes: int
    """The total capacity that torch reports: less than it is sold with, as the driver and error correction take their
    part."""
    usable_is_computed: bool
    """Whether no report of that capacity is known, so that it is computed from the nominal memory, rather too low than too
    high."""
    capability: tuple[int, int]
    """CUDA's compute capability, which decides on kernels. Of an AMD device one whose kernels take the same inputs."""
    target: str
    """The name of the GPU's architecture for compilers: ``sm_90``, ``gfx942``."""
    multiprocessors: int
    """Streaming multiprocessors, or AMD's compute units: large sums are divided among them."""
    peak_flops: dict[str, float]
    """FLOP/s by arithmetic, dense: ``fp32`` (without TF32), ``bf16``, ``fp16``. An arithmetic without an entry is one whose
    rate the vendor does not tell, or that the hardware `lacks`."""
    bandwidth: float
    """Bytes per second of the device memory."""

    @property
    def tf32_flops(self) -> float | None:
        """FLOP/s of fp32 where TF32 is allowed; None if it is not known, as on AMD's devices.

        Tensor cores do half as much in TF32 as in bf16 on all of NVIDIA's that have it. Those without compute in fp32.
        """
        if self.target.startswith("gfx"):
            return None
        if self.lacks("bf16"):
            return self.peak_flops["fp32"]
        bf16 = self.peak_flops.get("bf16")
        return None if bf16 is None else bf16 / 2

    def lacks(self, precision: str) -> bool:
        """Tell whether the hardware lacks the arithmetic of this precision."""
        return precision.startswith("bf16") and self.capability < (8, 0)

    def is_such(self, name: str, memory_bytes: int, compute_units: int | None) -> bool:
        """Tell whether a device that its driver describes in this way can be this board."""
        share = memory_bytes / self.memory_bytes
        return (
            re.fullmatch(self.pattern, name.strip(), re.IGNORECASE) is not None
            and (memory_bytes == 0 or _LEAST_MEMORY <= share <= _MOST_MEMORY)
            and compute_units in (None, self.multiprocessors)
        )


_FAMILY: Final = "(?:(?:NVIDIA|Tesla|GeForce|AMD|Instinct) )*"
"""Begins the drivers' names."""

_LEAST_MEMORY: Final = 0.90
_MOST_MEMORY: Final = 1.02
"""The share of a board's nominal memory that a driver may report: it was 0.937 of it, where error correction takes a
sixteenth, to 1.000. Anything else is another board, or a part of one."""

_LEAST_SHARE: Final = 0.975
_MOST_RESERVED: Final = 0.6
"""The usable memory of a device whose capacity is not known: this share of its memory, or all but these GiB, whichever is
less. No known device without inline error correction has less."""

_AMD_CAPABILITY: Final = (9, 0)


def _platforms() -> Iterator[Platform]:
    # tomllib reads the file, and not msgspec: every project loads this module for its markers, and msgspec takes time to
    # import.
    file = tomllib.loads(BOARDS.read_text(encoding="utf-8"))
    for marker, board in file["boards"].items():
        figures: dict[str, Any] = {}
        for figures_there in board["from"].values():
            figures |= figures_there
        if "bf16" in figures:
            figures.setdefault("fp16", figures["bf16"])
        memory = figures["memory"]
        computed = min(memory * _LEAST_SHARE, memory - _MOST_RESERVED)
        target = figures["capability"]
        major, _, minor = target.partition(".")
        is_amd = target.startswith("gfx")
        yield Platform(
            marker=marker,
            title=board["title"],
            pattern=f"{_FAMILY}(?:{board['name']})",
            driver_name="" if is_amd else board.get("driver", f"NVIDIA {board['name']}"),
            memory_bytes=memory * GiB,
            usable_bytes=figures.get("usable_bytes", int(figures.get("usable", computed) * GiB)),
            usable_is_computed=figures.keys().isdisjoint(("usable", "usable_bytes")),
            capability=_AMD_CAPABILITY if is_amd else (int(major), int(minor)),
            target=target if is_amd else f"sm_{major}{minor}",
            multiprocessors=figures["multiprocessors"],
            peak_flops={name: figures[name] * 1e12 for name in ("fp32", "bf16", "fp16") if name in figures},
            bandwidth=figures["bandwidth"] * 1e12,
        )


PLATFORMS: Final = {platform.marker: platform for platform in _platforms()}
"""The platforms by marker, in the order of the file."""

CPU: Final = "cpu"
"""Marker of a machine without a GPU."""

MARKERS: Final = (*PLATFORMS, CPU)
"""Every platform marker that the plugin registers."""


@functools.cache
def marker_of(device_name: str, memory_bytes: int = 0, compute_units: int | None = None) -> str | None:
    """Return the catalog marker of a device that its driver describes in this way; None if no board fits, or several do.

    Args:
        memory_bytes: 0 if the driver does not report it.
        compute_units: None if the driver does not report them.
    """
    possible = [
        marker for marker, platform in PLATFORMS.items() if platform.is_such(device_name, memory_bytes, compute_units)
    ]
    return possible[0] if len(possible) == 1 else None


def title_of(marker: str, otherwise: str = "") -> str:
    """Return the name of a platform for sentences.

    Args:
        otherwise: for one that the catalog lacks, in place of its marker.
    """
    platform = PLATFORMS.get(marker)
    return platform.title if platform else otherwise or marker


def slug(device_name: str) -> str:
    """Return a device's name in the form of a folder's name: ``NVIDIA H100 80GB HBM3`` becomes ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") or "unknown"


def peak_flops(marker: str | None, precision: str, *, tf32: bool = False) -> float | None:
    """Return the FLOP/s that a case of this precision could reach on one such device; None if they are unknown."""
    platform = PLATFORMS.get(marker or "")
    if platform is None:
        return None
    return platform.tf32_flops if tf32 else platform.peak_flops.get(precision.removesuffix("-amp"))
