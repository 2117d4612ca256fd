"""Defines the records that come back from a case's processes: events while they run, and the reply at their end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from pytest_gputrain.records.emulated import EmulatedRun
from pytest_gputrain.records.prediction import LiveTensor, TrainingPhase
from pytest_gputrain.records.whole import Whole

Phase = Literal["start", "import", "build", "count", "warmup", "measure", "check", "reply"]
"""Where a worker stands; ``count`` is the pass that counts allocations."""


StepSeconds = Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)]
"""Of at least one step; none takes no time."""


class Event(Struct, frozen=True, kw_only=True):
    """One line of the progress file."""

    phase: Phase
    step: Whole | None = None
    """Timed steps finished."""
    step_seconds: float | None = None
    allocated_bytes: Whole | None = None
    at: float | None = None
    """Of the host's monotonic clock, where a phase begins."""


class Holder(Struct, frozen=True, kw_only=True):
    """Somebody else on a GPU of a case."""

    pid: Whole | None
    """As the driver numbers processes; None for memory in use where no process is seen."""
    gpu: Whole
    """Index of the GPU."""
    name: str = ""
    """Of the program; empty where this user may not know it."""
    bytes: Whole | None = None
    """Device memory in use; None where the driver does not tell."""


class Telemetry(Struct, frozen=True, kw_only=True):
    """The GPUs of a case during its timed steps, read several times a second; None for what a driver does not tell."""

    readings: Whole
    energy_joules: float | None
    """Of all GPUs together, from the first timed step's begin to the last one's end."""
    power_watts: float | None
    """Mean, of all GPUs together."""
    clock_mhz: Whole | None
    """Median of the GPU that has the lowest."""
    utilization: float | None
    """Mean share of the time in which a kernel ran."""
    throttled: dict[str, float] | None
    """Share of the readings with a lowered clock, by the vendor's reason, of the GPU that has most of it."""
    others: tuple[Holder, ...] = ()
    """Processes of others that computed on these GPUs meanwhile."""


class Environment(Struct, frozen=True, kw_only=True):
    """Where a measurement was made. Fields that differ between a run and its baseline are named in a regression."""

    device_name: str
    """As the driver gives it (``NVIDIA H100 80GB HBM3``), or ``cpu``."""
    device_type: Literal["cpu", "cuda", "rocm"]
    device_count: Whole
    """Processes of the case, servers included: as many GPUs, or shares of a CPU."""
    device_memory_bytes: Whole | None
    host: str
    hosts: tuple[str, ...] = ()
    """All nodes, in the order of their ranks, where there were several."""
    cpu_model: str
    os: str
    python: str
    packages: dict[str, str]
    """Version of every training library that the worker could import."""
    runtime: str | None = None
    """CUDA or ROCm version that torch was built for."""
    driver: str | None = None
    power_limit_watts: float | None = None
    """Of each GPU; a lower one makes steps slower."""
    topology: tuple[tuple[str, ...], ...] = ()
    """Paths between the case's GPUs, a row for each as in ``nvidia-smi topo -m``; none for one GPU."""
    threads: Whole = 1
    """CPU threads the worker computed with."""
    cudnn: str | UnsetType = UNSET
    """Version of cuDNN, under ROCm of MIOpen. This and what follows are absent from files that are older than the fields, so
    that these files are stored again as they were."""
    nccl: str | UnsetType = UNSET
    """Version of NCCL, under ROCm of RCCL."""
    cores: Whole | UnsetType = UNSET
    """CPU cores that the worker could use, by its affinity and the quota of its container."""
    host_memory_bytes: Whole | UnsetType = UNSET
    """Of the host, or the limit of the container."""
    nics: tuple[str, ...] | UnsetType = UNSET
    """Ports of the host's network cards by kind and rate: ``8 x mlx5_core 400 Gb/sec (4X NDR)``."""


class Rank(Struct, frozen=True, kw_only=True):
    """What one of several processes of a case measured."""

    role: Literal["worker", "server"] = "worker"
    step_seconds: tuple[float, ...]
    """Empty for a server."""
    peak_allocated_bytes: Whole
    peak_host_bytes: Whole
    peak_reserved_bytes: Whole | None = None
    own_seconds: tuple[float, ...] = ()
    """Of each step, from the common start to the first need of another process; none where the steps do not tell."""
    updates: Whole | None = None
    """Updates that a server applied to its tables."""
    rows: Whole | None = None
    """Rows that they changed, counted once an update."""


