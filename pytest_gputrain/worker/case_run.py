"""Holds what the parts of a measurement share: the case, where it runs, what follows its steps, and its figures so far."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from pytest_gputrain.records import EmulatedRun, Measurement, Served, Task
from pytest_gputrain.worker.compiling import CompileCalls
from pytest_gputrain.worker.counted_steps import CountedSteps
from pytest_gputrain.worker.device import Device
from pytest_gputrain.worker.emulated import EmulatedFigures
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.operator_counts import OperatorCounter
from pytest_gputrain.worker.own_code import OwnCode
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.training import OwnCodeTraining, Trainable

Keep = Callable[[Measurement | Served | EmulatedRun], None]
"""Called with the figures as soon as the last timed step is over, so that nothing that fails afterwards loses them."""


@dataclass
class CaseRun:
    """The state of one case's run, which all parts of a measurement share from the build to the last check."""

    task: Task
    progress: Progress
    device: Device
    group: Group
    keep: Keep
    lines: OwnLines
    """Finds the user's own lines."""
    own: OwnCode | None = None
    """Where the case is of own code."""
    emulated: EmulatedFigures | None = None
    """Gets the figures that only an emulated GPU gives."""
    training: Trainable = field(init=False)
    """The training whose steps run, from the end of the build on."""
    figures: Measurement = field(init=False)
    """The figures so far, from the last timed step on."""
    fallback: tuple[Callable[[BaseException], str | None], Callable[[], None]] | None = field(init=False, default=None)
    """What becomes of the figures if the step that runs fails, see `may_fail`; None if the run fails with it."""

    def __post_init__(self) -> None:
        self.case, self.on_cpu = self.task.case, self.device.type == "cpu"
        self.compile_calls = CompileCalls(on_cpu=self.on_cpu)
        # Up to torch 2.9 FSDP loses local parts of its gradients under a dispatch mode that keeps their storages.
        loses_shards = self.case.parallel.startswith("fsdp") and torch.__version__ < "2.10"
        counts = self.on_cpu and self.task.counts and not self.task.curve and not loses_shards
        self.operators = OperatorCounter(self.lines if self.own else None) if counts else None
        """Counts further steps on a CPU."""

    @property
    def counter(self) -> CountedSteps | None:
        """The counter of the work of steps, such as kernel launches; None if nothing counts it."""
        return self.operators.steps if self.operators else self.emulated.counter if self.emulated else None

    @property
    def measures_times(self) -> bool:
        """Whether times are measured, and not only a curve of losses or memory."""
        return not (self.task.curve or self.task.memory_only)

    @property
    def is_profiled(self) -> bool:
        """Whether further steps run under a profiler, as they do on a real GPU."""
        return self.device.computes and self.measures_times and not self.on_cpu

    @property
    def runs_to_end(self) -> bool:
        """Whether all steps of the user's loop run."""
        return self.case.epoch and self.own is not None and self.measures_times

    def whole_rounds(self, steps: int) -> int:
        """Return the number of steps, rounded up to whole rounds of accumulation, because own code updates only at the end
        of a round."""
        if self.own is None or self.task.curve:
            return steps
        return -(-steps // self.case.gradient_accumulation) * self.case.gradient_accumulation

    def noting_shapes(self) -> contextlib.AbstractContextManager[None]:
        """Provide a context for steps of own code that records the shapes on which its model trains."""
        if not isinstance(self.training, OwnCodeTraining):
            return contextlib.nullcontext()
        return self.training.noting_shapes(compiled=self.compile_calls.any and not self.on_cpu)

    def set(self, **figures: Any) -> None:
        """Set fields of the figures."""
        self.figures = msgspec.structs.replace(self.figures, **figures)

    def note(self, *notes: str) -> None:
        """Add notes to the figures, except empty ones."""
        self.set(notes=(*self.figures.notes, *filter(None, notes)))

    @contextlib.contextmanager
    def may_fail(
        self, note_of: Callable[[BaseException], str | None], finish: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Provide a context for steps that only checks and counts need. If they fail, the figures of the earlier steps stay.

        They may need more memory, and under their dispatch modes torch refuses some operators of a GPU.

        Args:
            note_of: returns the note on what is missing, which may be empty; None if the error is one of the case.
            finish: does what can be done without them, once the error and what its frames held are freed.
        """
        self.fallback = note_of, finish
        yield  # After an exception the caller reads which fallback was set.
        self.fallback = None

    def may_miss(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Provide a context for steps whose failure only adds this note, with the error in brackets."""
        return self.may_fail(lambda error: in_note(what, error))


def in_note(note: str, error: BaseException) -> str:
    """Return a note with the type and the first line of an error."""
    return f"{note} ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
