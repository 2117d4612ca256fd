"""Decides whether a step is slower or only noisy. Pure arithmetic on seconds: no records, no files, no clock.

Everything is in logarithms, so that a ratio is a difference. x is the median step time of one process after its warm-up; a
baseline has K runs, this time there are m so far, one per fresh process:

    c     = mean(log x_base) without the fastest and the slowest (K >= 5); their median (K < 5)
    r_j   = log x_new_j - c
    dev   = |log x_base - c| (K > 1)  and  |log x_new - median(log x_new)| (m > 1);  k of them
    s1^2  = (4 s0^2 + k (1.4826 median dev)^2) / (4 + k)
    s^2   = (4 s0^2 + sum min(dev, 3 s1)^2) / (4 + (K - 1) + (m - 1))
    limit = max(log(1 + tolerance), 2.6 s sqrt(0.65 + 1.15 / K))

A run from -limit to limit / 2 passes; otherwise there are more, five at most, until three agree. Runs vote and are not
averaged: the mean of runs of which one is bad is bad too. In an A/B comparison each run comes with one of the baseline, and
s is less certain in the first rounds. So a comparison ends before its last round only if all rounds are from -limit to
limit / 3, or all are beyond the limit with 8 s for 2.6 s. `pytest_gputrain.gate.host_bound` has other constants for steps in
which the GPU waits for the host.

Where it comes from: s is a winsorised standard deviation (Tukey's) about a trimmed mean, shrunk towards a prior s0 that
counts as four observations, as the variance of an inverse-gamma prior is; 1.4826 makes a median absolute deviation that of a
normal distribution (Hampel 1974). The other constants were chosen by simulating what benchmarks do: processes that differ by
more than their steps tell, autocorrelated steps, outliers, bad processes, days. ``tools/measure_gate.py`` repeats that
simulation with fresh seeds and prints what the rule reaches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pytest_gputrain.utils.bounds import MOST_RUNS

PRIOR_SD: Final = 0.01
"""The standard deviation between processes, if nothing is known: s0."""
PRIOR_WEIGHT: Final = 4
"""Observations that s0 counts for."""
NORMAL_MAD: Final = 1.4826
WINSOR: Final = 3.0
"""Deviations count for this many s1 at most: one bad process must not widen the limit for all others."""
LIMIT_SDS: Final = 2.6
LIMIT_SDS_OF_ONE: Final = 4.0 / math.sqrt(0.65 + 1.15 / 5)
"""The limit without re-measurement: 4.0 s at K = 5."""
SENSITIVITY_SDS: Final = 2.7
ROUNDING: Final = 1e-9
"""A bound above the rounding of logarithms of equal times."""
AGREEING: Final = 3
EARLY_SDS: Final = 8.0
"""The limit of the first rounds of an A/B comparison, all of which have to be beyond it to end it."""
EARLY_QUIET: Final = 2 / 3
"""The share of what makes a run suspicious that none of the first rounds may reach for a comparison to end."""
MANY_CASES: Final = 10
"""The number of cases from which a suite has its own s0 and its own shift."""
LEAST_SHIFT: Final = 0.01
"""A suite's shift from which on it counts."""

MEAN_STEPS: Final = 10
"""The number of timed steps from which on their mean is judged, too."""
MEAN_TOLERANCE: Final = 0.25
"""The least tolerance of the mean of the steps. Three steps of 20 that a host makes three times as long raise it by 21 %."""
MEAN_PRIOR_SD: Final = 0.06
"""The standard deviation of that mean between processes: s0."""

