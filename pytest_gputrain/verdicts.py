"""What the runs of a case mean: a part of a `pytest_gputrain.records.Result`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Status = Literal["pass", "regressed", "improved", "new", "not-comparable", "failed", "recorded"]
MetricName = Literal[
    "step_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "scaling_efficiency"
]


class MetricVerdict(Struct, frozen=True, kw_only=True):
    """One metric of a case against its baseline."""

    metric: MetricName
    status: Status
    value: float | None = None
    baseline: float | None = None
    limit: float | None = None
    """The value beyond which the metric regresses: above it, for a scaling efficiency below it."""
    note: str = ""
    """Why it was not compared, or what changed within the limit."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What a case's runs mean. ``failed`` stands for a case that gave no number (a crash, a time-out)."""

    status: Status
    sentence: str
    """One sentence for people: case, value, baseline, delta, limit, what changed in the environment."""
    metrics: tuple[MetricVerdict, ...] = ()

    def metric(self, name: MetricName) -> MetricVerdict | None:
        return next((metric for metric in self.metrics if metric.metric == name), None)
