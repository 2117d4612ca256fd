"""Defines the results of cases, by what was asked of them, and the report that holds them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Struct

from pytest_gputrain.records.case import FORMAT, Case, Scale
from pytest_gputrain.records.emulated import EmulatedRun
from pytest_gputrain.records.measurement import Measurement
from pytest_gputrain.records.reply import Crashed, OutOfMemory, Reply, TimedOut
from pytest_gputrain.records.study import LossCurve, Search
from pytest_gputrain.records.verdict import Published, Verdict
from pytest_gputrain.records.whole import Whole


class RankSpread(Struct, frozen=True, kw_only=True):
    """The spread of the processes of a case, in the run with the largest spread."""

    slowest: Whole | None
    """The rank whose own work takes longest, by the median of its steps. None if the time of this work is not known."""
    lag: float | None
    """The time that the slowest rank takes longer than the fastest, as a share of the fastest. None if ``slowest`` is
    None."""
    lag_seconds: float | None
    """This time in seconds per step."""
    least_peak_allocated_bytes: Whole
    """The lowest peak of a process."""
    most_peak_allocated_bytes: Whole
    """The highest peak of a process."""


class Summary(Struct, frozen=True, kw_only=True):
    """Figures computed from the runs of a case."""

    median_step_seconds: float
    """The median over the runs of the median step of each run."""
    samples_per_second: float
    """Samples of all processes per second, at the median step."""
    tokens_per_second: float | None
    """Tokens of all processes per second, at the median step. None if samples are not token sequences."""
    peak_allocated_bytes: Whole
    """The median of the peaks of the runs. Of an even number of runs, the higher of the middle two."""
    model_flops_utilization: float | None
    """FLOPs without recomputation, divided by the time and by the platform's peak (MFU as in PaLM, arXiv:2204.02311)."""
    scaling_efficiency: float | None = None
    """The throughput divided by that of as many single workers, as the median over the runs. None unless the test asked for
    it."""
    ranks: RankSpread | None = None
    """The spread of the processes. None for one process."""
    first_step_seconds: float | None = None
    """Seconds of the first step of the warm-up, which loads, tunes and (with ``compile``) builds kernels. It is the median
    over the runs, and None without a warm-up."""
    joules_per_step: float | None = None
    """Energy of all GPUs of the case per step. This and the following figures are medians over the runs, and None if no
    driver reports them."""
    joules_per_sample: float | None = None
    """Energy of all GPUs of the case per sample."""
    power_watts: float | None = None
    """Mean power of all GPUs of the case together."""
    clock_mhz: Whole | None = None
    """The clock of the GPU that has the lowest."""
    gpu_utilization: float | None = None
    """The share of the time in which a kernel ran."""
    gpu_seconds: float | None = None
    """The seconds that the GPU works in a step, without collectives. This and the next figure are medians over the runs, and
    None if they are not known."""
    gpu_busy_share: float | None = None
    """The share of the median step in which the GPU works. In the rest it waits for the host or for other GPUs."""


class Origin(Struct, frozen=True, kw_only=True):
    """An earlier run, from which a resumed run took replies."""

    session: str
    """The id of the pytest run."""
    date: str
    """When it began, in UTC (ISO 8601)."""
    commit: str
    """The commit that it measured."""
    branch: str
    """The branch that it measured."""
    runs: Whole
    """How many replies were taken from it."""


