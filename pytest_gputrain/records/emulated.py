"""Defines the record of a case that ran on an emulated GPU, what its figures depend on, and what is stored of it."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from pytest_gputrain.records.case import Case, Scale
from pytest_gputrain.records.counts import Counts
from pytest_gputrain.records.expected import ExpectedTime
from pytest_gputrain.records.measurement import Measurement
from pytest_gputrain.records.memory import LiveTensor, TrainingPhase, peak_phase_of, without_lines
from pytest_gputrain.records.own_training import BatchShapes, TrainedTensors
from pytest_gputrain.records.step_memory import StepMemory
from pytest_gputrain.records.whole import Whole

NOT_MADE: Final = (
    "not checked, since kernels compute nothing there: whether losses are finite, and whether every trained tensor gets a "
    "gradient and changes"
)
NO_VALUES: Final = (
    "not checked, since kernels compute nothing there: whether losses are finite, and whether trained tensors change"
)
"""The note on checks for own code whose gradients were watched."""


class OperatorWork(Struct, frozen=True, kw_only=True, array_like=True):
    """The work of all calls of one operator in one step, and how it is divided among the lines of your own files."""

    calls: Whole
    """The number of calls."""
    flops: Whole
    """The floating-point operations of these calls."""
    bytes: Whole
    """The bytes that these calls read and write."""
    lines: tuple[tuple[str, Whole, Whole], ...] = ()
    """A line such as ``train.py:41``, and the FLOPs and bytes of its calls; in a backward pass it is the line of the forward
    pass. Baselines keep no names of lines, because lines move."""

    def without_lines(self) -> OperatorWork:
        """Return the work as baselines keep it."""
        return msgspec.structs.replace(self, lines=tuple(sorted(("", flops, moved) for _, flops, moved in self.lines)))


class EmulatedRun(Struct, frozen=True, kw_only=True, tag="emulated", tag_field="outcome"):
    """The figures of a case on an emulated GPU. There are no times, and the losses mean nothing. A figure that only a
    `Measurement` has is None; a test that reads one from what the fixture returned is skipped.

    It is exact: the same in every run with the same libraries. If the case has several processes, all of them ran if it
    is own code, and otherwise the first one.
    """

    device_name: str
    """The name that the driver of such a GPU reports. For a GPU that runs kernels for another GPU: which GPU is emulated,
    and by which kernels."""
    device_memory_bytes: Whole
    """The memory of the emulated GPU."""
    runtime: str | None
    """The version of CUDA that torch was built for."""
    packages: dict[str, str]
    """The version of every training library whose code the case runs."""
    torch_build: str | UnsetType = UNSET
    """The version of torch and the wheel that it came from, if ``gputrain emulate --install`` has installed it."""
    processes: Whole = 1
    """The number of processes of the case."""
    allocated_by_rank: tuple[Whole, ...] = ()
    """The peak of allocated memory of each process, if all of several ran. Then memory is that of the process that needs
    most, and FLOPs are those of all. Empty if only the first one ran, in a process group without the others."""
    fits: bool
    """Whether the case fits."""
    refused: str = ""
    """The allocator's own sentence, if it does not fit."""
    peak_allocated_bytes: Whole
    """The peak of torch's caching allocator, as in a measurement. If the case does not fit, the peak until then."""
    peak_reserved_bytes: Whole
    """The highest memory that the caching allocator held."""
    device_used_bytes: Whole
    """The memory in use on the device after the last step, with an estimate of the driver's context."""
    phase_peak_bytes: dict[TrainingPhase, Whole] = field(default_factory=dict)
    """The highest memory that the caching allocator had handed out in each phase, workspaces of libraries included.
    ``build`` is the highest before the first step. Empty for a script, and in files that are older than the field."""
    largest: dict[TrainingPhase, tuple[LiveTensor, ...]] = field(default_factory=dict)
    """The largest tensors at the peak of each phase."""
    memory_of_steps: tuple[StepMemory, ...] = ()
    """The memory of each step, those of the warm-up included; of several processes that of the one that needs most in it."""
    kept_behind: dict[TrainingPhase, Whole] = field(default_factory=dict)
    """Bytes in tensors that an evaluation, or saving a checkpoint, leaves behind."""
    heap_growth: Whole | None = None
    """Bytes that each timed step of own code leaves on the heap of the host, as in `Measurement`."""
    allowed_growth: Whole = 0
    """The bytes that the test allows own code to keep after each step, or each round of gradient accumulation."""
    peak_bytes_by_origin: dict[TrainingPhase, Whole] = field(default_factory=dict)
    """The bytes in use at the peak of the steps, by the phase that allocated them: ``build`` makes weights, ``forward``
    activations and workspaces of matrix products, ``backward`` gradients and what is recomputed, ``optimizer`` its state.
    Not stored in baselines."""
    parameters: Whole | None = None
    """The number of parameters. None if own code does not let the worker watch its model."""
    trainable_parameters: Whole | None = None
    """The number of parameters that train."""
    model_bytes: Whole | None = None
    """The memory of parameters, buffers and quantisation state."""
    flops_per_step: Whole | None = None
    """Floating-point operations of one step without recomputation."""
    recomputed_flops_per_step: Whole | None = None
    """Further operations that activation checkpointing repeats."""
    bytes_per_step: Whole | None = None
    """Bytes that the operators of one step read and write, in the step that FLOPs are counted in."""
    expected: ExpectedTime | None = None
    """How long that step takes on the GPU, by estimate; None without an estimate. Not stored in baselines."""
    operators: dict[str, OperatorWork] = field(default_factory=dict)
    """The work of each operator in that step, including recomputation."""
    counts: Counts | None = None
    """The counts of each timed step; of a script, those of each of the first 50 steps after its first update. None if the
    case does not fit, and in older files."""
    evaluation_counts: Counts | None = None
    """The counts of the evaluation, as one step. None for a case that does not evaluate."""
    trained: TrainedTensors | None = None
    """The tensors of own code's model that get a gradient, and those that get none. This and the next field are None if the
    model is not watched, and in older files."""
    batch_shapes: BatchShapes | None = None
    """The shapes that the model of own code is given."""
    not_counted: tuple[str, ...] = ()
    """Memory of libraries that is not known here, such as ``cuDNN's workspaces``."""
    estimated_bytes: Whole = 0
    """The largest workspace of a convolution, which is estimated: reserved memory can be off by about as much. 0 without
    convolutions of cuDNN. Not stored in baselines."""
    notes: tuple[str, ...] = ()
    """Sentences about what the figures rest on, and about what was not checked or was chosen for the case."""

    def update_seconds(self, accumulation: int) -> None:
        """Return None: a `Measurement` has the seconds of an optimizer update."""

    def __getattr__(self, name: str) -> None:
        """Return None for a figure that only a `Measurement` has."""
        if name.startswith("_") or not hasattr(Measurement, name):
            raise AttributeError(f"a run on an emulated GPU has no {name}")

    @property
    def conditions(self) -> EmulatedConditions:
        """Return the conditions that the figures depend on, beside the case."""
        return EmulatedConditions(
            packages=self.packages,
            device_name=self.device_name,
            device_memory_bytes=self.device_memory_bytes,
            runtime=self.runtime,
        )

    @property
    def peak_phase(self) -> TrainingPhase | None:
        """Return the phase of a step that has the peak; None if the peaks of phases are unknown."""
        return peak_phase_of(self.phase_peak_bytes)

    def as_stored(self) -> EmulatedRun:
        """Return the run in the form of baselines, without the names of lines, which move."""
        return msgspec.structs.replace(
            self,
            torch_build=UNSET,  # other builds of the same version have the same figures
            refused=re.sub(r" \(at [^()]*\)$", "", self.refused),
            largest=without_lines(self.largest),
            operators={name: work.without_lines() for name, work in self.operators.items()},
            counts=self.counts.as_stored() if self.counts else None,
            allowed_growth=0,
            evaluation_counts=self.evaluation_counts.as_stored() if self.evaluation_counts else None,
            peak_bytes_by_origin={},
            estimated_bytes=0,
            expected=None,
        )


class EmulatedConditions(Struct, frozen=True, kw_only=True):
    """The conditions of a run on an emulated GPU, beside the case."""

    packages: dict[str, str]
    device_name: str
    device_memory_bytes: Whole
    runtime: str | None


class Recorded(Struct, frozen=True, kw_only=True):
    """The stored runs of one case on emulated GPUs of one platform."""

    case: Case
    scale: Scale
    figures: tuple[EmulatedRun, ...]
    """The figures of each set of conditions, the latest recorded last."""

    def like(self, run: EmulatedRun) -> EmulatedRun | None:
        """Return the run that is stored under the same conditions; None if there is none."""
        return next((stored for stored in self.figures if stored.conditions == run.conditions), None)

    def nearest(self, run: EmulatedRun) -> EmulatedRun:
        """Return the stored run with most libraries of the same version; of several the latest."""
        return max(reversed(self.figures), key=lambda stored: len(stored.packages.items() & run.packages.items()))
