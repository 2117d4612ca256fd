"""Runs a case on an emulated GPU: what surrounds its training there, and its figures, which have no times."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from msgspec import UNSET
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pytest_gputrain.cases.libraries import packages_of
from pytest_gputrain.hardware.step_time import NOT_COMPILED, expected_time
from pytest_gputrain.records import (
    Case,
    Counts,
    Crashed,
    EmulatedRun,
    ExpectedTime,
    Measurement,
    OutOfMemory,
    Reply,
    Served,
    Task,
    TracedCall,
)
from pytest_gputrain.records.emulated import NO_VALUES, NOT_MADE
from pytest_gputrain.records.emulation import (
    ASSUMPTION,
    BALANCED,
    ESTIMATED,
    MADE_UP,
    NotExchanged,
    OtherKernels,
    Unpadded,
    not_exchanged_sentence,
    unpadded_sentence,
)
from pytest_gputrain.utils.torch_beside import ORIGIN_VARIABLE
from pytest_gputrain.worker.device import Accelerator, Device
from pytest_gputrain.worker.device_allocations import DeviceAllocations
from pytest_gputrain.worker.emulated_values import tracking
from pytest_gputrain.worker.emulated_values.autograd_lines import AutogradLines
from pytest_gputrain.worker.emulated_values.contents import count_collective, is_small
from pytest_gputrain.worker.emulated_values.operators import A_TRUTH_VALUE, Observer
from pytest_gputrain.worker.flops import count_flops
from pytest_gputrain.worker.memory_recorder import estimated_bytes, not_exchanged, unknown
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.parallel import sharding_rules
from pytest_gputrain.worker.step_counts import StepCounter
from pytest_gputrain.worker.untouched_host import UntouchedHost
from pytest_gputrain.worker.work import WorkCount

_NAMED: Final = 2
"""Lines that a note names."""


class EmulatedFigures:
    """The figures of a case that only an emulated GPU gives: peaks of phases with their tensors, work of operators, and
    counts of each timed step.

    Args:
        device: the GPU.
        lines: finds the user's own lines; None for a case without own code.
        task: the task of the case.
    """

    def __init__(self, device: Accelerator, lines: OwnLines | None, task: Task) -> None:
        self._lines = AutogradLines(lines.of_frame if lines else None)
        self.counter = StepCounter(lines) if task.counts else None
        self.allocations = DeviceAllocations(
            device,
            self._lines,
            self.counter.note if self.counter else lambda line: None,
            names_tensors=not task.memory_only,
        )
        self.compiles = task.case.compile != "off"
        """Whether the step runs compiled, and its work is counted as it is written."""
        self.work: WorkCount | None = None
        """The work of the step whose FLOPs are counted; None before that step is over."""

    @contextlib.contextmanager
    def counting_work(self) -> Iterator[WorkCount]:
        """Provide a context for the step whose work is counted."""
        work = WorkCount(self._lines.current)
        FOLLOWED.work = work
        with count_flops(work):
            yield work
        FOLLOWED.work = None
        self.work = work


class _Followed:
    """Passes each operator to the observer of a case, which may be set after the operators were replaced."""

    def __init__(self) -> None:
        self.by: Observer | None = None
        self.work: WorkCount | None = None
        """Counts the step that runs."""
        self._is_enabled = False

    def enable(self) -> None:
        """Replace the operators of this process, and of processes that are forked from it."""
        if not self._is_enabled:
            tracking.enable(self)
            self._is_enabled = True

    def begin(self, operator: str) -> None:
        if self.by is not None:
            self.by.begin(operator)

    def end(self, output: Any) -> None:
        if self.by is not None:
            self.by.end(output)


FOLLOWED: Final = _Followed()


@contextlib.contextmanager
def training_on_emulated_gpu(case: Case, figures: EmulatedFigures) -> Iterator[None]:
    """Provide a context for all of a case on an emulated GPU, from its build to its last check."""
    FOLLOWED.by = figures.allocations
    FOLLOWED.enable()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(DistributedDataParallel, "__init__", _make_answered))
        if not case.code:
            stack.enter_context(mock.patch.object(torch.nn.init, "kaiming_uniform_", _draw_if_known))
        if case.parallel == "fsdp":
            stack.enter_context(sharding_rules.found_in_linear_time())
        if case.cpu_offload or case.offload_optimizer or case.offload_param:
            stack.enter_context(UntouchedHost())
        if case.parallel.startswith("zero"):
            # Otherwise DeepSpeed would compile its optimizers, which needs NVIDIA's compiler and takes minutes.
            stack.enter_context(mock.patch("deepspeed.ops.adam.fused_adam.FusedAdamBuilder", _InPlace))
            stack.enter_context(mock.patch("deepspeed.ops.adam.cpu_adam.CPUAdamBuilder", _InPlace))
        yield


_draw: Final = torch.nn.init.kaiming_uniform_


def _draw_if_known(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draw the first values of a weight, unless it is on the host, where its values would be unknown once it moves to the
    GPU.

    peft makes its adapters on the host, and draws those of 70B parameters for a second.
    """
    if not tensor.is_cpu or is_small(tensor):
        return _draw(tensor, *args, **kwargs)
    with torch.no_grad():
        return tensor.zero_()


