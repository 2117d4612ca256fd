"""One GPU, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass


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
