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
    """``capped``: the tiny scale trains on fewer samples than were asked for."""
    samples_per_second: float | None = None
    peak_allocated_bytes: Whole | None = None
    reason: str = ""
    """Why it does not fit."""


class Search(Struct, frozen=True, kw_only=True):
    """Which micro-batches of a case fit, and which is the fastest; its `Result` has the figures of that one."""

    tries: tuple[Try, ...]
    """In the order they were made, each batch once."""
    most: Whole
    """No larger batch was to be tried."""
    largest: Whole | None = None
    """The largest that fits; None where not even one sample does, or where a crash ended the search."""
    fastest: Whole | None = None
    """The one with the most samples per second; None likewise."""


Trend = Literal["converging", "flat", "diverging"]


class LossCurve(Struct, frozen=True, kw_only=True):
    """The losses of a case in one precision, from the first step on."""

    precision: str
    outcome: Literal["recorded", "left_out", "out_of_memory", "timed_out", "crashed", "lost"]
    losses: tuple[float, ...] = ()
    """Ends before the first loss that is not finite."""
    non_finite_step: Whole | None = None
    """The step, counted from 1, whose loss was not finite."""
    trend: Trend | None = None
    gap: float | None = None
    """How far above the fp32 curve it ends, as a share of where that one begins: `pytest_gputrain.gate.loss_trend.gap`."""
    reason: str = ""
    """Why there is no curve."""
