"""Merges what the ranks of a case measured into the case's own figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pytest_gputrain.records import EmulatedRun, Measurement, Prediction, Rank, Reply, Served, WorkAtLines
from pytest_gputrain.utils.units import format_bytes


def merge(replies: Sequence[Reply | Served | Prediction | EmulatedRun]) -> Measurement:
    """Merge the figures of all ranks, in their order, into the case's."""
    measured = [reply for reply in replies if isinstance(reply, Measurement)]
    figures = [reply for reply in replies if isinstance(reply, Measurement | Served)]
    if len(figures) == 1:
        return measured[0]
    first = measured[0]
    hosts = tuple(dict.fromkeys(reply.environment.host for reply in measured))
    slowest = zip(*(reply.step_seconds for reply in measured), strict=True)
    slowest_warmup = zip(*(reply.warmup_seconds for reply in measured), strict=True)
    return msgspec.structs.replace(
        first,
        environment=msgspec.structs.replace(first.environment, hosts=hosts if len(hosts) > 1 else ()),
        step_seconds=tuple(map(max, slowest)),
        warmup_seconds=tuple(map(max, slowest_warmup)),
        device_step_seconds=tuple(map(max, zip(*(reply.device_step_seconds for reply in measured), strict=True))),
        input_seconds=max((reply.input_seconds for reply in measured if reply.input_seconds is not None), default=None),
        losses=tuple(sum(step) / len(measured) for step in zip(*(reply.losses for reply in measured), strict=False)),
        batch_size=sum(reply.batch_size for reply in measured),
        tokens=_total(reply.tokens for reply in measured),
        model_bytes=_largest(reply.model_bytes for reply in figures),
        peak_allocated_bytes=max(reply.peak_allocated_bytes for reply in figures),
        **_phases(measured),
        peak_reserved_bytes=_largest(reply.peak_reserved_bytes for reply in measured),
        device_used_bytes=_largest(reply.device_used_bytes for reply in measured),
        peak_host_bytes=sum(reply.peak_host_bytes for reply in figures),
        flops_per_step=_total(reply.flops_per_step for reply in measured),
        recomputed_flops_per_step=_total(reply.recomputed_flops_per_step for reply in measured),
        counted_threads=max(reply.counted_threads for reply in measured),
        notes=tuple(dict.fromkeys(note for reply in measured for note in reply.notes)),
        own_seconds=(),
        ranks=tuple(map(_rank, figures)),
    )


def merge_emulated(replies: Sequence[EmulatedRun]) -> EmulatedRun:
    """Merge the figures of all ranks on emulated GPUs, in their order: memory is that of the rank that needs most."""
    if len(replies) == 1:
        return replies[0]
    peaks = [reply.peak_allocated_bytes for reply in replies]
    most, least = peaks.index(max(peaks)), peaks.index(min(peaks))
    more = format_bytes(peaks[most] - peaks[least])
    spread = f"rank {most} needs most memory: {more} more allocated than rank {least}, which needs least"
    notes = dict.fromkeys(note for reply in replies for note in reply.notes)
    return msgspec.structs.replace(
        replies[most],
        **_phases(replies),
        bytes_per_step=_total(reply.bytes_per_step for reply in replies),
        operators=_work_of_all(replies),
        allocated_by_rank=tuple(peaks),
        peak_reserved_bytes=max(reply.peak_reserved_bytes for reply in replies),
        device_used_bytes=max(reply.device_used_bytes for reply in replies),
        model_bytes=_largest(reply.model_bytes for reply in replies),
        flops_per_step=_total(reply.flops_per_step for reply in replies),
        recomputed_flops_per_step=_total(reply.recomputed_flops_per_step for reply in replies),
        not_counted=tuple(dict.fromkeys(what for reply in replies for what in reply.not_counted)),
        notes=(*notes, *([spread] if peaks[most] > peaks[least] else [])),
    )


def _phases(replies: Sequence[Measurement] | Sequence[EmulatedRun]) -> dict[str, Any]:
    """Return the highest peak of each phase, and what lived there in the rank that has it."""
    highest = {
        phase: max(
            (reply for reply in replies if phase in reply.phase_peak_bytes), key=lambda reply: reply.phase_peak_bytes[phase]
        )
        for phase in dict.fromkeys(phase for reply in replies for phase in reply.phase_peak_bytes)
    }
    return {
        "phase_peak_bytes": {phase: reply.phase_peak_bytes[phase] for phase, reply in highest.items()},
        "largest": {phase: reply.largest[phase] for phase, reply in highest.items() if phase in reply.largest},
    }


def _work_of_all(replies: Sequence[EmulatedRun]) -> dict[str, WorkAtLines]:
    """Add up the work of all ranks by operator. The lines of each rank stay, because a baseline compares them one by one."""
    merged: dict[str, WorkAtLines] = {}
    for name in sorted({name for reply in replies for name in reply.operators}):
        works = [reply.operators[name] for reply in replies if name in reply.operators]
        merged[name] = WorkAtLines(
            calls=sum(work.calls for work in works),
            flops=sum(work.flops for work in works),
            bytes=sum(work.bytes for work in works),
            lines=tuple(line for work in works for line in work.lines),
        )
    return merged


def _rank(reply: Measurement | Served) -> Rank:
    if isinstance(reply, Served):
        return Rank(
            role="server",
            step_seconds=(),
            peak_allocated_bytes=reply.peak_allocated_bytes,
            peak_host_bytes=reply.peak_host_bytes,
            updates=reply.updates,
            rows=reply.rows,
        )
    return Rank(
        step_seconds=reply.step_seconds,
        peak_allocated_bytes=reply.peak_allocated_bytes,
        peak_reserved_bytes=reply.peak_reserved_bytes,
        peak_host_bytes=reply.peak_host_bytes,
        own_seconds=reply.own_seconds,
    )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _total(values: Iterable[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None
