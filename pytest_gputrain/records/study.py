"""Defines the records of what a search for a batch and a study of losses find: parts of a
`pytest_gputrain.records.Result`.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from pytest_gputrain.records.whole import Whole


class Try(Struct, frozen=True, kw_only=True):
    """One micro-batch of a search, tried in a fresh process."""

    batch_size: Whole
    """Samples per process."""
    outcome: Literal["fits", "out_of_memory", "timed_out", "capped", "crashed", "lost"]
    """The outcome. ``capped``: the tiny scale trains on fewer samples than requested."""
    samples_per_second: float | None = None
    """The throughput with this batch."""
    peak_allocated_bytes: Whole | None = None
    """The peak of allocated memory with this batch."""
    reason: str = ""
    """Why it does not fit."""


class Search(Struct, frozen=True, kw_only=True):
    """The search for the micro-batches that fit, and for the fastest one."""

    tries: tuple[Try, ...]
    """All tries in their order, each batch once."""
    most: Whole
    """The largest batch that the search may try."""
    largest: Whole | None = None
    """The largest batch that fits. None if not even one sample fits, or if a crash ended the search."""
    fastest: Whole | None = None
    """The batch with the most samples per second. None if ``largest`` is None."""


Trend = Literal["converging", "flat", "diverging"]
"""The trend of the losses of a case."""


class LossCurve(Struct, frozen=True, kw_only=True):
    """The losses of a case in one precision, from the first step on."""

    precision: str
    """The precision."""
    outcome: Literal["recorded", "left_out", "out_of_memory", "timed_out", "crashed", "lost"]
    """Whether there is a curve."""
    losses: tuple[float, ...] = ()
    """The loss of each step, up to the first that is not finite."""
    non_finite_step: Whole | None = None
    """The step, counted from 1, whose loss was not finite."""
    trend: Trend | None = None
    """The trend of the losses."""
    gap: float | None = None
    """The distance of its end above the fp32 curve, as a share of where that one begins."""
    reason: str = ""
    """Why there is no curve."""
