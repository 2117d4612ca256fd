"""Tells whether a loss curve converges, stays flat or diverges. Pure.

The rule compares levels. A level is the median of some losses in a row, so that a few spikes change nothing. The curve is
cut into fifths; beside the first and the last fifth, the half of each that lies outermost counts too, and half of that, down
to eight losses: a case that memorises its batch in the first hundred of 1500 steps, or blows up in the last fifty, does so
inside of one fifth.

- `diverging`: a loss was not finite; or an ending level lies above the lowest fifth, the curve has lost more than a tenth of
  what it had gained (without the tenth, one that has memorised its batch would diverge by wobbling near zero), and rounding
  does not explain it, as follows.
- `converging`: not that, and a beginning level lies above the last fifth.
- `flat`: neither.

Two levels differ where they do so by more than `_SIGMAS` standard errors, and by more than twice the smallest change between
neighbouring losses: a loss stored in bf16 comes in steps, and one step is no trend. The noise is estimated from the second
differences of the curve (their median absolute value): a trend bends slowly, so they hardly see it, while the spread of the
losses themselves would take the trend for noise.

A curve in 16 bits has noise that second differences do not see. The batch is the same in every step, so its roundings
change only as the weights move, and the loss wanders. That is measured against what the precision resolves of the loss:
u = 2**-8 of where the curve begins in bf16, whose numbers have 8 significant bits, 2**-11 in fp16 and 2**-24 in fp32. A
curve diverges only where an ending level lies more than u above the lowest fifth, and more than u above the same part of
the fp32 curve:

    E - lowest > max(5 standard errors, two changes, gained / 10, u * beginning)  and  E - E of fp32 > u * beginning

Where fp32 gave no curve or diverges itself, there is nothing to compare with, and the first half decides. A tiny LoRA of
FLUX.1-dev at a learning rate of 1e-6 (20 steps, 100 seeds), whose fp32 losses all fall by a hundred-thousandth, wanders
in bf16 by at most u / 33 and in fp16 by u / 17. Without u, 44 % of its curves in bf16-amp diverged, 41 % in bf16 and 1 %
in fp16-amp; now none does.

Comparing levels asks less than Mann-Kendall and Theil-Sen do, which want all pairs to rise or fall together: a curve that
fell early and stayed is no trend to them, nor is one that fell and rose again.

Share of constant curves in fp32 with noise that were not called flat, in 4,000 draws each (1,000 of 1,500 steps):

    steps                                 20       50       200      1500
    Gaussian                              0.08 %   0        0        0
    Student's t with 2 degrees            0.05 %   0        0.03 %   0
    log-normal, sigma 1                   0.1 %    0.03 %   0.05 %   0.6 %
    Gaussian, three times as wide at end  0.1 %    0.1 %    0.1 %    0.3 %
    AR(1), coefficient 0.3                0.7 %    0.2 %    0.5 %    0.8 %
    AR(1), coefficient 0.5                2.7 %    4.1 %    9.0 %    17 %

A straight fall over the whole curve was called converging in this share of 300 draws, by its depth in standard deviations
of Gaussian noise: 20 steps 24 % at 5 and 93 % at 10; 50 steps 25 % at 3 and 91 % at 5; 200 steps 68 % at 2 and all at 3;
1500 steps 11 % at 0.5 and 98 % at 1. So a short run shows only what is clear to the eye.

Not covered: noise that remembers and is wider than u (a running mean of losses; the last line of the table), a rise that
u explains (0.4 % of the loss in bf16), a fall that rounding makes (it is called converging), a fall or a rise within a few
steps, and curves of fewer than `LEAST_STEPS`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from pytest_gputrain.records import Case
from pytest_gputrain.records.study import LossCurve, Trend
from pytest_gputrain.utils.bounds import LEAST_STEPS

_LEAST_LOSSES: Final = 8
"""The least number of losses in a level inside of a fifth: with half as many, skewed noise (log-normal) is a trend in 1 % of
draws."""
_SIGNIFICANT_BITS: Final = {"fp32": 24, "bf16": 8, "bf16-amp": 8, "fp16-amp": 11}
"""The significant bits of the numbers of a precision, including the leading one."""
_SIGMAS: Final = 5.0
_LOST_SHARE: Final = 0.1
_MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median of Gaussian values times the root of their count, over their standard deviation."""
_MAD_TO_SIGMA: Final = 1.4826


