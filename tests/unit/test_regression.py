"""What runs mean against a baseline."""

import math
from collections.abc import Sequence

import msgspec
import pytest
from unit_examples import (
    CASE,
    baseline,
    baseline_run,
    cpu_environment,
    crashed,
    gpu_environment,
    judged,
    live_tensor,
    measurement,
    oom_run,
    out_of_memory,
    result,
    timed_out,
    told,
)

from pytest_gputrain.gate.contention import GPU_MEMORY_NOISE_BYTES
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.memory import tensor
from pytest_gputrain.gate.regression import first_ratio
from pytest_gputrain.records import Counts, Holder, StepCounts, TrainedTensors
from pytest_gputrain.records.tolerance import CountTerms, MemoryTolerance, Tolerance
from pytest_gputrain.report.terminal import change
from pytest_gputrain.utils.units import GiB, MiB

TOLERANCE = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02))
EXACT = Tolerance(time=0.0, memory=MemoryTolerance(ratio=0.0))
BASE_BYTES = 40_000_000_000
GPU, CPU, TWO_CPUS = gpu_environment(), cpu_environment(), cpu_environment(device_count=2)
ON_H200 = gpu_environment(device_name="NVIDIA H200")


def _judge(replies, stored, *, tolerance=TOLERANCE, **criteria):
    """Of these replies, or of three processes that all give this one: as many as have to agree."""
    several = list(replies) if isinstance(replies, Sequence) else [replies] * 3
    return judged(several, stored, tolerance, **criteria).verdict


def _outcome(replies, stored, **criteria):
    return judged(replies, stored, TOLERANCE, **criteria)


def _ratio(replies, stored, case=CASE):
    return first_ratio(Criteria(case=case, scale="full", tolerance=TOLERANCE, baseline=stored), replies)


def _took(seconds, **fields):
    return measurement(step_seconds=(seconds,) * 3, **fields)


def _needed(peak, **fields):
    return measurement(peak_allocated_bytes=peak, **fields)


def _stored(environment=GPU, *, runs=1, **fields):
    return baseline(*[baseline_run(environment=environment, **fields)] * runs)


def _of_times(*logs):
    return baseline(*(baseline_run(step_seconds=(math.exp(x),)) for x in logs))


FIVE = _of_times(-0.02, -0.01, 0.0, 0.01, 0.02)
NOISY = _of_times(-0.06, -0.03, 0.0, 0.03, 0.06)
TWICE = _needed(2 * BASE_BYTES)
CPU_TWICE = _needed(2 * BASE_BYTES, environment=CPU)


@pytest.mark.parametrize(
    ("seconds", "status"),
    [
        (1.0, "pass"),
        (1.03, "pass"),
        (1.03 + 1e-8, "regressed"),
        (1 / 1.03, "pass"),
        (1 / 1.03 - 1e-8, "improved"),
    ],
)
def test_time_on_a_gpu_has_its_limit_at_the_tolerance_whatever_the_host(seconds, status):
    for stored in (baseline(), _stored(gpu_environment(host="node-2", cpu_model="Xeon"))):
        verdict = _judge(_took(seconds), stored)
        assert [metric.status for metric in verdict.metrics] == [status, "pass"]
        assert verdict.status == status


def test_time_is_the_median_of_the_runs_medians_on_both_sides():
    runs = [measurement(step_seconds=seconds) for seconds in ((1.0, 1.0, 50.0), (9.0, 9.0, 9.0), (1.01, 1.01, 0.1))]
    stored = baseline(*(baseline_run(step_seconds=(seconds, seconds, 99.0)) for seconds in (1.0, 2.0, 8.0)))
    metric = _judge(runs, stored).metric("step_seconds")
    assert (metric.value, metric.baseline) == (1.01, 2.0)
    assert (metric.baseline_runs, metric.runs, metric.votes) == (3, 3, 0)
    slower = _judge(_took(2.0), baseline()).metric("step_seconds")
    assert (slower.limit, slower.votes) == (pytest.approx(1.03), 3)
    assert 0.03 < slower.sensitivity < 0.08


