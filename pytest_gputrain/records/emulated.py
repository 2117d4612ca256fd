"""Defines the record of a case that ran on an emulated GPU, and what its figures depend on."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from pytest_gputrain.records.prediction import FiguresWithoutTimes, LiveTensor, TrainingPhase
from pytest_gputrain.records.whole import Whole

NOT_MADE: Final = (
    "not checked, since kernels compute nothing there: whether losses are finite, and whether every trained tensor gets a "
    "gradient and changes"
)


class EmulatedRun(FiguresWithoutTimes, frozen=True, kw_only=True, tag="emulated"):
    """What a case took of an emulated GPU. It has no times, and losses mean nothing there.

    Exact: the same in every process with the same libraries. Of several processes the first one ran.
    """

    _described = "a run on an emulated GPU"

    device_name: str
    """As the emulated driver tells it."""
    device_memory_bytes: Whole
    runtime: str | None
    """CUDA version that torch was built for."""
    packages: dict[str, str]
    """As in `Prediction`."""
    processes: Whole = 1
    """Of the case, of which the first ran, beside a process group in which no other takes part."""
    fits: bool
    refused: str = ""
    """Where it does not fit, the allocator's own sentence."""
    peak_allocated_bytes: Whole
    """Of torch's caching allocator, as in a measurement; where the case does not fit, up to then."""
    peak_reserved_bytes: Whole
    device_used_bytes: Whole
    """Memory in use on the device after the last step, with what is assumed of the driver's context."""
    parameters: Whole | None = None
    trainable_parameters: Whole | None = None
    model_bytes: Whole | None = None
    flops_per_step: Whole | None = None
    recomputed_flops_per_step: Whole | None = None
    not_counted: tuple[str, ...] = ()
    """Memory of libraries that nobody knows here, such as ``cuDNN's workspaces``."""
    notes: tuple[str, ...] = ()
    """As in `Measurement`."""

    @property
    def conditions(self) -> EmulatedConditions:
        return EmulatedConditions(
            packages=self.packages,
            device_name=self.device_name,
            device_memory_bytes=self.device_memory_bytes,
            runtime=self.runtime,
        )

    @property
    def phase_peak_bytes(self) -> dict[TrainingPhase, int]:
        """Nothing: an allocator keeps no peak of a phase."""
        return {}

    @property
    def largest(self) -> dict[TrainingPhase, tuple[LiveTensor, ...]]:
        """Nothing, likewise."""
        return {}


class EmulatedConditions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run on an emulated GPU depends on, beside the case."""

    packages: dict[str, str]
    device_name: str
    device_memory_bytes: Whole
    runtime: str | None
