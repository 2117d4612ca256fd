"""Lists the models of GPUs, known without having one: marker, memory, peak arithmetic and bandwidth of each.

Peaks are dense (no sparsity) tensor-core rates with fp32 accumulation where the vendor tells them apart, as in the vendor's
data sheet. One entry per marker; a device is matched to its marker by the name that its driver gives.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final

from pytest_gputrain.utils.units import GiB


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """One kind of device."""

    marker: str
    """Name of the pytest marker, a Python identifier."""
    title: str
    pattern: str
    """Regular expression found in the driver's name of such a device, case ignored."""
    memory_bytes: int
    """What it is sold with."""
    usable_bytes: int
    """What torch calls its total capacity: less than it is sold with, as the driver and error correction take their part."""
    capability: tuple[int, int]
    """CUDA's compute capability, which decides on kernels. Of an AMD device one whose kernels take the same inputs."""
    multiprocessors: int
    """Streaming multiprocessors, or AMD's compute units: large sums are divided among them."""
    peak_flops: dict[str, float]
    """FLOP/s by arithmetic: ``fp32`` (without TF32), ``bf16``, ``fp16``. An arithmetic without an entry is not supported by
    the hardware."""
    bandwidth: float
    """Bytes per second of the device memory."""
    source: str

    @property
    def tf32_flops(self) -> float | None:
        """FLOP/s of fp32 where TF32 is allowed; None where it is not known, as on AMD's devices.

        TF32's tensor cores do half of what those of bf16 do on all of NVIDIA's that have them. Those without compute in fp32.
        """
        if not self.source.startswith("NVIDIA"):
            return None
        return self.peak_flops["bf16"] / 2 if self.capability >= (8, 0) else self.peak_flops["fp32"]


_USABLE_SHARE: Final = 0.975
"""Of the memory of a device whose capacity is not known: no known one without inline error correction has less."""


def _platform(
    marker: str,
    title: str,
    pattern: str,
    gib: int,
    tb_per_s: float,
    source: str,
    *,
    sm: tuple[int, int],
    multiprocessors: int,
    usable: float | None = None,
    **teraflops: float,
) -> Platform:
    """
    Args:
        usable: GiB, the least total capacity that messages of torch about memory that ran out give for such a device, in
            reports on GitHub up to 2026; drivers differ by some 0.1 GiB. None where there is no such report.
    """
    peaks = {name: rate * 1e12 for name, rate in teraflops.items()}
    return Platform(
        marker=marker,
        title=title,
        pattern=pattern,
        memory_bytes=gib * GiB,
        usable_bytes=int((gib * _USABLE_SHARE if usable is None else usable) * GiB),
        capability=sm,
        multiprocessors=multiprocessors,
        peak_flops=peaks,
        bandwidth=tb_per_s * 1e12,
        source=source,
    )


