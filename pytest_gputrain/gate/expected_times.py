"""Compares expected times of steps: which of two is surely faster, and what a change costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from pytest_gputrain.records import Case, EmulatedRun, ExpectedTime, MetricName, Rates
from pytest_gputrain.records.counts import PARTS_OF_WORK

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


_CHANGE_ERROR: Final = (0.5, 1.75)
"""The interval of a change as multiples of what the rates say. No measured pair of steps differs by less than 10 %, so it is
not known how often it holds."""
_LEAST_CHANGE: Final = 0.01
"""A smaller share of a step is told as less than this."""
_WORK: Final = frozenset(
    {"flops_per_step", "recomputed_flops_per_step", "bytes_per_step", "fp32_flops", "work", *PARTS_OF_WORK}
)
"""The figures whose growth costs time of the GPU, by operator."""
_FLOPS: Final = frozenset(name for name in _WORK if name.endswith(("flops", "flops_per_step")))


def describe_slowdown(
    case: Case, grown: Collection[MetricName], before: EmulatedRun, now: EmulatedRun, rates: Rates | None
) -> str:
    """Say how much longer a step is expected to take: ``a step is expected to take about 8 % longer (4 to 14 %)``.

    Baselines keep no expected times, but the work of each operator. What it differs by takes the time that the rates of the
    board give it, and all else of the step takes what it takes now. Nothing is said where this does not tell the cost: if
    anything else has grown, such as waits, if the step waits for the host, if it is compiled, if FLOPs of a case in fp32
    have grown, of which it is not known whether they are in TF32, or if operators that do more and others that do less
    outweigh each other within their error.

    Args:
        grown: the figures that fail the case, without those of memory.
    """
    step = now.expected
    if step is None or rates is None or not step.seconds or step.host_bound or case.compile != "off":
        return ""
    if not grown or not _WORK.issuperset(grown) or not before.operators:
        return ""
    if case.precision == "fp32" and _FLOPS.intersection(grown):
        return ""
    changes = [_seconds(name, now, case, rates) - _seconds(name, before, case, rates) for name in now.operators]
    changes += [-_seconds(name, before, case, rates) for name in before.operators.keys() - now.operators.keys()]
    in_fp32 = 1 / _rate("fp32", "products", rates) - 1 / _rate(case.precision, "products", rates)
    changes.append(in_fp32 * (_fp32_flops(now) - _fp32_flops(before)))
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


def _rate(precision: str, kind: str, rates: Rates) -> float:
    """Return FLOP/s of a kind of kernel; infinite where the board has no such arithmetic."""
    peak = rates.flops.get(precision.removesuffix("-amp"), math.inf)
    return peak * rates.kinds[f"{kind}_{'fp32' if precision == 'fp32' else '16bit'}"]


def _seconds(name: str, run: EmulatedRun, case: Case, rates: Rates) -> float:
    """Return about the seconds of all calls of an operator in a step."""
    work = run.operators.get(name)
    if work is None:
        return 0.0
    computing = work.flops / _rate(case.precision, "convolutions" if "convolution" in name else "products", rates)
    moving = work.bytes / (rates.bandwidth * rates.kinds["pointwise"])
    return work.calls * rates.kinds["kernel_us"] * 1e-6 + max(computing, moving)


def _fp32_flops(run: EmulatedRun) -> int:
    """Return the FLOPs that libraries computed in fp32 in the last step, though the case is in 16 bits."""
    return run.counts.of_step(len(run.counts.steps) - 1).fp32_flops if run.counts and run.counts.steps else 0
