"""What others on a case's GPUs, and what the GPUs themselves, do to its figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from pytest_gputrain.gate.messages import count, describe_failure
from pytest_gputrain.records import Baseline, BaselineRun, Holder, Measurement, MetricVerdict, OutOfMemory
from pytest_gputrain.utils.units import MiB, format_bytes, format_percent

GPU_MEMORY_FLOOR_BYTES: Final = 64 * MiB
"""By which a GPU's memory differs from run to run: its allocator takes a few segments more or fewer."""

_SHOWN: Final = 3
"""Of those who hold a GPU."""

_POWER: Final = ("SW Power Cap", "PPT")
"""Reasons for a lower clock that a busy GPU has at all times."""

_WORTH_TELLING: Final = 0.05
"""Share of the readings with a lowered clock."""


def named(holders: Iterable[Holder]) -> str:
    """Who they are: ``python (pid 4711, 12.30 GiB) on GPU 0``; empty for nobody."""
    names = [_named(holder) for holder in sorted(holders, key=lambda holder: -(holder.bytes or 0))]
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    *first, last = [*names[:_SHOWN], *more] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _named(holder: Holder) -> str:
    held = "" if holder.bytes is None else format_bytes(holder.bytes)
    if holder.pid is None:
        return f"somebody unseen with {held or 'memory'} on GPU {holder.gpu}"
    return f"{holder.name or 'a process'} (pid {holder.pid}{f', {held}' if held else ''}) on GPU {holder.gpu}"


def of(run: Measurement) -> tuple[Holder, ...]:
    """Who was on the GPUs of a run, before it or meanwhile."""
    return (*run.holders, *(run.telemetry.others if run.telemetry else ()))


def beside(measured: Iterable[Measurement]) -> str:
    """Who was on the GPUs of some runs, whose time may be their doing; empty where nobody is known to have been."""
    there = {(holder.pid, holder.gpu): holder for run in measured for holder in of(run)}
    who = named(there.values())
    return f"beside {who}" if who else ""


def doubted(
    metric: MetricVerdict, by: Callable[[Sequence[int]], MetricVerdict], measured: Sequence[Measurement]
) -> MetricVerdict:
    """A verdict on time: a slowdown beside others is not surely the case's own, unless it shows without them.

    Args:
        by: decides by some of the runs only.
    """
    others = beside(measured)
    if not others or metric.status != "regressed":
        return metric
    alone = [at for at, run in enumerate(measured) if not of(run)]
    if alone and by(alone).status == "regressed":
        return metric
    note = "; ".join(filter(None, [metric.note, f"measured {others}"]))
    return msgspec.structs.replace(metric, status="inconclusive", note=note)


def slowed_down(measured: Sequence[Measurement]) -> str:
    """What lowered the clocks of the GPUs, but for their power limit; empty for nothing, or where no driver tells."""
    worst: dict[str, float] = {}
    for run in measured:
        for reason, share in ((run.telemetry and run.telemetry.throttled) or {}).items():
            if reason not in _POWER and share >= _WORTH_TELLING:
                worst[reason] = max(share, worst.get(reason, 0.0))
    each = [f"{reason} for {format_percent(share, signed=False)} of the time" for reason, share in worst.items()]
    return f"its GPUs lowered their clocks ({', '.join(each)})" if each else ""


def crowded(reply: OutOfMemory, runs: Sequence[BaselineRun]) -> str:
    """What took the memory of a case that ran out of it, by itself or beside a baseline; empty where nothing else did."""
    if reply.holders:
        return f"it ran beside {named(reply.holders)}"
    if reply.other_processes:
        number = reply.other_processes
        return f"{number} other {'process' if number == 1 else 'processes'} computed on the GPU when it started"
    free_before = [run.free_bytes for run in runs if run.free_bytes is not None]
    if free_before and reply.free_bytes is not None and reply.free_bytes < min(free_before) - GPU_MEMORY_FLOOR_BYTES:
        return (
            f"{format_bytes(reply.free_bytes)} were free when it started, {format_bytes(min(free_before))} for its baseline"
        )
    return ""


def no_baseline_of(replies: Sequence[Measurement | OutOfMemory], baseline: Baseline | None) -> str:
    """Why the runs of a case become no baseline; empty where they do.

    What runs out of memory does only if it never fits by itself, and a time only if nobody else was on the GPUs.
    """
    out = [reply for reply in replies if isinstance(reply, OutOfMemory)]
    if not out:
        others = beside(reply for reply in replies if isinstance(reply, Measurement))
        return (
            f"was measured {others}, so it is not recorded: end that, or choose other GPUs with --gpu-ids" if others else ""
        )
    what = describe_failure(out[0])
    if len(out) < len(replies):
        return (
            f"{what} in {len(out)} of {count(len(replies), 'run')}, so it is not recorded: a baseline fits always or never"
        )
    others = next(filter(None, (crowded(reply, baseline.runs if baseline else ()) for reply in out)), "")
    return f"{what}; {others}, so it is not recorded" if others else ""
