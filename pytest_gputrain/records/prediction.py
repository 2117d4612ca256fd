"""Defines the records of a prediction: the target that it is made for, the prediction itself, and what it depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Literal

import msgspec
from msgspec import Struct

from pytest_gputrain.records.whole import Whole

TrainingPhase = Literal["build", "forward", "backward", "between", "optimizer"]
"""``forward`` is a step before its first backward pass; recomputation of activations is part of ``backward``. ``between`` is
what a step does after its first backward pass and outside of backward passes and optimizers: it clips gradients, or runs the
forward pass of the second loss of a GAN."""


class Target(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device that a case is predicted for."""

    marker: str
    """The marker of the GPU."""
    kind: Literal["cpu", "cuda"]
    """The rules for kernels, optimizer loops and rounding."""
    memory_bytes: Whole | None = None
    """The memory that the driver can give: some hundred MiB less than a card is sold with. None for no limit."""
    context_bytes: Whole = 0
    """The part of it that the driver's context and loaded kernels take."""
    expandable_segments: bool = False
    """Whether the caching allocator grows its segments in place, instead of asking for new ones."""
    equal_blocks: Literal["current", "lower_address"] = "current"
    """The one among free blocks of one size that the caching allocator takes: as in the installed torch, or the one at the
    lower address, as before torch 2.12."""
    capability: tuple[Whole, Whole] = (9, 0)
    """CUDA's compute capability. Below 8.0 there is no flash attention."""
    attention: Literal["current", "unfused"] = "current"
    """The kernels of attention: those of the installed libraries, or plain products as before torch 2.0."""
    lists: bool = True
    """Whether optimizers work on lists of tensors, which is the default on a GPU since torch 2.0. Otherwise they update one
    tensor after another."""
    multiprocessors: Whole = 132
    """The number of multiprocessors of the GPU, among which a large sum is divided."""
    workspace_bytes: Whole = 0
    """The workspace that cuBLAS takes from the caching allocator, once for the forward and once for the backward pass."""
    peak_flops: dict[str, float] = {}
    """FLOP/s by arithmetic: ``fp32`` (that of TF32 if the case allows it), ``bf16``, ``fp16``, and ``tf32`` if convolutions
    in fp32 may use it."""
    bandwidth: float | None = None
    """Bytes per second of the device memory."""


