"""Defines the records of a prediction: the target that it is made for, the prediction itself, and what it depends on."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from msgspec import Struct

from pytest_gputrain.records.whole import Whole

TrainingPhase = Literal["build", "forward", "backward", "between", "optimizer"]
"""``forward`` is a step before its first backward pass; recomputation of activations is part of ``backward``. ``between`` is
what a step does after its first backward pass and outside of backward passes and optimizers: it clips gradients, or runs the
forward pass of the second loss of a GAN."""


class Target(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device that a case is predicted for."""

    marker: str
    kind: Literal["cpu", "cuda"]
    """Whose rules decide on kernels, optimizer loops and rounding."""
    memory_bytes: Whole | None = None
    """What the driver has to give: some hundred MiB less than a card is sold with. None for no limit."""
    context_bytes: Whole = 0
    """Of the memory, what the driver's context and loaded kernels take."""
    expandable_segments: bool = False
    """Whether the caching allocator grows its segments in place, instead of asking for new ones."""
    capability: tuple[Whole, Whole] = (9, 0)
    """CUDA's compute capability: before 8.0 there is no flash attention."""
    attention: Literal["current", "unfused"] = "current"
    """Whose kernels: those of the libraries here, or plain products, as before torch 2.0."""
    lists: bool = True
    """Whether optimizers work on lists of tensors, torch's default on a GPU since 2.0; else on one tensor after another."""
    multiprocessors: Whole = 132
    """Of the GPU: among so many a large sum is divided."""
    workspace_bytes: Whole = 0
    """What cuBLAS takes of the caching allocator, once for the forward and once for the backward pass."""
    peak_flops: dict[str, float] = {}
    """FLOP/s by arithmetic: ``fp32`` (of TF32 where a case allows that), ``bf16``, ``fp16``."""
    bandwidth: float | None = None
    """Bytes per second of the device memory."""


class LiveTensor(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Storages that one operator made alike in one phase, and that lived at the peak."""

    bytes: Whole
    """Of all of them."""
    count: Whole
    operator: str
    phase: TrainingPhase
    shape: tuple[Whole, ...]
    dtype: str
    lines: tuple[str, ...] = ()
    """Of the user's own files, that made them: ``tests/test_mine.py:41``. Known where memory was counted; baselines keep
    none, since lines move."""


class OperatorWork(Struct, frozen=True, kw_only=True, array_like=True):
    """What all calls of one operator in one micro-batch do."""

    calls: Whole
    flops: Whole
    bytes: Whole
    """Read and written."""


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
    "tokens",
    "tokens_per_second",
    "tokens_per_step",
    "uncompiled",
    "updates",
    "warmup_seconds",
)
"""What a `Measurement` has and a `Prediction` has not."""


class FiguresWithoutTimes(Struct, frozen=True, kw_only=True, tag_field="outcome"):
    """What a prediction and a run on an emulated GPU have in common: no time was measured."""

    _described: ClassVar[str]

    def update_seconds(self, accumulation: int) -> None:
        """Return None: a `Measurement` has the seconds of an optimizer update."""

    def __getattr__(self, name: str) -> None:
        """Give None for a figure that a `Measurement` has and these have not."""
        if name not in MEASURED_ONLY:
            raise AttributeError(f"{self._described} has no {name}")


class Prediction(FiguresWithoutTimes, frozen=True, kw_only=True, tag="predicted"):
    """A case that ran to its end on fake tensors. Exact: the same on every machine with the same library versions."""

    _described = "a prediction"

    target: Target
    fidelity: Literal["cpu", "cuda-rules"]
    """``cpu``: the operators are those of a real run. ``cuda-rules``: CPU operators, with CUDA's own where they are known to
    differ (see `pytest_gputrain.worker.prediction.patches`)."""
    parameters: Whole | None
    trainable_parameters: Whole | None
    model_bytes: Whole | None
    """Storage of parameters, buffers and quantisation state."""
    peak_allocated_bytes: Whole
    """Highest memory in use from the first step on, as in a measurement: on a GPU the blocks that the caching allocator has
    handed out, which can be larger than what was asked for; on a CPU the live tensor storages."""
    peak_phase: TrainingPhase
    phase_peak_bytes: dict[TrainingPhase, Whole]
    """Highest sum of live tensor storages by phase; ``build`` is the highest before the first step."""
    largest: dict[TrainingPhase, tuple[LiveTensor, ...]]
    """At the peak of each phase, largest first."""
    peak_bytes_by_origin: dict[TrainingPhase, Whole] = {}
    """Live tensor storages at the peak of `peak_phase`, by the phase that made them: weights in ``build``, activations in
    ``forward``, gradients and what is recomputed in ``backward``, the optimizer's state in ``optimizer``. Empty in files of
    before there was this field."""
    peak_reserved_bytes: Whole | None
    """Highest memory held by the caching allocator, as in a measurement; where the case does not fit, what it would hold
    without limit. None without such an allocator."""
    host_bytes: Whole = 0
    """Highest sum of tensor storages on the host, where that is not the device: what a case offloads."""
    fits: bool | None
    """None without a limit."""
    refused: LiveTensor | None = None
    """The allocation that did not fit."""
    flops_per_step: Whole
    """Of one micro-batch, without recomputation."""
    recomputed_flops_per_step: Whole
    bytes_per_step: Whole
    """Read and written by the operators of a micro-batch: one without an update where the case accumulates."""
    roofline_seconds: float | None
    """Of that micro-batch: for each operator the larger of arithmetic and memory traffic at the device's peaks."""
    operators: dict[str, OperatorWork]
    """Of that micro-batch, recomputation included, by name."""
    packages: dict[str, str]
    """Version of every training library whose code the case runs, without local label (``+cu130``); for own code, of those
    that it imported."""
    processes: Whole | None = None
    """Workers and servers that stand for more of them on a CPU; None where those run that the case names."""

    @property
    def conditions(self) -> PredictionConditions:
        return PredictionConditions(packages=self.packages, target=self.target, processes=self.processes)


class PredictionConditions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a prediction depends on, beside the case."""

    packages: dict[str, str]
    target: Target
    processes: Whole | None = None