class Served(Struct, frozen=True, kw_only=True, tag="served", tag_field="outcome"):
    """What a parameter server replies instead of a measurement: it takes no steps."""

    updates: Whole
    rows: Whole
    model_bytes: Whole
    """Of its tables' rows, without optimizer states."""
    peak_allocated_bytes: Whole
    peak_host_bytes: Whole


class Measurement(Struct, frozen=True, kw_only=True, tag="measured", tag_field="outcome"):
    """A case that trained to its end and passed the worker's checks.

    Of several processes: each step's seconds are the slowest's, memory is the largest of one process, host memory the sum.
    """

    step_seconds: StepSeconds
    """Wall seconds of every timed step, synchronised with the device, in order. With ``loader_workers`` each is the mean
    over as many steps, because batches come in bursts."""
    device_step_seconds: tuple[float, ...] = ()
    """The same steps by the GPU's clock, from the begin to the end of its main stream's work; the wall's has besides what
    other streams and the host did after that."""
    input_seconds: float | None = None
    """That a timed step waited for its batch, on average; None without ``loader_workers``."""
    warmup_seconds: tuple[float, ...]
    """Of the steps before; the first has what is compiled and tuned once."""
    losses: tuple[float, ...]
    """Loss of every timed step."""
    batch_size: Whole
    """Samples in one step, over all processes."""
    sequence_length: Whole
    """Tokens per sample as run (the tiny scale shrinks them), padding included; 0 where samples are not token sequences."""
    tokens: Whole | None = None
    """Tokens in one step over all processes, without padding; None where none is padding."""
    updates: Whole
    """Optimizer updates from the first step to the last timed one; for own code, calls of its step."""
    parameters: Whole | None
    """None where own code does not let the worker watch its model; likewise the next two."""
    trainable_parameters: Whole | None
    model_bytes: Whole | None
    """Storage of parameters, buffers and quantisation state."""
    peak_allocated_bytes: Whole
    """Highest sum of live tensor storages from the first step on: the caching allocator's on a GPU, counted tensor by
    tensor (in steps of its own) on a CPU."""
    phase_peak_bytes: dict[TrainingPhase, Whole] = {}
    """The same by phase of training, where it was counted tensor by tensor; ``build`` is the highest before the first step.
    Of several processes that train, the largest of one."""
    largest: dict[TrainingPhase, tuple[LiveTensor, ...]] = {}
    """At the peak of each phase, largest first."""
    peak_host_bytes: Whole
    """Highest resident set of the worker process, without the processes of a DataLoader."""
    peak_reserved_bytes: Whole | None = None
    """Highest memory held by the caching allocator (GPU)."""
    device_used_bytes: Whole | None = None
    """Memory in use on the device after the last step, context and other processes included: what nvidia-smi shows."""
    flops_per_step: Whole | None = None
    """Floating-point operations of one step without recomputation; 0 never stands for unknown."""
    recomputed_flops_per_step: Whole | None = None
    """Further operations that activation checkpointing repeats."""
    uncompiled: bool = False
    """Whether own code uses `torch.compile` on a CPU, where its tensors are counted one by one and nothing is compiled."""
    ranks: tuple[Rank, ...] = ()
    """Figures of each process, where there were several."""
    own_seconds: tuple[float, ...] = ()
    """In the reply of one of several processes: see `Rank`."""
    one_worker_seconds: float | None = None
    """Seconds of an update by one worker alone, added by the parent where a test asks how the case scales."""
    counted_threads: Whole = 1
    """Threads whose tensors were counted one by one. With several the peak depends on which of them is faster."""
    notes: tuple[str, ...] = ()
    """What was not counted, each as a sentence."""
    free_bytes: Whole | None = None
    """Free on the fullest of the case's GPUs before it started; this and the next from the parent."""
    other_processes: Whole | None = None
    """That computed on its GPUs then."""
    holders: tuple[Holder, ...] = ()
    """Who they were; likewise memory in use by nobody seen."""
    telemetry: Telemetry | None = None
    """Of its GPUs, from the parent."""
    environment: Environment

    @property
    def joules_per_step(self) -> float | None:
        return (
            self.telemetry.energy_joules / len(self.step_seconds)
            if self.telemetry and self.telemetry.energy_joules
            else None
        )

    @property
    def counts_exactly(self) -> bool:
        """Whether another process would count the same bytes."""
        return self.environment.device_type == "cpu" and self.environment.device_count == self.counted_threads == 1

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        return self.batch_size / self.median_step_seconds

    def update_seconds(self, accumulation: int) -> float | None:
        """Return the median seconds of an optimizer update with all its micro-batches; None where no whole one was timed."""
        return update_seconds(self.step_seconds, accumulation)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens_per_step / self.median_step_seconds if self.tokens_per_step else None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all processes that are no padding; 0 where samples are not token sequences."""
        return self.batch_size * self.sequence_length if self.tokens is None else self.tokens


def update_seconds(step_seconds: Sequence[float], accumulation: int) -> float | None:
    """Return the median of the sums of ``accumulation`` steps; None where there are fewer."""
    accumulation = max(1, accumulation)  # of a report that somebody wrote
    starts = range(0, len(step_seconds) - accumulation + 1, accumulation)
    return statistics.median(sum(step_seconds[at : at + accumulation]) for at in starts) if starts else None


class OutOfMemory(Struct, frozen=True, kw_only=True, tag="out_of_memory", tag_field="outcome"):
    """The case does not fit. An outcome: it can be a baseline, and fails a test whose baseline fitted."""

    where: Literal["device", "host"]
    phase: Phase
    message: str
    """The allocator's own sentence."""
    step: Whole | None = None
    rank: Whole | None = None
    """Of several processes, the one it happened to."""
    peak_allocated_bytes: Whole | None = None
    free_bytes: Whole | None = None
    """As in `Measurement`, and the next."""
    other_processes: Whole | None = None
    holders: tuple[Holder, ...] = ()
    environment: Environment | None = None


