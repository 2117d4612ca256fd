"""Defines the records of figures as others printed them: a number, or a range, with the rounding that printing it took."""

from __future__ import annotations

from msgspec import Struct


class Figure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A printed figure as a range. ``9-11s/it`` is 9 to 11 with a rounding of 1, and ``4.7`` is 4.7 to 4.7 with a rounding
    of 0.1."""

    low: float
    """The lower end as printed."""
    high: float
    """The upper end as printed."""
    rounding: float
    """One unit of the last digit printed."""

    @property
    def least(self) -> float:
        """The lowest value that would be printed so."""
        return self.low - self.rounding / 2

    @property
    def most(self) -> float:
        """The highest value that would be printed so."""
        return self.high + self.rounding / 2

    @property
    def middle(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2


class Figures(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The figures that a table prints for one case by one framework. Memory is that of one GPU."""

    step_seconds: Figure | None = None
    """Seconds of one micro-batch."""
    update_seconds: Figure | None = None
    """Seconds of one optimizer update, with all micro-batches that the case accumulates."""
    samples_per_second: Figure | None = None
    """Samples per second of all GPUs together."""
    samples_per_second_per_gpu: Figure | None = None
    """Samples per second of one GPU."""
    peak_allocated_bytes: Figure | None = None
    """The peak of allocated memory."""
    peak_reserved_bytes: Figure | None = None
    """The peak of memory that the caching allocator reserved."""
    device_used_bytes: Figure | None = None
    """The memory in use on the device, as nvidia-smi shows it."""
    model_bytes: Figure | None = None
    """The memory of the model."""
    peak_host_bytes: Figure | None = None
    """The peak of host memory of the whole job."""
    epoch_seconds: Figure | None = None
    """Seconds of one epoch."""
