"""Compares expected times of steps: which of two is surely faster, and what a change costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from pytest_gputrain.hardware.step_time import Board, UnknownKernel
from pytest_gputrain.records import Case, EmulatedRun, ExpectedTime, MetricName, OperatorWork, Rates
from pytest_gputrain.records.counts import PARTS_OF_WORK

RATIO_ERROR: Final = 0.09
"""The error of the ratio of two expected times on one GPU: it was smaller for 80 % of 112 measured pairs of steps that
differ by up to 40 % (docs/how-true.md)."""


def tells_apart(fast: ExpectedTime, slow: ExpectedTime, work_ratio: float, *, on_one_gpu: bool) -> bool:
    """Tell whether the first step surely does more work in each second than the second step.

    On one GPU the error of both is nearly the same, so their ratio decides. On two GPUs their intervals must not overlap.

    Args:
        work_ratio: the work of a first step, such as its tokens, by that of a second one.
    """
    if on_one_gpu:
        return work_ratio * (slow.seconds or 0.0) > (1 + RATIO_ERROR) * (fast.seconds or math.inf)
    return work_ratio * (slow.low or 0.0) > (fast.high or math.inf)


_CHANGE_ERROR: Final = (0.5, 1.75)
"""The interval of a change as multiples of what the rates say. No measured pair of steps differs by less than 10 %, so it is
not known how often it holds."""
_LEAST_CHANGE: Final = 0.01
"""A smaller share of a step is given as less than this."""
_FLOPS: Final = frozenset({"flops_per_step", "recomputed_flops_per_step", "fp32_flops"})
_WORK: Final = _FLOPS | {"bytes_per_step", "work", *PARTS_OF_WORK}
"""The figures whose growth costs time of the GPU, by operator."""
_NOTHING: Final = OperatorWork(calls=0, flops=0, bytes=0)


def describe_slowdown(
    case: Case, grown: Collection[MetricName], before: EmulatedRun, now: EmulatedRun, rates: Rates | None
) -> str:
    """Say how much longer a step is expected to take: ``a step is expected to take about 8 % longer (4 to 14 %)``.

    Baselines keep no expected times, but the work of each operator. What it differs by takes the time that the rates of the
    board give it, and all else of the step takes what it takes now. Nothing is said where this does not tell the cost: if
    anything else has grown, such as waits, if the step waits for the host, if a kernel is not known whose work has changed,
    if FLOPs of a case in fp32 have grown, of which it is not known whether they are in TF32, or if operators that do more
    and others that do less outweigh each other within their error.

    Args:
        grown: the figures that fail the case, without those of memory.
    """
    step = now.expected
    if step is None or rates is None or not step.seconds or step.host_bound or not before.operators:
        return ""
    if not grown or not _WORK.issuperset(grown) or (case.precision == "fp32" and _FLOPS.intersection(grown)):
        return ""
    board, dtype, changes = Board(rates), case.precision.removesuffix("-amp"), list[float]()
    try:
        for name in {**before.operators, **now.operators}:
            old, new = (run.operators.get(name, _NOTHING) for run in (before, now))
            if (old.calls, old.flops, old.bytes) != (new.calls, new.flops, new.bytes):
                changes.append(board.work(name, new, dtype) - board.work(name, old, dtype))
        for run, sign in ((now, 1), (before, -1)):
            slow = OperatorWork(calls=1, flops=_fp32_flops(run), bytes=0)
            changes.append(sign * (board.work("mm", slow, "fp32") - board.work("mm", slow, dtype)))
    except UnknownKernel:
        return ""
    longer, shorter = sum(change for change in changes if change > 0), -sum(change for change in changes if change < 0)
    change, (low, high) = longer - shorter, _CHANGE_ERROR
    was = step.seconds - change
    ends = [(one * longer - other * shorter) / was for one, other in ((low, high), (high, low))] if was > 0 else [0.0]
    if ends[0] <= 0:
        return ""
    if ends[1] < _LEAST_CHANGE:
        return "a step is expected to take less than 1 % longer"
    shown, least, most = (f"{100 * share:.{0 if ends[0] >= _LEAST_CHANGE else 1}f}" for share in (change / was, *ends))
    return f"a step is expected to take about {shown} % longer ({least} to {most} %)"


def _fp32_flops(run: EmulatedRun) -> int:
    """Return the FLOPs that libraries computed in fp32 in the last step, though the case is in 16 bits."""
    return run.counts.of_step(len(run.counts.steps) - 1).fp32_flops if run.counts and run.counts.steps else 0
