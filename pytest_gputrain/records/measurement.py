"""Defines the record of a case that was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from pytest_gputrain.records.counts import Counts
from pytest_gputrain.records.memory import LiveTensor, TrainingPhase
from pytest_gputrain.records.own_training import BatchShapes, TrainedTensors
from pytest_gputrain.records.step_memory import StepMemory
from pytest_gputrain.records.whole import Whole

StepSeconds = Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)]
"""The times of at least one step; none is 0."""


class Holder(Struct, frozen=True, kw_only=True):
    """Another process on a GPU of a case, or memory in use that no process seems to own."""

    pid: Whole | None
    """The process id as the driver reports it. None for memory that no process seems to own."""
    gpu: Whole
    """The index of the GPU."""
    name: str = ""
    """The name of the program. Empty if this user may not see it."""
    bytes: Whole | None = None
    """The device memory that it uses. None if the driver does not report it."""


class Telemetry(Struct, frozen=True, kw_only=True):
    """The GPUs of a case during its timed steps, read several times a second. A figure that a driver does not report is
    None."""

    readings: Whole
    """The number of readings."""
    energy_joules: float | None
    """The energy of all GPUs together, from the begin of the first timed step to the end of the last."""
    power_watts: float | None
    """The mean power of all GPUs together."""
    clock_mhz: Whole | None
    """The median clock of the GPU that has the lowest."""
    utilization: float | None
    """The mean share of the time in which a kernel ran."""
    throttled: dict[str, float] | None
    """The share of readings with a lowered clock, by the vendor's reason, for the GPU that has most of it."""
    others: tuple[Holder, ...] = ()
    """Processes of others that computed on these GPUs meanwhile."""


class Environment(Struct, frozen=True, kw_only=True):
    """The machine and the software of a measurement. The sentence of a regression names the fields that differ between the
    run and its baseline."""

    device_name: str
    """The name that the driver reports (``NVIDIA H100 80GB HBM3``), or ``cpu``."""
    device_type: Literal["cpu", "cuda", "rocm"]
    """The type of the device that torch used."""
    device_count: Whole
    """The processes of the case, servers included. There are as many GPUs, or shares of a CPU."""
    device_memory_bytes: Whole | None
    """The memory of one GPU. None on a CPU."""
    host: str
    """The name of the machine."""
    hosts: tuple[str, ...] = ()
    """The names of all nodes in the order of their ranks, if there were several."""
    cpu_model: str
    """The model of the CPU."""
    os: str
    """The operating system."""
    python: str
    """The version of Python."""
    packages: dict[str, str]
    """The version of every training library that the worker could import."""
    runtime: str | None = None
    """The version of CUDA or ROCm that torch was built for."""
    driver: str | None = None
    """The version of the GPU's driver."""
    power_limit_watts: float | None = None
    """The power limit of each GPU. A lower limit makes steps slower."""
    topology: tuple[tuple[str, ...], ...] = ()
    """The paths between the case's GPUs, with one row for each as in ``nvidia-smi topo -m``. Empty for one GPU."""
    threads: Whole = 1
    """CPU threads that the worker computed with."""
    cudnn: str | UnsetType = UNSET
    """The version of cuDNN, or of MIOpen under ROCm. This and the following fields are missing in files that are older than
    the fields."""
    nccl: str | UnsetType = UNSET
    """The version of NCCL, or of RCCL under ROCm."""
    cores: Whole | UnsetType = UNSET
    """CPU cores that the worker could use, by its affinity and the quota of its container."""
    host_memory_bytes: Whole | UnsetType = UNSET
    """The memory of the host, or the limit of the container."""
    nics: tuple[str, ...] | UnsetType = UNSET
    """The ports of the host's network cards by kind and rate, as ``8 x mlx5_core 400 Gb/sec (4X NDR)``."""
    gpu_digests: tuple[str, ...] | UnsetType = UNSET
    """A digest of the UUID of each GPU that the run could use. Runs that have one in common were on one machine."""


