"""Runs one case, from its task to its reply: builds it, counts, warms up, times and checks its steps."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pytest_gputrain.cases.architectures.facts import Architecture
from pytest_gputrain.records import Case, Crashed, Measurement, OutOfMemory, Reply, Served, Task
from pytest_gputrain.worker.allocations import AllocationCounter
from pytest_gputrain.worker.checks import CheckFailed, Movement, check_losses, check_peak, finite_losses, local
from pytest_gputrain.worker.compiling import CompileCalls, uncompiled
from pytest_gputrain.worker.device import Accelerator, Cpu, Device, peak_host_bytes
from pytest_gputrain.worker.environment import environment_of
from pytest_gputrain.worker.flops import FlopCount, count_flops
from pytest_gputrain.worker.group import ALONE, Group
from pytest_gputrain.worker.loop import TimedOnDevice, schedule, timed
from pytest_gputrain.worker.own_code import Checked, OwnCode
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.parallel import NEEDS_GROUP
from pytest_gputrain.worker.parallel.table_server import TableServer
from pytest_gputrain.worker.precision import tf32_allowed
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.straggler_clock import StragglerClock
from pytest_gputrain.worker.training import OPTIMIZERS, OwnCodeTraining, StepBuilder, Trainable, Training, load_builder

SEED: Final = 20_240_101

_LIBRARY_OUT_OF_MEMORY: Final = re.compile("(CUBLAS|CUDNN|HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED", re.I)
"""How libraries tell that their workspace did not fit, which happens a few MiB before torch's allocator finds no memory."""


Keep = Callable[[Measurement | Served], None]
"""Called with the figures as soon as the last timed step is over, so that nothing that fails afterwards loses them."""


def run(
    task: Task,
    progress: Progress,
    builder: StepBuilder | None = None,
    group: Group = ALONE,
    keep: Keep = lambda figures: None,
) -> Reply | Served:
    """Train, measure and check. Whatever goes wrong becomes a reply; only signals and a broken interpreter do not return.

    Leaves torch's seed, its number of threads on a CPU, and a frozen heap behind: a worker ends here, others mend that.

    Args:
        builder: the user's function itself, for a run inside the pytest process.
        group: this process among those of the case.
        keep: gets the figures before they are checked.
    """
    device: Device | None = None
    try:
        device = Cpu() if task.device_type == "cpu" or group.serves else Accelerator(group.local_rank)
        torch.manual_seed(SEED)
        even_alone = task.case.parallel in NEEDS_GROUP
        own = None
        if is_own_code(task.case, builder):
            own = OwnCode(task, group, counts_memory=device.type == "cpu")
        with (
            group.joined(device.torch_device, even_alone=even_alone),
            device.keeping_peaks(),
            tf32_allowed(task.case.tf32 if device.type != "cpu" else None),
            own.running() if own else contextlib.nullcontext(),
        ):
            if group.serves:
                return _serve(task, progress, device, group, keep)
            return _measure(task, progress, device, builder, group, keep, own)
    except CheckFailed as error:
        return Crashed(sentence=str(error), phase=progress.phase, step=progress.step)
    except Exception as error:
        where = _out_of_memory(error)
        if where is None or device is None or progress.phase == "check":  # whose steps have fitted
            return crash(error, progress)
        peaks = device.peaks()
        return OutOfMemory(
            where=where,
            phase=progress.phase,
            message=_first_line(error),
            step=progress.step,
            peak_allocated_bytes=peaks.allocated,
            environment=environment_of(device, group),
        )


def crash(error: BaseException, progress: Progress) -> Crashed:
    """An exception as a reply, with its traceback."""
    return Crashed(
        sentence=f"{type(error).__name__}: {_first_line(error)}",
        phase=progress.phase,
        step=progress.step,
        detail="".join(traceback.format_exception(error)),
    )