CPU_TIME = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02), cpu_time=True)


@pytest.mark.parametrize(
    ("stored", "tolerance", "status", "note"),
    [
        (_stored(CPU, runs=5), TOLERANCE, "not-comparable", "time on a CPU is shown, not judged"),
        (_stored(CPU, runs=5), CPU_TIME, "regressed", ""),
        (_stored(CPU, runs=4), CPU_TIME, "not-comparable", "judged against 5 runs or more, and there are 4"),
        (_stored(cpu_environment(host="node-2"), runs=5), CPU_TIME, "not-comparable", "on the host node-2, here node-1"),
    ],
)
def test_time_on_a_cpu_is_judged_on_request_against_five_runs_of_its_host(stored, tolerance, status, note):
    verdict = _judge(_took(1.5, environment=CPU), stored, tolerance=tolerance)
    assert verdict.status == ("regressed" if status == "regressed" else "pass")
    time = verdict.metric("step_seconds")
    assert (time.status, time.value) == (status, 1.5)
    assert note in time.note
    assert _judge(CPU_TWICE, stored, tolerance=tolerance).status == "regressed", "memory decides where time cannot"


def test_a_case_that_needs_more_memory_says_that_it_may_be_slower_too():
    sentence = _judge(_took(1.05, peak_allocated_bytes=2 * BASE_BYTES), NOISY).sentence
    assert "(100.0 %) more memory" in sentence
    assert "; it also is 5.0 % slower: 1.05 s a step" in sentence
    assert sentence.endswith(", which noise or the whole suite may explain")
    assert "it also" not in _judge(_needed(2 * BASE_BYTES), NOISY).sentence


@pytest.mark.parametrize("memory", [MemoryTolerance(ratio=0.02), MemoryTolerance(bytes=512 * MiB), MemoryTolerance()])
@pytest.mark.parametrize(
    ("environment", "least_ratio", "noise"),
    [(GPU, 0.0, GPU_MEMORY_NOISE_BYTES), (CPU, 0.0, 0), (TWO_CPUS, 0.1, 0)],
    ids=["gpu", "cpu", "two processes on a cpu"],
)
def test_memory_has_its_limits_at_tolerance_and_noise(memory, environment, least_ratio, noise):
    def status(peak):
        tolerance = Tolerance(time=0.03, memory=memory)
        verdict = _judge(_needed(peak, environment=environment), _stored(environment), tolerance=tolerance)
        return verdict.metric("peak_allocated_bytes").status

    ratio, slack = max(memory.ratio, least_ratio), memory.bytes + noise
    most = math.floor(BASE_BYTES * (1 + ratio) + slack)
    least = math.ceil(BASE_BYTES / (1 + ratio) - slack)
    assert [status(peak) for peak in (most, most + 1, least, least - 1)] == ["pass", "regressed", "pass", "improved"]


@pytest.mark.parametrize("peak", [BASE_BYTES, BASE_BYTES + 500, 2 * BASE_BYTES])
def test_what_the_baseline_has_measured_is_no_change(peak):
    peaks = (BASE_BYTES, BASE_BYTES + 500, 2 * BASE_BYTES)
    stored = baseline(*(baseline_run(peak_allocated_bytes=peak, environment=CPU) for peak in peaks))
    metric = _judge(_needed(peak, environment=CPU), stored, tolerance=EXACT).metric("peak_allocated_bytes")
    assert (metric.status, metric.note) == ("pass", "")


@pytest.mark.parametrize(
    ("peaks", "value", "status"),
    [
        ([60, 45, 50], 50, "regressed"),
        ([60, 45, 37], 45, "pass"),
        ([60, 37], 60, "pass"),
        ([30, 30], 30, "improved"),
        ([37, 30], 37, "pass"),
    ],
)
def test_memory_regresses_or_improves_only_where_every_run_does(peaks, value, status):
    verdict = _judge([_needed(peak * GiB) for peak in peaks], _stored(peak_allocated_bytes=37 * GiB))
    metric = verdict.metric("peak_allocated_bytes")
    assert (metric.value, metric.status) == (value * GiB, status)


