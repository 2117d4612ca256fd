"""Measures a training: builds it, counts, warms up, times and checks its steps, whoever runs them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
from collections.abc import Generator, Sequence
from typing import Final

from pytest_gputrain.records import Measurement
from pytest_gputrain.records.step_memory import folded
from pytest_gputrain.utils.linux import CoreWait
from pytest_gputrain.worker.allocations import AllocationCounter
from pytest_gputrain.worker.beside_steps import BesideSteps
from pytest_gputrain.worker.building import build
from pytest_gputrain.worker.case_run import CaseRun
from pytest_gputrain.worker.checks import check_peak, model_bytes
from pytest_gputrain.worker.compiling import uncompiled
from pytest_gputrain.worker.device import Peaks, peak_host_bytes
from pytest_gputrain.worker.environment import environment_of
from pytest_gputrain.worker.further_steps import Confirmation, count_python_calls, profile_gpu
from pytest_gputrain.worker.loop import Steps, counted_steps, lead_in, levelled, schedule, timed, timed_steps
from pytest_gputrain.worker.memory_beside import MemoryBeside
from pytest_gputrain.worker.own_code import OwnCode
from pytest_gputrain.worker.profiled_steps import StepProfile, find_gpu
from pytest_gputrain.worker.step_memory import StepMemory
from pytest_gputrain.worker.straggler_clock import StragglerClock
from pytest_gputrain.worker.training import OwnCodeTraining, StepBuilder

_ATTACHED: Final = (
    "timed with torch's profiler attached, because a step was profiled in this process before, which may make each launch "
    "slower; without inline the case has a process of its own"
)


class Measuring:
    """Builds and measures one case, as a chain of phases.

    A training may own its loop, as a generator or a framework's trainer does. So this calls no step: `_steps` is a generator
    that the training resumes before each of its steps and after the last one.
    """

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self._own_work = StragglerClock(run.device)
        self._beside = MemoryBeside(after=3 * run.case.gradient_accumulation)
        self._beside_steps = BesideSteps(run.task, run.device, run.group, run.progress, run.lines, run.emulated)
        self._counter: AllocationCounter | None = None
        """Counts the tensors of a CPU, where no allocator does."""
        self._memory = StepMemory(run)
        self._is_checked = False

    def run(self, builder: StepBuilder | None) -> Measurement:
        """Build the case, and run its training to its last check.

        Args:
            builder: the user's function itself, for a run inside the pytest process.

        Raises:
            CheckFailed: the case does not train as it says, or ends before it is measured.
        """
        run, device = self._run, self._run.device
        run.progress.enter("build")
        device.reset_peaks()
        if limit := run.task.limit:
            device.limit(0 if limit.of_steps else limit.bytes)
        with contextlib.ExitStack() as counting, contextlib.ExitStack() as noting:
            self._counter = counting.enter_context(device.counting(run.lines.current))
            if run.emulated:
                counting.enter_context(run.emulated.allocations.following())
            if run.own:
                # On a CPU later steps run uncompiled, too. So calls of compiled functions are noted until the end.
                (noting if run.on_cpu else counting).enter_context(run.compile_calls.noted())
                if self._counter is not None:
                    counting.enter_context(self._beside.noting(run.lines))
            run.training = build(run.task, device.torch_device, builder, run.group, self._own_work.done)
            if run.own:
                self._ask(run.own)
            finish = None
            with contextlib.closing(self._steps(counting)) as steps:
                try:
                    run.training.run(steps)
                    assert self._is_checked, "a training runs until it has no more steps to run"
                except (Exception, SystemExit) as error:
                    note_of, finish = run.fallback or (lambda error: None, None)
                    if (note := note_of(error)) is None:
                        raise
                    run.note(note)
            if finish:
                device.reset_peaks()  # The exception is freed by now, with all tensors of its frames.
                finish()
        if run.is_profiled:
            run.progress.enter("check")
        run.training.leave()
        return run.figures

    def _ask(self, own: OwnCode) -> None:
        """Provide a context that counts the batches and the optimizer updates of own code, and that notes where the build of
        a generator ends."""
        run, training = self._run, self._run.training
        if run.counter:
            run.counter.asked = own.asked
        if isinstance(training, OwnCodeTraining):
            training.optimizer_steps.when_updating = own.asked.updated
            if self._counter is not None:
                self._counter.phases.first_step_began = training.first_step_began
            if run.emulated:
                run.emulated.allocations.phases.first_step_began = training.first_step_began

    def _steps(self, counting: contextlib.ExitStack) -> Steps:
        run, device, memory, emulated = self._run, self._run.device, self._memory, self._run.emulated
        confirmation = Confirmation(run, counting)
        # The first use of a library may raise and catch exceptions. Their frames keep what was being built.
        gc.collect()
        device.reset_peaks()
        if run.task.limit and run.task.limit.of_steps:
            device.limit(run.task.limit.bytes)
        if self._counter is not None:
            yield from self._count(self._counter)
        followed = memory.counter = self._counter if run.runs_to_end else None
        if followed:
            followed.follow_sizes_only()
        elif not emulated:
            counting.close()
        # Objects of the build never become garbage. If they were not frozen, looking through them would make one step 0.2 s
        # longer.
        gc.collect()
        gc.freeze()
        run.progress.enter("warmup")
        with run.noting_shapes():
            warmup_seconds = yield from self._warm_up()
        if emulated and emulated.counter:
            emulated.counter.first = len(warmup_seconds)
        run.group.barrier()
        run.progress.enter("measure")
        updates = schedule(run.whole_rounds(self._steps_to_time()), run.case.gradient_accumulation)
        core_wait = CoreWait()
        step_seconds = yield from self._timed(updates)
        core_wait_share = core_wait.share()
        peaks = device.peaks()
        losses = tuple(float(loss) for loss in run.training.losses)
        run.figures = self._unchecked(step_seconds, warmup_seconds, losses, peaks, core_wait_share)
        run.keep(run.figures)
        if self._counter is None:
            run.figures = self._beside_steps.behind_timed_steps(run.training, run.figures)
        if not followed:
            counting.close()
        with followed.paused() if followed else contextlib.nullcontext():
            yield from self._finish(confirmation, losses, peaks)
            yield from profile_gpu(run, self._meet, updates)
        if run.runs_to_end and run.own:
            yield from memory.to_the_end(run.own.growth)

    def _meet(self) -> None:
        """Wait for the other processes. Asynchronous workers wait only once, because one may run ahead of the others."""
        if not self._run.case.asynchronous:
            self._run.group.barrier()

    def _begin_step(self) -> None:
        """Begin a step of the warm-up, or a timed step."""
        self._meet()
        if self._run.emulated:
            self._run.emulated.allocations.begin_step()
        self._memory.begin_step()

    def _end_step(self, step: int, seconds: float) -> bool:
        """End a step of the warm-up, or a timed step. Return whether further steps make no sense."""
        run, losses = self._run, self._run.training.losses
        if run.emulated:
            losses.clear()  # These losses mean nothing, and they would take memory.
            run.emulated.allocations.end_step()
        self._memory.end_step()
        run.progress.stepped(step, seconds if run.device.computes else None, run.device.allocated_bytes())
        # After a loss that is not finite a single process ends its curve. Several processes must make the same number of
        # steps.
        return run.task.curve and run.group.size == 1 and not all(math.isfinite(float(loss)) for loss in losses[-1:])

    def _count(self, counter: AllocationCounter) -> Steps:
        """Run steps that count their tensors."""
        run, own, beside = self._run, self._run.own, self._beside
        run.progress.enter("count")
        counter.threads.clear()
        # Without `uncompiled`, torch would never compile a module that has run here.
        with run.noting_shapes(), uncompiled(run.case):
            if own is None:
                for update in counted_steps(run.case):
                    counter.begin_step()
                    yield update
                return

            def begin_step() -> None:
                beside.begin_step(counter.trace)
                counter.begin_step()

            def end_step() -> None:
                self._memory.note(counter.of_step())

            yield from own.growth.count(run.training, lambda: counter.live_bytes, begin_step, end_step)
            beside.end(counter.trace)
            self._beside_steps.run(run.training, counter)
            if not run.task.curve and run.group.size == 1 and not run.case.epoch:
                yield from self._memory.follow(own.growth, counter)

    def _warm_up(self) -> Generator[bool, None, tuple[float, ...]]:
        """Run the steps before the timed ones; return their seconds."""
        case, device = self._run.case, self._run.device
        updates = schedule(self._run.whole_rounds(case.warmup), case.gradient_accumulation)
        warmup = yield from timed(updates, device, self._end_step, self._begin_step)
        if not case.loader_workers or self._run.task.curve:
            return warmup
        # If batches were loaded while nothing trains, a slow loader would not be noticed.
        self._run.training.drain()
        updates = schedule(lead_in(case), case.gradient_accumulation)
        return warmup + (yield from timed(updates, device, self._end_step, self._begin_step))

    def _steps_to_time(self) -> int:
        """Return how many steps remain. The losses of earlier steps are dropped, except those of a curve."""
        run, losses = self._run, self._run.training.losses
        if not run.task.curve:
            losses.clear()
            return timed_steps(run.case)
        # A curve includes the counted steps, because they trained as well. So it has the same length on a CPU and on a GPU.
        finite = all(math.isfinite(float(loss)) for loss in losses)
        return max(1, run.case.steps - len(losses)) if finite or run.group.size > 1 else 1

    def _timed(self, updates: Sequence[bool]) -> Generator[bool, None, tuple[float, ...]]:
        """Run the timed steps; return their seconds."""
        run, own, counter = self._run, self._run.own, self._run.emulated.counter if self._run.emulated else None

        def begin_step() -> None:
            self._begin_step()
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
                own.growth.end_step(run.training, run.device.allocated_bytes())
            return self._end_step(step, seconds)

        # Looking at shapes takes time, which the figures of a real device would include.
        with contextlib.nullcontext() if run.device.computes else run.noting_shapes():
            return (yield from timed(updates, run.device, end_step, begin_step))

    def _unchecked(
        self,
        step_seconds: tuple[float, ...],
        warmup_seconds: tuple[float, ...],
        losses: tuple[float, ...],
        peaks: Peaks,
        core_wait_share: float | None,
    ) -> Measurement:
        """Return the figures of the timed steps, before any check."""
        run, training, counter = self._run, self._run.training, self._counter
        counted = None if counter is None else counter.peaks()
        waits = run.own.asked.waits if run.own and run.own.asked.loads else training.input_waits[-len(step_seconds) :]
        uncounted = (*counter.uncounted(), *self._beside.uncounted(counted.bytes)) if counter and counted else ()
        allocated = counted.bytes if counted else peaks.allocated
        assert allocated is not None, "a device either keeps peaks or counts"
        attached = not run.on_cpu and StepProfile.is_attached
        return Measurement(
            step_seconds=levelled(step_seconds, run.case.loader_workers),
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
            peak_allocated_bytes=allocated,
            phase_peak_bytes=counted.by_phase if counted else {},
            memory_of_steps=folded(self._memory.of_steps) if run.own or not counted else (),
            allowed_growth=run.task.growth_bytes,
            largest=counter.trace.largest_at_peaks(counted) if counter and counted else {},
            peak_reserved_bytes=peaks.reserved,
            device_used_bytes=peaks.used,
            peak_host_bytes=peak_host_bytes(),
            own_seconds=tuple(self._own_work.seconds) if run.group.size > 1 else (),
            core_wait_share=core_wait_share,
            counted_threads=max(1, len(counter.threads)) if run.own and counter is not None else 1,
            uncounted_memory=bool(uncounted),
            uncompiled=run.compile_calls.any and counter is not None,
            notes=(*uncounted, *filter(None, [self._memory.late_growth, _ATTACHED if attached else ""])),
            environment=environment_of(run.device, run.group),
        )

    def _finish(self, confirmation: Confirmation, losses: tuple[float, ...], peaks: Peaks) -> Steps:
        """Run the further steps that only checks and counts need.

        Args:
            losses: the losses of the timed steps; for a curve, of all steps.
        """
        run, training, device = self._run, self._run.training, self._run.device
        run.progress.enter("check")
        check_peak(peaks, model_bytes(training.model, device.torch_device))
        steps = len(run.figures.warmup_seconds) + len(run.figures.step_seconds)
        confirmation.check_losses(losses, steps + (len(counted_steps(run.case)) if run.on_cpu else 0))
        if run.is_profiled:
            find_gpu()
        yield from confirmation.check(steps=steps)
        counts = run.operators is not None and not run.compile_calls.any
        run.figures = self._beside_steps.behind_checks(training, run.figures, counts=counts)
        self._is_checked = True
        yield from count_python_calls(run)
