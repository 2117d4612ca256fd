"""Defines the records of baselines and of verdicts on runs that are compared with them."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from pytest_gputrain.records.case import Case, Scale
from pytest_gputrain.records.counts import CountFigure, Counts
from pytest_gputrain.records.measurement import Environment, GpuSteps
from pytest_gputrain.records.memory import LiveTensor, TrainingPhase
from pytest_gputrain.records.own_training import BatchShapes, TrainedTensors
from pytest_gputrain.records.published import Figures
from pytest_gputrain.records.step_memory import StepMemory
from pytest_gputrain.records.whole import Whole

Status = Literal[
    "pass", "regressed", "improved", "inconclusive", "new", "not-comparable", "failed", "recorded", "over-limit"
]
"""The verdict of a case or of a metric; docs/gate.md explains each."""
FAILING: Final[tuple[Status, ...]] = ("regressed", "over-limit", "failed")
"""The verdicts that fail a test."""
STRICTLY_FAILING: Final[tuple[Status, ...]] = ("inconclusive", "not-comparable", "new")
"""The verdicts that also fail a test in a strict run."""
HeldTo = Literal["emulated", "published"]
"""The kind of figures that a case is compared with on a device that has no baseline yet."""
MetricName = Literal[
    "step_seconds",
    "mean_step_seconds",
    "gpu_seconds",
    "input_seconds",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_used_bytes",
    "scaling_efficiency",
    "build_peak_bytes",
    "forward_peak_bytes",
    "backward_peak_bytes",
    "between_peak_bytes",
    "optimizer_peak_bytes",
    "step_peak_bytes",
    "step_growth_bytes",
    "evaluate_peak_bytes",
    "checkpoint_peak_bytes",
    "checkpoint_host_peak_bytes",
    "evaluation_counts",
    "evaluate_kept_bytes",
    "checkpoint_kept_bytes",
    "heap_growth",
    "flops_per_step",
    "recomputed_flops_per_step",
    "bytes_per_step",
    CountFigure,
]
"""``step_peak_bytes`` is the peak of the step that exceeds the baseline's by most, ``step_growth_bytes`` is what steps keep
more each time than those of the baseline, and ``heap_growth`` is what each leaves on the heap of the host.
``mean_step_seconds`` is there if only the mean of the steps tells a change. A real GPU gives no peak of a phase of a step,
and only the counts that its profiler tells. Bytes are those of emulated runs. ``evaluation_counts`` stands for all counts of
an evaluation, and has no value. Kept bytes are those of tensors that an evaluation, or saving a checkpoint, leaves
behind."""


class BaselineRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fresh process of a recorded baseline. Raw figures only: the rule that judges them may change."""

    outcome: Literal["measured", "out_of_memory"]
    out_of: Literal["device", "host"] | None = None
    """The kind of memory that ran out."""
    environment: Environment
    date: str
    """UTC, ISO 8601."""
    session: str
    """Id of the pytest run; runs of one session share the machine's mood."""
    commit: str = ""
    variables: tuple[str, ...] = ()
    """The changed variables, as in `Result`."""
    warmup: Whole = 0
    step_seconds: tuple[float, ...] = ()
    peak_allocated_bytes: Whole | None = None
    phase_peak_bytes: dict[TrainingPhase, Whole] = {}
    """The peaks of the phases, as in `Measurement`; none if an allocator keeps the peak."""
    largest: dict[TrainingPhase, tuple[LiveTensor, ...]] = {}
    """The largest tensors, as in `Measurement`, without lines of code, which change often."""
    memory_of_steps: tuple[StepMemory, ...] = ()
    """The memory of each step, as in `Measurement`."""
    kept_behind: dict[TrainingPhase, Whole] = {}
    """The memory that an evaluation, or saving a checkpoint, leaves behind, as in `Measurement`."""
    heap_growth: Whole | None = None
    """The bytes that each step leaves on the heap of the host, as in `Measurement`."""
    peak_reserved_bytes: Whole | None = None
    peak_host_bytes: Whole | None = None
    model_bytes: Whole | None = None
    flops_per_step: Whole | None = None
    recomputed_flops_per_step: Whole | None = None
    """The FLOPs that activation checkpointing repeats, as in `Measurement`. None in files that are older than the field."""
    gpu_steps: GpuSteps | None = None
    """How long the GPU works in a step, as in `Measurement`."""
    input_seconds: float | None = None
    """How long a step waits for its batches, as in `Measurement`. None on a CPU, where it is not judged."""
    counts: Counts | None = None
    """The counts of the steps, as in `Measurement`, without numbers of lines."""
    evaluation_counts: Counts | None = None
    """The counts of the evaluation, as in `Measurement`, without numbers of lines."""
    trained: TrainedTensors | None = None
    """The tensors of own code that train, as in `Measurement`."""
    batch_shapes: BatchShapes | None = None
    """The shapes that own code trains on, as in `Measurement`."""
    core_wait_share: float | None = None
    """How long the training waited for a CPU core, as in `Measurement`."""
    one_worker_seconds: float | None = None
    """The step time of one worker, as in `Measurement`. The scaling efficiency of this run follows from it."""
    free_bytes: Whole | None = None
    """The free memory, as in `Measurement`."""


