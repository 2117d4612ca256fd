"""Runs further steps after the timed ones, which only checks and counts need, and adds what they tell to the figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_gputrain.records.reply import UNPROFILED
from pytest_gputrain.worker.case_run import CaseRun, in_note
from pytest_gputrain.worker.checks import CheckFailed, Movement, check_losses, finite_losses
from pytest_gputrain.worker.compiling import uncompiled
from pytest_gputrain.worker.flops import FlopCount, count_flops
from pytest_gputrain.worker.gpu_events import CannotTell
from pytest_gputrain.worker.loop import Steps, schedule
from pytest_gputrain.worker.own_code import Checked
from pytest_gputrain.worker.precision import PRECISIONS
from pytest_gputrain.worker.profiled_steps import StepProfile, steps_to_profile
from pytest_gputrain.worker.python_calls import CannotCount, PythonCalls
from pytest_gputrain.worker.training import OwnCodeTraining

UNWATCHED: Final = (
    "without FLOPs, and without a check that every trained tensor gets a gradient: both take a step without torch.compile, "
    "which ran out of memory"
)
_UNCOUNTED: Final = (
    "without FLOPs and bytes moved, because the step in which they are counted failed, where the measured steps did not"
)
_FLOPS_FAILED: Final = "FLOPs are not known, because pytest-gputrain failed to count them"
_COUNTED_LESS: Final = "without further counts of what a step asks for, because the step after the last check failed"
_OTHER_STEP: Final = (
    "without calls of Python functions, because the step in which they are counted asks the GPU for something else than "
    "every timed step"
)
_COUNTS_FAILED: Final = "what a step asks for is not known, because pytest-gputrain failed to count it"
_UNCALLED: Final = "without calls of Python functions, because the step in which they are counted failed"

_COUNTED_STEPS: Final = 2
"""The number of steps of own code on a CPU in which operators and other events are counted."""
_COMPILING_STEPS: Final = 4
"""The number of such steps where own code compiles: the first two compile."""


class Confirmation:
    """Checks a case from the end of its build to the end of its last step.

    Args:
        counting: is open in the steps that are counted.

    Raises:
        CheckFailed: a tensor that is declared to be idle is not there.
    """

    def __init__(self, run: CaseRun, counting: contextlib.ExitStack) -> None:
        self._run = run
        self._movement = self._movement_of_model(counting)
        self._not_trained = ""
        """The note on tensors of own code that do not train."""

    def _movement_of_model(self, counting: contextlib.ExitStack) -> Movement | None:
        """Return the record of how the model's weights change, which itself is not counted; None if nothing can be
        checked."""
        run, training, computes = self._run, self._run.training, self._run.device.computes
        if run.own:
            run.own.seeds.end_build()
        # A curve may end in weights that are NaN, of which no check makes sense.
        if training.model is None or run.task.curve or not (computes or run.own):
            return None
        # fp16 rounds small gradients to zero, even if they are scaled. On an H200 this happened to 16 of 680 tensors of
        # Stable Diffusion 3.
        zeros = run.own is not None or PRECISIONS[run.case.precision].scaled
        with _disable_current_modes():
            movement = Movement(training.model, training.idle, accepts_zeros=zeros, knows_values=computes)
        if isinstance(training, OwnCodeTraining):
            movement.check_declared(training.idle_names)
        if not computes and not run.compile_calls.any:
            # A later step may train another part of the model. Without computed values only a hook can see which part a step
            # trains.
            counting.enter_context(movement.watching())
        return movement

    def check_losses(self, losses: tuple[float, ...], steps: int) -> None:
        """Add to the figures the losses that tell how the case trains.

        Args:
            steps: how many there were, those included in which tensors were counted.

        Raises:
            CheckFailed: one is not finite; or not every step of a curve gave one.
        """
        case = self._run.case
        if self._run.task.curve:
            losses = finite_losses(losses, case.model, steps=steps)[: case.steps]
        elif self._run.device.computes:
            check_losses(losses)
        self._run.set(losses=losses)

    def check(self, *, steps: int) -> Steps:
        """Run the further steps that only checks need, and add their results to the figures.

        Args:
            steps: how many there were before.

        Raises:
            CheckFailed: the case does not train, keeps more and more memory, or has operators that were not counted.
        """
        run, training, own, emulated = self._run, self._run.training, self._run.own, self._run.emulated
        growth = ""
        if own:
            kept, before = emulated.allocations.kept if emulated else None, len(run.figures.warmup_seconds)
            growth = yield from own.growth.check(training, run.device.allocated_bytes, kept, before)
            run.set(heap_growth=own.growth.on_heap)
        run.note(*training.notes, growth)
        if run.task.memory_only:
            return
        if run.operators:
            run.operators.steps.first = steps
            if not own and run.case.gradient_accumulation > 1:
                with uncompiled(run.case), _counting_step(run, update=False):
                    yield False
        flops = yield from self._watched(steps=steps + 1)
        checked = own.check(flops, training) if own else Checked(())
        if isinstance(training, OwnCodeTraining):
            run.set(batch_shapes=training.batch_shapes)
        if flops.trouble:
            checked = Checked((*checked.notes, f"{_FLOPS_FAILED} ({flops.trouble})"), knows_flops=False)
        if emulated:
            emulated.compiles |= run.compile_calls.any
            emulated.work = emulated.work if checked.knows_flops else None
        if checked.knows_flops:
            run.set(
                flops_per_step=(flops.total - flops.recomputed) or None,
                recomputed_flops_per_step=flops.recomputed if flops.total else None,
                tf32_share=flops.tf32_share or None,
            )
        run.note(self._not_trained, *checked.notes)
        yield from _count_own_steps(run)

    def _watched(self, *, steps: int) -> Generator[bool, None, FlopCount]:
        """Run a further step in which operations are counted and gradients are checked.

        Args:
            steps: how many there are with it.
        """
        run, own, movement = self._run, self._run.own, self._movement
        # In a compiled case this step runs uncompiled. It takes blocks of other sizes, and maybe more memory than there is.
        run.device.reset_peaks()
        may_fail = run.case.compile != "off" or run.emulated is not None
        if may_fail:
            run.device.limit(0)
        traced_later = run.compile_calls.any and run.group.size == 1
        updates = own is None or run.case.gradient_accumulation == 1
        with (
            # If one of several processes ran out of memory, the others would wait for it for ever. So only a single process
            # may fail.
            run.may_fail(self._why_unwatched, lambda: self._do_without(steps=steps - 1))
            if may_fail and run.group.size == 1
            else contextlib.nullcontext(),
            uncompiled(run.case),
            run.compile_calls.paused(),
            own.recording_threads() if own else contextlib.nullcontext(),
            contextlib.nullcontext() if traced_later else _counting_step(run, update=updates),
            run.emulated.counting_work() if run.emulated else count_flops() as flops,
            movement.watching() if movement else contextlib.nullcontext(),
            run.noting_shapes(),
        ):
            yield True
        moved, reached = movement.changes() if movement else (set(), set())
        # On an emulated GPU large messages between processes carry no contents, so each process reports its own tensors.
        if not run.emulated:
            moved, reached = run.group.union((moved, reached))
        # A CUDA graph calls no hooks of gradients, and on an emulated GPU it computes no values that would tell.
        if not (run.emulated and flops.launches_graphs):
            self._check_movement(moved, reached, steps=steps)
        return flops

    def _why_unwatched(self, error: BaseException) -> str | None:
        if isinstance(error, torch.OutOfMemoryError) and self._run.case.compile != "off":
            return UNWATCHED
        if self._run.emulated is None or isinstance(error, CheckFailed | SystemExit):
            return None
        return in_note(_UNCOUNTED, error)

    def _do_without(self, *, steps: int) -> None:
        """Make the checks that need no watched step, and note which checks are missing."""
        if self._movement is not None and self._run.device.computes:
            self._check_movement(self._movement.changes()[0], None, steps=steps)
        self._run.note(self._not_trained)

    def _check_movement(self, moved: set[str], reached: set[str] | None, *, steps: int) -> None:
        """Check that the model trains. For own code only note the tensors that do not, because only a baseline can tell
        whether that is wrong.

        Args:
            reached: the names of tensors that got a gradient; None if no step was watched.
        """
        training = self._run.training
        if self._movement is None:
            return
        if isinstance(training, OwnCodeTraining):
            # A step of own code may train only a part, such as one of two networks of a GAN, or the experts that were
            # chosen.
            reached = None if reached is None else reached | moved
            trained, self._not_trained = self._movement.tell(moved, reached, steps=steps, declared=training.idle_names)
            self._run.set(trained=trained)
        else:
            self._movement.check(moved, reached, steps=steps, remote_tensors=training.remote_tensors)


def _counting_step(run: CaseRun, *, update: bool) -> contextlib.AbstractContextManager[None]:
    """Provide a context that counts the operators and other events of a step on a CPU."""
    if run.operators is None:
        return contextlib.nullcontext()
    parameters = () if run.training.model is None else run.training.model.parameters()
    return run.operators.counting((value for value in parameters if value.requires_grad), update=update)


def _take_counts(run: CaseRun) -> None:
    """Add the counts of a CPU so far to the figures."""
    if run.operators is None:
        return
    run.set(counts=run.operators.counts())
    failed = f"{_COUNTS_FAILED} ({run.operators.trouble})" if run.operators.trouble else ""
    run.note("" if failed in run.figures.notes else failed)


def _count_own_steps(run: CaseRun) -> Steps:
    """Run further steps of own code in which operators and other events are counted, until a round of gradient accumulation
    is complete.

    Of several processes there is none, because the others would wait for one whose step fails.
    """
    if run.operators and run.own and run.group.size == 1:
        compiles, round_steps = run.compile_calls.any, run.case.gradient_accumulation
        if compiles:
            torch._dynamo.reset()  # a case before this one in the same process may have compiled the same code
        most = max(_COMPILING_STEPS if compiles else _COUNTED_STEPS, round_steps)
        with run.may_fail(lambda error: in_note(_COUNTED_LESS, error), lambda: _take_counts(run)):
            for number in range(0 if compiles else 1, most):
                with run.compile_calls.traced(), _counting_step(run, update=(number + 1) % round_steps == 0):
                    yield True
    _take_counts(run)


def count_python_calls(run: CaseRun) -> Steps:
    """Run one more step to count its calls of Python functions, if they can be compared with others."""
    emulated, counter = run.emulated.counter if run.emulated else None, run.counter
    rounds = run.case.gradient_accumulation > 1
    if counter is None or run.case.asynchronous or not run.measures_times:
        return
    if run.operators and run.own and rounds and (run.compile_calls.any or run.group.size > 1):
        # In such a case the counted micro-batches are other ones than the one that would run here, so nothing could be
        # compared.
        return
    # The optimizer must update in this step if the step is the last of a round of gradient accumulation. All earlier rounds
    # of a built-in model are complete, and the step that updates is counted. Own code is at the second step of a round on an
    # emulated GPU, and else at the first.
    update = not rounds or not run.own or (emulated is not None and run.case.gradient_accumulation == 2)
    with run.may_miss(_UNCALLED):
        if not run.own and rounds:
            yield False
        calls = PythonCalls(counter.lines, run.device.torch_device)
        try:
            with calls.counting():
                if emulated:
                    emulated.begin_step()
                yield update
                if emulated:
                    kind = emulated.end_further_step(update=update)
                else:
                    kind = counter.kind_of_step(0 if run.own and rounds else -1)
        except CannotCount as error:
            run.note(f"without calls of Python functions, because {error}")
        else:
            if kind is None:
                run.note(_OTHER_STEP)
            else:
                counter.python = calls, kind
    _take_counts(run)


def profile_gpu(run: CaseRun, meet: Callable[[], None], timed: Sequence[bool]) -> Steps:
    """Run further steps under a profiler to find out how long the GPU works in them.

    Args:
        meet: waits for the other processes between two steps.
        timed: for each timed step whether it updates.
    """
    if not run.is_profiled:
        return
    run.keep(run.figures)
    run.group.barrier()  # A process that fails after this point loses no other figure.
    run.progress.enter("profile")
    if isinstance(run.training, OwnCodeTraining):
        run.training.keeps_losses = False
    profile = StepProfile(run.device, meet)
    accumulation = run.case.gradient_accumulation
    # If the step of one of several processes failed, the others would wait for it for ever.
    with run.may_miss(UNPROFILED) if run.group.size == 1 else contextlib.nullcontext():
        yield from profile.steps(schedule(run.whole_rounds(steps_to_profile(timed, accumulation)), accumulation))
    with run.may_miss(UNPROFILED):
        try:
            gpu_steps, counts = profile.read()
        except CannotTell as error:
            run.note(f"without GPU seconds, because {error}")
        else:
            run.set(gpu_steps=gpu_steps, counts=counts if run.task.counts else None)
