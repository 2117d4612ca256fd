"""Predicts a task: builds and steps its case on fake tensors, and derives the figures for the task's target."""

from __future__ import annotations

import gc
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_gputrain.cases.architectures.facts import Architecture
from pytest_gputrain.cases.libraries import packages_of
from pytest_gputrain.records import Crashed, OperatorWork, Prediction, Task
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.loop import Steps
from pytest_gputrain.worker.measuring import build, counted_steps, is_own_code, model_bytes, typical_step
from pytest_gputrain.worker.methods import trainable_parameters
from pytest_gputrain.worker.parallel import NEEDS_GROUP
from pytest_gputrain.worker.precision import check_precision, weights_by_type
from pytest_gputrain.worker.prediction.allocator import Allocator, replay, ties_of
from pytest_gputrain.worker.prediction.kernels import temporaries
from pytest_gputrain.worker.prediction.layouts import layouts
from pytest_gputrain.worker.prediction.patches import patched
from pytest_gputrain.worker.prediction.placement import Placement
from pytest_gputrain.worker.prediction.refusals import refusal, sentence_of_fakes
from pytest_gputrain.worker.prediction.repetition import ALL, Observed, extrapolate
from pytest_gputrain.worker.prediction.tracker import TENSOR_RATES, YOCTOSECONDS, Tracker, Work
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.run import SEED, of_config
from pytest_gputrain.worker.trace import peaks
from pytest_gputrain.worker.training import StepBuilder, Trainable
from pytest_gputrain.worker.zoo.completed import architecture_of

HOST: Final = torch.device("cpu")
GPU: Final = torch.device("cpu", 0)
"""Labels of fakes, which any torch can run. They are two devices: what is on the one must be copied to the other."""

_PART_BY_PART: Final = frozenset({"single", "fsdp"})
"""Parallelisms that treat each block by itself, as others do not that put all parameters in buffers of one size."""


def predict(
    task: Task, progress: Progress, builder: StepBuilder | None = None, *, whole: bool = False
) -> Prediction | Crashed:
    """Build and step the task's case on fake tensors, as on the task's target.

    Two steps, and a third for accumulation: those that a worker counts allocations in. Of a deep model three shallow ones
    run instead, where what it would show follows from them.

    Args:
        whole: the model itself runs, however deep it is.
    """
    if task.case.compile != "off" and task.target is not None and task.target.kind == "cuda":
        sentence = f"{task.case} is compiled, and a prediction does not know the compiled code; set compile to off"
        return Crashed(sentence=sentence, phase=progress.phase)
    # All that is imported stays: collections need not look at it.
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.collect()
        gc.freeze()
    try:
        observed = None if whole or builder is not None else _from_shallow_models(task, progress)
        return _prediction(task, observed or PredictionRun(task, progress, builder).run())
    except Exception as error:
        crashed = refusal(error, progress, own_code=is_own_code(task.case, builder))
        return crashed if sentence_of_fakes(error) else of_config(crashed, task, error)
    finally:
        if freezes:
            gc.unfreeze()


class PredictionRun:
    """Runs a task on fakes, as often as needed: what is known of operators stays."""

    def __init__(self, task: Task, progress: Progress, builder: StepBuilder | None = None) -> None:
        assert task.target is not None, "a prediction is for a device"
        self._task = task
        self._target = target = task.target
        self._progress = progress
        self._builder = builder
        cuda = target.kind == "cuda"
        self._device = GPU if cuda else HOST
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._tracker = Tracker(
            self._device,
            rounding=512 if cuda else 1,
            layouts=layouts(target),
            temporaries=temporaries(target) if cuda else {},
            workspace_bytes=target.workspace_bytes,
            peak_flops={dtype: target.peak_flops[name] for dtype, name in TENSOR_RATES.items() if name in target.peak_flops},
            convolution_flops=target.peak_flops.get("tf32"),
            bandwidth=target.bandwidth,
            sums_in_place=cuda,
        )
        self._group = Group(size=task.processes, servers=task.servers, simulated=True)

    def run(self, architecture: Architecture | None = None) -> Observed:
        """Build and step the case, or that of another architecture."""
        task, tracker = self._task, self._tracker
        torch.manual_seed(SEED)
        # Reference cycles die when the collector happens to run. Without it the trace is the same on every run.
        gc.collect()
        gc.disable()
        try:
            joined = self._group.joined(self._device, even_alone=task.case.parallel in NEEDS_GROUP)
            placement = Placement(self._device if self._device == GPU else None)
            with joined, self._fakes, patched(self._target, self._device), tracker, placement:
                self._progress.enter("build")
                training = build(task, self._device, self._builder, self._group, architecture=architecture)
                works: list[Work] = []
                training.run(self._steps(works))
                placement.check(training.model, task.case, self._device, tracker.trace, tracker.host)
                if is_own_code(task.case, self._builder):
                    stored = {} if training.model is None else weights_by_type(training.model)
                    check_precision(task.case.model, task.case.precision, stored, works[-1].by_type)
                weights = None if training.model is None else model_bytes(training.model)
        finally:
            gc.enable()
        return _observed(tracker, works[typical_step(task.case)], training, weights)

    def _steps(self, works: list[Work]) -> Steps:
        """Have the counted steps run, and add what each computes to ``works``."""
        # As in a real run, whose allocations are counted from here; all of the build is in the youngest generation.
        gc.collect(0)
        self._progress.enter("count")
        typical = typical_step(self._task.case)
        for place, update in enumerate(counted_steps(self._task.case)):
            if place == typical:
                self._tracker.trace.mark_round()
            self._tracker.begin_step()
            yield update
            works.append(self._tracker.work)
        self._tracker.trace.mark_round()