class LiveTensor(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tensors of one shape that one operator made in one phase, and that were live at the peak."""

    bytes: Whole
    """The memory of all of them."""
    count: Whole
    """The number of tensors."""
    operator: str
    """The operator that made them."""
    phase: TrainingPhase
    """The phase that made them."""
    shape: tuple[Whole, ...]
    """The shape of each."""
    dtype: str
    """Their type."""
    lines: tuple[str, ...] = ()
    """The lines of your own files that made them, as ``tests/test_mine.py:41``, if memory was counted. Baselines keep no
    lines, because lines move."""


def without_lines(largest: Mapping[TrainingPhase, Sequence[LiveTensor]]) -> dict[TrainingPhase, tuple[LiveTensor, ...]]:
    """Return the rows as baselines keep them."""
    return {phase: tuple(msgspec.structs.replace(row, lines=()) for row in rows) for phase, rows in largest.items()}


class OperatorWork(Struct, frozen=True, kw_only=True, array_like=True):
    """The work of all calls of one operator in one micro-batch."""

    calls: Whole
    """The number of calls."""
    flops: Whole
    """Their floating-point operations."""
    bytes: Whole
    """The bytes that they read and write."""


class WorkAtLines(OperatorWork, frozen=True, kw_only=True, array_like=True):
    """The same, and how it is divided among the lines of your own files."""

    lines: tuple[tuple[str, Whole, Whole], ...] = ()
    """A line such as ``train.py:41``, and the FLOPs and bytes of its calls; in a backward pass it is the line of the forward
    pass. Baselines keep no names of lines, because lines move."""

    def without_lines(self) -> WorkAtLines:
        """Return the work as baselines keep it."""
        return msgspec.structs.replace(self, lines=tuple(sorted(("", flops, moved) for _, flops, moved in self.lines)))


MEASURED_ONLY: Final = (
    "batch_size",
    "counted_threads",
    "counts_exactly",
    "device_step_seconds",
    "device_used_bytes",
    "environment",
    "free_bytes",
    "holders",
    "input_seconds",
    "joules_per_step",
    "losses",
    "median_step_seconds",
    "notes",
    "one_worker_seconds",
    "other_processes",
    "own_seconds",
    "peak_host_bytes",
    "ranks",
    "samples_per_second",
    "sequence_length",
    "step_seconds",
    "telemetry",
    "tf32_share",
    "tokens",
    "tokens_per_second",
    "tokens_per_step",
    "uncompiled",
    "updates",
    "warmup_seconds",
)
"""The fields that a `Measurement` has and a `Prediction` has not."""


class FiguresWithoutTimes(Struct, frozen=True, kw_only=True, tag_field="outcome"):
    """The common part of a prediction and a run on an emulated GPU, which have no measured times."""

    _described: ClassVar[str]

    def update_seconds(self, accumulation: int) -> None:
        """Return None: a `Measurement` has the seconds of an optimizer update."""

    def __getattr__(self, name: str) -> None:
        """Give None for a figure that a `Measurement` has and these have not."""
        if name not in MEASURED_ONLY:
            raise AttributeError(f"{self._described} has no {name}")


class Prediction(FiguresWithoutTimes, frozen=True, kw_only=True, tag="predicted"):
    """A case that ran to its end on fake tensors. It is exact: the same on every machine with the same library versions."""

    _described = "a prediction"

    target: Target
    """The device that it was predicted for."""
    fidelity: Literal["cpu", "cuda-rules"]
    """``cpu``: the operators are those of a real run. ``cuda-rules``: the operators are those of a CPU, except where CUDA is
    known to use others."""
    parameters: Whole | None
    """The number of parameters. None if own code does not let the worker watch its model."""
    trainable_parameters: Whole | None
    """The number of parameters that train."""
    model_bytes: Whole | None
    """The memory of parameters, buffers and quantisation state."""
    peak_allocated_bytes: Whole
    """The highest memory in use from the first step on, as in a measurement. On a GPU these are the blocks that the caching
    allocator has handed out, which can be larger than requested. On a CPU these are the live tensor storages."""
    peak_phase: TrainingPhase
    """The phase that has the peak."""
    phase_peak_bytes: dict[TrainingPhase, Whole]
    """The highest sum of live tensor storages in each phase. ``build`` is the highest before the first step."""
    largest: dict[TrainingPhase, tuple[LiveTensor, ...]]
    """The largest tensors at the peak of each phase."""
    peak_bytes_by_origin: dict[TrainingPhase, Whole] = {}
    """Live tensor storages at the peak of ``peak_phase``, by the phase that made them: ``build`` makes weights, ``forward``
    activations, ``backward`` gradients and what is recomputed, ``optimizer`` its state. Empty in files that are older than
    the field."""
    peak_reserved_bytes: Whole | None
    """The highest memory that the caching allocator holds. If the case does not fit, what it would hold without a limit.
    None without a caching allocator."""
    host_bytes: Whole = 0
    """The highest sum of tensor storages on the host, if the host is not the device: what a case offloads."""
    fits: bool | None
    """Whether the case fits. None without a limit."""
    refused: LiveTensor | None = None
    """The allocation that did not fit."""
    flops_per_step: Whole
    """Floating-point operations of one micro-batch, without recomputation."""
    recomputed_flops_per_step: Whole
    """Further operations that activation checkpointing repeats."""
    bytes_per_step: Whole
    """Bytes that the operators of one micro-batch read and write. If the case accumulates gradients, it is a micro-batch
    without an update."""
    roofline_seconds: float | None
    """The least time of that micro-batch: the sum, over its operators, of the larger of arithmetic and memory traffic at the
    device's peaks."""
    operators: dict[str, OperatorWork]
    """The work of each operator in that micro-batch, including recomputation."""
    packages: dict[str, str]
    """The version of every training library whose code the case runs, without a local label such as ``+cu130``. For own
    code, of those that it imported."""
    processes: Whole | None = None
    """The number of workers and servers that stood for more of them on a CPU. None if as many ran as the case declares."""

    @property
    def conditions(self) -> PredictionConditions:
        """Return what the figures depend on, beside the case."""
        return PredictionConditions(packages=self.packages, target=self.target, processes=self.processes)


class PredictionConditions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The conditions of a prediction, beside the case."""

    packages: dict[str, str]
    target: Target
    processes: Whole | None = None
