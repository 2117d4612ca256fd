"""Defines the records of baselines, verdicts, results and the report that holds them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from pytest_gputrain.records.case import FORMAT, Case, Scale
from pytest_gputrain.records.prediction import LiveTensor, Prediction, TrainingPhase
from pytest_gputrain.records.published import Figures
from pytest_gputrain.records.reply import Environment, Reply
from pytest_gputrain.records.study import LossCurve, Search
from pytest_gputrain.records.whole import Whole

Status = Literal[
    "pass", "regressed", "improved", "inconclusive", "new", "not-comparable", "failed", "recorded", "over-limit"
]
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

    def metric(self, name: MetricName) -> MetricVerdict | None:
        return next((metric for metric in self.metrics if metric.metric == name), None)


class RankSpread(Struct, frozen=True, kw_only=True):
    """How far the processes of a case lie apart, in the run where they lie farthest."""

    slowest: Whole | None
    """Rank whose own work takes longest by the median of its steps; None where the steps do not tell their own work."""
    lag: float | None
    """How much longer than that of the fastest, as a share of the fastest's; None likewise."""
    lag_seconds: float | None
    least_peak_allocated_bytes: Whole
    most_peak_allocated_bytes: Whole


class Summary(Struct, frozen=True, kw_only=True):
    """Figures derived from the runs of a case, for readers that do not want to derive them."""

    median_step_seconds: float
    """Median over the runs of each run's median."""
    samples_per_second: float
    tokens_per_second: float | None
    peak_allocated_bytes: Whole
    """Median of the runs' peaks (the higher of the middle two)."""
    model_flops_utilization: float | None
    """FLOPs without recomputation over time and the platform's peak (MFU of the PaLM paper, arXiv:2204.02311)."""
    scaling_efficiency: float | None = None
    """See `pytest_gputrain.gate.scaling.efficiency`; the median over the runs."""
    ranks: RankSpread | None = None
    first_step_seconds: float | None = None
    """Of the first step of the warm-up, in which kernels are loaded, tuned and, with ``compile``, made; median over the
    runs, None without warm-up."""
    joules_per_step: float | None = None
    """Energy of all GPUs of the case; this and what follows the median over the runs, None where no driver tells."""
    joules_per_sample: float | None = None
    power_watts: float | None = None
    """Of all GPUs of the case together."""
    clock_mhz: Whole | None = None
    """Of the GPU that has the lowest."""
    gpu_utilization: float | None = None
    """Share of the time in which a kernel ran."""


class Origin(Struct, frozen=True, kw_only=True):
    """An earlier run that replies of a resumed one are of."""

    session: str
    """Id of the pytest run."""
    date: str
    """When it began: UTC, ISO 8601."""
    commit: str
    branch: str
    runs: Whole
    """Replies of it."""


class Result(Struct, frozen=True, kw_only=True):
    """One case in one test: a row of the table and of the JSON report."""

    nodeid: str
    suite: str
    key: str
    case: Case
    scale: Scale
    platform: str
    """Catalog marker of the machine, or ``unknown``."""
    device: str
    """Slug: the folder of its baselines."""
    replies: tuple[Reply, ...] = ()
    """One per fresh process; of a prediction only that of a process that failed."""
    resumed: tuple[Origin, ...] = ()
    """Whose the first replies are, where ``--gpu-resume`` took them from an earlier report; one run after the other."""
    inline: bool = False
    """Whether it ran in the pytest process."""
    variables: tuple[str, ...] = ()
    """Names of the environment variables that the test had changed since the session began; values may be secrets."""
    variables_digest: str = ""
    """Tells other values of these variables from the same ones; empty where none had changed."""
    prediction: Prediction | None = None
    """Of a prediction."""
    remedy: str = ""
    """What makes a case fit that does not, found by further predictions."""
    summary: Summary | None = None
    verdict: Verdict | None = None
    """None where the test only measured."""
    published: Published | None = None
    """The row that it was compared with under ``--gpu-baseline=published``."""
    search: Search | None = None
    """Of ``--gpu-find-batch``."""
    loss_curves: tuple[LossCurve, ...] = ()
    """Of ``--gpu-loss``; fp32 first."""
    to_come: Whole = 0
    """Runs that its baseline still waits for; none of them is stored before all are there."""


class Report(Struct, frozen=True, kw_only=True):
    """The document of ``--gpu-json``."""

    format: Whole = FORMAT
    generator: str
    created: str
    session: str
    commit: str = ""
    changes: str = ""
    """Tells uncommitted changes of tracked files from others, what runs write apart; empty for none."""
    branch: str = ""
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    """Only JSON values."""
    exit_status: Whole = 0
    """2 until the run has come to its end."""
    notes: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