class CaseResult(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The fields of results of all kinds."""

    nodeid: str
    """pytest's id of the test."""
    suite: str
    """The test file without ``test_`` and ``.py``."""
    key: str
    """The id of the case. It ends in ``@tiny`` at the tiny scale."""
    case: Case
    """The case."""
    scale: Scale
    """Whether the case ran at full size or at the tiny scale."""
    platform: str
    """The marker of the machine, or ``unknown``."""
    device: str
    """The name of the folder that has the baselines of this device."""
    inline: bool = False
    """Whether the case ran in the pytest process."""
    measured_for: str = ""
    """The earlier test of this run that the case was measured for. Empty if it was measured for this test: a case is
    measured once in a run, even if what it reads has changed since."""
    variables: tuple[str, ...] = ()
    """Names of the environment variables that the test had changed since the session began. Their values may be secrets, so
    they are left out."""
    variables_digest: str = ""
    """A digest of the values of these variables. Empty if none had changed."""
    verdict: Verdict | None = None
    """The verdict. None if the test only measured."""


class TrainedResult(CaseResult, frozen=True, kw_only=True):
    """The fields of results of cases that really trained."""

    replies: Annotated[tuple[Reply, ...], msgspec.Meta(min_length=1)]
    """The reply of each fresh process, at least one."""
    summary: Summary | None = None
    """The summary; None if no process gave figures."""

    @property
    def figures(self) -> Measurement | None:
        """The first reply that is a `Measurement`, or None."""
        return next((reply for reply in self.replies if isinstance(reply, Measurement)), None)


class Measured(TrainedResult, frozen=True, kw_only=True, tag="measured"):
    """A case that was measured as it is declared."""

    resumed: tuple[Origin, ...] = ()
    """The earlier runs whose replies ``--gpu-resume`` took. These replies come first."""
    published: Published | None = None
    """The published row that ``--gpu-baseline=published`` compared with."""
    to_come: Whole = 0
    """How many more runs its baseline needs. The baseline is stored once all of them have ended."""


class BatchSearch(TrainedResult, frozen=True, kw_only=True, tag="batch_search"):
    """A case whose batches ``--gpu-find-batch`` searched. Its figures are those of the fastest batch."""

    search: Search
    """The results of the search."""


class LossStudy(TrainedResult, frozen=True, kw_only=True, tag="loss_study"):
    """A case whose losses ``--gpu-loss`` recorded in several precisions. Its figures are those of its own precision."""

    loss_curves: tuple[LossCurve, ...]
    """The curve of each precision, fp32 first."""


class Emulated(CaseResult, frozen=True, kw_only=True, tag="emulated"):
    """A case that ran on an emulated GPU, by ``--gpu-emulate``. It has no times, and is the same in every process."""

    reply: EmulatedRun | OutOfMemory | Crashed | TimedOut
    """The figures of the run, or the failure of its process."""

    @property
    def replies(self) -> tuple[Reply, ...]:
        """The reply, if it is a failure."""
        return () if isinstance(self.reply, EmulatedRun) else (self.reply,)

    @property
    def summary(self) -> None:
        """Always None, because nothing was measured."""
        return

    @property
    def figures(self) -> EmulatedRun | None:
        """The figures, or None if the run failed."""
        return self.reply if isinstance(self.reply, EmulatedRun) else None


Study = BatchSearch | LossStudy
"""A case of which something else was studied than how it compares with its baseline."""
Result = Measured | Emulated | BatchSearch | LossStudy
"""One case in one test: a row of the table and of the JSON report."""


class Report(Struct, frozen=True, kw_only=True):
    """The document of ``--gpu-json``."""

    format: Whole = FORMAT
    """The version of the format."""
    generator: str
    """The name and the version of the package that wrote it."""
    created: str
    """When it was written, in UTC (ISO 8601)."""
    session: str
    """The id of the pytest run."""
    commit: str = ""
    """The commit that was checked out. Empty outside of a repository."""
    changes: str = ""
    """A digest of the uncommitted changes of tracked files, without the files that runs write. Empty for none."""
    branch: str = ""
    """The branch that was checked out."""
    arguments: tuple[str, ...] = ()
    """The arguments of pytest, with ``***`` for what looks like a secret."""
    settings: dict[str, Any] = {}
    """The options of the run, as JSON values."""
    exit_status: Whole = 0
    """pytest's exit status. 2 until the run has ended."""
    notes: tuple[str, ...] = ()
    """Sentences about the run as a whole, as below its tables."""
    results: tuple[Result, ...] = ()
    """The results of all cases."""