def _observed(tracker: Tracker, typical: Work, training: Trainable, weights: int | None) -> Observed:
    sums: dict[tuple[str, str], int | None] = {
        ("parameters", ALL): training.parameters,
        ("trainable parameters", ALL): training.trainable_parameters,
        ("model bytes", ALL): weights,
        ("FLOPs", ALL): typical.flops,
        ("recomputed FLOPs", ALL): typical.recomputed,
        ("bytes", ALL): typical.bytes,
        ("yoctoseconds", ALL): typical.yoctoseconds,
    }
    for name, (calls, flops, moved) in typical.operators.items():
        sums |= {("calls", name): calls, ("FLOPs", name): flops, ("bytes", name): moved}
    known_sums = {name_of_sum: value for name_of_sum, value in sums.items() if value is not None}
    return Observed(tracker.trace.in_order(), tracker.host.in_order(), known_sums)


class _ShallowFailed(Exception):
    """A shallow model does not run."""


def _from_shallow_models(task: Task, progress: Progress) -> Observed | None:
    """Return what a model of the zoo would show, from shallow ones; None where only the model itself will do."""
    case = task.case
    if case.code or task.scale != "full" or case.parallel not in _PART_BY_PART:
        return None
    if float(case.activation_checkpointing) not in (0, 1):
        return None  # which blocks recompute depends on how many there are
    architecture = architecture_of(case.model)
    if not architecture.repetitions:
        return None
    prediction_run = PredictionRun(task, progress)

    def run(repetitions: int) -> Observed:
        try:
            return prediction_run.run(architecture.repeated(repetitions))
        except Exception as error:
            raise _ShallowFailed from error

    try:
        observed = extrapolate(run, architecture.repetitions)
    except _ShallowFailed:
        return None  # the model itself will tell
    if observed is None:
        return None
    expected = {
        "parameters": architecture.trained_part.parameters["full"],
        "trainable parameters": trainable_parameters(architecture, case, "full"),
    }
    differs = any(count not in (None, observed.sums[name, ALL]) for name, count in expected.items())
    return None if differs else observed


def _prediction(task: Task, observed: Observed) -> Prediction:
    """Derive the figures for the task's target from what the run showed."""
    target = task.target
    assert target is not None, "a prediction is for a device"
    cuda = target.kind == "cuda"
    trace, sums = observed.device, observed.sums
    capacity = None if target.memory_bytes is None else target.memory_bytes - target.context_bytes
    ties = "address" if target.equal_blocks == "lower_address" else ties_of(torch.__version__)
    allocator = Allocator(capacity, expandable=target.expandable_segments, ties=ties)
    refused = replay(trace, allocator)
    if refused is not None:
        allocator = Allocator(expandable=target.expandable_segments, ties=ties)
        replay(trace, allocator)
    peak = peaks(trace)
    running = task.processes + task.servers
    return Prediction(
        target=target,
        fidelity="cuda-rules" if cuda else "cpu",
        parameters=sums.get(("parameters", ALL)),
        trainable_parameters=sums.get(("trainable parameters", ALL)),
        model_bytes=sums.get(("model bytes", ALL)),
        peak_allocated_bytes=allocator.peak_allocated if cuda else peak.bytes,
        peak_phase=peak.phase,
        phase_peak_bytes=peak.by_phase,
        largest=trace.largest_at_peaks(peak),
        peak_bytes_by_origin=trace.by_origin(peak.events[peak.phase]),
        peak_reserved_bytes=allocator.peak_reserved if cuda else None,
        host_bytes=peaks(observed.host).bytes,
        fits=None if capacity is None else refused is None,
        refused=None if refused is None else trace.allocations[refused],
        flops_per_step=sums["FLOPs", ALL] - sums["recomputed FLOPs", ALL],
        recomputed_flops_per_step=sums["recomputed FLOPs", ALL],
        bytes_per_step=sums["bytes", ALL],
        roofline_seconds=sums["yoctoseconds", ALL] / YOCTOSECONDS or None,
        operators={
            operator: OperatorWork(calls=calls, flops=sums["FLOPs", operator], bytes=sums["bytes", operator])
            for (name_of_sum, operator), calls in sorted(sums.items())
            if name_of_sum == "calls"
        },
        packages=packages_of(task.case),
        processes=running if running < task.case.gpus + task.case.servers else None,
    )