def test_a_peak_of_several_threads_is_judged_by_the_tolerance_and_never_called_exact():
    stored = _stored(CPU, peak_allocated_bytes=1000 * MiB)
    single, several = (_needed(1001 * MiB, environment=CPU, counted_threads=threads) for threads in (1, 2))
    assert _judge(single, stored).metric("peak_allocated_bytes").note == "changed by +1,048,576 bytes, within the limit"
    assert _judge(several, stored).metric("peak_allocated_bytes").note == ""
    above = msgspec.structs.replace(several, peak_allocated_bytes=1030 * MiB)
    assert not _outcome([above], stored).settled
    assert _judge(above, stored).status == "regressed"


@pytest.mark.parametrize(
    ("replies", "settled"),
    [
        ([_took(1.0)], True),
        ([_took(1.2)], False),
        ([_took(1.2)] * 3, True),
        ([TWICE], False),
        ([TWICE, measurement()], True),
        ([out_of_memory()], False),
        ([out_of_memory()] * 2, True),
        ([out_of_memory(), crashed()], True),
    ],
)
def test_what_looks_worse_wants_further_processes(replies, settled):
    assert _outcome(replies, FIVE).settled is settled


@pytest.mark.parametrize(
    ("reply", "stored", "most"),
    [(_took(1.2), FIVE, 1), (TWICE, FIVE, 1), (out_of_memory(), FIVE, 1), (CPU_TWICE, _stored(CPU, runs=5), 5)],
    ids=["time", "memory", "out of memory", "a CPU counts exactly"],
)
def test_the_first_process_decides_where_no_other_could(reply, stored, most):
    outcome = _outcome([reply], stored, most=most)
    assert (outcome.settled, outcome.verdict.status) == (True, "regressed")


@pytest.mark.parametrize(("environment", "settled"), [(GPU, False), (CPU, True)], ids=["GPU", "CPU"])
def test_a_tensor_that_does_not_train_any_more_is_confirmed_where_processes_may_differ(environment, settled):
    trains, idle = TrainedTensors(learning={"expert": 1}), TrainedTensors(idle={"expert.weight": 1})
    stored = _stored(environment, trained=trains)
    first, second = (measurement(environment=environment, trained=trained) for trained in (idle, trains))
    outcome = _outcome([first], stored)
    assert (outcome.settled, outcome.verdict.status) == (settled, "regressed")
    assert _outcome([first, second], stored).verdict.status == "pass"
    assert _outcome([first, first], stored).verdict.status == "regressed"


def test_the_first_run_is_told_for_the_suite_where_time_is_compared():
    assert _ratio([_took(1.2), _took(1.0)], FIVE) == pytest.approx(math.log(1.2))
    unfit = baseline(baseline_run(), *[baseline_run(outcome="out_of_memory", step_seconds=())] * 2)
    assert _ratio([_took(1.0, environment=CPU)], _stored(CPU, runs=5)) is None
    for replies in ([], [_took(1.2), crashed()], [out_of_memory()]):
        assert _ratio(replies, FIVE) is None
    for stored in (None, unfit, _stored(ON_H200), msgspec.structs.replace(FIVE, runs=())):
        assert _ratio([_took(1.2)], stored) is None
    assert _ratio([_took(1.2)], FIVE, CASE.replace(batch_size=3)) is None


@pytest.mark.parametrize(("fitting", "failing"), [(4, 1), (1, 1), (1, 2)])
def test_a_baseline_that_did_not_always_fit_is_what_most_runs_were(fitting, failing):
    stored = baseline(*[baseline_run()] * fitting, *[oom_run()] * failing)
    fits = fitting >= failing
    assert _judge(out_of_memory(), stored).status == ("regressed" if fits else "pass")
    assert _judge(measurement(), stored).status == ("pass" if fits else "improved")
    slower = [_took(1.5, peak_allocated_bytes=2 * BASE_BYTES)] * 3
    assert _judge(slower, stored).status == ("regressed" if fits else "improved")


