"""Measures how far the processes of a case differ in step time and in memory. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from pytest_gputrain.records import Measurement, Rank, RankSpread


def widest(runs: Iterable[Measurement]) -> RankSpread | None:
    """Return how much the workers differ in the run in which they differ most; None for one worker."""
    workers = [[rank for rank in run.ranks if rank.role == "worker"] for run in runs]
    spreads = [_spread(ranks) for ranks in workers if len(ranks) > 1]
    return max(spreads, key=lambda spread: spread.lag or 0.0, default=None)


def _spread(ranks: Sequence[Rank]) -> RankSpread:
    peaks = [rank.peak_allocated_bytes for rank in ranks]
    # The median is used, so that a process that is late in some steps and early in others does not count as slow.
    own = [statistics.median(rank.own_seconds) if rank.own_seconds else 0.0 for rank in ranks]
    most, least = max(own), min(own)
    return RankSpread(
        slowest=own.index(most) if least else None,
        lag=most / least - 1 if least else None,
        lag_seconds=most - least if least else None,
        least_peak_allocated_bytes=min(peaks),
        most_peak_allocated_bytes=max(peaks),
    )
