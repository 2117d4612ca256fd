"""From a task to its prediction."""

from __future__ import annotations

import gc
from typing import Final

import msgspec
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from pytest_gputrain.cases import library_versions
from pytest_gputrain.records import Crashed, OperatorWork, Prediction, Target, Task
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.dry_run.allocator import Allocator, in_order, replay
from pytest_gputrain.worker.dry_run.attention import temporaries
from pytest_gputrain.worker.dry_run.layouts import layouts
from pytest_gputrain.worker.dry_run.patches import patched
from pytest_gputrain.worker.dry_run.tracker import TENSOR_RATES, Tracker
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.parallel import NEEDS_GROUP
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.recipe import StepBuilder
from pytest_gputrain.worker.run import SEED, build, counted_steps, crash, model_bytes

SHOWN: Final = 8
"""Rows of the largest tensors at each peak."""

HOST: Final = torch.device("cpu")
GPU: Final = torch.device("cpu", 0)
"""Labels of fakes, which any torch can run. They are two devices: what is on the one must be copied to the other."""


def predict(task: Task, progress: Progress, builder: StepBuilder | None = None) -> Prediction | Crashed:
    """Build and step the task's case on fake tensors, as on the task's target.

    Two steps, and a third for accumulation: those that a worker counts allocations in.
    """
    assert task.target is not None, "a prediction is for a device"
    try:
        return _predicted(task, task.target, progress, builder)
    except CheckFailed as error:
        return Crashed(sentence=str(error), phase=progress.phase)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        sentence = (
            f"the case reads what a tensor holds ({error.func}), which a dry run does not know; least of all where it comes "
            "from another process: measure it"
        )
        return msgspec.structs.replace(crash(error, progress), sentence=sentence)
    except Exception as error:
        return crash(error, progress)


def _predicted(task: Task, target: Target, progress: Progress, builder: StepBuilder | None) -> Prediction:
    cuda = target.kind == "cuda"
    device = GPU if cuda else HOST
    tracker = Tracker(
        device,
        rounding=512 if cuda else 1,
        layouts=layouts(target),
        temporaries=temporaries() if cuda else {},
        workspace_bytes=target.workspace_bytes,
        peak_flops={dtype: target.peak_flops[name] for dtype, name in TENSOR_RATES.items() if name in target.peak_flops},
        bandwidth=target.bandwidth,
    )
    group = Group(size=task.processes, servers=task.servers, rehearsed=True)
    torch.manual_seed(SEED)
    # Reference cycles die when the collector happens to run. Without it the trace is the same on every run.
    gc.collect()
    gc.disable()
    try:
        joined = group.joined(device, even_alone=task.case.parallel in NEEDS_GROUP)
        with joined, FakeTensorMode(allow_non_fake_inputs=True), patched(target, device), tracker:
            progress.enter("build")
            training = build(task, device, builder, group)
            # As in a real run, whose allocations are counted from here; all of the build is in the youngest generation.
            gc.collect(0)
            progress.enter("count")
            typical = tracker.work
            for update in counted_steps(task.case):
                tracker.begin_step()
                training.step(update)
                if not update or task.case.gradient_accumulation == 1:
                    typical = tracker.work
            weights = None if training.model is None else model_bytes(training.model)
    finally:
        gc.enable()
    capacity = None if target.memory_bytes is None else target.memory_bytes - target.context_bytes
    sizes = [allocation.bytes for allocation in tracker.allocations]
    trace = in_order(tracker.trace)
    endless = Allocator(expandable=target.expandable_segments)
    replay(trace, sizes, endless)
    limited, refused = endless, None
    if capacity is not None:
        limited = Allocator(capacity, expandable=target.expandable_segments)
        refused = replay(trace, sizes, limited)
    held = limited if refused is None else endless
    return Prediction(
        target=target,
        fidelity="cuda-rules" if cuda else "cpu",
        parameters=training.parameters,
        trainable_parameters=training.trainable_parameters,
        model_bytes=weights,
        peak_allocated_bytes=tracker.peak_bytes,
        peak_phase=tracker.peak_phase,
        phase_peak_bytes=tracker.phase_peaks,
        largest=tracker.largest_at_peaks(SHOWN),
        peak_reserved_bytes=held.peak_reserved if cuda else None,
        host_bytes=tracker.host_bytes,
        fits=None if capacity is None else refused is None,
        refused=None if refused is None else tracker.allocations[refused],
        flops_per_step=typical.flops - typical.recomputed,
        recomputed_flops_per_step=typical.recomputed,
        bytes_per_step=typical.bytes,
        roofline_seconds=typical.roofline_seconds or None,
        operators={
            name: OperatorWork(calls=calls, flops=flops, bytes=moved)
            for name, (calls, flops, moved) in sorted(typical.operators.items())
        },
        packages=library_versions(task.case),
    )