Outcome = Literal["pass", "regressed", "improved", "inconclusive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The outcome of runs against those of a baseline. Its figures are logarithms of the ratio of both times."""

    outcome: Outcome
    settled: bool
    """Whether no further run could change `outcome`. If one could, this is the outcome without it."""
    suspicious: bool
    """Whether a run looked slow, or was faster than the limit, so that further runs have to decide."""
    centre: float
    """The centre of the baseline's runs, in their unit: the exponential of c."""
    ratios: tuple[float, ...]
    """r_j of every run, in its order."""
    sd: float
    """The standard deviation between processes: s."""
    limit: float
    """A run above it counts as slower, and one below its negative as faster."""
    sensitivity: float
    """The slowdown that is caught 99 times in 100, about."""
    votes: int
    """Runs beyond the limit, on the side of the outcome or of the median."""
    shift: float
    """The shift of the whole suite, as far as it counted."""


def decide(
    base: Sequence[float],
    new: Sequence[float],
    *,
    tolerance: float,
    prior: float = PRIOR_SD,
    most: int = MOST_RUNS,
    shift: float = 0.0,
    doubted_from: float = 0.5,
    paired: bool = False,
) -> Decision:
    """Decide what ``new`` runs mean against ``base`` runs. Both are seconds, one for each fresh process, at least one.

    Args:
        tolerance: slowdown that always passes, as a share.
        prior: s0, the standard deviation between processes (of the logarithm) that is expected before any is seen.
        most: runs that there may be in all; with fewer than three, all have to agree, and beyond a wider limit.
        shift: of the whole suite (see `suite_shift`); 0 for none. A case regresses only if it does with and without it.
        doubted_from: share of the limit from which on a slower run asks for another one.
        paired: each run comes with one of the baseline, so a further run is one of both.

    Raises:
        ValueError: no runs, or figures that cannot be times, tolerances or counts.
    """
    _check(base, new, tolerance, prior, most, shift)
    most = max(most, len(new))
    base_logs, new_logs = sorted(map(math.log, base)), [math.log(seconds) for seconds in new]
    centre = _centre(base_logs)
    ratios = tuple(value - centre for value in new_logs)
    sd = _sd(base_logs, centre, new_logs, prior)
    alone = most < AGREEING
    bound = (LIMIT_SDS_OF_ONE if alone else LIMIT_SDS) * sd * math.sqrt(0.65 + 1.15 / len(base))
    within = math.log1p(tolerance) + ROUNDING
    limit = max(within, bound)
    counted = shift if abs(shift) > LEAST_SHIFT else 0.0
    # A case must not fail because the whole suite is slower, for example on a warmer machine. So two slowdowns of the case
    # are computed, with and without that of the suite, and the milder one is judged. The same holds for speedups.
    slower = [min(ratio, ratio - counted) for ratio in ratios]
    faster = [max(ratio, ratio - counted) for ratio in ratios]
    above, below = sum(ratio > limit for ratio in slower), sum(ratio < -limit for ratio in faster)
    waits = paired and len(ratios) < most
    # Rounds of an A/B comparison end early only beyond a wider limit, because the standard deviation is not certain yet.
    far = max(within, bound * EARLY_SDS / LIMIT_SDS)
    by_far = waits and (min(slower) > far or max(faster) < -far)
    needed = len(ratios) if by_far else max(min(AGREEING, most), most // 2 + 1)
    middle = statistics.median(ratios)
    looks_slow = any(ratio > limit * doubted_from for ratio in slower)
    suspicious = looks_slow or any(ratio < -limit for ratio in faster)
    outcome: Outcome
    if above >= needed:
        outcome = "regressed"
    elif below >= needed:
        outcome = "improved"
    else:
        # A case that is slower only because the whole suite is slower does not pass either.
        outcome = "inconclusive" if middle > (within if looks_slow else limit) else "pass"
    decided = max(above, below, len(ratios) - above - below) >= needed
    settled = decided or not suspicious or len(ratios) >= most
    if waits:
        settled = by_far or not (suspicious or max(slower) > limit * doubted_from * EARLY_QUIET)
    return Decision(
        outcome=outcome,
        settled=settled,
        suspicious=suspicious,
        centre=float(f"{math.exp(centre):.12g}"),  # This is rounded, so that equal times have no difference.
        ratios=ratios,
        sd=sd,
        limit=limit,
        sensitivity=limit + SENSITIVITY_SDS * sd * math.sqrt(0.29 + 1.15 / len(base)),
        votes=max(above, below),
        shift=counted,
    )


def mean_step(seconds: Sequence[float]) -> float | None:
    """Return the mean of a process's steps without the slowest one, which any process may have; None if there are too few
    steps.

    A median does not see what fewer than half of the steps take longer.
    """
    return statistics.fmean(sorted(seconds)[:-1]) if len(seconds) >= MEAN_STEPS else None


def _check(base: Sequence[float], new: Sequence[float], tolerance: float, prior: float, most: int, shift: float) -> None:
    if not base or not new:
        raise ValueError(f"a comparison needs runs on both sides, got {len(base)} and {len(new)}")
    for seconds in (*base, *new):
        if not 0 < seconds < math.inf:
            raise ValueError(f"{seconds!r} is not the time of a step: it must be above 0 and finite")
    if not (0 <= tolerance < math.inf and 0 <= prior < math.inf and math.isfinite(shift) and most >= 1):
        raise ValueError(f"tolerance {tolerance!r}, prior {prior!r}, shift {shift!r} or most {most!r} is out of range")


def _centre(base_logs: Sequence[float]) -> float:
    """Return the centre of sorted logarithms, which one bad process hardly changes."""
    if len(base_logs) < 5:
        return statistics.median(base_logs)
    return statistics.fmean(base_logs[1:-1])


def _sd(base_logs: Sequence[float], centre: float, new_logs: Sequence[float], prior: float) -> float:
    deviations = [abs(value - centre) for value in base_logs] if len(base_logs) > 1 else []
    if len(new_logs) > 1:
        middle = statistics.median(new_logs)
        deviations += [abs(value - middle) for value in new_logs]
    if not deviations:
        return prior
    k, weighted = len(deviations), PRIOR_WEIGHT * prior**2
    first = math.sqrt((weighted + k * (NORMAL_MAD * statistics.median(deviations)) ** 2) / (PRIOR_WEIGHT + k))
    total = weighted + sum(min(deviation, WINSOR * first) ** 2 for deviation in deviations)
    return math.sqrt(total / (PRIOR_WEIGHT + len(base_logs) - 1 + len(new_logs) - 1))


def suite_prior(baselines: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation (s0) that a suite's cases have between processes, from the seconds of their baselines'
    runs.

    From ten cases of two runs and more on, the median of their standard deviations; it is 1 - 1 / 4K of the true one, about.
    """
    own = [
        statistics.stdev(map(math.log, seconds)) / (1 - 1 / (4 * len(seconds))) for seconds in baselines if len(seconds) > 1
    ]
    return statistics.median(own) if len(own) >= MANY_CASES else PRIOR_SD


def suite_shift(first: Sequence[float]) -> float | None:
    """Return by how much all cases are slower today, as a logarithm: the median of their first runs'; None for fewer than
    ten."""
    return statistics.median(first) if len(first) >= MANY_CASES else None


def levelled(base: Sequence[float], head: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return both sides of an A/B comparison without the noise of the machine, which the two processes of a round share.

        d_j    = log head_j - log base_j;   D = median(d_j);   m = mean of all logarithms
        base_j = m - D / 2 - (d_j - D) / sqrt 2
        head_j = m + D / 2 + (d_j - D) / sqrt 2

    What is left is the difference of the sides. A difference of two processes varies sqrt 2 times as much as one of them,
    so its deviations are scaled to those of one, which `decide` expects.

    Args:
        base: seconds, one a round, as ``head``.
    """
    differences = [
        math.log(head_seconds) - math.log(base_seconds) for base_seconds, head_seconds in zip(base, head, strict=True)
    ]
    middle = statistics.median(differences)
    level = statistics.fmean(map(math.log, (*base, *head)))
    halves = [middle / 2 + (difference - middle) / math.sqrt(2) for difference in differences]
    return [math.exp(level - half) for half in halves], [math.exp(level + half) for half in halves]


def exceeds(values: Sequence[float], limit: float, most: int = AGREEING) -> bool | None:
    """Tell whether a figure is above ``limit`` in every one of three processes; None if too few processes have run to tell.

    Of more processes than three, in more than half of them: one that needs less must not clear all others.

    Args:
        most: processes that there may be.
    """
    above = sum(value > limit for value in values)
    if len(values) > AGREEING:
        return 2 * above > len(values)
    if above < len(values):
        return False
    return True if len(values) >= min(AGREEING, most) else None


def runs_out(out: int, runs: int, most: int = AGREEING) -> bool | None:
    """Tell whether a case that fitted runs out of memory: in two of three processes; None if that is not decided.

    Args:
        out: of ``runs``, those that ran out.
        most: processes that there may be.
    """
    enough = min(AGREEING, most)
    if 2 * out > max(runs, enough):
        return True
    return False if runs >= enough else None