class _InPlace:
    """Stands in for DeepSpeed's compiled optimizers, which work in place and allocate nothing. It computes nothing."""

    def load(self) -> _InPlace:
        """Return this object in place of a compiled library."""
        return self

    def multi_tensor_adam(self, *arguments: Any) -> None:
        """Do one update of `FusedAdam`."""

    def create_adam(self, *arguments: Any) -> None:
        """Stand in for `DeepSpeedCPUAdam`, as the next methods do."""

    def adam_update(self, *arguments: Any) -> None:
        """Do one update."""

    def destroy_adam(self, *arguments: Any) -> None:
        """Free the optimizer."""


_make: Final = DistributedDataParallel.__init__


def _make_answered(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    """Initialise DistributedDataParallel. With torch's fake process group each bucket of gradients is returned at once.

    The fake group answers an exchange with nothing, where the reducer wants the bucket.
    """
    _make(self, *args, **kwargs)
    if dist.get_backend(self.process_group) == "fake":
        # The hook has no annotations. torch compares annotations with types, and in this module annotations are texts.
        self.register_comm_hook(None, lambda state, bucket: _answer(bucket.buffer()))


def _answer(bucket: Tensor) -> torch.futures.Future[Tensor]:
    count_collective("allreduce_", bucket.nbytes)
    if FOLLOWED.work:
        FOLLOWED.work.add_exchange("allreduce_", bucket.nbytes)
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[bucket.device])
    future.set_result(bucket)
    return future


def emulated_reply(
    reply: Reply | Served, task: Task, device: Device, figures: EmulatedFigures
) -> EmulatedRun | OutOfMemory | Crashed:
    """Return the reply for an emulated GPU, from the reply that would be right for a real one.

    Args:
        device: whose kernels compute nothing.
    """
    if isinstance(reply, Measurement):
        return emulated_run(reply, task, device, figures)
    if isinstance(reply, OutOfMemory) and reply.where == "device":
        peaks = device.peaks()
        return EmulatedRun(
            **conditions(task, device),
            fits=False,
            refused=reply.message,
            peak_allocated_bytes=reply.peak_allocated_bytes or 0,
            peak_reserved_bytes=peaks.reserved or 0,
            device_used_bytes=peaks.used or 0,
            not_counted=tuple(unknown()),
            estimated_bytes=(estimated := estimated_bytes()),
            notes=(*of_estimates(estimated), *_own_rests_on(tracking.report())),
        )
    assert isinstance(reply, OutOfMemory | Crashed), "a worker on an emulated GPU serves nobody, and waits for nobody"
    return reply


def with_made_up_values(crashed: Crashed) -> Crashed:
    """Return what an emulated GPU replies of an error, which may follow from values that nobody computed."""
    said = (crashed.sentence, *read_though_unknown(tracking.report()["unknown_reads"]))
    return msgspec.structs.replace(crashed, sentence="; before, ".join(said))


def emulated_run(measured: Measurement, task: Task, device: Device, figures: EmulatedFigures) -> EmulatedRun:
    """Return the figures of a measurement that are true of an emulated GPU."""
    allocations, work = figures.allocations, figures.work
    unnamed = f"the tensors at the peaks are not named: {allocations.why_unknown}" if allocations.why_unknown else ""
    counts, reads = figures.counter.counts() if figures.counter else None, tracking.report()
    return EmulatedRun(
        **conditions(task, device),
        fits=True,
        peak_allocated_bytes=measured.peak_allocated_bytes,
        peak_reserved_bytes=measured.peak_reserved_bytes or 0,
        device_used_bytes=measured.device_used_bytes or 0,
        memory_of_steps=measured.memory_of_steps,
        kept_behind=measured.kept_behind,
        heap_growth=measured.heap_growth,
        allowed_growth=measured.allowed_growth,
        phase_peak_bytes={**allocations.phase_peak_bytes, **measured.phase_peak_bytes},
        largest={**allocations.largest(), **measured.largest},
        peak_bytes_by_origin=allocations.peak_bytes_by_origin(),
        bytes_per_step=work.bytes if work else None,
        expected=_expected(work.calls(), task, compiled=figures.compiles) if work else None,
        counts=counts,
        evaluation_counts=measured.evaluation_counts,
        trained=measured.trained,
        batch_shapes=measured.batch_shapes,
        operators=work.by_operator() if work else {},
        parameters=measured.parameters,
        trainable_parameters=measured.trainable_parameters,
        model_bytes=measured.model_bytes,
        flops_per_step=measured.flops_per_step,
        recomputed_flops_per_step=measured.recomputed_flops_per_step,
        not_counted=tuple(unknown()),
        estimated_bytes=(estimated := estimated_bytes()),
        notes=(
            *measured.notes,
            *filter(None, [unnamed]),
            *of_estimates(estimated),
            NO_VALUES if measured.trained else NOT_MADE,
            *_own_rests_on(reads),
            *of_counts(counts, reads["unknown_reads"]),
        ),
    )


