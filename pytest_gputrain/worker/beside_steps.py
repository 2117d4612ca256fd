"""Runs what a training does beside its steps, an evaluation and the saving of a checkpoint, as phases of their own."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import numpy
import torch
from torch import nn

from pytest_gputrain.records import Counts, LiveTensor, Measurement, Task, TrainingPhase
from pytest_gputrain.utils.units import GiB, format_bytes
from pytest_gputrain.worker.allocations import GIVEN, AllocationCounter
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.counted_steps import counts_of
from pytest_gputrain.worker.device import Device
from pytest_gputrain.worker.emulated import EmulatedFigures
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.operator_counts import OperatorCounter
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.training import OwnCodeTraining, Trainable

MOST_SAVED: Final = 4 * GiB
"""The most memory in use at which a checkpoint is saved: it may write as much."""
_LETTING_GO: Final = 1.0
"""Seconds in which gloo's threads have let go of buffers that nobody uses any more, also on a busy machine."""
_OF_CACHES: Final = ("mallocs", "frees")
"""Counts that depend on what earlier steps have left in the caches of allocators."""


class BesideSteps:
    """Runs the evaluation and the checkpoint of a training between two of its steps. They change no figure of the steps:
    nothing is timed or counted meanwhile, and random numbers and the modes of modules are restored.

    Args:
        lines: finds the user's own lines.
        emulated: gets the peaks on an emulated GPU.
    """

    def __init__(
        self,
        task: Task,
        device: Device,
        group: Group,
        progress: Progress,
        lines: OwnLines,
        emulated: EmulatedFigures | None,
    ) -> None:
        self._is_asked = not (task.curve or task.memory_only)
        self._device, self._group, self._progress, self._lines, self._emulated = device, group, progress, lines, emulated
        self._peaks: dict[TrainingPhase, int] = {}
        """The peaks that neither the counter of a CPU nor an emulated GPU has."""
        self._largest: dict[TrainingPhase, tuple[LiveTensor, ...]] = {}
        self._kept: dict[TrainingPhase, int] = {}
        """The bytes that each leaves behind."""
        self._evaluation_counts: Counts | None = None
        self._notes: tuple[str, ...] = ()

    def run(self, training: Trainable, counter: AllocationCounter | None = None) -> None:
        """Run the evaluation of own code, and save its checkpoint, if it has them.

        Args:
            counter: counts the memory of a CPU, from the build on.
        """
        if not self._is_asked or not isinstance(training, OwnCodeTraining):
            return
        beside = training.beside
        if beside.evaluate is not None:
            self._progress.enter("evaluate")
            with _undisturbed(training.model, self._device):
                beside.prepare()
                with self._phase("evaluate", counter), self._counting():
                    _call("evaluation", beside.evaluate)
            self._notes = beside.notes
        # All processes share the folder, so they agree on the sizes, even if only one saves or only one has too much memory
        # in use.
        in_use = self._in_use(counter)
        too_much = in_use > min(MOST_SAVED, shutil.disk_usage(tempfile.gettempdir()).free // 2)
        saving, sizes = self._group.union(
            ({"this"} if beside.save else set[str](), {str(in_use)} if too_much else set[str]())
        )
        if not saving:
            return
        if sizes:
            size = format_bytes(max(map(int, sizes)))
            self._notes += (f"no checkpoint was saved, because as much as {size} might be written to the temporary folder",)
            return
        folder, failed = self._made_folder()
        if failed:
            shutil.rmtree(folder, ignore_errors=True)
            self._notes += (f"no checkpoint was saved, because {failed}",)
            return
        self._progress.enter("save")
        with (
            self._removing(folder),
            _undisturbed(training.model, self._device),
            self._phase("checkpoint", counter),
            self._host() if counter is None else contextlib.nullcontext(),
        ):
            if (save := beside.save) is not None:
                _call("checkpoint", functools.partial(save, folder))

    def behind_timed_steps(self, training: Trainable, figures: Measurement) -> Measurement:
        """Run both on a GPU after the timed steps, and return the figures with the peaks of both phases."""
        self.run(training)
        return msgspec.structs.replace(figures, phase_peak_bytes=self._peaks, largest=self._largest)

    def behind_checks(self, training: Trainable, figures: Measurement, *, counts: bool) -> Measurement:
        """Return the figures with the counts of the evaluation, and with the memory that both phases leave behind.

        Args:
            counts: whether own code is to evaluate once more, to count what that asks of a CPU.
        """
        evaluate = training.beside.evaluate if isinstance(training, OwnCodeTraining) and self._is_asked else None
        if counts and evaluate is not None:
            operators = OperatorCounter(self._lines)
            parameters = () if training.model is None else training.model.parameters()
            trained = (value for value in parameters if value.requires_grad)
            try:
                with _undisturbed(training.model, self._device), operators.counting(trained, update=True):
                    evaluate()
            except Exception as error:
                why = f"which failed the second time ({type(error).__name__})"
                self._notes += (f"without counts of the evaluation, {why}",)
            else:
                self._evaluation_counts = operators.counts()
        notes = (*figures.notes, *self._notes)
        return msgspec.structs.replace(
            figures, kept_behind=self._kept, evaluation_counts=self._evaluation_counts, notes=notes
        )

    def _in_use(self, counter: AllocationCounter | None) -> int:
        """Return the bytes that tensors take now."""
        return counter.live_bytes if counter else self._device.allocated_bytes() or 0

    def _left(self, counter: AllocationCounter | None, least: int = 0) -> int:
        """Return the bytes that tensors take once garbage is collected and buffers of messages are freed.

        Args:
            least: bytes at which there is nothing to wait for.
        """
        gc.collect()
        if counter is not None and self._group.size > 1:
            ends = time.monotonic() + _LETTING_GO
            while self._in_use(counter) > least and time.monotonic() < ends:
                time.sleep(0.01)
        return self._in_use(counter)

    @contextlib.contextmanager
    def _phase(self, phase: TrainingPhase, counter: AllocationCounter | None) -> Iterator[None]:
        """Provide a context for a phase, and record its peak."""
        before, events = self._left(counter), len(counter.trace.events) if counter else 0
        if counter is not None:
            counter.phases.begin_beside_steps(phase)
            yield
        elif self._emulated:
            self._emulated.allocations.begin_beside_steps(phase)
            yield
            self._emulated.allocations.end_step()
        else:
            self._device.reset_peaks()
            yield
            self._peaks[phase] = self._device.peaks().allocated or 0
        # The counter counts data that existed before as new when it first sees them, so they are subtracted.
        _, given = counter.trace.bytes_of({GIVEN}, events) if counter else (0, 0)
        self._kept[phase] = max(0, self._left(counter, before + given) - before - given)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Provide a context that counts the work that the evaluation gives to an emulated GPU."""
        counter = self._emulated.counter if self._emulated else None
        if counter is None:
            yield
            return
        counter.begin_step()
        yield
        judged = {cause: asked for cause, asked in counter.end().judged.items() if cause.what not in _OF_CACHES}
        self._evaluation_counts = counts_of(judged, counter.lines_unknown)

    @contextlib.contextmanager
    def _host(self) -> Iterator[None]:
        """Provide a context that counts tensors on the host while a checkpoint is saved from a GPU."""
        phase: TrainingPhase = "checkpoint_host"
        counter = AllocationCounter(self._lines.current)
        with counter:
            counter.begin_step()
            counter.phases.begin_beside_steps(phase)
            yield
        peaks = counter.peaks()
        self._peaks[phase] = peaks.by_phase.get(phase, 0)
        self._largest |= {phase: counter.trace.largest_at(peaks.events[phase], 8)} if phase in peaks.events else {}

    def _made_folder(self) -> tuple[Path, str]:
        """Return a folder that all processes of the case share, or the reason why a process has none.

        Those of a node share it, and those of all nodes if their temporary folder is of a file system that all see.
        """
        made = {tempfile.mkdtemp(prefix="gputrain-checkpoint-")} if self._group.rank == 0 else set[str]()
        ((path,),) = self._group.union((made,))
        failed = set[str]()
        try:
            Path(path).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            place = f"{socket.gethostname()} cannot make a folder in {Path(path).parent} ({error.strerror})"
            failed.add(f"{place}; set TMPDIR to a folder that each node has")
        (failed,) = self._group.union((failed,))
        return Path(path), min(failed, default="")

    @contextlib.contextmanager
    def _removing(self, folder: Path) -> Iterator[None]:
        """Provide a context that removes the folder from each node at its end, once all processes have saved."""
        try:
            yield
            self._group.barrier()
        finally:
            if self._group.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)


def _call(said: str, function: Callable[[], object]) -> None:
    """Call a function of own code outside of a generator, where its `StopIteration` would mean something else."""
    try:
        function()
    except StopIteration:
        raise CheckFailed(
            f"the function of setup.{said}() reads an iterator that is used up; make it anew in each call"
        ) from None


@contextlib.contextmanager
def _undisturbed(model: nn.Module | None, device: Device) -> Iterator[None]:
    """Provide a context that restores random numbers and the training mode of modules: of the model, and of any other module
    that existed before and whose ``eval()`` or ``train()`` is called."""
    python, of_numpy = random.getstate(), numpy.random.get_state()
    # The references are weak, because a module that the evaluation lets go of must not live longer.
    modes = weakref.WeakKeyDictionary((module, module.training) for module in (() if model is None else model.modules()))
    # A module that is being made may have no hash yet, so `id` is the key.
    made: dict[int, weakref.ref[nn.Module]] = {}

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def make(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            made[id(module)] = weakref.ref(module)
            return real(module, *arguments, **keywords)

        return make

    real_train = nn.Module.train

    def train(module: nn.Module, mode: bool = True) -> nn.Module:
        if (known := made.get(id(module))) is None or known() is not module:
            modes.setdefault(module, module.training)
        return real_train(module, mode)

    try:
        with (
            torch.random.fork_rng([] if device.type == "cpu" else [device.torch_device]),
            mock.patch.object(nn.Module, "train", train),
            mock.patch.object(nn.Module, "__init__", noting(nn.Module.__init__)),
            # Copies and unpickled modules are made by this one.
            mock.patch.object(nn.Module, "__setstate__", noting(nn.Module.__setstate__)),
        ):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        for module, trains in modes.items():
            module.training = trains
