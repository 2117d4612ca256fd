"""Merges what the ranks of a case measured into the case's own figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from pytest_gputrain.records import (
    CountCause,
    Counts,
    EmulatedRun,
    GpuSteps,
    Measurement,
    OperatorWork,
    Rank,
    Reply,
    Served,
    SlowClass,
    StepCounts,
    TrainedTensors,
    TrainingPhase,
)
from pytest_gputrain.records.counts import added_up
from pytest_gputrain.records.expected import slowest
from pytest_gputrain.records.step_memory import OfStep, StepMemory, folded, unfolded
from pytest_gputrain.utils.units import format_bytes

_HIGHEST: Final = ("heap_growth", "peak_reserved_bytes", "device_used_bytes")
_ADDED_UP: Final = ("flops_per_step", "recomputed_flops_per_step")


def merge(replies: Sequence[Reply | Served | EmulatedRun]) -> Measurement:
    """Return the figures of the case from those of all ranks, which are in the order of their numbers."""
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
        gpu_steps=_slowest_gpu([reply.gpu_steps for reply in measured]),
        losses=tuple(sum(step) / len(measured) for step in zip(*(reply.losses for reply in measured), strict=False)),
        **_each(("core_wait_share", "input_seconds", "counted_threads", *_HIGHEST), _largest, measured),
        **_each(("batch_size", "tokens", *_ADDED_UP), _total, measured),
        **_each(("model_bytes", "peak_allocated_bytes"), _largest, figures),
        **_each(("peak_host_bytes",), _total, figures),
        **_phases(measured),
        memory_of_steps=_steps(measured),
        kept_behind=_kept(measured),
        trained=_trained(measured),
        notes=tuple(dict.fromkeys(note for reply in measured for note in reply.notes)),
        own_seconds=(),
        ranks=tuple(map(_rank, figures)),
    )


def merge_emulated(replies: Sequence[EmulatedRun]) -> EmulatedRun:
    """Return the figures of the case from those of all ranks on emulated GPUs. Memory is of the rank that needs most."""
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
        memory_of_steps=_steps(replies),
        kept_behind=_kept(replies),
        **_each(("model_bytes", "estimated_bytes", *_HIGHEST), _largest, replies),
        **_each(("bytes_per_step", *_ADDED_UP), _total, replies),
        operators=_work_of_all(replies),
        trained=_trained(replies),
        batch_shapes=replies[0].batch_shapes,
        counts=_counts_of_all([reply.counts for reply in replies if reply.counts]),
        expected=slowest(reply.expected for reply in replies),
        allocated_by_rank=tuple(peaks),
        not_counted=tuple(dict.fromkeys(what for reply in replies for what in reply.not_counted)),
        notes=(*notes, *([spread] if peaks[most] > peaks[least] else [])),
    )


def _each(names: Iterable[str], merged: Callable[[Iterable[Any]], Any], replies: Sequence[object]) -> dict[str, Any]:
    """Return each of these fields with its value for all ranks together."""
    return {name: merged(getattr(reply, name) for reply in replies) for name in names}


def _slowest_gpu(steps: Sequence[GpuSteps | None]) -> GpuSteps | None:
    """Return for each step the seconds of the GPU that works longest; None if the seconds of any GPU are unknown."""
    known = [of_rank for of_rank in steps if of_rank is not None]
    if len(known) < len(steps):
        return None
    of_ranks = (zip(of_rank.seconds, of_rank.collective_seconds, strict=True) for of_rank in known)
    seconds, collective_seconds = zip(*map(max, zip(*of_ranks, strict=True)), strict=True)
    return GpuSteps(seconds=seconds, collective_seconds=collective_seconds)


def _kept(replies: Sequence[Measurement] | Sequence[EmulatedRun]) -> dict[TrainingPhase, int]:
    """Return the bytes that evaluation and saving a checkpoint leave in memory, each from the rank that leaves most."""
    phases = dict.fromkeys(phase for reply in replies for phase in reply.kept_behind)
    return {phase: max(reply.kept_behind.get(phase, 0) for reply in replies) for phase in phases}


def _steps(replies: Sequence[Measurement] | Sequence[EmulatedRun]) -> tuple[StepMemory, ...]:
    """Return for each step the memory of the rank that needs most in it."""
    of_ranks = [unfolded(reply.memory_of_steps) for reply in replies]
    return folded(OfStep(*map(max, zip(*step, strict=True))) for step in zip(*of_ranks, strict=False))


def _phases(replies: Sequence[Measurement] | Sequence[EmulatedRun]) -> dict[str, Any]:
    """Return the highest peak of each phase, and the tensors at this peak of the rank that has it."""
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


def _trained(replies: Sequence[Measurement] | Sequence[EmulatedRun]) -> TrainedTensors | None:
    """Return the tensors that at least one rank trains. Ranks train the same model, or each a part of it."""
    known = [reply.trained for reply in replies if reply.trained]
    if not known:
        return None
    learning, idle = Counter[str](), Counter[str]()
    for trained in known:
        learning, idle = learning | Counter(trained.learning), idle | Counter(trained.idle)
    return TrainedTensors(learning=dict(learning), idle=dict(idle))


def _work_of_all(replies: Sequence[EmulatedRun]) -> dict[str, OperatorWork]:
    """Return the sum of the work of all ranks by operator. The lines of each rank stay apart, because a baseline compares
    them one by one."""
    merged: dict[str, OperatorWork] = {}
    for name in sorted({name for reply in replies for name in reply.operators}):
        works = [reply.operators[name] for reply in replies if name in reply.operators]
        merged[name] = OperatorWork(
            calls=sum(work.calls for work in works),
            flops=sum(work.flops for work in works),
            bytes=sum(work.bytes for work in works),
            lines=tuple(line for work in works for line in work.lines),
        )
    return merged


def _counts_of_all(counts: Sequence[Counts]) -> Counts | None:
    """Return the sum of all ranks' counts for each step; None without counts."""
    if not counts:
        return None
    # Steps get the same kind in the sum if they have the same kind in every rank.
    together = list(zip(*(of_rank.steps for of_rank in counts), strict=False))
    kinds = list(dict.fromkeys(together))
    return Counts(
        steps=tuple(kinds.index(kind) for kind in together),
        kinds=tuple(_sum_of_steps([of.kinds[at] for of, at in zip(counts, kind, strict=True)]) for kind in kinds),
        causes=_causes_of_all([of_rank.causes for of_rank in counts], kinds),
        others=_causes_of_all([of_rank.others for of_rank in counts], kinds),
        first=counts[0].first,
        lines_unknown=next((of_rank.lines_unknown for of_rank in counts if of_rank.lines_unknown), ""),
        python=min(of_rank.python for of_rank in counts),
    )


def _sum_of_steps(steps: Sequence[StepCounts]) -> StepCounts:
    numbers = [name for name in StepCounts.__struct_fields__ if name not in ("update", "slow_flops")]
    slow: Counter[SlowClass] = Counter()
    for step in steps:
        slow.update(step.slow_flops)
    sums = {name: sum(getattr(step, name) for step in steps) for name in numbers}
    # A sum would mean nothing, because processes count calls in different steps.
    if not all(step.python_calls for step in steps):
        sums["python_calls"] = 0
    return StepCounts(update=steps[0].update, slow_flops=dict(sorted(slow.items())), **sums)


def _causes_of_all(by_rank: Sequence[Sequence[CountCause]], kinds: Sequence[tuple[int, ...]]) -> tuple[CountCause, ...]:
    return added_up(
        msgspec.structs.replace(
            cause,
            counts=tuple(cause.counts[kind[rank]] for kind in kinds),
            bytes=tuple(cause.bytes[kind[rank]] for kind in kinds) if cause.bytes else (),
        )
        for rank, causes in enumerate(by_rank)
        for cause in causes
    )


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
