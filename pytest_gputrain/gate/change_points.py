"""Finds where a series of figures changes its level, by binary segmentation of winsorised residuals. Pure arithmetic.

x is the logarithm of the figures, so that a change is a ratio; s is their noise, from the differences of neighbours:

    m   = 1.4826 median |x_i - x_(i-1)| / sqrt 2
    s^2 = (4 s0^2 + n m^2) / (4 + n),  at least 0.1 %;  s0 = 1 % for times, as `gate.step_times` expects of processes

In a segment each figure counts by its distance from the segment's median in units of s, cut off at 3.5. A level of k of the
segment's m figures, whose distances differ from their mean by d in total, lowers the sum of squares by d^2 m / (k (m - k)).
A change costs 5 log n, with n = 50 for shorter series. The segment is cut where the gain exceeds the cost by most: once, if
the level lasts to an end of the segment, or twice, if it lies inside. Both parts, or all three, are searched likewise.

Levels inside are searched for because a slowdown that was mended after some days is hidden in the sum of a single cut. Their
lengths are tried in steps of sqrt 2, and a cut may serve one level only until others are found; so at last each change is
moved to its best place between its neighbours, and those that do not pay there any more are dropped.

Cutting off is what makes the method: a few bad processes in a row look like a level otherwise. ``tools/measure_trend.py``
measures false alarms, misses, delay and speed with fresh seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_gputrain.gate.step_times import NORMAL_MAD, PRIOR_SD, PRIOR_WEIGHT

Array = NDArray[np.float64]

PENALTY: Final = 5.0
LEAST_COUNTED: Final = 50
"""A shorter series pays as if it were so long: its noise is little known."""
LEAST_LENGTH: Final = 4
"""Figures of a level that is searched for."""
WINSOR: Final = 3.5
LEAST_SD: Final = 0.001
_LENGTHS: Final = math.sqrt(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """The levels of a series, in order of time."""

    starts: tuple[int, ...]
    """Index of each level's first figure; 0 is the first of them."""
    medians: tuple[float, ...]
    """The median of each level, in the unit of the figures."""
    sd: float
    """Noise between neighbours, as a share."""


def levels(figures: Sequence[float] | Array, prior: float = PRIOR_SD) -> Levels:
    """Find the levels of ``figures``, which are in order of time; one level if nothing changed.

    Args:
        prior: s0, the noise that is expected before any is seen, as a share: `LEAST_SD` for exact counts.

    Raises:
        ValueError: no figures, or some that are not above 0 and finite.
    """
    values = np.asarray(figures, float)
    if not len(values) or not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("a series needs figures, all of them above 0 and finite")
    logs = np.log(values)
    sd = _noise(logs, prior)
    cost = PENALTY * math.log(max(len(logs), LEAST_COUNTED))
    logs /= sd
    cuts: list[int] = []
    segments = [(0, len(logs))]
    while segments:
        begin, end = segments.pop()
        inner_edges = [begin + index for index in _cut(logs[begin:end], cost)]
        if inner_edges:
            cuts += inner_edges
            segments += itertools.pairwise((begin, *inner_edges, end))
    edges = _settled(logs, [0, *sorted(cuts), len(logs)], cost)
    medians = tuple(_median(values[begin:end]) for begin, end in itertools.pairwise(edges))
    return Levels(starts=tuple(edges[:-1]), medians=medians, sd=sd)


def exact_levels(figures: Sequence[float], most: Callable[[float], float]) -> Levels:
    """Return the levels of figures without noise. Each figure that differs from the first one of its level begins another
    level.

    Args:
        most: the highest figure that does not differ from one that is lower.
    """
    starts = [0]
    for index, figure in enumerate(figures):
        low, high = sorted((figures[starts[-1]], figure))
        if high > most(low):
            starts.append(index)
    ends = [*starts[1:], len(figures)]
    medians = tuple(_median(np.asarray(figures[start:end], float)) for start, end in zip(starts, ends, strict=True))
    return Levels(starts=tuple(starts), medians=medians, sd=0.0)


def _median(values: Array) -> float:
    """Compute the median as numpy does, at a quarter of its time for some hundred values."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _noise(logs: Array, prior: float) -> float:
    steps = abs(np.diff(logs))
    own = NORMAL_MAD * _median(steps) / math.sqrt(2) if len(steps) else 0.0
    squares = (PRIOR_WEIGHT * prior**2 + len(logs) * own**2) / (PRIOR_WEIGHT + len(logs))
    return max(math.sqrt(squares), LEAST_SD)


def _cut(segment: Array, cost: float) -> tuple[int, ...]:
    """Return where a new level begins and, if it ends inside, where it ends; nothing if the gain is too small."""
    size = len(segment)
    if size < 2 * LEAST_LENGTH:
        return ()
    sums = _summed(segment)
    gain, at = _one_cut(sums)
    best = gain - cost
    cuts: tuple[int, ...] = (at,)
    inner, length = sums[LEAST_LENGTH : size - LEAST_LENGTH + 1], LEAST_LENGTH
    while length < len(inner):
        inside = inner[length:] - inner[:-length]
        at = int(abs(inside).argmax())
        gain = float(inside[at]) ** 2 * size / (length * (size - length))
        if gain - 2 * cost > best:
            best, cuts = gain - 2 * cost, (LEAST_LENGTH + at, LEAST_LENGTH + at + length)
        length = math.ceil(length * _LENGTHS)
    return cuts if best > 0 else ()


def _settled(logs: Array, edges: list[int], cost: float) -> list[int]:
    """Move each edge of a level to its best place between its neighbours, and drop edges whose gain is too small there."""
    while True:
        gains = []
        for index in range(1, len(edges) - 1):
            begin, end = edges[index - 1], edges[index + 1]
            # The search includes the last figure of the old level, because that figure may belong to the new level.
            gain, at = _one_cut(_summed(logs[begin:end]), LEAST_LENGTH - 1)
            edges[index] = begin + at
            gains.append(gain)
        weakest = min(gains, default=math.inf)
        if weakest > cost:
            return edges
        del edges[1 + gains.index(weakest)]


def _one_cut(sums: Array, least: int = LEAST_LENGTH) -> tuple[float, int]:
    """Return the largest gain of a single cut, and the place of the cut."""
    size = len(sums) - 1
    lengths = np.arange(least, size - least + 1)
    gains = sums[least : size - least + 1] ** 2 * size / (lengths * (size - lengths))
    at = int(gains.argmax())
    return float(gains[at]), least + at


def _summed(segment: Array) -> Array:
    """Return the running sums of the winsorised distances from the median, without their mean slope."""
    distances = np.clip(segment - _median(segment), -WINSOR, WINSOR)
    sums = np.concatenate(([0.0], np.cumsum(distances)))
    return np.asarray(sums - np.arange(len(sums)) * (sums[-1] / len(segment)))