NICS = {"nics": ("8 x mlx5_core 400 Gb/sec (4X NDR)",)}
DOWN = {"nics": ("1 x mlx5_core down", "7 x mlx5_core 400 Gb/sec (4X NDR)")}
HOST = {"cudnn": "9.10.2", "nccl": "2.27.3", "cores": 48, "host_memory_bytes": 512 * GiB, **NICS}
WEAKER = {"cudnn": "9.8.0", "nccl": "2.26.2", "cores": 16, "host_memory_bytes": 256 * GiB, **DOWN}


def _computed(flops, again, **figures):
    return measurement(flops_per_step=flops, recomputed_flops_per_step=again, environment=CPU, **figures)


@pytest.mark.parametrize("repeated", [None, 0])
def test_a_baseline_that_counts_recomputed_flops_with_the_others_passes(repeated):
    together = _stored(CPU, flops_per_step=200, recomputed_flops_per_step=repeated)
    assert _judge(_computed(150, 50), together).status == "pass"


def _slower_since(there, here):
    return _judge(_took(1.5, environment=gpu_environment(**here)), _stored(gpu_environment(**there)))


def test_verdicts_are_told_with_all_that_matters(snapshot):
    same = CASE.replace(steps=99, warmup=9, platforms=("h100",), named=("batch_size",))
    eight, out = gpu_environment(device_count=8), out_of_memory()
    beside = _took(1.5, holders=(Holder(pid=7, gpu=0, name="python"),))
    alone, in_cpu, unfit = "one worker alone ran out of memory", _stored(CPU, flops_per_step=100), baseline(oom_run())
    checkpointing = _stored(CPU, flops_per_step=150, recomputed_flops_per_step=50)
    newer = {"packages": {"torch": "2.13.0", "peft": "0.18"}, "driver": "580.20"}
    verdicts = {
        "no baseline": _judge(measurement(), None),
        "no baseline here": _judge(measurement(), None, hint="some for h200", no_scaling=alone),
        "no baseline, out of memory": _judge(out_of_memory(), None),
        "crashed": _judge(crashed(step=2), None),
        "crashed before a step": _judge(crashed(phase="build", step=None), None),
        "one process of several crashed": _judge(crashed(rank=3), None),
        "one process of several out of memory": _judge(out_of_memory(rank=3), None),
        "timed out": _judge(timed_out(timeout_seconds=90.0), None),
        "passed": _judge([_took(1.0)], FIVE),
        "passed after several": _judge([_took(1.2), _took(1.0), _took(1.01), _took(1.0)], FIVE),
        "passed after two": _judge([_took(1.029), _took(1 - 1e-9)], FIVE, most=2),
        "passed at once": _judge([_took(1.029)], FIVE, most=1),
        "baseline without peak": _judge(measurement(), _stored(peak_allocated_bytes=None)),
        "memory within the limit": _judge(_needed(BASE_BYTES + 1000, environment=CPU, flops_per_step=100), in_cpu),
        "FLOPs within the limit": _judge(measurement(flops_per_step=102, environment=CPU), in_cpu),
        "FLOPs not counted": _judge(measurement(environment=CPU), in_cpu),
        "slower and larger": _judge(_took(1.5, peak_allocated_bytes=2 * BASE_BYTES), baseline()),
        "another model": _judge(_took(1.5, flops_per_step=102, model_bytes=2), _stored(flops_per_step=100, model_bytes=GiB)),
        "more FLOPs": _judge(measurement(flops_per_step=150, environment=CPU), in_cpu),
        "checkpointing gone": _judge(_computed(150, 0, peak_allocated_bytes=2 * BASE_BYTES), checkpointing),
        "checkpointing gone for nothing": _judge(_computed(150, 0), checkpointing),
        "checkpointing new": _judge(_computed(150, 50), _stored(CPU, flops_per_step=150, recomputed_flops_per_step=0)),
        "more checkpointing": _judge(_computed(150, 60), checkpointing),
        "a little more checkpointing": _judge(_computed(150, 52), checkpointing),
        "checkpointing was not counted": _judge(_computed(150, 50), _stored(CPU, flops_per_step=150)),
        "other libraries": _slower_since({"packages": {"torch": "2.12.0"}}, newer),
        "other links": _slower_since(
            {"topology": (("X", "NV18"), ("NV18", "X"))}, {"topology": (("X", "SYS"), ("SYS", "X"))}
        ),
        "another host": _slower_since(HOST, WEAKER),
        "a baseline of an earlier version": _slower_since({}, HOST),
        "another kernel on the same host": _slower_since(HOST, {**HOST, "host_memory_bytes": 512 * GiB - 4096}),
        "a host that does not tell": _slower_since(HOST, {**HOST, "nics": msgspec.UNSET}),
        "AMD's libraries": _slower_since(*({"device_type": "rocm", "cudnn": it, "nccl": f"2.{it}"} for it in "12")),
        "slower than a quiet suite allows": _judge(_took(1.1), baseline()),
        "slower than a noisy suite is": _judge(_took(1.1), baseline(), prior=0.05),
        "slower within the noise": _judge(_took(1.05), NOISY),
        "slower with the suite": _judge([_took(1.05)], FIVE, shift=0.045),
        "out of memory once": _judge([out_of_memory()], baseline(), most=1),
        "out of memory": _judge(out_of_memory(), baseline(baseline_run(environment=gpu_environment(driver="570.1")))),
        "out of memory as before": _judge(out_of_memory(), unfit),
        "out of another memory": _judge(out_of_memory(where="host"), unfit),
        "out of memory beside others": _judge(out_of_memory(other_processes=1), baseline()),
        "fits now": _judge(measurement(), unfit),
        "faster": _judge(_took(0.5), baseline()),
        "fewer FLOPs": _judge(measurement(flops_per_step=50, environment=CPU), in_cpu),
        "no scaling efficiency": _judge(measurement(), baseline(), no_scaling=alone),
        "other processes": _judge(_took(9.0), _stored(gpu_environment(device_count=8))),
        "another GPU": _judge(_took(9.0), _stored(ON_H200)),
        "another device": _judge(measurement(environment=CPU), baseline()),
        "another device, out of memory": _judge(out_of_memory(environment=CPU), baseline()),
        "another device, out of memory before": _judge(measurement(environment=CPU), unfit),
        "another case": _judge(measurement(), baseline(case=CASE.replace(batch_size=1))),
        "another case, out of memory": _judge(out, baseline(case=CASE.replace(batch_size=1))),
        "the same case with other steps and platforms": _judge(measurement(), baseline(case=same)),
        "faster and larger": _judge(_took(0.5, peak_allocated_bytes=2 * BASE_BYTES), baseline()),
        "larger than on another GPU": _judge(_took(9.0, peak_allocated_bytes=2 * BASE_BYTES), _stored(ON_H200)),
        "larger than on a CPU": _judge(_took(9.0, peak_allocated_bytes=7), _stored(CPU, step_seconds=(2.0,))),
        "larger with other processes": _judge(
            measurement(peak_allocated_bytes=2 * BASE_BYTES, flops_per_step=150), _stored(eight, flops_per_step=100)
        ),
        "no FLOPs in the baseline": _judge(measurement(flops_per_step=150), _stored()),
        "out of memory in 1 of 5": _judge([*[measurement()] * 4, out], baseline()),
        "out of memory in 1 of 3": _judge([*[measurement()] * 2, out], baseline()),
        "out of memory in 2 of 3": _judge([measurement(), out, out], baseline()),
        # Of five runs that there may be: with two of three used up beside others, the rest may still speak.
        "slower in 5 runs beside others": _judge([beside] * 5, FIVE),
        "slower in 2 runs alone and 3 beside others": _judge([*[beside] * 3, *[_took(1.5)] * 2], FIVE),
        "slower in 2 runs alone and 1 beside others": _judge([beside, *[_took(1.5)] * 2], FIVE),
    }
    assert told(verdicts) == snapshot


