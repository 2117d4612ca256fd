"""Records of the single processes of a case: parts of a `pytest_gputrain.records.Measurement`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Rank(Struct, frozen=True, kw_only=True):
    """What one of several processes of a case measured."""

    role: Literal["worker", "server"] = "worker"
    step_seconds: tuple[float, ...]
    """Empty for a server."""
    peak_allocated_bytes: int
    peak_host_bytes: int
    peak_reserved_bytes: int | None = None
    updates: int | None = None
    """Updates that a server applied to its tables."""
    rows: int | None = None
    """Rows that they changed, counted once an update."""


class Served(Struct, frozen=True, kw_only=True, tag="served", tag_field="outcome"):
    """What a parameter server replies instead of a measurement: it takes no steps."""

    updates: int
    rows: int
    model_bytes: int
    """Of its tables' rows, without optimizer states."""
    peak_allocated_bytes: int
    peak_host_bytes: int
