"""Describes how a stored baseline differs from that of an earlier commit where it lets more pass than before. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pytest_gputrain.cases.identity import differences
from pytest_gputrain.gate.messages import count
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.records import Baseline, Prediction
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.utils.units import format_bytes, format_flops, format_percent, format_seconds


class Loosened(NamedTuple):
    """What a baseline lets pass that the one before did not."""

    raised: tuple[str, ...]
    """Figures that are higher now."""
    lost: tuple[str, ...]
    """What is not compared any more, or of another kind."""


class _Figure(NamedTuple):
    name: str
    value: float | None
    show: Callable[[float], str]


def loosened(before: Baseline | Recorded, after: Baseline | Recorded | None) -> Loosened:
    """Compare an entry with that of the same device, suite and key before.

    Args:
        after: None where it is gone.
    """
    if after is None:
        return Loosened((), ("removed",))
    raised, lost = [], []
    if changed := differences(before.case, after.case):
        lost.append(f"another case: {changed}")
    kind, kind_before = _kind(after), _kind(before)
    if kind != kind_before:
        lost.append(f"{kind_before} -> {kind}")
        return Loosened((), tuple(lost))
    now = {figure.name: figure.value for figure in _figures(after)}
    for name, value, show in _figures(before):
        if not value:
            continue
        if not now.get(name):
            lost.append(f"without {name}, which was {show(value)}")
        elif (ratio := (now[name] or 0) / value - 1) > 0:
            raised.append(f"{name} {show(value)} -> {show(now[name] or 0)} ({format_percent(ratio)})")
    runs, runs_before = _runs(after), _runs(before)
    if runs < runs_before:
        lost.append(f"{count(runs_before, 'run')} -> {runs}")
    return Loosened(tuple(raised), tuple(lost))


def _kind(record: Baseline | Recorded) -> str:
    if isinstance(record, Recorded):
        fits = record.predictions[-1].fits
        return "predicted not to fit" if fits is False else "predicted to fit"
    return "figures" if any(run.outcome == "measured" for run in record.runs) else "out of memory"


def _runs(record: Baseline | Recorded) -> int:
    return len(record.runs) if isinstance(record, Baseline) else 0


def _figures(record: Baseline | Recorded) -> Iterator[_Figure]:
    """Yield what a run is compared with."""
    if isinstance(record, Recorded):
        yield from _predicted(record.predictions[-1])
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
        yield _Figure("step time", statistics.median(statistics.median(run.step_seconds) for run in runs), format_seconds)
        alone = [run.one_worker_seconds for run in runs if run.one_worker_seconds is not None]
        yield _Figure("time of one worker", max(alone, default=None), format_seconds)


def _predicted(prediction: Prediction) -> Iterator[_Figure]:
    yield _Figure("peak memory", prediction.peak_allocated_bytes, format_bytes)
    for phase, peak in prediction.phase_peak_bytes.items():
        yield _Figure(f"peak of {phase}", peak, format_bytes)
    yield _Figure("FLOPs", prediction.flops_per_step, format_flops)
    yield _Figure("recomputed FLOPs", prediction.recomputed_flops_per_step, format_flops)
    yield _Figure("bytes moved", prediction.bytes_per_step, format_bytes)