def _expected(calls: Sequence[TracedCall], task: Task, *, compiled: bool) -> ExpectedTime:
    """Return the expected seconds of a step that makes these calls."""
    case, lacking = task.case, ""
    if case.cpu_offload or case.offload_optimizer or case.offload_param:
        lacking = "it is not known how fast the host computes and moves what the case offloads to it"
    elif compiled:
        lacking = NOT_COMPILED
    steps = case.gradient_accumulation
    return expected_time(calls, task.rates, processes=task.processes, accumulation=steps, lacking=lacking)


def conditions(task: Task, device: Device) -> dict[str, Any]:
    """Return the fields of a run on an emulated GPU with the conditions that its figures depend on."""
    properties = torch.cuda.get_device_properties(device.torch_device)
    origin = os.environ.get(ORIGIN_VARIABLE)
    return {
        "torch_build": f"{torch.__version__} of {origin}" if origin else UNSET,
        "device_name": other.name if (other := _other_kernels()) else properties.name,
        "device_memory_bytes": properties.total_memory,
        "runtime": torch.version.cuda,
        "packages": packages_of(task.case),
        "processes": task.processes,
    }


def _other_kernels() -> OtherKernels | None:
    return OtherKernels.of_description(os.environ["GPUTRAIN_EMULATED_DEVICE"])


def rests_on(
    dealt: Sequence[Mapping[str, str | int]],
    assumed: Sequence[Mapping[str, str | int]],
    calls: Sequence[NotExchanged],
    unpadded: Sequence[Unpadded],
) -> Iterator[str]:
    """Yield what the figures assume: values that nobody computed or exchanged, or kernels of another GPU."""
    if other := _other_kernels():
        yield other.sentence
    if dealt:
        yield f"{BALANCED}, by {_places(dealt)}"
    if assumed:
        yield f"{ASSUMPTION}, by {_places(assumed)}"
    if calls:
        yield not_exchanged_sentence(calls)
    if unpadded:
        yield unpadded_sentence(unpadded)


def _own_rests_on(reads: Mapping[str, Sequence[Mapping[str, str | int]]]) -> Iterator[str]:
    """Yield what the figures of this process assume."""
    calls = msgspec.convert(list(not_exchanged()), list[NotExchanged])
    return rests_on(reads["dealt"], reads["assumed"], calls, msgspec.convert(reads["unpadded"], list[Unpadded]))


def of_estimates(estimated: int) -> Iterator[str]:
    """Yield the sentence on estimated workspaces, if there are any."""
    if estimated:
        yield ESTIMATED


def read_though_unknown(reads: Sequence[Mapping[str, str | int]]) -> Iterator[str]:
    """Yield a sentence on the lines at which a script has read made-up values."""
    if reads:
        yield f"{MADE_UP}, by {_places(reads)}"


def of_counts(counts: Counts | None, reads: Sequence[Mapping[str, str | int]]) -> Iterator[str]:
    """Yield sentences on what the counts lack, and on the unknown values that decided what the program did.

    It may have gone another way than on a GPU.
    """
    if counts is None:
        return
    if counts.lines_unknown:
        yield f"what the steps ask of the GPU has no lines: {counts.lines_unknown}"
    if chosen := [one for one in reads if str(one["what"]).startswith(A_TRUTH_VALUE)]:
        yield f"what the steps ask of the GPU rests on values that nobody computed: {_places(chosen)}"


def _places(happened: Sequence[Mapping[str, str | int]]) -> str:
    return ", ".join(f"{one['what']} at {one['where']}" for one in happened[:_NAMED])
