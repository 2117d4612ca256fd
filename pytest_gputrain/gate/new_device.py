"""Judges a case that has no baseline of its device against the prediction for its platform. Pure.

Memory and FLOPs are held to the prediction, with a wide tolerance; time is not, since nobody can predict it. So the first
run on a new GPU already fails a case that needs far more than it should. The verdict of all others stays ``new``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from pytest_gputrain.gate.messages import describe_metric
from pytest_gputrain.records import Case, Measurement, MetricVerdict, Prediction, Status, Verdict
from pytest_gputrain.records.tolerance import MemoryTolerance
from pytest_gputrain.utils.units import GiB, format_bytes

TOLERANCE: Final = MemoryTolerance(ratio=0.05, bytes=GiB)
"""Of peak allocated memory. Published peaks of cases on one GPU lay within 3.7 % of their predictions; other versions of the
libraries, and workspaces of cuDNN, which are not predicted, add to that."""
_LARGEST_FLOPS_RATIO: Final = 0.03
"""FLOPs are counted by the same rules in both, so they differ only where other operators run."""


def judge_by_prediction(verdict: Verdict, case: Case, measured: Sequence[Measurement], prediction: Prediction) -> Verdict:
    """Judge runs of a case against its prediction.

    Args:
        verdict: that the case is new.
        prediction: for the platform that it ran on.
    """
    metrics = [_memory(measured, prediction)]
    if measured[0].flops_per_step and prediction.flops_per_step:
        metrics.append(_flops(measured[0].flops_per_step, prediction.flops_per_step))
    worse = [describe_metric(metric) for metric in metrics if metric.status == "regressed"]
    platform = prediction.target.marker
    if worse:
        sentence = (
            f"{case} {' and '.join(worse)} (predicted for {platform}; it has no baseline here); if that is expected, record "
            "it with --gpu-baseline-update"
        )
        return msgspec.structs.replace(
            verdict, status="regressed", sentence=sentence, metrics=tuple(metrics), by_prediction=True
        )
    value, predicted = (format_bytes(metrics[0].value or 0), format_bytes(prediction.peak_allocated_bytes))
    what = "memory and FLOPs are" if len(metrics) > 1 else "memory is"
    held_to = f"its {what} within what is predicted for {platform} ({value} of {predicted}), and its time is not judged"
    return msgspec.structs.replace(
        verdict, sentence=f"{verdict.sentence}; {held_to}", metrics=tuple(metrics), by_prediction=True
    )


def _memory(measured: Sequence[Measurement], prediction: Prediction) -> MetricVerdict:
    value, predicted = statistics.median_high(run.peak_allocated_bytes for run in measured), prediction.peak_allocated_bytes
    limit = predicted * (1 + TOLERANCE.ratio) + TOLERANCE.bytes
    status: Status = "regressed" if value > limit else "pass"
    return MetricVerdict(
        metric="peak_allocated_bytes", status=status, value=value, baseline=predicted, limit=limit, runs=len(measured)
    )


def _flops(value: int, predicted: int) -> MetricVerdict:
    limit = predicted * (1 + _LARGEST_FLOPS_RATIO)
    status: Status = "regressed" if value > limit else "pass"
    return MetricVerdict(metric="flops_per_step", status=status, value=value, baseline=predicted, limit=limit)