class Baseline(Struct, frozen=True, kw_only=True):
    """The stored runs of one case on one device."""

    device: str
    """Slug of the folder it lies in, or the name of the report it was read from."""
    case: Case
    scale: Scale
    runs: tuple[BaselineRun, ...]


class Published(Struct, frozen=True, kw_only=True):
    """The published figures of one case on one platform: a row of a table in ``baselines/published``."""

    table: str
    """The name of the table."""
    suite: str
    """The suite that reproduces it."""
    platform: str
    """The marker of the GPU."""
    case: Case
    """The case that reproduces the row."""
    outcome: Literal["measured", "out_of_memory", "error"]
    """The outcome that the row reports. ``error`` stands for an error instead of figures."""
    cells: dict[str, str]
    """The text of every column as printed, by its heading."""
    figures: dict[str, Figures]
    """The figures by framework, ``pytorch`` or ``paddle``. Empty if the document shows a picture only."""
    made_with: str
    """Versions and hardware, as ``torch 2.5.1 on NVIDIA H100``."""
    time_not_judged: str = ""
    """Why the published time is shown but not judged. Empty if it is judged."""
    memory_not_judged: str = ""
    """Why the published memory is shown but not judged. Empty if it is judged."""


class LineCount(Struct, frozen=True, kw_only=True):
    """The count of one line of code in a step, such as its kernel launches, now and in the step of the baseline."""

    line: str
    """The line, as sentences name it."""
    value: Whole
    """The count of the line today."""
    baseline: Whole
    """The count of the line in the baseline."""
    more: Whole = 0
    """The growth of the count. A count that has only moved from another line is no growth."""


class MetricVerdict(Struct, frozen=True, kw_only=True):
    """One metric of a case, compared with its baseline."""

    metric: MetricName
    """The metric."""
    status: Status
    """The verdict on the metric."""
    value: float | None = None
    """Its value today."""
    baseline: float | None = None
    """Its value in the baseline."""
    limit: float | None = None
    """The value beyond which the metric regresses: above it, or below it for a scaling efficiency."""
    note: str = ""
    """Why it was not compared, what changed within the limit, or what else you should know."""
    lines: tuple[LineCount, ...] = ()
    """The lines with the largest parts of a count that has grown, or of the work, in the step that has these values. Lines
    that have grown come first."""
    sd: float | None = None
    """The standard deviation between fresh processes, as a share of the time. This and the following fields are set for step
    times only."""
    sensitivity: float | None = None
    """The slowdown, as a share, that would be caught 99 times in 100."""
    baseline_runs: Whole | None = None
    """Fresh processes of the baseline."""
    runs: Whole | None = None
    """Fresh processes of today."""
    votes: Whole | None = None
    """The number of these that are beyond the limit, on the side that has more."""
    gpu_busy_share: float | None = None
    """The share of the baseline's step in which the GPU works. It is set for ``step_seconds``, whose tolerance depends on
    it. None if it is not known."""

    @property
    def change(self) -> float | None:
        """The change from baseline to value, as a share. None if the two were not compared."""
        if self.status == "not-comparable" or self.value is None or not self.baseline:
            return None
        return self.value / self.baseline - 1


class LimitVerdict(Struct, frozen=True, kw_only=True):
    """One figure of a case, compared with what its test allows at most."""

    metric: MetricName
    """The metric."""
    status: Literal["pass", "over-limit", "inconclusive", "not-judged"]
    """Whether it is within the limit. ``inconclusive`` is a count that exceeds it in one of two runs."""
    value: float | None
    """The median of the runs. Of an even number of runs, the higher of the middle two. Of a count, that of the step that has
    most. None if there are no figures."""
    limit: float
    """The highest allowed value."""
    stated: str
    """The place of the limit, as ``gpu_limit on test_tuning``."""
    note: str = ""
    """Why it was not judged, or for a count which step exceeds the limit, and at which line."""
    runs: Whole = 0
    """Fresh processes that gave a figure."""


class Verdict(Struct, frozen=True, kw_only=True):
    """The status of a case, such as ``regressed``, and the sentence that says why. ``failed`` stands for a case that gave no
    figures, because it crashed or timed out."""

    status: Status
    """The verdict of the case, which is that of its worst metric."""
    sentence: str
    """One sentence for people: case, value, baseline, difference, limit, and what changed in the environment."""
    metrics: tuple[MetricVerdict, ...] = ()
    """The verdict of each metric."""
    limits: tuple[LimitVerdict, ...] = ()
    """The verdict of each limit that ``gpu_limit`` sets."""
    before: Status | None = None
    """For a ``recorded`` case, the verdict that its figures had before they were recorded."""
    accepted: tuple[str, ...] = ()
    """For a ``recorded`` case, each count of its steps that has changed: ``waits 0 -> 1 a step``."""
    other_conditions: str = ""
    """How the conditions of an emulated run differ from those of its baseline, as ``torch 2.12.0 -> 2.13.0``."""
    held_to: HeldTo | None = None
    """The figures that a measured case without a baseline was compared with instead."""

    def metric(self, name: MetricName) -> MetricVerdict | None:
        """Return the verdict of a metric, or None."""
        return next((metric for metric in self.metrics if metric.metric == name), None)