class Rank(Struct, frozen=True, kw_only=True):
    """The figures of one of several processes of a case."""

    role: Literal["worker", "server"] = "worker"
    """Whether it trained or served tables."""
    step_seconds: tuple[float, ...]
    """Seconds of each timed step. Empty for a server."""
    peak_allocated_bytes: Whole
    """The peak of allocated memory of this process."""
    peak_host_bytes: Whole
    """The peak of resident host memory of this process."""
    peak_reserved_bytes: Whole | None = None
    """The peak of memory that the caching allocator of this process reserved."""
    own_seconds: tuple[float, ...] = ()
    """Seconds of each step from the common start until the process first needed another one. Empty if this is not known."""
    updates: Whole | None = None
    """Updates that a server applied to its tables."""
    rows: Whole | None = None
    """Rows that these updates changed, counted once per update."""


class GpuSteps(Struct, frozen=True, kw_only=True):
    """How long the GPU works in steps that run after all others, under a profiler. They are not timed, because the profiler
    slows the host down. If the case has several processes, each step is that of the process whose GPU works longest."""

    seconds: StepSeconds
    """For each step, the seconds in which the GPU runs at least one kernel, copy or memset. Kernels of collectives are left
    out, because they also run while they wait for other GPUs."""
    collective_seconds: tuple[float, ...]
    """For each step, the seconds in which it runs at least one kernel of a collective."""