def _measure(
    task: Task,
    progress: Progress,
    device: Device,
    builder: StepBuilder | None,
    group: Group,
    keep: Keep,
    own: OwnCode | None,
) -> Measurement:
    case = task.case

    def report(step: int, seconds: float) -> bool:
        progress.stepped(step, seconds, device.allocated_bytes())
        # What comes after a loss that is not finite is no training: the rest of a curve need not be waited for. Of several
        # processes none may end before the others.
        return task.curve and group.size == 1 and bool(training.losses) and not math.isfinite(float(training.losses[-1]))

    # Asynchronous workers meet once: how far one runs ahead of another is their own affair.
    meet = _nobody if case.asynchronous else group.barrier

    def begin_step() -> None:
        meet()
        if own:
            own.growth.begin_step()
        own_work.begin()

    def end_step(step: int, seconds: float) -> bool:
        own_work.note()
        if own:
            own.growth.end_step(training, device.allocated_bytes())
        return report(step, seconds)

    own_work, compile_calls = StragglerClock(device), CompileCalls()
    progress.enter("build")
    device.reset_peaks()
    with (
        device.counting(_own_lines(task, builder).current) as counter,
        compile_calls.noted() if own else contextlib.nullcontext(),
    ):
        training = build(task, device.torch_device, builder, group, own_work.done)
        # A curve may end in weights that are NaN, of which nothing can be checked.
        movement = None if training.model is None or task.curve else _movement(training.model, training.idle, own)
        # Libraries raise and catch exceptions when they are first used, whose frames hold what was being built.
        gc.collect()
        device.reset_peaks()
        if counter is not None:
            _count(training, case, counter, progress, own)

    counted = None if counter is None else counter.peaks()
    # What the build left on the heap never becomes garbage: without this, a collection of it costs one step 0.2 s.
    gc.collect()
    gc.freeze()
    progress.enter("warmup")
    warmup = timed(training.step, schedule(case.warmup, case.gradient_accumulation), device.synchronize, report, meet)
    group.barrier()
    progress.enter("measure")
    stamped = TimedOnDevice(training.step, device)
    updates = schedule(_steps_to_time(task, training, group), case.gradient_accumulation)
    seconds = timed(stamped, updates, device.synchronize, end_step, begin_step)

    peaks, host = device.peaks(), peak_host_bytes()
    losses = tuple(float(loss) for loss in training.losses)
    figures = Measurement(
        step_seconds=tuple(seconds),
        device_step_seconds=stamped.seconds,
        warmup_seconds=tuple(warmup),
        losses=tuple(itertools.takewhile(math.isfinite, losses)),
        batch_size=training.samples,
        sequence_length=training.sequence_length,
        updates=training.updates,
        parameters=training.parameters,
        trainable_parameters=training.trainable_parameters,
        model_bytes=None if training.model is None else model_bytes(training.model),
        peak_allocated_bytes=_known(peaks.allocated if counted is None else counted.bytes),
        phase_peak_bytes=counted.by_phase if counted else {},
        largest=counter.trace.largest_at_peaks(counted) if counter and counted else {},
        peak_reserved_bytes=peaks.reserved,
        device_used_bytes=peaks.used,
        peak_host_bytes=host,
        own_seconds=tuple(own_work.seconds) if group.size > 1 else (),
        uncompiled=compile_calls.any and counter is not None,
        counted_threads=max(1, len(counter.threads)) if own and counter is not None else 1,
        environment=environment_of(device, group),
    )
    keep(figures)
    progress.enter("check")
    check_peak(peaks, 0 if training.model is None else model_bytes(training.model, device.torch_device))
    if task.curve:
        step_count = (0 if counter is None else len(counted_steps(case))) + len(warmup) + len(seconds)
        losses = finite_losses(losses, case.model, steps=step_count)[: case.steps]
    else:
        check_losses(losses)
    # A compiled case takes its last step as it is written: in blocks of other sizes than those that the allocator has kept.
    device.reset_peaks()
    flops = _watched(training, case, movement, group, own, steps=len(warmup) + len(seconds) + 1)
    checked = own.check(flops, training, device.allocated_bytes) if own else Checked(())
    training.leave()
    return msgspec.structs.replace(
        figures,
        losses=losses,
        flops_per_step=(flops.total - flops.recomputed) or None if checked.knows_flops else None,
        recomputed_flops_per_step=flops.recomputed if flops.total and checked.knows_flops else None,
        notes=checked.notes,
    )


def _steps_to_time(task: Task, training: Trainable, group: Group) -> int:
    """How many steps are still to come; the losses of those before are forgotten, unless they are of a curve."""
    if not task.curve:
        training.losses.clear()
        return task.case.steps
    # The counted steps trained too: the curve begins with the first of them, and is as long on a CPU as on a GPU.
    finite = all(math.isfinite(float(loss)) for loss in training.losses)
    return max(1, task.case.steps - len(training.losses)) if finite or group.size > 1 else 1


def _watched(
    training: Trainable, case: Case, movement: Movement | None, group: Group, own: OwnCode | None, *, steps: int
) -> FlopCount:
    """A further step, whose operations are counted and whose gradients are checked.

    Args:
        steps: how many there are with it.

    Raises:
        CheckFailed: the model does not train.
    """
    with (
        uncompiled(case),
        own.witnessed() if own else contextlib.nullcontext(),
        count_flops() as flops,
        movement.watching() if movement else contextlib.nullcontext(),
    ):
        training.step(True)
    moved, reached = group.union(movement.changes() if movement else (set(), set()))
    if movement is not None:
        # A step of own code may train but a part, as one of two players or the experts that are chosen.
        movement.check(moved, (reached | moved) if own else reached, steps=steps, remote_tensors=training.remote_tensors)
    return flops


