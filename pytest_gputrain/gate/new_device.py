"""Judges a case that has no baseline of its device against its run on such an emulated GPU, or its published row. Pure.

Memory and FLOPs are held to the emulated run, with a wide tolerance; time is not, since nothing tells it. A case without
such a run is held to the memory of its published row. So the first run on a new GPU already fails a case that needs far
more than it should. The verdict of all others stays ``new``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from pytest_gputrain.gate.contention import GPU_MEMORY_NOISE_BYTES
from pytest_gputrain.gate.messages import describe_metric, record_it
from pytest_gputrain.gate.published import MEMORY
from pytest_gputrain.records import Case, EmulatedRun, Measurement, MetricName, MetricVerdict, Published, Status, Verdict
from pytest_gputrain.records.emulation import BESIDE_TORCH
from pytest_gputrain.records.published import Figures
from pytest_gputrain.records.tolerance import MemoryTolerance
from pytest_gputrain.records.verdict import HeldTo
from pytest_gputrain.storage.published import GATED
from pytest_gputrain.utils.units import GiB, format_bytes

TOLERANCE: Final = MemoryTolerance(ratio=0.05, bytes=GiB)
"""The tolerance of peak allocated memory, and of published memory. Emulated peaks lie within a few percent of measured
ones (docs/how-true.md); other versions of the libraries, and workspaces that are not counted, add to that."""
_LARGEST_FLOPS_RATIO: Final = 0.03
"""FLOPs are counted by the same rules in both, so they differ only where other operators run."""


def judge_by_emulated(verdict: Verdict, case: Case, measured: Sequence[Measurement], run: EmulatedRun) -> Verdict:
    """Return the verdict on runs that are compared with an emulated run. ``verdict`` stays if the emulated run knows only
    the least memory.

    Args:
        verdict: that the case is new.
        run: on an emulated GPU of the platform that the case ran on, which it fits.
    """
    if set(run.not_counted) - {BESIDE_TORCH}:
        return verdict
    metrics = [_memory("peak_allocated_bytes", measured, run.peak_allocated_bytes)]
    if measured[0].flops_per_step and run.flops_per_step:
        # If only the first process was recorded, each of the others computes as much.
        processes = 1 if run.allocated_by_rank else run.processes
        metrics.append(_flops(measured[0].flops_per_step, run.flops_per_step * processes))
    return _conclude(verdict, case, tuple(metrics), "emulated", f"recorded on an emulated {run.device_name}")


def judge_by_published(verdict: Verdict, case: Case, measured: Sequence[Measurement], row: Published) -> Verdict:
    """Return the verdict on memory that is compared with a published row. ``verdict`` stays if the row has no memory.

    Args:
        verdict: that the case is new.
        row: the published row of this case and of the platform that it ran on.
    """
    printed = Figures() if row.memory_not_judged else row.figures.get(GATED, Figures())
    metrics = tuple(
        _memory(name, measured, round(figure.most) + GPU_MEMORY_NOISE_BYTES)
        for name in MEMORY
        if (figure := getattr(printed, name)) is not None and all(getattr(run, name) is not None for run in measured)
    )
    if not metrics:
        return verdict
    return _conclude(verdict, case, metrics, "published", f"published for {row.platform} in {row.table}")


def _conclude(verdict: Verdict, case: Case, metrics: tuple[MetricVerdict, ...], held_to: HeldTo, source: str) -> Verdict:
    worse = [describe_metric(metric) for metric in metrics if metric.status == "regressed"]
    if worse:
        said = f"{case} {' and '.join(worse)} ({source}; it has no baseline here)"
        sentence = f"{said}; if that is expected, {record_it()}"
        return msgspec.structs.replace(verdict, status="regressed", sentence=sentence, metrics=metrics, held_to=held_to)
    value, expected = format_bytes(metrics[0].value or 0), format_bytes(metrics[0].baseline or 0)
    what = "memory and FLOPs are" if metrics[-1].metric == "flops_per_step" else "memory is"
    held = f"its {what} within what is {source} ({value} of {expected}), and its time is not judged"
    return msgspec.structs.replace(verdict, sentence=f"{verdict.sentence}; {held}", metrics=metrics, held_to=held_to)


def _memory(name: MetricName, measured: Sequence[Measurement], expected: int) -> MetricVerdict:
    value = statistics.median_high(getattr(run, name) for run in measured)
    limit = expected * (1 + TOLERANCE.ratio) + TOLERANCE.bytes
    status: Status = "regressed" if value > limit else "pass"
    return MetricVerdict(metric=name, status=status, value=value, baseline=expected, limit=limit, runs=len(measured))


def _flops(value: int, expected: int) -> MetricVerdict:
    limit = expected * (1 + _LARGEST_FLOPS_RATIO)
    status: Status = "regressed" if value > limit else "pass"
    return MetricVerdict(metric="flops_per_step", status=status, value=value, baseline=expected, limit=limit)