class Measurement(Struct, frozen=True, kw_only=True, tag="measured", tag_field="outcome"):
    """A case that trained to its end and passed the worker's checks.

    If the case has several processes, each step takes the seconds of the slowest one, memory is the largest of one process,
    and host memory is the sum.
    """

    step_seconds: StepSeconds
    """Wall seconds of every timed step in order, synchronised with the device. With ``loader_workers``, each is the mean
    over that many steps, because batches come in bursts."""
    gpu_steps: GpuSteps | None = None
    """How long the GPU worked in further steps. None on a CPU, for a script, and where it is not known; ``notes`` then says
    why."""
    input_seconds: float | None = None
    """The mean time that a timed step waited for its batches. None if none came from torch's DataLoader. Built-in models use
    it with ``loader_workers``."""
    warmup_seconds: tuple[float, ...]
    """Seconds of the steps of the warm-up. The first one includes what is compiled and tuned once."""
    losses: tuple[float, ...]
    """The loss of every timed step."""
    batch_size: Whole
    """Samples in one step, over all processes."""
    sequence_length: Whole
    """Tokens per sample as run, padding included; the tiny scale shrinks them. 0 if samples are not token sequences."""
    tokens: Whole | None = None
    """Tokens in one step over all processes, without padding. None if there is no padding."""
    updates: Whole
    """Optimizer updates from the first step to the last timed one. For own code, calls of its step."""
    parameters: Whole | None
    """The number of parameters. This and the next two fields are None if own code does not let the worker watch its
    model."""
    trainable_parameters: Whole | None
    """The number of parameters that train."""
    model_bytes: Whole | None
    """The memory of parameters, buffers and quantisation state."""
    peak_allocated_bytes: Whole
    """The highest sum of live tensor storages from the first step on. On a GPU the caching allocator counts it. On a CPU it
    is counted tensor by tensor, in steps of its own."""
    phase_peak_bytes: dict[TrainingPhase, Whole] = {}
    """The highest sum of live tensor storages in each phase. Phases of training have one if storages were counted tensor by
    tensor; evaluation and saving a checkpoint have one on all devices. ``build`` is the highest before the first step. If
    several processes train, it is the largest of one."""
    largest: dict[TrainingPhase, tuple[LiveTensor, ...]] = {}
    """The largest tensors at the peak of each phase."""
    memory_of_steps: tuple[StepMemory, ...] = ()
    """The memory of each step, from the first one on: on a CPU of as many steps as were asked for, on a GPU of the warm-up
    and the timed ones. Empty on a CPU for a built-in model, and if several processes train. Of several GPUs, each step is
    that of the GPU that needs most in it."""
    kept_behind: dict[TrainingPhase, Whole] = {}
    """Bytes in tensors that an evaluation, or saving a checkpoint, leaves behind."""
    heap_growth: Whole | None = None
    """Bytes that each timed step of own code leaves on the heap of the host, 0 if that does not go on from step to step, and
    None if malloc does not tell. On a CPU tensors are there, too."""
    allowed_growth: Whole = 0
    """The bytes that the test allows own code to keep after each step, or each round of its accumulation."""
    peak_host_bytes: Whole
    """The highest resident set of the worker process, without the processes of a DataLoader."""
    peak_reserved_bytes: Whole | None = None
    """The highest memory that the caching allocator held (GPU)."""
    device_used_bytes: Whole | None = None
    """The memory in use on the device after the last step, as nvidia-smi shows it: with the context and with other
    processes."""
    flops_per_step: Whole | None = None
    """Floating-point operations of one step without recomputation. None if unknown, never 0."""
    recomputed_flops_per_step: Whole | None = None
    """Further operations that activation checkpointing repeats."""
    tf32_share: float | None = None
    """The share of all these operations that torch may compute in TF32: in fp32, on a GPU of NVIDIA, where its switch for
    convolutions or for matrix products allows it. None if there are none."""
    counts: Counts | None = None
    """The counts of each step. On a CPU: operators, collectives, compilations and values that the program reads. On a GPU:
    launches, copies and others in the steps of ``gpu_steps``. If several processes train, they are those of the first."""
    evaluation_counts: Counts | None = None
    """The counts of the evaluation, as one step. None of a case that does not evaluate, and on a GPU."""
    trained: TrainedTensors | None = None
    """The tensors of own code's model that train, and those that do not. None if the model is not watched."""
    batch_shapes: BatchShapes | None = None
    """The shapes that the model of own code is given. None if the model is not watched, or its calls cannot be seen."""
    uncompiled: bool = False
    """Whether own code uses `torch.compile` on a CPU. There its graphs are made only in the steps of ``counts``, and
    nothing is generated."""
    ranks: tuple[Rank, ...] = ()
    """The figures of each process, if there were several."""
    own_seconds: tuple[float, ...] = ()
    """Like the field of `Rank`, in the reply of one of several processes."""
    one_worker_seconds: float | None = None
    """Seconds of an update by one worker alone. It is set if the test asks how the case scales."""
    counted_threads: Whole = 1
    """The number of threads whose tensors were counted one by one. With several, the peak depends on which of them is
    faster."""
    uncounted_memory: bool = False
    """Whether the steps in which memory was counted held memory that was not. ``notes`` say which."""
    notes: tuple[str, ...] = ()
    """Sentences that name what was not counted."""
    free_bytes: Whole | None = None
    """Free memory on the fullest of the case's GPUs before the case started."""
    other_processes: Whole | None = None
    """The number of other processes that computed on the case's GPUs before the case started."""
    holders: tuple[Holder, ...] = ()
    """The other processes on the case's GPUs before it started, and memory in use that no process seems to own."""
    telemetry: Telemetry | None = None
    """Energy, power and clocks of the case's GPUs."""
    core_wait_share: float | None = None
    """The share of the timed steps, from 0 to 1, in which the thread that trains, or autograd's, was ready to run and had no
    CPU core. None if the kernel does not tell."""
    environment: Environment
    """The machine and the software of the measurement."""

    @property
    def joules_per_step(self) -> float | None:
        """Energy of all GPUs per step. None if no driver reports it."""
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
        """The median of ``step_seconds``."""
        return statistics.median(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        """Samples per second at the median step."""
        return self.batch_size / self.median_step_seconds

    @property
    def gpu_seconds(self) -> float | None:
        """The median seconds that the GPU works in a step, without collectives. None if they are not known."""
        return statistics.median(self.gpu_steps.seconds) if self.gpu_steps else None

    @property
    def gpu_busy_share(self) -> float | None:
        """The share of the median step in which the GPU works. None if ``gpu_seconds`` are not known."""
        return self.gpu_seconds / self.median_step_seconds if self.gpu_seconds else None

    def update_seconds(self, accumulation: int) -> float | None:
        """Return the median seconds of an optimizer update with all its micro-batches, or None if no whole update was
        timed."""
        return update_seconds(self.step_seconds, accumulation)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second at the median step. None if samples are not token sequences."""
        return self.tokens_per_step / self.median_step_seconds if self.tokens_per_step else None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all processes, without padding. 0 if samples are not token sequences."""
        return self.batch_size * self.sequence_length if self.tokens is None else self.tokens


def update_seconds(step_seconds: Sequence[float], accumulation: int) -> float | None:
    """Return the median of the sums of ``accumulation`` steps; None if there are fewer."""
    accumulation = max(1, accumulation)  # A report that somebody wrote may have 0.
    starts = range(0, len(step_seconds) - accumulation + 1, accumulation)
    return statistics.median(math.fsum(step_seconds[at : at + accumulation]) for at in starts) if starts else None