# Phases, and the tensors behind what changed

PHASES = {"build": 10 * GiB, "forward": 20 * GiB, "backward": 40 * GiB, "between": 12 * GiB, "optimizer": 15 * GiB}
WEIGHTS = live_tensor(bytes=10 * GiB, phase="build", shape=(5, 2**30), operator="aten.zeros")
NEW = live_tensor(bytes=2 * GiB, count=2, operator="aten.mul", shape=(2**29,), lines=("a.py:3", "a.py:9"))
ROWS = dict.fromkeys(PHASES, (WEIGHTS,))


def _counted(processes=1, **phases):
    """One whose ``phases`` have so many bytes more than the baseline's, in `NEW`."""
    peaks = {phase: size + phases.get(phase, 0) for phase, size in PHASES.items()}
    largest = {phase: (WEIGHTS, NEW) if phases.get(phase, 0) > 0 else (WEIGHTS,) for phase in PHASES}
    peak = max(size for phase, size in peaks.items() if phase != "build")
    environment = cpu_environment(device_count=processes)
    return measurement(environment=environment, peak_allocated_bytes=peak, phase_peak_bytes=peaks, largest=largest)


def _judged_phases(reply, processes=1, **fields):
    defaults = {"peak_allocated_bytes": 40 * GiB, "phase_peak_bytes": PHASES, "largest": ROWS, **fields}
    run = baseline_run(environment=cpu_environment(device_count=processes), **defaults)
    return judged([reply], baseline(run), TOLERANCE).verdict


