"""Records of what was found out about a case: parts of a `pytest_gputrain.records.Result`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Try(Struct, frozen=True, kw_only=True):
    """One micro-batch of a search, tried in a fresh process."""

    batch_size: int
    """Samples per process."""
    outcome: Literal["fits", "out_of_memory", "timed_out", "capped", "crashed"]
    """``capped``: the tiny scale trains on fewer samples than were asked for."""
    samples_per_second: float | None = None
    peak_allocated_bytes: int | None = None
    reason: str = ""
    """Why it does not fit."""


class Search(Struct, frozen=True, kw_only=True):
    """Which micro-batches of a case fit, and which is the fastest; its `Result` has the figures of that one."""

    tries: tuple[Try, ...]
    """In the order they were made, each batch once."""
    most: int
    """No larger batch was to be tried."""
    largest: int | None = None
    """The largest that fits; None where not even one sample does, or where a crash ended the search."""
    fastest: int | None = None
    """The one with the most samples per second; None likewise."""


Trend = Literal["converging", "flat", "diverging"]


class LossCurve(Struct, frozen=True, kw_only=True):
    """The losses of a case in one precision, from the first step on."""

    precision: str
    outcome: Literal["recorded", "left_out", "out_of_memory", "timed_out", "crashed"]
    losses: tuple[float, ...] = ()
    """Ends before the first loss that is not finite."""
    non_finite_step: int | None = None
    """The step, counted from 1, whose loss was not finite."""
    trend: Trend | None = None
    gap: float | None = None
    """How far above the fp32 curve it ends, as a share of where that one begins (see `pytest_gputrain.loss.gap`)."""
    reason: str = ""
    """Why there is no curve."""


class Rank(Struct, frozen=True, kw_only=True):
    """What one of several processes of a case measured."""

    step_seconds: tuple[float, ...]
    peak_allocated_bytes: int
    peak_host_bytes: int
    peak_reserved_bytes: int | None = None
    own_seconds: tuple[float, ...] = ()
    """Of each step, from the common start to the first need of another process; none where the steps do not tell."""


class RankSpread(Struct, frozen=True, kw_only=True):
    """How far the processes of a case lie apart, in the run where they lie farthest."""

    slowest: int | None
    """Rank whose own work takes longest by the median of its steps; None where the steps do not tell their own work."""
    lag: float | None
    """How much longer than that of the fastest, as a share of the fastest's; None likewise."""
    lag_seconds: float | None
    least_peak_allocated_bytes: int
    most_peak_allocated_bytes: int
