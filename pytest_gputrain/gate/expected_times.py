"""Compares expected times of steps: which of two is surely faster, and what a change costs. Pure."""

from __future__ import annotations

import math
from typing import Final

from pytest_gputrain.records import ExpectedTime

RATIO_ERROR: Final = 0.09
"""The error of the ratio of two expected times on one GPU: it was smaller for 80 % of 112 measured pairs of steps that
differ by up to 40 % (docs/how-fast.md)."""


def tells_apart(fast: ExpectedTime, slow: ExpectedTime, work_ratio: float, *, on_one_gpu: bool) -> bool:
    """Tell whether the first step surely does more work a second than the second one.

    On one GPU the error of both is nearly the same, so their ratio decides. On two GPUs their intervals must not overlap.

    Args:
        work_ratio: the work of a first step, such as its tokens, by that of a second one.
    """
    if on_one_gpu:
        return work_ratio * (slow.seconds or 0.0) > (1 + RATIO_ERROR) * (fast.seconds or math.inf)
    return work_ratio * (slow.low or 0.0) > (fast.high or math.inf)
