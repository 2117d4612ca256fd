"""Defines the results of cases, by what was asked of them, and the report that holds them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from pytest_gputrain.records.case import FORMAT, Case, Scale
from pytest_gputrain.records.emulated import EmulatedRun
from pytest_gputrain.records.prediction import Prediction
from pytest_gputrain.records.reply import Crashed, Measurement, OutOfMemory, Reply, TimedOut
from pytest_gputrain.records.study import LossCurve, Search
from pytest_gputrain.records.verdict import Published, Verdict
from pytest_gputrain.records.whole import Whole


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


class CaseResult(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What the results of all kinds have in common: one case in one test."""

    nodeid: str
    suite: str
    key: str
    case: Case
    scale: Scale
    platform: str
    """Catalog marker of the machine, or ``unknown``."""
    device: str
    """Slug: the folder of its baselines."""
    inline: bool = False
    """Whether it ran in the pytest process."""
    variables: tuple[str, ...] = ()
    """Names of the environment variables that the test had changed since the session began; values may be secrets."""
    variables_digest: str = ""
    """Tells other values of these variables from the same ones; empty where none had changed."""
    verdict: Verdict | None = None
    """None where the test only measured."""


class TrainedResult(CaseResult, frozen=True, kw_only=True):
    """What the results of cases that really trained have in common."""

    replies: tuple[Reply, ...]
    """One per fresh process, at least one."""
    summary: Summary | None = None
    """None where no process gave figures."""

    @property
    def figures(self) -> Measurement | None:
        """Those of the first process that gave some."""
        return next((reply for reply in self.replies if isinstance(reply, Measurement)), None)


class Measured(TrainedResult, frozen=True, kw_only=True, tag="measured"):
    """A case that was measured as it is declared."""

    resumed: tuple[Origin, ...] = ()
    """Whose the first replies are, where ``--gpu-resume`` took them from an earlier report; one run after the other."""
    published: Published | None = None
    """The row that it was compared with under ``--gpu-baseline=published``."""
    to_come: Whole = 0
    """Runs that its baseline still waits for; none of them is stored before all are there."""


class BatchSearch(TrainedResult, frozen=True, kw_only=True, tag="batch_search"):
    """A case whose batches were searched by ``--gpu-find-batch``. Its figures are those of the fastest batch."""

    search: Search


class LossStudy(TrainedResult, frozen=True, kw_only=True, tag="loss_study"):
    """A case whose losses were recorded by ``--gpu-loss`` in several precisions. Its figures are those of its own."""

    loss_curves: tuple[LossCurve, ...]
    """fp32 first."""


class UnmeasuredResult(CaseResult, frozen=True, kw_only=True):
    """What the results of cases have in common that no device ran: figures without times, the same in every process."""

    reply: Prediction | EmulatedRun | OutOfMemory | Crashed | TimedOut
    """The failures are those of the process that was to give figures."""

    @property
    def replies(self) -> tuple[Reply, ...]:
        """Those of processes that failed."""
        return () if isinstance(self.reply, Prediction | EmulatedRun) else (self.reply,)

    @property
    def summary(self) -> None:
        """None: nothing was measured."""
        return


class Predicted(UnmeasuredResult, frozen=True, kw_only=True, tag="predicted"):
    """A case that ``--gpu-predict`` predicted."""

    reply: Prediction | OutOfMemory | Crashed | TimedOut
    remedy: str = ""
    """What makes a case fit that does not, found by further predictions."""

    @property
    def figures(self) -> Prediction | None:
        return self.reply if isinstance(self.reply, Prediction) else None


class Emulated(UnmeasuredResult, frozen=True, kw_only=True, tag="emulated"):
    """A case that ran on an emulated GPU, by ``--gpu-emulate``."""

    reply: EmulatedRun | OutOfMemory | Crashed | TimedOut

    @property
    def figures(self) -> EmulatedRun | None:
        return self.reply if isinstance(self.reply, EmulatedRun) else None


Study = BatchSearch | LossStudy
"""A case that was asked something else than how it compares with its baseline."""
Result = Measured | Predicted | Emulated | BatchSearch | LossStudy
"""One case in one test: a row of the table and of the JSON report."""


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