PLATFORMS: Final = {
    platform.marker: platform
    for platform in (
        _platform("h200_nvl", "H200 NVL", r"\bH200 NVL\b", 141, 4.8, "NVIDIA H200 data sheet (NVL)", sm=(9, 0), multiprocessors=132, fp32=60, bf16=835.5, fp16=835.5),
        _platform("h200", "H200", r"\bH200\b", 141, 4.8, "NVIDIA H200 data sheet", sm=(9, 0), multiprocessors=132, usable=139.72, fp32=67, bf16=989.4, fp16=989.4),
        _platform("h100_pcie", "H100 PCIe", r"\bH100 PCIe\b", 80, 2.0, "NVIDIA H100 data sheet (PCIe)", sm=(9, 0), multiprocessors=114, fp32=51, bf16=756, fp16=756),
        _platform("h100_nvl", "H100 NVL", r"\bH100 NVL\b", 94, 3.9, "NVIDIA H100 data sheet (NVL)", sm=(9, 0), multiprocessors=132, usable=93.0, fp32=60, bf16=835, fp16=835),
        _platform("h100", "H100", r"\bH100\b", 80, 3.35, "NVIDIA H100 data sheet (SXM)", sm=(9, 0), multiprocessors=132, usable=79.11, fp32=67, bf16=989.4, fp16=989.4),
        _platform("h800", "H800", r"\bH800\b", 80, 3.35, "NVIDIA H800 data sheet (SXM)", sm=(9, 0), multiprocessors=132, fp32=67, bf16=989.4, fp16=989.4),
        _platform("h20", "H20", r"\bH20\b", 96, 4.0, "NVIDIA H20 data sheet", sm=(9, 0), multiprocessors=78, fp32=44, bf16=148, fp16=148),
        _platform("b200", "B200", r"\bB200\b", 180, 8.0, "NVIDIA HGX B200 data sheet", sm=(10, 0), multiprocessors=148, usable=178.35, fp32=75, bf16=2250, fp16=2250),
        _platform("a100", "A100", r"\bA100\b", 80, 2.039, "NVIDIA A100 80GB data sheet", sm=(8, 0), multiprocessors=108, usable=79.14, fp32=19.5, bf16=312, fp16=312),
        _platform("a800", "A800", r"\bA800\b", 80, 2.039, "NVIDIA A800 80GB data sheet", sm=(8, 0), multiprocessors=108, fp32=19.5, bf16=312, fp16=312),
        _platform("v100", "V100", r"\bV100\b", 16, 0.9, "NVIDIA V100 data sheet (SXM2)", sm=(7, 0), multiprocessors=80, usable=15.78, fp32=15.7, fp16=125),
        _platform("l40s", "L40S", r"\bL40S\b", 48, 0.864, "NVIDIA L40S data sheet", sm=(8, 9), multiprocessors=142, usable=44.4, fp32=91.6, bf16=362, fp16=362),
        _platform("l4", "L4", r"\bL4\b", 24, 0.3, "NVIDIA L4 data sheet", sm=(8, 9), multiprocessors=58, usable=22.03, fp32=30.3, bf16=121, fp16=121),
        _platform("a10g", "A10G", r"\bA10G\b", 24, 0.6, "NVIDIA A10G data sheet", sm=(8, 6), multiprocessors=80, usable=21.99, fp32=35, bf16=70, fp16=70),
        _platform("t4", "T4", r"\bT4\b", 16, 0.32, "NVIDIA T4 data sheet", sm=(7, 5), multiprocessors=40, usable=14.56, fp32=8.1, fp16=65),
        _platform(
            "rtx_pro_6000", "RTX Pro 6000", r"RTX PRO 6000", 96, 1.792, "NVIDIA RTX PRO 6000 Blackwell data sheet",
            sm=(12, 0), multiprocessors=188, usable=94.97, fp32=125, bf16=503.8, fp16=503.8,
        ),
        _platform("rtx_5090", "RTX 5090", r"RTX 5090\b", 32, 1.792, "NVIDIA RTX Blackwell whitepaper", sm=(12, 0), multiprocessors=170, usable=31.34, fp32=104.8, bf16=209.5, fp16=209.5),
        _platform("rtx_4090", "RTX 4090", r"RTX 4090\b", 24, 1.008, "NVIDIA Ada whitepaper", sm=(8, 9), multiprocessors=128, usable=23.52, fp32=82.6, bf16=165.2, fp16=165.2),
        _platform("rtx_3090", "RTX 3090", r"RTX 3090\b", 24, 0.936, "NVIDIA Ampere GA102 whitepaper", sm=(8, 6), multiprocessors=82, fp32=35.6, bf16=71, fp16=71),
        _platform("mi300x", "MI300X", r"\bMI300X\b", 192, 5.3, "AMD MI300X data sheet", sm=(9, 0), multiprocessors=304, usable=191.69, fp32=163.4, bf16=1307.4, fp16=1307.4),
        _platform("mi250x", "MI250X", r"\bMI250X\b", 64, 1.638, "AMD MI250X data sheet, one of its two dies", sm=(9, 0), multiprocessors=110, usable=63.98, fp32=47.9, bf16=191.5, fp16=191.5),
    )
}  # fmt: skip
"""By marker. The order decides which pattern is tried first."""

_OTHER_CHIPS: Final = r"\bLaptop\b|\bMax-Q\b|\bMIG\b|\bGRID\b|\bvGPU\b|\b[45]090 D\b|\b3090 Ti\b|\b[CDTQ]PX\b"
"""Devices that bear the name of a faster one."""

CPU: Final = "cpu"
"""Marker of a machine without a GPU."""

MARKERS: Final = (*PLATFORMS, CPU)
"""Every platform marker that the plugin registers."""


@functools.cache
def marker_of(device_name: str) -> str | None:
    """The catalog marker of a device by its driver's name, None for a device that the catalog lacks."""
    if re.search(_OTHER_CHIPS, device_name, re.IGNORECASE):
        return None
    for marker, platform in PLATFORMS.items():
        if re.search(platform.pattern, device_name, re.IGNORECASE):
            return marker
    return None


def slug(device_name: str) -> str:
    """The name as a folder's: ``NVIDIA H100 80GB HBM3`` becomes ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") or "unknown"


def peak_flops(marker: str | None, precision: str, *, tf32: bool = False) -> float | None:
    """FLOP/s a case of this precision could reach on one such device; None where it is not known."""
    platform = PLATFORMS.get(marker or "")
    if platform is None:
        return None
    return platform.tf32_flops if tf32 else platform.peak_flops.get(precision.removesuffix("-amp"))
