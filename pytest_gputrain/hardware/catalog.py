"""What is known of a GPU model without having one: marker, memory, peak arithmetic and bandwidth.

Peaks are dense (no sparsity) tensor-core rates with fp32 accumulation where the vendor tells them apart, as in the vendor's
data sheet. One entry per marker; a device is matched to its marker by the name that its driver gives.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final

from pytest_gputrain.units import GiB


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """One kind of device."""

    marker: str
    """Name of the pytest marker, a Python identifier."""
    title: str
    pattern: str
    """Regular expression found in the driver's name of such a device, case ignored."""
    memory_bytes: int
    peak_flops: dict[str, float]
    """FLOP/s by arithmetic: ``fp32`` (TF32 tensor cores where there are any, as torch uses them if allowed: not counted
    here), ``bf16``, ``fp16``. An arithmetic without an entry is not supported by the hardware."""
    bandwidth: float
    """Bytes per second of the device memory."""
    source: str


def _platform(marker: str, title: str, pattern: str, gib: int, tb_per_s: float, source: str, **teraflops: float) -> Platform:
    peaks = {name: rate * 1e12 for name, rate in teraflops.items()}
    return Platform(
        marker=marker,
        title=title,
        pattern=pattern,
        memory_bytes=gib * GiB,
        peak_flops=peaks,
        bandwidth=tb_per_s * 1e12,
        source=source,
    )


PLATFORMS: Final = {
    platform.marker: platform
    for platform in (
        _platform("h200_nvl", "H200 NVL", r"\bH200 NVL\b", 141, 4.8, "NVIDIA H200 data sheet (NVL)", fp32=60, bf16=835.5, fp16=835.5),
        _platform("h200", "H200", r"\bH200\b", 141, 4.8, "NVIDIA H200 data sheet", fp32=67, bf16=989.4, fp16=989.4),
        _platform("h100_pcie", "H100 PCIe", r"\bH100 PCIe\b", 80, 2.0, "NVIDIA H100 data sheet (PCIe)", fp32=51, bf16=756, fp16=756),
        _platform("h100_nvl", "H100 NVL", r"\bH100 NVL\b", 94, 3.9, "NVIDIA H100 data sheet (NVL)", fp32=60, bf16=835, fp16=835),
        _platform("h100", "H100", r"\bH100\b", 80, 3.35, "NVIDIA H100 data sheet (SXM)", fp32=67, bf16=989.4, fp16=989.4),
        _platform("h800", "H800", r"\bH800\b", 80, 3.35, "NVIDIA H800 data sheet (SXM)", fp32=67, bf16=989.4, fp16=989.4),
        _platform("h20", "H20", r"\bH20\b", 96, 4.0, "NVIDIA H20 data sheet", fp32=44, bf16=148, fp16=148),
        _platform("b200", "B200", r"\bB200\b", 180, 8.0, "NVIDIA HGX B200 data sheet", fp32=75, bf16=2250, fp16=2250),
        _platform("a100", "A100", r"\bA100\b", 80, 2.039, "NVIDIA A100 80GB data sheet", fp32=19.5, bf16=312, fp16=312),
        _platform("a800", "A800", r"\bA800\b", 80, 2.039, "NVIDIA A800 80GB data sheet", fp32=19.5, bf16=312, fp16=312),
        _platform("v100", "V100", r"\bV100\b", 16, 0.9, "NVIDIA V100 data sheet (SXM2)", fp32=15.7, fp16=125),
        _platform("l40s", "L40S", r"\bL40S\b", 48, 0.864, "NVIDIA L40S data sheet", fp32=91.6, bf16=362, fp16=362),
        _platform("l4", "L4", r"\bL4\b", 24, 0.3, "NVIDIA L4 data sheet", fp32=30.3, bf16=121, fp16=121),
        _platform("a10g", "A10G", r"\bA10G\b", 24, 0.6, "NVIDIA A10G data sheet", fp32=35, bf16=70, fp16=70),
        _platform("t4", "T4", r"\bT4\b", 16, 0.32, "NVIDIA T4 data sheet", fp32=8.1, fp16=65),
        _platform(
            "rtx_pro_6000", "RTX Pro 6000", r"RTX PRO 6000", 96, 1.792, "NVIDIA RTX PRO 6000 Blackwell data sheet",
            fp32=125, bf16=503.8, fp16=503.8,
        ),
        _platform("rtx_5090", "RTX 5090", r"RTX 5090\b", 32, 1.792, "NVIDIA RTX Blackwell whitepaper", fp32=104.8, bf16=209.5, fp16=209.5),
        _platform("rtx_4090", "RTX 4090", r"RTX 4090\b", 24, 1.008, "NVIDIA Ada whitepaper", fp32=82.6, bf16=165.2, fp16=165.2),
        _platform("rtx_3090", "RTX 3090", r"RTX 3090\b", 24, 0.936, "NVIDIA Ampere GA102 whitepaper", fp32=35.6, bf16=71, fp16=71),
        _platform("mi300x", "MI300X", r"\bMI300X\b", 192, 5.3, "AMD MI300X data sheet", fp32=163.4, bf16=1307.4, fp16=1307.4),
        _platform("mi250x", "MI250X", r"\bMI250X\b", 64, 1.638, "AMD MI250X data sheet, one of its two dies", fp32=47.9, bf16=191.5, fp16=191.5),
    )
}  # fmt: skip
"""By marker. The order decides which pattern is tried first."""

_OTHER_CHIPS: Final = r"\bLaptop\b|\bMax-Q\b|\bMIG\b|\bGRID\b|\bvGPU\b|\b[45]090 D\b|\b3090 Ti\b"
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


def peak_flops(marker: str | None, precision: str) -> float | None:
    """FLOP/s a case of this precision could reach on one such device; None where it is not known."""
    platform = PLATFORMS.get(marker or "")
    return platform.peak_flops.get(precision.removesuffix("-amp")) if platform else None
