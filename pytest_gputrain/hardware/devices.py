"""One GPU, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass


class HardwareError(Exception):
    """The hardware is not what was asked for, or its driver fails; one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as its driver describes it."""

    index: int
    """In the driver's order."""
    uuid: str
    """Unique, and accepted by ``CUDA_VISIBLE_DEVICES``."""
    name: str
    memory_bytes: int
    driver: str
