"""Measures a training: builds it, counts, warms up, times and checks its steps, whoever runs them."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pytest_gputrain.records import Case, EmulatedRun, Measurement, Served, Task, TrainedTensors
from pytest_gputrain.records.reply import UNPROFILED
from pytest_gputrain.records.step_memory import OfStep, folded
from pytest_gputrain.utils.linux import CoreWait
from pytest_gputrain.worker.allocations import AllocationCounter, strided_parts
from pytest_gputrain.worker.beside_steps import BesideSteps
from pytest_gputrain.worker.checks import CheckFailed, LoopEnded, Movement, check_losses, check_peak, finite_losses, local
from pytest_gputrain.worker.compiling import CompileCalls, uncompiled
from pytest_gputrain.worker.counted_steps import CountedSteps
from pytest_gputrain.worker.device import Device, Peaks, peak_host_bytes
from pytest_gputrain.worker.emulated import EmulatedFigures
from pytest_gputrain.worker.environment import environment_of
from pytest_gputrain.worker.flops import FlopCount, count_flops
from pytest_gputrain.worker.gpu_events import CannotTell
from pytest_gputrain.worker.group import ALONE, Group
from pytest_gputrain.worker.growth import Growth
from pytest_gputrain.worker.loop import Steps, lead_in, levelled, schedule, timed, timed_steps
from pytest_gputrain.worker.memory_beside import MemoryBeside
from pytest_gputrain.worker.operator_counts import OperatorCounter
from pytest_gputrain.worker.own_code import Checked, OwnCode
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.precision import PRECISIONS
from pytest_gputrain.worker.profiled_steps import StepProfile, find_gpu, steps_to_profile
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.python_calls import CannotCount, PythonCalls
from pytest_gputrain.worker.straggler_clock import StragglerClock
from pytest_gputrain.worker.trace import taken
from pytest_gputrain.worker.training import OwnCodeTraining, StepBuilder, Trainable, Training, load_builder

Keep = Callable[[Measurement | Served | EmulatedRun], None]
"""Called with the figures as soon as the last timed step is over, so that nothing that fails afterwards loses them."""


UNWATCHED: Final = (
    "without FLOPs, and without a check that every trained tensor gets a gradient: both take a step without torch.compile, "
    "which ran out of memory"
)
COUNTED_LESS: Final = "without further counts of what a step asks for, because the step after the last check failed"
UNCOUNTED: Final = (
    "without FLOPs and bytes moved, because the step in which they are counted failed, where the measured steps did not"
)
OTHER_STEP: Final = (
    "without calls of Python functions, because the step in which they are counted asks the GPU for something else than "
    "every timed step"
)
ATTACHED: Final = (
    "timed with torch's profiler attached, because a step was profiled in this process before, which may make each launch "
    "slower; without inline the case has a process of its own"
)
FLOPS_FAILED: Final = "FLOPs are not known, because pytest-gputrain failed to count them"
COUNTS_FAILED: Final = "what a step asks for is not known, because pytest-gputrain failed to count it"
UNCALLED: Final = "without calls of Python functions, because the step in which they are counted failed"

_MOST_STEPS: Final = 1_000
"""The steps of an epoch."""
_COUNTED_STEPS: Final = 2
"""The steps of own code, on a CPU, in which it is counted what they ask for."""
_COMPILING_STEPS: Final = 4
"""The same where own code compiles: the first two compile."""


class Measuring:
    """The measurement of one case.

    A training may own its loop, as a generator or a framework's trainer does. So this calls no step: `steps` is a generator
    that the training resumes before each of its steps and after the last one.

    Args:
        own: where the case is of own code.
        emulated: gets the figures that only an emulated GPU gives.
    """

    def __init__(
        self,
        task: Task,
        progress: Progress,
        device: Device,
        group: Group,
        keep: Keep,
        own: OwnCode | None,
        emulated: EmulatedFigures | None = None,
    ) -> None:
        self._task, self._case = task, task.case
        self._progress = progress
        self._device = device
        self._group = group
        self._keep = keep
        self._own = own
        self._emulated = emulated
        self._operators: OperatorCounter | None = None
        """Counts further steps on a CPU."""
        self._counts_further = False
        """Whether a step runs that nothing but this counter needs."""
        self._compile_calls = CompileCalls(on_cpu=device.type == "cpu")
        self._own_work = StragglerClock(device)
        self._core_wait_share: float | None = None
        self._memory: list[OfStep] = []
        """The memory of each step so far."""
        self._is_followed = False
        """Whether all is known but the memory of the steps that are still to come, up to the end of the user's loop."""
        self._late_growth = ""
        """The note on what steps keep now and then."""
        self._beside = MemoryBeside(after=3 * self._case.gradient_accumulation)
        self._attached = device.type != "cpu" and StepProfile.is_attached
        self._figures: Measurement | None = None
        self._trained: TrainedTensors | None = None
        self._not_trained = ""
        """The note on tensors of own code that do not train."""
        self._only_missing = ""
        """What is missing if the step that runs fails, behind all checks: the beginning of a note."""
        self._check_without_step: Callable[[str], Measurement] | None = None
        """The last check without the step that it takes, while that step runs and may fail where those before did not: it
        may need more memory, and under its dispatch mode torch refuses some operators of a GPU."""

    def run(self, builder: StepBuilder | None) -> Measurement:
        """Build the case, and have its training run to its last check.

        Args:
            builder: the user's function itself, for a run inside the pytest process.

        Raises:
            CheckFailed: the case does not train as it says, or ends before it is measured.
        """
        lines = own_lines(self._task, builder)
        # Up to torch 2.9 FSDP loses the local parts of its gradients below a dispatch mode that keeps their storages.
        loses_shards = self._case.parallel.startswith("fsdp") and torch.__version__ < "2.10"
        if self._device.type == "cpu" and self._task.counts and not self._task.curve and not loses_shards:
            self._operators = OperatorCounter(lines if self._own else None)
        self._beside_steps = BesideSteps(self._task, self._device, self._group, self._progress, lines, self._emulated)
        self._progress.enter("build")
        self._device.reset_peaks()
        if limit := self._task.limit:
            self._device.limit(0 if limit.of_steps else limit.bytes)
        with contextlib.ExitStack() as counting, contextlib.ExitStack() as noting:
            counter = counting.enter_context(self._device.counting(lines.current))
            if self._emulated:
                counting.enter_context(self._emulated.allocations.following())
            if self._own:
                # On a CPU nothing is to be compiled in any later step, either.
                (noting if self._device.type == "cpu" else counting).enter_context(self._compile_calls.noted())
                if counter is not None:
                    counting.enter_context(self._beside.noting(lines))
            training = build(self._task, self._device.torch_device, builder, self._group, self._own_work.done)
            if self._own:
                self._ask(self._own, training, counter)
            check = None
            with contextlib.closing(self._steps(training, counting, counter)) as steps:
                try:
                    training.run(steps)
                except (Exception, SystemExit) as error:
                    why = self._why_without_step(error)
                    if self._only_missing:
                        self._note(f"{self._only_missing} ({_described(error)})")
                    elif self._check_without_step is None or not why:
                        raise
                    else:
                        check = functools.partial(self._check_without_step, why)
            if check is not None:
                self._device.reset_peaks()  # only here: the exception and what its frames held are freed
                self._figures = check()
        if self._is_profiled:
            self._progress.enter("check")
        training.leave()
        assert self._figures is not None, "a training runs until it has no more steps to run"
        return self._figures

    def _ask(self, own: OwnCode, training: Trainable, counter: AllocationCounter | None) -> None:
        """Have it counted what own code asks of loaders and optimizers, and known where the build of a generator ends."""
        if self._counter:
            self._counter.asked = own.asked
        if isinstance(training, OwnCodeTraining):
            training.optimizer_steps.when_updating = own.asked.updated
            if counter is not None:
                counter.phases.first_step_began = training.first_step_began
            if self._emulated:
                self._emulated.allocations.phases.first_step_began = training.first_step_began

    @property
    def _counter(self) -> CountedSteps | None:
        """Counts what steps ask for; None where nothing does."""
        return self._operators.steps if self._operators else self._emulated.counter if self._emulated else None

    def _why_without_step(self, error: BaseException) -> str:
        """Return the note for a counted step that ended with this error; empty where the error is no fault of counting."""
        if self._is_followed:
            return "the loop has ended" if isinstance(error, LoopEnded) else ""
        if self._counts_further:
            return f"{COUNTED_LESS} ({_described(error)})"
        if isinstance(error, torch.OutOfMemoryError) and self._case.compile != "off":
            return UNWATCHED
        if self._emulated is None or isinstance(error, CheckFailed | SystemExit):
            return ""
        return f"{UNCOUNTED} ({_described(error)})"

    def _note(self, note: str) -> None:
        assert self._figures is not None
        self._figures = msgspec.structs.replace(self._figures, notes=(*self._figures.notes, note))

    def _steps(
        self,
        training: Trainable,
        counting: contextlib.ExitStack,
        counter: AllocationCounter | None,
    ) -> Steps:
        task, case, device, group, emulated = self._task, self._case, self._device, self._group, self._emulated
        movement = self._movement(training, counting)
        # Libraries raise and catch exceptions when they are first used, whose frames hold what was being built.
        gc.collect()
        device.reset_peaks()
        if task.limit and task.limit.of_steps:
            device.limit(task.limit.bytes)
        if counter is not None:
            yield from self._count(training, counter)
        followed = counter if self._runs_to_end else None
        if followed:
            followed.follow_sizes_only()
        elif not emulated:
            counting.close()
        # What the build left on the heap never becomes garbage: without this, a collection of it costs one step 0.2 s.
        gc.collect()
        gc.freeze()

        # Asynchronous workers meet once: how far one runs ahead of another is their own affair.
        meet = _nobody if case.asynchronous else group.barrier

        begin_step, of_step = _memory_of(followed) if followed else (device.of_step, device.of_step)

        # A step starts with `begin` and ends with `report`, whether it is timed or of the warm-up.
        def begin() -> None:
            meet()
            if emulated:
                emulated.allocations.begin_step()
            begin_step()

        def report(step: int, seconds: float) -> bool:
            if emulated:
                training.losses.clear()  # they mean nothing, and would be memory that the program does not have
                emulated.allocations.end_step()
            self._note_memory(of_step(), training)
            self._progress.stepped(step, seconds if device.computes else None, device.allocated_bytes())
            # What comes after a loss that is not finite is no training: the rest of a curve need not be waited for. Of
            # several processes none may end before the others.
            return task.curve and group.size == 1 and not all(math.isfinite(float(loss)) for loss in training.losses[-1:])

        self._progress.enter("warmup")
        with self._noting_shapes(training):
            warmup_seconds = yield from self._warm_up(training, report, begin)
        if emulated and emulated.counter:
            emulated.counter.first = len(warmup_seconds)
        group.barrier()
        self._progress.enter("measure")
        updates = schedule(self._whole(_steps_to_time(task, training, group)), case.gradient_accumulation)
        step_seconds = yield from self._timed(training, updates, report, begin)

        peaks = device.peaks()
        losses = tuple(float(loss) for loss in training.losses)
        figures = self._unchecked(training, step_seconds, warmup_seconds, losses, peaks, counter)
        self._keep(figures)
        if counter is None:
            figures = self._beside_steps.behind_timed_steps(training, figures)
        if not followed:
            counting.close()
        with followed.paused() if followed else contextlib.nullcontext():
            yield from self._finish(training, movement, figures, losses, peaks)
            yield from self._gpu_steps(training, meet, updates)
        if self._runs_to_end:
            yield from self._to_the_end(training, begin_step, of_step)

    def _finish(
        self,
        training: Trainable,
        movement: Movement | None,
        figures: Measurement,
        losses: tuple[float, ...],
        peaks: Peaks,
    ) -> Steps:
        """Have the further steps run that only checks and counts need.

        Args:
            figures: of the timed steps.
            losses: of these, and of all of a curve.
        """
        case, device = self._case, self._device
        self._progress.enter("check")
        check_peak(peaks, 0 if training.model is None else model_bytes(training.model, device.torch_device))
        steps = len(figures.warmup_seconds) + len(figures.step_seconds)
        counted = len(counted_steps(case)) if device.type == "cpu" else 0
        figures = msgspec.structs.replace(figures, losses=self._checked_losses(losses, steps + counted))
        if self._is_profiled:
            find_gpu()
        figures = yield from self._checked(training, movement, figures, steps=steps)
        self._figures = self._beside_steps.behind_checks(
            training, figures, counts=self._operators is not None and not self._compile_calls.any
        )
        yield from self._python_calls()

    def _to_the_end(
        self, training: Trainable, begin_step: Callable[[], object], of_step: Callable[[], OfStep | None]
    ) -> Steps:
        """Have all further steps of the user's loop run, for the memory that they take.

        Raises:
            CheckFailed: there are too many.
        """
        assert isinstance(training, OwnCodeTraining)
        assert self._own is not None
        training.keeps_losses = False
        training.losses.clear()
        self._is_followed = True
        self._check_without_step = lambda why: self._of_epoch(training)
        # In the steps of the checks other modes than that of the counter decide what lives.
        self._memory += [OfStep(0, 0)] * (training.updates - len(self._memory))
        while training.updates < _MOST_STEPS:
            begin_step()
            yield True
            memory = of_step()
            self._note_memory(memory, training)
            self._own.growth.note_end(training, memory.end if memory else 0)
        raise CheckFailed(
            f"the loop of {self._case.model} has not ended after {_MOST_STEPS:,} steps, and epoch=True follows it to its "
            "end; give it fewer batches, or leave epoch out"
        )

    def _of_epoch(self, training: OwnCodeTraining) -> Measurement:
        """Return the figures of a loop that has ended, as it was to.

        Raises:
            CheckFailed: its steps keep more and more memory, or its optimizer steps otherwise than the case says.
        """
        assert self._own is not None
        assert self._figures is not None
        training.optimizer_steps.check()
        growth = self._own.growth.judge_ends(len(self._memory))
        notes = (*self._figures.notes, *filter(None, [growth]))
        return msgspec.structs.replace(self._figures, memory_of_steps=folded(self._memory), notes=notes)

    @property
    def _runs_to_end(self) -> bool:
        return self._case.epoch and self._own is not None and not (self._task.curve or self._task.memory_only)

    def _python_calls(self) -> Steps:
        """Have one more step run whose calls of Python functions are counted, where it can be compared with others."""
        emulated = self._emulated.counter if self._emulated else None
        counter = self._counter
        rounds = self._case.gradient_accumulation > 1
        if counter is None or self._task.curve or self._task.memory_only or self._case.asynchronous:
            return
        if self._operators and self._own and rounds and (self._compile_calls.any or self._group.size > 1):
            return  # whose place in the round is that of no counted step
        # A built-in model has made a whole round. Own code has made the first step of one, and on a CPU a whole one.
        update = not rounds or not self._own or (emulated is not None and self._case.gradient_accumulation == 2)
        self._only_missing = UNCALLED
        if not self._own and rounds:
            yield False
        calls = PythonCalls(counter.lines, self._device.torch_device)
        kind: int | None
        try:
            with calls.counting():
                if emulated:
                    emulated.begin_step()
                yield update
                if emulated:
                    kind = emulated.end_further_step(update=update)
                else:
                    kind = counter.kind_of_step(0 if self._own and rounds else -1)
        except CannotCount as error:
            self._note(f"without calls of Python functions, because {error}")
        else:
            if kind is None:
                self._note(OTHER_STEP)
            else:
                counter.python = calls, kind
        self._only_missing = ""
        if self._operators:
            assert self._figures is not None
            self._figures = self._with_counts(self._figures)

    @property
    def _is_profiled(self) -> bool:
        """Whether further steps run under a profiler: of a real GPU, where steps are measured."""
        return self._device.type != "cpu" and self._device.computes and not (self._task.curve or self._task.memory_only)

    def _gpu_steps(self, training: Trainable, meet: Callable[[], None], timed: Sequence[bool]) -> Steps:
        """Have more steps run under a profiler, which tells how long the GPU works in them.

        Args:
            timed: for each timed step whether it updates.
        """
        if not self._is_profiled:
            return
        assert self._figures is not None
        self._keep(self._figures)
        self._group.barrier()  # from here on no process that fails, and that others wait for, loses any other figure
        self._progress.enter("profile")
        if isinstance(training, OwnCodeTraining):
            training.keeps_losses = False
        profile = StepProfile(self._device, meet)
        # Of several processes the others would wait for the one whose step fails.
        self._only_missing = UNPROFILED if self._group.size == 1 else ""
        accumulation = self._case.gradient_accumulation
        yield from profile.steps(schedule(self._whole(steps_to_profile(timed, accumulation)), accumulation))
        self._only_missing = UNPROFILED
        try:
            gpu_steps, counts = profile.read()
        except CannotTell as error:
            self._note(f"without GPU seconds, because {error}")
        else:
            self._figures = msgspec.structs.replace(
                self._figures, gpu_steps=gpu_steps, counts=counts if self._task.counts else None
            )
        self._only_missing = ""

    def _checked_losses(self, losses: tuple[float, ...], steps: int) -> tuple[float, ...]:
        """Return the losses that tell how the case trains.

        Args:
            steps: how many there were, those included in which tensors were counted.
        """
        if self._task.curve:
            return finite_losses(losses, self._case.model, steps=steps)[: self._case.steps]
        if self._device.computes:
            check_losses(losses)
        return losses

    def _checked(
        self, training: Trainable, movement: Movement | None, figures: Measurement, *, steps: int
    ) -> Generator[bool, None, Measurement]:
        """Have the further steps run that only checks need, and return the figures with what they tell.

        Args:
            figures: of the ``steps`` before.

        Raises:
            CheckFailed: the case does not train, keeps more and more memory, or has operators that were not counted.
        """
        own = self._own
        kept = self._emulated.allocations.kept if self._emulated else None
        before = len(figures.warmup_seconds)
        growth = (yield from own.growth.check(training, self._device.allocated_bytes, kept, before)) if own else ""
        figures = msgspec.structs.replace(
            figures,
            heap_growth=own.growth.on_heap if own else None,
            notes=(*figures.notes, *training.notes, *filter(None, [growth])),
        )
        if self._task.memory_only:
            return figures
        if self._operators:
            self._operators.steps.first = steps
            if not own and self._case.gradient_accumulation > 1:
                with uncompiled(self._case), self._counting_step(training, update=False):
                    yield False
        flops = yield from self._watched(training, movement, figures, steps=steps + 1)
        checked = own.check(flops, training) if own else Checked(())
        if isinstance(training, OwnCodeTraining):
            figures = msgspec.structs.replace(figures, trained=self._trained, batch_shapes=training.batch_shapes)
        if flops.trouble:
            checked = Checked((*checked.notes, f"{FLOPS_FAILED} ({flops.trouble})"), knows_flops=False)
        if self._emulated:
            self._emulated.compiles |= self._compile_calls.any
            self._emulated.work = self._emulated.work if checked.knows_flops else None
        figures = msgspec.structs.replace(
            figures,
            flops_per_step=(flops.total - flops.recomputed) or None if checked.knows_flops else None,
            recomputed_flops_per_step=flops.recomputed if flops.total and checked.knows_flops else None,
            tf32_share=(flops.tf32_share or None) if checked.knows_flops else None,
            notes=(*figures.notes, *filter(None, [self._not_trained]), *checked.notes),
        )
        yield from self._count_further(training, figures)
        return self._with_counts(figures)

    def _counting_step(self, training: Trainable, *, update: bool) -> contextlib.AbstractContextManager[None]:
        """Provide a context for a step in which it is counted what the step asks of a CPU."""
        if self._operators is None:
            return contextlib.nullcontext()
        parameters = () if training.model is None else training.model.parameters()
        return self._operators.counting((value for value in parameters if value.requires_grad), update=update)

    def _count_further(self, training: Trainable, figures: Measurement) -> Steps:
        """Have further steps of own code run in which it is counted what they ask for: a whole round of its accumulation.

        Of several processes there is none, because the others would wait for one whose step fails.
        """
        if self._operators is None or self._own is None or self._group.size > 1:
            return
        compiles, round_steps = self._compile_calls.any, self._case.gradient_accumulation
        if compiles:
            torch._dynamo.reset()  # a case before this one in the same process may have compiled the same code
        self._counts_further = True
        self._check_without_step = lambda why: self._with_counts(
            msgspec.structs.replace(figures, notes=(*figures.notes, why))
        )
        for number in range(0 if compiles else 1, max(_COMPILING_STEPS if compiles else _COUNTED_STEPS, round_steps)):
            with self._compile_calls.traced(), self._counting_step(training, update=(number + 1) % round_steps == 0):
                yield True
        self._counts_further, self._check_without_step = False, None

    def _with_counts(self, figures: Measurement) -> Measurement:
        if self._operators is None:
            return figures
        failed = f"{COUNTS_FAILED} ({self._operators.trouble})" if self._operators.trouble else ""
        notes = (*figures.notes, failed) if failed and failed not in figures.notes else figures.notes
        return msgspec.structs.replace(figures, counts=self._operators.counts(), notes=notes)

    def _unchecked(
        self,
        training: Trainable,
        step_seconds: tuple[float, ...],
        warmup_seconds: tuple[float, ...],
        losses: tuple[float, ...],
        peaks: Peaks,
        counter: AllocationCounter | None,
    ) -> Measurement:
        """Return the figures of the timed steps, before anything is checked."""
        case, device, group = self._case, self._device, self._group
        counted = None if counter is None else counter.peaks()
        waits = training.input_waits[-len(step_seconds) :]
        if self._own and self._own.asked.loads:
            waits = self._own.asked.waits
        uncounted = (*counter.uncounted(), *self._beside.uncounted(counted.bytes)) if counter and counted else ()
        return Measurement(
            step_seconds=levelled(step_seconds, case.loader_workers),
            input_seconds=statistics.fmean(waits) if waits else None,
            warmup_seconds=warmup_seconds,
            losses=tuple(itertools.takewhile(math.isfinite, losses)),
            batch_size=training.samples,
            sequence_length=training.sequence_length,
            tokens=training.tokens,
            updates=training.updates,
            parameters=training.parameters,
            trainable_parameters=training.trainable_parameters,
            model_bytes=None if training.model is None else model_bytes(training.model),
            peak_allocated_bytes=known(peaks.allocated if counted is None else counted.bytes),
            phase_peak_bytes=counted.by_phase if counted else {},
            memory_of_steps=folded(self._memory) if self._own or not counted else (),
            allowed_growth=self._task.growth_bytes,
            largest=counter.trace.largest_at_peaks(counted) if counter and counted else {},
            peak_reserved_bytes=peaks.reserved,
            device_used_bytes=peaks.used,
            peak_host_bytes=peak_host_bytes(),
            own_seconds=tuple(self._own_work.seconds) if group.size > 1 else (),
            core_wait_share=self._core_wait_share,
            counted_threads=max(1, len(counter.threads)) if self._own and counter is not None else 1,
            uncounted_memory=bool(uncounted),
            uncompiled=self._compile_calls.any and counter is not None,
            notes=(*uncounted, *filter(None, [self._late_growth, ATTACHED if self._attached else ""])),
            environment=environment_of(device, group),
        )

    def _warm_up(
        self, training: Trainable, report: Callable[[int, float], bool], begin: Callable[[], None]
    ) -> Generator[bool, None, tuple[float, ...]]:
        """Have the steps run that come before the timed ones; return their seconds."""
        case = self._case
        updates = schedule(self._whole(case.warmup), case.gradient_accumulation)
        warmup = yield from timed(updates, self._device, report, begin)
        if not case.loader_workers or self._task.curve:
            return warmup
        # Batches that were loaded while nothing trained would hide that the loader is too slow.
        training.drain()
        last = yield from timed(schedule(lead_in(case), case.gradient_accumulation), self._device, report, begin)
        return warmup + last

    def _timed(
        self, training: Trainable, updates: Sequence[bool], report: Callable[[int, float], bool], begin: Callable[[], None]
    ) -> Generator[bool, None, tuple[float, ...]]:
        """Have the timed steps run; return their seconds."""
        own, counter = self._own, self._emulated.counter if self._emulated else None

        def begin_step() -> None:
            begin()
            if own:
                own.growth.begin_step()
                own.asked.begin_step()
            self._own_work.begin()
            if counter:
                counter.begin_step()

        def end_step(step: int, seconds: float) -> bool:
            if counter:
                counter.end_step(update=updates[step - 1])
            self._own_work.note()
            if own:
                own.growth.end_step(training, self._device.allocated_bytes())
            return report(step, seconds)

        core_wait = CoreWait()
        # A look at shapes would be part of the time.
        with contextlib.nullcontext() if self._device.computes else self._noting_shapes(training):
            seconds = yield from timed(updates, self._device, end_step, begin_step)
        self._core_wait_share = core_wait.share()
        return seconds

    def _whole(self, steps: int) -> int:
        """Return the steps of whole rounds of the accumulation: own code updates when it will, and not in the last step."""
        if self._own is None or self._task.curve:
            return steps
        return -(-steps // self._case.gradient_accumulation) * self._case.gradient_accumulation

    def _count(self, training: Trainable, counter: AllocationCounter) -> Steps:
        """Have steps run for the tensors that live in them."""
        self._progress.enter("count")
        counter.threads.clear()
        # What has run while tensors are counted is never compiled afterwards.
        with self._noting_shapes(training), uncompiled(self._case):
            if self._own is None:
                for update in counted_steps(self._case):
                    counter.begin_step()
                    yield update
                return
            beside = self._beside

            def begin_step() -> None:
                beside.begin_step(counter.trace)
                counter.begin_step()

            def end_step() -> None:
                self._note_memory(counter.of_step(), training)

            yield from self._own.growth.count(training, lambda: counter.live_bytes, begin_step, end_step)
            beside.end(counter.trace)
            self._beside_steps.run(training, counter)
            if not self._task.curve and self._group.size == 1 and not self._case.epoch:
                yield from self._follow(self._own.growth, training, counter)

    def _note_memory(self, memory: OfStep | None, training: Trainable) -> None:
        """Note the memory of a step that is over, without the losses that the worker keeps; None where nobody knows it."""
        if memory is None:
            return
        kept = [taken(loss.nbytes, self._device.type) for loss in training.losses if isinstance(loss, Tensor)]
        # That of the step itself is made at its end.
        self._memory.append(OfStep(memory.peak - sum(kept[:-1]), memory.end - sum(kept)))

    def _follow(self, growth: Growth, training: Trainable, counter: AllocationCounter) -> Steps:
        """Have as many steps of own code run as were asked for, those included whose tensors were counted.

        Of the others it is counted how much memory they take: a later one may have a larger sample, or begin to keep more.
        """
        rounds = (self._whole(self._case.steps) - len(self._memory)) // self._case.gradient_accumulation
        counter.follow_sizes_only()
        gc.freeze()  # without what is there already, the collection behind each step takes no time
        self._late_growth = yield from growth.follow(training, lambda: counter.live_bytes, rounds)
        gc.unfreeze()

    def _watched(
        self, training: Trainable, movement: Movement | None, figures: Measurement, *, steps: int
    ) -> Generator[bool, None, FlopCount]:
        """Have a further step run, whose operations are counted and whose gradients are checked.

        Args:
            figures: of the steps before.
            steps: how many there are with it.
        """
        own = self._own
        # A compiled case takes this step as it is written: in blocks of other sizes than those that the allocator kept, and
        # maybe in more memory than there is.
        self._device.reset_peaks()
        if self._case.compile != "off" or self._emulated:
            self._device.limit(0)
            if self._group.size == 1:  # of several processes, the others would wait for the one that has no memory
                self._check_without_step = lambda why: self._unwatched(figures, training, movement, why, steps=steps - 1)
        traced_later = self._compile_calls.any and self._group.size == 1
        updates = own is None or self._case.gradient_accumulation == 1
        with (
            uncompiled(self._case),
            self._compile_calls.paused(),
            own.recording_threads() if own else contextlib.nullcontext(),
            contextlib.nullcontext() if traced_later else self._counting_step(training, update=updates),
            self._emulated.counting_work() if self._emulated else count_flops() as flops,
            movement.watching() if movement else contextlib.nullcontext(),
            self._noting_shapes(training),
        ):
            yield True
        self._check_without_step = None
        moved, reached = movement.changes() if movement else (set(), set())
        if not self._emulated:  # where each process tells of its own tensors, and a large message has no known bytes
            moved, reached = self._group.union((moved, reached))
        # A CUDA graph calls nothing for a gradient, and only values that are computed would tell.
        if movement is not None and not (self._emulated and flops.launches_graphs):
            self._check_movement(movement, training, moved, reached, steps=steps)
        return flops

    def _unwatched(
        self, figures: Measurement, training: Trainable, movement: Movement | None, why: str, *, steps: int
    ) -> Measurement:
        """Check what can be checked without a further step, and say what was not.

        Args:
            why: the note on what is missing.
        """
        if movement is not None and self._device.computes:
            moved, _ = movement.changes()
            self._check_movement(movement, training, moved, None, steps=steps)
        said = filter(None, [why, self._not_trained])
        return msgspec.structs.replace(figures, trained=self._trained, notes=(*figures.notes, *said))

    def _check_movement(
        self, movement: Movement, training: Trainable, moved: set[str], reached: set[str] | None, *, steps: int
    ) -> None:
        """Check that the model trains, and note what of own code's does not, which only a baseline can tell to be wrong.

        Args:
            reached: the names of tensors that got a gradient; None where no step was watched.
        """
        if isinstance(training, OwnCodeTraining):
            # A step of own code may train but a part, as one of two players or the experts that are chosen.
            reached = None if reached is None else reached | moved
            self._trained, self._not_trained = movement.tell(moved, reached, steps=steps, declared=training.idle_names)
        else:
            movement.check(moved, reached, steps=steps, remote_tensors=training.remote_tensors)

    def _movement(self, training: Trainable, counting: contextlib.ExitStack) -> Movement | None:
        """Return that of the model, at the end of its build, without a look at the weights that would be counted.

        Args:
            counting: is open in the steps that are counted.

        Returns:
            None where there is no model, or nothing of it can be checked.

        Raises:
            CheckFailed: a tensor that is declared to be idle is not there.
        """
        computes = self._device.computes
        if self._own:
            self._own.seeds.end_build()
        # A curve may end in weights that are NaN, of which nothing can be checked.
        if training.model is None or self._task.curve or not (computes or self._own):
            return None
        # fp16 rounds small gradients to zero, scaled or not: on an H200 those of 16 of 680 tensors of Stable Diffusion 3.
        zeros = self._own is not None or PRECISIONS[self._case.precision].scaled
        with _disable_current_modes():
            movement = Movement(training.model, training.idle, accepts_zeros=zeros, knows_values=computes)
        if isinstance(training, OwnCodeTraining):
            movement.check_declared(training.idle_names)
        if not computes and not self._compile_calls.any:
            counting.enter_context(movement.watching())  # a step may train another part, and no changed value tells it there
        return movement

    def _noting_shapes(self, training: Trainable) -> contextlib.AbstractContextManager[None]:
        """Provide a context for steps of own code in which it is noted on what shapes its model trains."""
        if not isinstance(training, OwnCodeTraining):
            return contextlib.nullcontext()
        return training.noting_shapes(compiled=self._compile_calls.any and self._device.type != "cpu")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _steps_to_time(task: Task, training: Trainable, group: Group) -> int:
    """Return how many steps are still to come; the losses of those before are forgotten, unless they are of a curve."""
    if not task.curve:
        training.losses.clear()
        return timed_steps(task.case)
    # The counted steps trained too: the curve begins with the first of them, and is as long on a CPU as on a GPU.
    finite = all(math.isfinite(float(loss)) for loss in training.losses)
    return max(1, task.case.steps - len(training.losses)) if finite or group.size > 1 else 1


def own_lines(task: Task, builder: StepBuilder | None = None) -> OwnLines:
    """Make the finder of own lines: those of files below the root, or in the folder of ``builder``."""
    file = getattr(getattr(builder, "__code__", None), "co_filename", None)
    return OwnLines([Path(task.root), *([Path(file).parent] if file else [])])


def _memory_of(counter: AllocationCounter) -> tuple[Callable[[], object], Callable[[], OfStep | None]]:
    """Return what begins a step, and what tells its memory at its end, where an allocator does not."""

    def of_step() -> OfStep:
        gc.collect()
        return counter.of_step()

    return counter.begin_step, of_step


def _nobody() -> None:
    """Meet nobody before a step, as asynchronous workers do."""


def counted_steps(case: Case) -> list[bool]:
    """Count the steps under the allocation counter, by whether the optimizer updates.

    The first makes its states. With them live, a step without gradients from before, and for accumulation one with them.
    Own code updates when it will: two whole rounds of the accumulation that its case declares.
    """
    if case.code:
        return [True] * (2 * case.gradient_accumulation)
    return [True, True] if case.gradient_accumulation == 1 else [True, False, True]


def is_own_code(case: Case, builder: StepBuilder | None) -> bool:
    """Tell if a case trains the user's own code, and not a model of the zoo."""
    return bool(case.code) or builder is not None


def build(
    task: Task,
    device: torch.device,
    builder: StepBuilder | None = None,
    group: Group = ALONE,
    own_work_done: Callable[[], None] = lambda: None,
) -> Trainable:
    """Build what the task's case steps, on ``device``."""
    case = task.case
    if not is_own_code(case, builder):
        return Training(case, task.scale, device, group, own_work_done, task.deepspeed)
    builder = builder or load_builder(case.code, Path(task.root), task.module)
    if case.args:
        builder = functools.partial(builder, **msgspec.json.decode(case.args))
    return OwnCodeTraining(case, task.scale, device, builder, group, own_work_done)


def known(count: int | None) -> int:
    assert count is not None, "a device either keeps peaks or counts"
    return count


def model_bytes(model: nn.Module, device: torch.device | None = None) -> int:
    """Return the bytes of the storages behind parameters, buffers and bitsandbytes' quantisation states, each once.

    Args:
        device: only of those on it.
    """

    def tensors() -> Iterable[Tensor]:
        yield from model.parameters()
        yield from model.buffers()
        for parameter in model.parameters():
            state: Any = getattr(parameter, "quant_state", None)
            while state is not None:
                yield from (value for value in vars(state).values() if isinstance(value, Tensor))
                state = getattr(state, "state2", None)

    on_device = (tensor for tensor in map(local, tensors()) if device is None or tensor.device == device)
    storages = (part.untyped_storage() for tensor in on_device for part in strided_parts(tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