def trend(
    losses: Sequence[float], *, precision: str = "fp32", reference: Sequence[float] = (), finite: bool = True
) -> Trend:
    """Return a description of the curve, such as that it falls. The result does not depend on the unit of the loss.

    Args:
        losses: at least `LEAST_STEPS`, or as many as there were before one was not finite.
        reference: as many losses of fp32; empty if it gave none or diverges.
        finite: whether every loss was.
    """
    if not finite:
        return "diverging"
    noise, coarseness = _noise(losses), _coarseness(losses)

    def limit(level: Sequence[float], other: Sequence[float]) -> float:
        error = _MEDIAN_ERROR * noise * math.sqrt(1 / len(level) + 1 / len(other))
        return max(_SIGMAS * error, 2 * coarseness)

    fifths = _fifths(losses)
    beginnings = list(_halved(fifths[0], from_start=True))
    lowest = min(fifths[:-1], key=statistics.median)
    lowest_median, last = statistics.median(lowest), statistics.median(fifths[-1])
    gained = max(map(_level, beginnings)) - lowest_median
    rounding = 2.0 ** -_SIGNIFICANT_BITS[precision] * abs(statistics.median(fifths[0]))
    for ending in _halved(fifths[-1], from_start=False):
        rises = _level(ending) - lowest_median > max(limit(ending, lowest), _LOST_SHARE * gained, rounding)
        if rises and (not reference or _level(ending) - _level(reference[-len(ending) :]) > rounding):
            return "diverging"
    if any(_level(beginning) - last > limit(beginning, fifths[-1]) for beginning in beginnings):
        return "converging"
    return "flat"


def gap(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return how far above ``reference`` the curve ends: the difference of their last levels as a share of the reference's
    first.

    A share of where fp32 begins, not of where it ends: a case of one batch ends near zero, where shares mean nothing. None
    if either is shorter than `LEAST_STEPS`, or where the reference begins at zero.
    """
    if min(len(losses), len(reference)) < LEAST_STEPS:
        return None
    first = abs(statistics.median(_fifths(reference)[0]))
    return (statistics.median(_fifths(losses)[-1]) - statistics.median(_fifths(reference)[-1])) / first if first else None


def _fifths(losses: Sequence[float]) -> list[Sequence[float]]:
    """Return five parts of a curve, all of one length. Losses that are left over are dropped before the last part."""
    size = len(losses) // 5
    return [losses[size * part : size * (part + 1)] for part in range(4)] + [losses[-size:]]


def _halved(fifth: Sequence[float], *, from_start: bool) -> Iterator[Sequence[float]]:
    """Return the fifth, its outer half, the outer half of that, and so on."""
    yield fifth
    size = len(fifth) // 2
    while size >= _LEAST_LOSSES:
        yield fifth[:size] if from_start else fifth[-size:]
        size //= 2


def _level(losses: Sequence[float]) -> float:
    """Return the lower median. Losses have outliers, and this is high only if three of four losses are high."""
    return statistics.median_low(losses)


def _noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of what is not trend: second differences have six times its variance."""
    bends = (abs(a - 2 * b + c) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False))
    return _MAD_TO_SIGMA / math.sqrt(6) * statistics.median(bends)


def _coarseness(losses: Sequence[float]) -> float:
    """Return the smallest change between neighbours, 0 for a constant."""
    return min((abs(b - a) for a, b in itertools.pairwise(losses) if a != b), default=0.0)


def describe_failed_curves(case: Case, curves: Sequence[LossCurve]) -> str | None:
    """Return the sentence for precisions that gave no curve, None if all did that could.

    Running out of memory in another precision than the case's own is no failure: fp32 takes twice the memory of bf16.
    """
    harmless = ("recorded", "left_out", "out_of_memory")
    failed = [
        f"in {curve.precision} {curve.reason}"
        for curve in curves
        if curve.outcome not in (harmless if curve.precision != case.precision else harmless[:2])
    ]
    return f"{case} {'; '.join(failed)}" if failed else None


def describe_divergence(case: Case, curves: Sequence[LossCurve]) -> str | None:
    """Return the sentence for precisions in which the case diverges while it does not in fp32; None if there are none.

    If fp32 diverges too, the recipe diverges and no precision is to blame. This is reported, but fails no test, unless the
    losses of the declared case become infinite or NaN.
    """
    own = next((curve for curve in curves if curve.precision == case.precision), None)
    if own is not None and own.non_finite_step is not None:
        return f"{case} diverges: its loss is not finite in step {own.non_finite_step}"
    if any(curve.precision == "fp32" and curve.trend == "diverging" for curve in curves):
        return None
    worse = [
        f"{curve.precision}{f' (its loss is not finite in step {curve.non_finite_step})' if curve.non_finite_step else ''}"
        for curve in curves
        if curve.trend == "diverging"
    ]
    compared = any(curve.precision == "fp32" and curve.trend for curve in curves)
    beside = "but not in fp32" if compared else "and fp32 gave no curve to compare with"
    return f"{case} diverges in {' and in '.join(worse)}, {beside}" if worse else None
