"""Defines the records of baselines and of verdicts on runs that are compared with them."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from pytest_gputrain.records.case import Case, Scale
from pytest_gputrain.records.prediction import LiveTensor, TrainingPhase
from pytest_gputrain.records.published import Figures
from pytest_gputrain.records.reply import Environment
from pytest_gputrain.records.whole import Whole

Status = Literal[
    "pass", "regressed", "improved", "inconclusive", "new", "not-comparable", "failed", "recorded", "over-limit"
]
FAILING: Final[tuple[Status, ...]] = ("regressed", "over-limit", "failed")
"""What fails a test."""
STRICTLY_FAILING: Final[tuple[Status, ...]] = ("inconclusive", "not-comparable", "new")
"""What fails a test in addition where a comparison has to be made."""
HeldTo = Literal["prediction", "published"]
"""What stands in for the baseline of a device that has none yet."""
MetricName = Literal[
    "step_seconds",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_used_bytes",
    "scaling_efficiency",
    "build_peak_bytes",
    "forward_peak_bytes",
    "backward_peak_bytes",
    "between_peak_bytes",
    "optimizer_peak_bytes",
    "flops_per_step",
    "recomputed_flops_per_step",
    "bytes_per_step",
]
"""Peaks of phases are those of memory counted on a CPU, or predicted; recomputed FLOPs and bytes are predicted only."""


class BaselineRun(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fresh process of a recorded baseline. Raw figures only: the rule that judges them may change."""

    outcome: Literal["measured", "out_of_memory"]
    out_of: Literal["device", "host"] | None = None
    """Which memory ran out."""
    environment: Environment
    date: str
    """UTC, ISO 8601."""
    session: str
    """Id of the pytest run; runs of one session share the machine's mood."""
    commit: str = ""
    variables: tuple[str, ...] = ()
    """As in `Result`."""
    warmup: Whole = 0
    step_seconds: tuple[float, ...] = ()
    peak_allocated_bytes: Whole | None = None
    phase_peak_bytes: dict[TrainingPhase, Whole] = {}
    """As in `Measurement`; none where an allocator keeps the peak."""
    largest: dict[TrainingPhase, tuple[LiveTensor, ...]] = {}
    """As in `Measurement`, without lines of code, which move."""
    peak_reserved_bytes: Whole | None = None
    peak_host_bytes: Whole | None = None
    model_bytes: Whole | None = None
    flops_per_step: Whole | None = None
    one_worker_seconds: float | None = None
    """As in `Measurement`: what the scaling efficiency of this run is derived from."""
    free_bytes: Whole | None = None
    """As in `Measurement`."""
    final_loss: float | None = None


class Baseline(Struct, frozen=True, kw_only=True):
    """What is stored for one case on one device."""

    device: str
    """Slug of the folder it lies in, or the name of the report it was read from."""
    case: Case
    scale: Scale
    runs: tuple[BaselineRun, ...]


class Published(Struct, frozen=True, kw_only=True):
    """What others published for one case on one platform: a row of a table in ``baselines/published``."""

    table: str
    suite: str
    platform: str
    """Catalog marker."""
    case: Case
    outcome: Literal["measured", "out_of_memory", "error"]
    """``error`` where the row tells of one instead of figures."""
    cells: dict[str, str]
    """Every column as printed, by its header."""
    figures: dict[str, Figures]
    """By framework, ``pytorch`` or ``paddle``; empty where the figures are a picture."""
    made_with: str
    """Versions and hardware: ``torch 2.5.1 on NVIDIA H100``."""
    time_not_judged: str = ""
    """Why its time is shown but says nothing of the case as declared."""
    memory_not_judged: str = ""
    """Likewise of its memory."""


class MetricVerdict(Struct, frozen=True, kw_only=True):
    """One metric of a case against its baseline."""

    metric: MetricName
    status: Status
    value: float | None = None
    baseline: float | None = None
    limit: float | None = None
    """The value beyond which the metric regresses: above it, for a scaling efficiency below it."""
    note: str = ""
    """Why it was not compared, what changed within the limit, or what else is to be known."""
    sd: float | None = None
    """Between fresh processes, as a share of the time; this and what follows where
    `pytest_gputrain.gate.step_times` decided."""
    sensitivity: float | None = None
    """The slowdown, as a share, that would be caught 99 times in 100."""
    baseline_runs: Whole | None = None
    runs: Whole | None = None
    """Fresh processes of today."""
    votes: Whole | None = None
    """Of those, the ones beyond the limit, on the side that has more."""

    @property
    def change(self) -> float | None:
        """From baseline to value, as a share; None where the two were not compared."""
        if self.status == "not-comparable" or self.value is None or not self.baseline:
            return None
        return self.value / self.baseline - 1


class LimitVerdict(Struct, frozen=True, kw_only=True):
    """One figure of a case against what its test allows at most."""

    metric: MetricName
    status: Literal["pass", "over-limit", "not-judged"]
    value: float | None
    """Median of the runs (the higher of the middle two); None where there are no figures."""
    limit: float
    stated: str
    """Where: ``gpu_limit on test_tuning``."""
    note: str = ""
    """Why it was not judged."""
    runs: Whole = 0
    """Fresh processes that gave a figure."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What a case's runs mean. ``failed`` stands for a case that gave no number (a crash, a time-out)."""

    status: Status
    sentence: str
    """One sentence for people: case, value, baseline, delta, limit, what changed in the environment."""
    metrics: tuple[MetricVerdict, ...] = ()
    limits: tuple[LimitVerdict, ...] = ()
    """Of ``gpu_limit``."""
    before: Status | None = None
    """The verdict on the figures of a ``recorded`` case, had they not been recorded."""
    held_to: HeldTo | None = None
    """What a measured case without a baseline was compared with instead."""

    def metric(self, name: MetricName) -> MetricVerdict | None:
        return next((metric for metric in self.metrics if metric.metric == name), None)