def test_growth_is_told_with_its_phase_and_what_grew(snapshot):
    verdicts = {
        "below the peak": _judged_phases(_counted(forward=2 * GiB, optimizer=GiB)),
        "of the peak": _judged_phases(_counted(backward=2 * GiB)),
        "within the limit": _judged_phases(_counted(forward=8)),
        "of the peak, within the limit": _judged_phases(_counted(backward=8)),
        "a baseline without phases": _judged_phases(_counted(), phase_peak_bytes={}, largest={}),
        "a baseline without tensors": _judged_phases(_counted(forward=2 * GiB), largest={}),
    }
    assert told(verdicts) == snapshot


def test_table_names_the_phase_that_the_sentence_describes():
    reply = _counted(build=2 * GiB, forward=3 * GiB)
    verdict = _judged_phases(reply)
    assert "more in forward" in verdict.sentence
    assert change("peak_allocated_bytes", result(replies=(reply,), verdict=verdict)) == "+15.0 % forward"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("processes", [1, 2])
def test_every_phase_has_the_tolerance_of_the_peak_and_of_several_processes_a_share_of_it(phase, processes):
    """A buffer of gloo that is let go of late is as large in a phase that needs little as in one that needs much."""
    whole = PHASES[phase if processes == 1 else "backward"]
    limit = 0.02 if processes == 1 else 0.5 if phase in ("build", "forward") else 0.2
    for share, status in ((-1.05, "improved"), (-0.95, "pass"), (0.95, "pass"), (1.05, "regressed")):
        verdict = _judged_phases(_counted(processes, **{phase: round(whole * limit * share)}), processes)
        assert verdict.metric(f"{phase}_peak_bytes").status == status


EIGHT = tuple(live_tensor(bytes=GiB, phase="build", operator="aten.empty", shape=(number,)) for number in range(8))


def _small(size, count, operator="aten.mm", phase="backward", lines=()):
    return live_tensor(bytes=size, count=count, operator=operator, phase=phase, shape=(), dtype="", lines=lines)


def _alone(size, lines=()):
    return live_tensor(bytes=size, operator="aten.mm", phase="backward", shape=(8, 8), lines=lines)


