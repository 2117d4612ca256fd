"""Describes changes of what the operators of a step compute and move, with the operator and the line behind them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from pytest_gputrain.records import EmulatedRun, MetricName, MetricVerdict, OperatorWork
from pytest_gputrain.utils.units import format_bytes, format_flops, format_percent

WORK: Final[dict[MetricName, str]] = {
    "flops_per_step": "computes",
    "recomputed_flops_per_step": "recomputes",
    "bytes_per_step": "moves",
}
"""The metrics of work, and the verb of each."""


def flops_apart(before: tuple[int | None, int | None], now: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """Return the FLOPs of a baseline in two parts: those without recomputation, and those of recomputation.

    Older files count both together for own code that calls `torch.utils.checkpoint` itself. If the sum is the same as now,
    the parts are those of now.
    """
    (flops, recomputed), (flops_now, recomputed_now) = before, now
    together = not recomputed and flops and recomputed_now and flops == (flops_now or 0) + recomputed_now
    return now if together else before


def describe_work(metric: MetricVerdict, before: EmulatedRun, now: EmulatedRun) -> str:
    """Describe a change of work: ``moves 1.2 GiB (3.0 %) more a step, most of it clone (+1.1 GiB in +32 calls) at
    train.py:42``."""
    assert metric.value is not None
    assert metric.baseline is not None
    value, baseline = int(metric.value), int(metric.baseline)
    more = "more" if value > baseline else "less"
    share = f" ({format_percent(abs(value / baseline - 1), signed=False)})" if baseline else ""
    form = format_bytes if metric.metric == "bytes_per_step" else format_flops
    behind = _operator_behind(metric, before.operators, now.operators)
    return f"{WORK[metric.metric]} {form(abs(value - baseline))}{share} {more} a step{behind}"


def _operator_behind(metric: MetricVerdict, before: Mapping[str, OperatorWork], now: Mapping[str, OperatorWork]) -> str:
    """Name the operator whose work has changed most, with the line of its calls that is new or does more."""
    field = "bytes" if metric.metric == "bytes_per_step" else "flops"
    form = format_bytes if field == "bytes" else format_flops
    changes = {}
    for name in {*before, *now}:
        old, new = before.get(name), now.get(name)
        work = (getattr(new, field) if new else 0) - (getattr(old, field) if old else 0)
        changes[name] = (work, (new.calls if new else 0) - (old.calls if old else 0))
    total = (metric.value or 0) - (metric.baseline or 0)
    name = (max if total > 0 else min)(changes, key=lambda name: (changes[name][0], name), default="")
    if not name or changes[name][0] * total <= 0:
        return ""
    work, calls = changes[name]
    much = "most of it" if 2 * abs(work) > abs(total) else "including"
    called = f" in {calls:+} calls" if calls else ""
    sign = "+" if work > 0 else "-"
    line = _line_behind(before.get(name), now.get(name), 2 if field == "bytes" else 1) if work > 0 else ""
    at = f" at {line}" if line else ""
    return f", {much} {name.removeprefix('aten.')} ({sign}{form(abs(work))}{called}){at}"


def _line_behind(before: OperatorWork | None, now: OperatorWork | None, place: int) -> str:
    """Name the line with the largest work of those that the baseline does not have.

    A baseline keeps no names of lines, because lines move. A line that only moved has the work that it had.
    """
    if now is None:
        return ""
    known = Counter(row[place] for row in before.lines) if before else Counter()
    new = []
    for row in now.lines:
        if known[row[place]]:
            known[row[place]] -= 1
        else:
            new.append(row)
    return max(new, key=lambda row: row[place], default=("", 0, 0))[0]
