"""Tells which figures other processes on a case's GPUs, or lowered clocks of the GPUs, may have spoiled. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from pytest_gputrain.gate.messages import count, describe_failure, listed
from pytest_gputrain.records import Baseline, BaselineRun, Holder, Measurement, MetricVerdict, OutOfMemory
from pytest_gputrain.utils.units import MiB, format_bytes, format_percent

GPU_MEMORY_NOISE_BYTES: Final = 64 * MiB
"""A GPU's memory differs by so much from run to run: its allocator takes a few segments more or fewer."""

_SHOWN: Final = 3
"""Processes on a GPU that a sentence names, at most."""

_POWER: Final = ("SW Power Cap", "PPT")
"""Reasons for a lower clock that a busy GPU has at all times."""

_LEAST_THROTTLED_SHARE: Final = 0.05
"""A lowered clock is mentioned if at least this share of the readings has it."""


def describe_holders(holders: Iterable[Holder]) -> str:
    """Describe processes on GPUs: ``python (pid 4711, 12.30 GiB) on GPU 0``; empty for nobody."""
    names = [_describe_holder(holder) for holder in sorted(holders, key=lambda holder: -(holder.bytes or 0))]
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return listed([*names[:_SHOWN], *more])


def _describe_holder(holder: Holder) -> str:
    held = "" if holder.bytes is None else format_bytes(holder.bytes)
    if holder.pid is None:
        return f"an unseen process with {held or 'memory'} on GPU {holder.gpu}"
    return f"{holder.name or 'a process'} (pid {holder.pid}{f', {held}' if held else ''}) on GPU {holder.gpu}"


def holders_of(run: Measurement) -> tuple[Holder, ...]:
    """Return the processes that were on the GPUs before a run or during it."""
    return (*run.holders, *(run.telemetry.others if run.telemetry else ()))


def describe_others(measured: Iterable[Measurement]) -> str:
    """Describe the processes that were on the GPUs of some runs and may have slowed them; empty if none is known."""
    holders = {(holder.pid, holder.gpu): holder for run in measured for holder in holders_of(run)}
    who = describe_holders(holders.values())
    return f"beside {who}" if who else ""


def with_contention(
    metric: MetricVerdict, judge_runs: Callable[[Sequence[int]], MetricVerdict], measured: Sequence[Measurement]
) -> MetricVerdict:
    """Make a slowdown beside other processes inconclusive, unless runs without them show it too.

    Args:
        judge_runs: judges only the runs with these indices.
    """
    others = describe_others(measured)
    if not others or metric.status != "regressed":
        return metric
    undisturbed = [index for index, run in enumerate(measured) if not holders_of(run)]
    if undisturbed and judge_runs(undisturbed).status == "regressed":
        return metric
    note = "; ".join(filter(None, [metric.note, f"measured {others}"]))
    return msgspec.structs.replace(metric, status="inconclusive", note=note)


def describe_throttling(measured: Sequence[Measurement]) -> str:
    """Describe what has lowered the clocks of the GPUs, except their power limit; empty if no driver reports anything."""
    worst: dict[str, float] = {}
    for run in measured:
        for reason, share in ((run.telemetry and run.telemetry.throttled) or {}).items():
            if reason not in _POWER and share >= _LEAST_THROTTLED_SHARE:
                worst[reason] = max(share, worst.get(reason, 0.0))
    each = [f"{reason} for {format_percent(share, signed=False)} of the time" for reason, share in worst.items()]
    return f"its GPUs lowered their clocks ({', '.join(each)})" if each else ""


def describe_memory_shortage(reply: OutOfMemory, runs: Sequence[BaselineRun]) -> str:
    """Describe the other programs that took the memory of a case that ran out of it; empty if none is known."""
    if reply.holders:
        return f"it ran beside {describe_holders(reply.holders)}"
    if reply.other_processes:
        number = reply.other_processes
        return f"{number} other {'process' if number == 1 else 'processes'} computed on the GPU when it started"
    free_before = [run.free_bytes for run in runs if run.free_bytes is not None]
    if free_before and reply.free_bytes is not None and reply.free_bytes < min(free_before) - GPU_MEMORY_NOISE_BYTES:
        return f"{format_bytes(reply.free_bytes)} were free when it started, {format_bytes(min(free_before))} when it fitted"
    return ""


def why_not_recorded(replies: Sequence[Measurement | OutOfMemory], baseline: Baseline | None) -> str:
    """Say why the runs of a case are not recorded as a baseline; empty if they are.

    A case that ran out of memory is recorded only if it does not fit even without other processes, and a time only if no
    other process was on the GPUs.
    """
    out = [reply for reply in replies if isinstance(reply, OutOfMemory)]
    if not out:
        others = describe_others(reply for reply in replies if isinstance(reply, Measurement))
        return (
            f"was measured {others}, so it is not recorded: end the other processes, or choose other GPUs with --gpu-ids"
            if others
            else ""
        )
    what = describe_failure(out[0])
    if len(out) < len(replies):
        return (
            f"{what} in {len(out)} of {count(len(replies), 'run')}, so it is not recorded: a baseline fits always or never"
        )
    others = next(filter(None, (describe_memory_shortage(reply, baseline.runs if baseline else ()) for reply in out)), "")
    return f"{what}; {others}, so it is not recorded" if others else ""