GREW = {
    "all are new": (
        [_small(GiB, 3, "aten.empty", "build")],
        [_small(GiB, 3, "aten.empty", "build"), _small(2 * GiB, 34, lines=("a.py:7",))],
    ),
    "more of them": ([_small(5 * GiB, 30)], [_small(6 * GiB, 50, lines=("a.py:7",)), _small(GiB // 2, 9, "aten.sum")]),
    "as many that are larger": ([_small(5 * GiB, 30)], [_small(7 * GiB, 30, lines=("a.py:7",))]),
    "one that has no row of its own any more": (
        [_alone(3 * GiB), _small(2 * GiB, 30)],
        [_small(5 * GiB, 31), _small(2 * GiB, 9, "aten.sum")],
    ),
    "one shape": ([_small(2 * GiB, 30)], [_alone(2 * GiB, ("a.py:9",)), _small(2 * GiB, 30)]),
    "a baseline with the largest alone": ([], [_small(2 * GiB, 34)]),
}
"""What lived before and now beside eight larger tensors."""


def test_small_tensors_are_told_by_their_operator_where_no_shape_explains_the_growth(snapshot):
    peaks = {"forward": 20 * GiB, "backward": 40 * GiB}
    reply = measurement(environment=CPU, peak_allocated_bytes=40 * GiB, phase_peak_bytes={**peaks, "forward": 22 * GiB})
    verdicts = {
        what: _judged_phases(
            msgspec.structs.replace(reply, largest={"forward": (*EIGHT, *now)}),
            phase_peak_bytes=peaks,
            largest={"forward": (*EIGHT, *before)},
        )
        for what, (before, now) in GREW.items()
    }
    assert told(verdicts) == snapshot


def test_three_lines_are_named_at_most():
    row = live_tensor(lines=tuple(f"a.py:{number}" for number in range(6)))
    assert tensor(row).endswith("at a.py:0, a.py:1, a.py:2 and 3 more lines)")


# --- What steps ask of a CPU


def _of_cpu(**figures):
    return Counts(steps=(0,), kinds=(StepCounts(**figures),), on_cpu=True)


FEW, MANY, MORE = (_of_cpu(operators=number) for number in (100, 200, 300))
_ON_CPU = {"peak_allocated_bytes": BASE_BYTES, "environment": CPU}
COUNTED = _stored(CPU, counts=FEW)


def _asked(*counts, before=FEW, **criteria):
    return _judge([measurement(counts=one, **_ON_CPU) for one in counts], _stored(CPU, counts=before), **criteria)


def test_what_steps_ask_of_a_cpu_is_told_beside_the_other_figures(snapshot):
    calling = msgspec.structs.replace(FEW, kinds=(StepCounts(operators=100, python_calls=9),), python="3.12")
    verdicts = {
        "more": _asked(MANY),
        "more, and a second process counts the same": _asked(MANY, MANY),
        "more, and a second process counts more": _asked(MANY, MORE),
        "more for fewer reads": _asked(*[_of_cpu(operators=200, reads=1)] * 2, before=_of_cpu(operators=100, reads=3)),
        "fewer": _asked(FEW, before=MANY),
        "as many": _asked(FEW),
        "they are new": _asked(FEW, before=None),
        "there are none": _asked(None, before=None),
        **{f"they are gone: {mode}": _asked(None, counts=CountTerms(mode=mode)) for mode in ("judge", "tell", "off")},
        "calls of Python functions are new": _asked(calling),
        "another number of processes": _judge([measurement(counts=MANY, **_ON_CPU | {"environment": TWO_CPUS})], COUNTED),
    }
    assert told(verdicts) == snapshot


@pytest.mark.parametrize(
    ("replies", "most", "settled"),
    [((MANY,), 3, False), ((MANY, MANY), 3, True), ((MANY, MORE), 3, True), ((MANY,), 1, True)],
)
def test_more_operators_want_a_second_process_that_counts_the_same(replies, most, settled):
    assert _outcome([measurement(counts=one, **_ON_CPU) for one in replies], COUNTED, most=most).settled is settled