class Crashed(Struct, frozen=True, kw_only=True, tag="crashed", tag_field="outcome"):
    """No valid result: an exception, a failed check, a signal, or a reply that cannot be read."""

    sentence: str
    phase: Phase
    step: Whole | None = None
    detail: str = ""
    """Traceback or the end of the worker's stderr."""
    exit_code: Whole | None = None
    refused: bool = False
    """Whether nothing broke, but a check found that the case is not what it says."""
    rank: Whole | None = None
    measured: Measurement | EmulatedRun | None = None
    """Figures of the timed steps, where the case failed after them: they are shown, never judged or recorded."""


class TimedOut(Struct, frozen=True, kw_only=True, tag="timed_out", tag_field="outcome"):
    """The case was ended after its time."""

    timeout_seconds: float
    phase: Phase
    step: Whole | None = None
    detail: str = ""
    """Python stacks of the worker at the end, where it could still give them."""
    advice: str = ""
    """What may help, beside more time."""
    measured: Measurement | EmulatedRun | None = None
    """As in `Crashed`."""


Cause = Literal[
    "node_died", "preempted", "cancelled", "not_scheduled", "queue_full", "no_delivery", "unfit_node", "unreachable"
]


class Lost(Struct, frozen=True, kw_only=True, tag="lost", tag_field="outcome"):
    """The fleet did not run the case to its end, so nothing is known of it; none of the code's doing."""

    cause: Cause
    sentence: str
    """What happened, and what to do."""
    job: str = ""
    """As the fleet's scheduler numbers it; empty where it took none."""
    host: str = ""
    """Where it ran, as far as known."""
    detail: str = ""
    """The end of the job's output."""


Reply = Measurement | OutOfMemory | Crashed | TimedOut | Lost

Failure = Literal["out_of_memory", "crashed", "timed_out", "lost"]


def failure_of(reply: OutOfMemory | Crashed | TimedOut | Lost) -> Failure:
    """Name in a word what became of a run without figures: the tag of the reply in files."""
    match reply:
        case OutOfMemory():
            return "out_of_memory"
        case TimedOut():
            return "timed_out"
        case Crashed():
            return "crashed"
        case Lost():
            return "lost"
