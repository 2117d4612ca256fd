"""Describes how a stored baseline lets more pass than that of an earlier commit. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pytest_gputrain.cases.identity import differences
from pytest_gputrain.gate.count_lines import count_changes
from pytest_gputrain.gate.host_bound import gpu_seconds, pace
from pytest_gputrain.gate.messages import count
from pytest_gputrain.gate.own_training import lost_tensors
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.records import Baseline, BaselineRun, EmulatedRun, Recorded
from pytest_gputrain.utils.units import format_bytes, format_flops, format_percent, format_seconds


class Loosened(NamedTuple):
    """A change of a baseline that lets more pass than before."""

    raised: tuple[str, ...]
    """Figures that are higher now."""
    lost: tuple[str, ...]
    """Figures that are not compared any more, or have another kind."""


_Stored = Baseline | EmulatedRun
_Record = Baseline | Recorded


class _Figure(NamedTuple):
    name: str
    value: float | None
    show: Callable[[float], str]


def loosened(before: _Record, after: _Record | None) -> Loosened:
    """Return the changes of an entry that let more pass. ``before`` is the earlier entry of the same device, suite and key.

    Args:
        after: None if it is gone.
    """
    if after is None:
        return Loosened((), ("removed",))
    raised: dict[str, None] = {}
    lost: dict[str, None] = {}
    if changed := differences(before.case, after.case):
        lost[f"another case: {changed}"] = None
    for old, new in _pairs(before, after):
        kind, kind_before = _kind(new), _kind(old)
        if kind != kind_before:
            lost[f"{kind_before} -> {kind}"] = None
            continue
        now = {figure.name: figure.value for figure in _figures(new)}
        for name, value, show in _figures(old):
            value_now = now.get(name)
            if value and not value_now:
                lost[f"without {name}, which was {show(value)}"] = None
            elif value and value_now and value_now > value:
                raised[f"{name} {_rise(value, value_now, show)}"] = None
        raised.update(dict.fromkeys(_looser_pace(old, new)))
        if no_longer := lost_tensors(_last(new).trained, _last(old).trained):
            lost[no_longer] = None
        if counts_before := _last(old).counts:
            counts = _last(new).counts
            if counts is None:
                lost[f"without what its steps ask of the {'CPU' if counts_before.on_cpu else 'GPU'}"] = None
            else:
                steps, steps_before = len(counts.steps), len(counts_before.steps)
                lost.update({f"counts of {steps_before} steps -> {steps}": None} if steps < steps_before else {})
                raised.update(dict.fromkeys(count_changes(counts_before, counts, only_more=True)))
    runs, runs_before = _runs(after), _runs(before)
    if runs < runs_before:
        lost[f"{count(runs_before, 'run')} -> {runs}"] = None
    return Loosened(tuple(raised), tuple(lost))


def _rise(before: float, now: float, show: Callable[[float], str]) -> str:
    if show is not format_seconds and show(before) == show(now):  # Rounded figures would not show what has changed.
        return f"{before:,.0f} -> {now:,.0f} {'FLOP' if show is format_flops else 'bytes'}"
    return f"{show(before)} -> {show(now)} ({format_percent(now / before - 1)})"


def _looser_pace(before: _Stored, after: _Stored) -> Iterator[str]:
    """Say that wall seconds have a wider limit because the GPU has begun to wait for the host."""
    if isinstance(before, Baseline) and isinstance(after, Baseline):
        found = pace(after.runs)
        if found.is_host_bound and not pace(before.runs).is_host_bound:
            yield f"its step may take longer, because {found}"


def _pairs(before: _Record, after: _Record) -> Iterator[tuple[_Stored, _Stored]]:
    """Yield pairs of records, before and now, that a run would be compared with. Emulated figures are paired by their
    conditions."""
    if isinstance(before, Recorded) and isinstance(after, Recorded):
        yield from ((old, after.like(old) or after.figures[-1]) for old in before.figures)
    elif isinstance(before, Baseline) and isinstance(after, Baseline):
        yield before, after


def _kind(stored: _Stored) -> str:
    if isinstance(stored, EmulatedRun):
        return "emulated to fit" if stored.fits else "emulated not to fit"
    environment = stored.runs[-1].environment
    outcome = "figures" if any(run.outcome == "measured" for run in stored.runs) else "out of memory"
    return f"{outcome} of {environment.device_count} x {environment.device_type}"


def _last(stored: _Stored) -> EmulatedRun | BaselineRun:
    return stored if isinstance(stored, EmulatedRun) else stored.runs[-1]


def _runs(record: _Record) -> int:
    return len(record.runs) if isinstance(record, Baseline) else 0


def _figures(record: _Stored) -> Iterator[_Figure]:
    """Yield the figures that a run is compared with."""
    if isinstance(record, EmulatedRun):
        yield _Figure("peak memory", record.peak_allocated_bytes, format_bytes)
        yield _Figure("reserved memory", record.peak_reserved_bytes, format_bytes)
        for phase, peak in record.phase_peak_bytes.items():
            yield _Figure(f"peak of {phase}", peak, format_bytes)
        yield _Figure("FLOPs", record.flops_per_step, format_flops)
        yield _Figure("recomputed FLOPs", record.recomputed_flops_per_step, format_flops)
        yield _Figure("bytes moved", record.bytes_per_step, format_bytes)
        return
    runs = [run for run in record.runs if run.outcome == "measured"]
    if not runs:
        return
    peaks = [run.peak_allocated_bytes or 0 for run in runs]
    yield _Figure("peak memory", max(peaks), format_bytes)
    for phase in dict.fromkeys(phase for run in runs for phase in run.phase_peak_bytes):
        yield _Figure(f"peak of {phase}", max(run.phase_peak_bytes.get(phase, 0) for run in runs), format_bytes)
    yield _Figure("FLOPs", runs[-1].flops_per_step, format_flops)
    if record.device != CPU:
        medians = [statistics.median(run.step_seconds) for run in runs]
        yield _Figure("step time", statistics.median(medians), format_seconds)
        yield _Figure("step time of the slowest run", max(medians), format_seconds)
        yield _Figure("GPU seconds", max(gpu_seconds(runs), default=None), format_seconds)
        waits = [run.input_seconds for run in runs if run.input_seconds is not None]
        yield _Figure("waiting for batches", max(waits, default=None), format_seconds)
        alone = [run.one_worker_seconds for run in runs if run.one_worker_seconds is not None]
        yield _Figure("time of one worker", max(alone, default=None), format_seconds)
