"""Defines the records of figures as others printed them: a number, or a range, with the rounding that printing it took."""

from __future__ import annotations

from msgspec import Struct


class Figure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``9-11s/it`` is 9 to 11 with a rounding of 1; ``4.7`` is 4.7 to 4.7 with one of 0.1."""

    low: float
    high: float
    rounding: float
    """One unit of the last digit printed."""

    @property
    def least(self) -> float:
        """The lowest value that would be printed so."""
        return self.low - self.rounding / 2

    @property
    def most(self) -> float:
        return self.high + self.rounding / 2

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


class Figures(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a table prints of one case by one framework; memory is that of one GPU."""

    step_seconds: Figure | None = None
    """Of one micro-batch."""
    update_seconds: Figure | None = None
    """Of one optimizer update: all the micro-batches that the case accumulates for it."""
    samples_per_second: Figure | None = None
    """Of all GPUs together."""
    samples_per_second_per_gpu: Figure | None = None
    peak_allocated_bytes: Figure | None = None
    peak_reserved_bytes: Figure | None = None
    device_used_bytes: Figure | None = None
    model_bytes: Figure | None = None
    peak_host_bytes: Figure | None = None
    """Of the whole job."""
    epoch_seconds: Figure | None = None