def _count(training: Trainable, case: Case, counter: AllocationCounter, progress: Progress, own: OwnCode | None) -> None:
    """Steps for the tensors that live in them."""
    progress.enter("count")
    counter.threads.clear()
    with uncompiled(case):  # what has run while tensors are counted is never compiled afterwards
        if own:
            own.growth.count(training, lambda: counter.live_bytes, counter.begin_step)
            return
        for update in counted_steps(case):
            counter.begin_step()
            training.step(update)


def _movement(model: nn.Module, idle: Sequence[str], own: OwnCode | None) -> Movement:
    """Return that of the model. Its look at the weights is no part of the build that is counted."""
    with _disable_current_modes():
        return Movement(model, idle, accepts_zeros=own is not None)


def _own_lines(task: Task, builder: StepBuilder | None = None) -> OwnLines:
    """Make the finder of own lines: of files below the root, and in the folder of a function that was given as itself."""
    file = getattr(getattr(builder, "__code__", None), "co_filename", None)
    return OwnLines([Path(task.root), *([Path(file).parent] if file else [])])


def _nobody() -> None:
    """Whom asynchronous workers meet before a step."""


def _serve(task: Task, progress: Progress, device: Device, group: Group, keep: Keep) -> Served:
    """A parameter server's life: from the first worker's tables to the last worker's leave."""
    case = task.case
    progress.enter("build")
    optimizer = OPTIMIZERS[case.optimizer]
    with device.counting(_own_lines(task).current) as counter:
        server = TableServer(group, case.asynchronous, lambda rows: optimizer(rows, case.learning_rate))
        progress.enter("count")
        # Those of the workers' counted steps: the first makes the optimizer's states, the second finds them there.
        server.serve(updates=2 * (group.size if case.asynchronous else 1))
    gc.collect()
    gc.freeze()
    progress.enter("measure")
    server.serve()
    figures = Served(
        updates=server.updates,
        rows=server.rows,
        model_bytes=server.bytes,
        peak_allocated_bytes=_known(None if counter is None else counter.peak_bytes),
        peak_host_bytes=peak_host_bytes(),
    )
    keep(figures)
    progress.enter("check")
    if not task.curve:
        server.check()
    return figures


def counted_steps(case: Case) -> list[bool]:
    """The steps under the allocation counter, by whether the optimizer updates.

    The first makes its states. With them live, a step without gradients from before, and for accumulation one with them.
    Own code updates when it will: two whole rounds of the accumulation that its case declares.
    """
    if case.code:
        return [True] * (2 * case.gradient_accumulation)
    return [True, True] if case.gradient_accumulation == 1 else [True, False, True]


def typical_step(case: Case) -> int:
    """Tell which of the counted steps is like most: it finds the optimizer's states, and updates only if all do."""
    return case.gradient_accumulation if case.code else 1


def is_own_code(case: Case, builder: StepBuilder | None) -> bool:
    """Tell if a case trains the user's own code, and not a model of the zoo."""
    return bool(case.code) or builder is not None


def build(
    task: Task,
    device: torch.device,
    builder: StepBuilder | None = None,
    group: Group = ALONE,
    own_work_done: Callable[[], None] = lambda: None,
    architecture: Architecture | None = None,
) -> Trainable:
    """What the task's case steps, on ``device``.

    Args:
        architecture: of the model of the zoo, instead of its own.
    """
    case = task.case
    if not is_own_code(case, builder):
        return Training(case, task.scale, device, group, own_work_done, architecture, task.deepspeed)
    builder = builder or load_builder(case.code, Path(task.root), task.module)
    return OwnCodeTraining(case, task.scale, device, builder, group, own_work_done)


def _known(count: int | None) -> int:
    assert count is not None, "a device either keeps peaks or counts"
    return count


def model_bytes(model: nn.Module, device: torch.device | None = None) -> int:
    """Bytes of the storages behind parameters, buffers and bitsandbytes' quantisation states, each once.

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
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in on_device}
    return sum(storages.values())


def _out_of_memory(error: Exception) -> Literal["device", "host"] | None:
    """Tell which memory ran out, None for any other error. torch has no exception of its own for the CPU's."""
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    message = str(error)
    if isinstance(error, RuntimeError) and "out of memory" in message and ("CUDA" in message or "HIP" in message):
        return "device"  # allocated by a library beside torch's allocator
    if isinstance(error, RuntimeError) and _LIBRARY_OUT_OF_MEMORY.search(message):
        return "device"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in message):
        return "host"
    return None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
