"""What runs mean against a baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unit_examples import (
    CASE,
    baseline,
    baseline_run,
    cpu_environment,
    crashed,
    gpu_environment,
    measurement,
    oom_run,
    out_of_memory,
    timed_out,
)

from pytest_gputrain.gate.contention import GPU_MEMORY_NOISE_BYTES
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.gate.regression import Circumstances, GateResult, first_ratio, judge
from pytest_gputrain.records import (
    Baseline,
    Case,
    Crashed,
    Environment,
    Holder,
    Measurement,
    MetricVerdict,
    OutOfMemory,
    Reply,
    Verdict,
)
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance
from pytest_gputrain.utils.units import GiB, MiB

TOLERANCE = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02))
EXACT = Tolerance(time=0.0, memory=MemoryTolerance(ratio=0.0))
BASE_BYTES = 40_000_000_000


def _judge(
    replies: Reply | Sequence[Reply],
    stored: Baseline | None,
    *,
    case: Case = CASE,
    tolerance: Tolerance = TOLERANCE,
    hint: str = "",
    no_scaling: str = "",
    most: int = 5,
) -> Verdict:
    """Of these replies, or of three processes that all give this one: as many as have to agree."""
    several = list(replies) if isinstance(replies, Sequence) else [replies] * 3
    return judge(case, several, stored, tolerance, hint, no_scaling, Circumstances(most=most)).verdict


def _took(seconds: float, **fields: Any) -> Measurement:
    return measurement(step_seconds=(seconds,) * 3, **fields)


def _time(verdict: Verdict) -> MetricVerdict:
    metric = verdict.metric("step_seconds")
    assert metric is not None
    return metric


def _memory(verdict: Verdict) -> MetricVerdict:
    metric = verdict.metric("peak_allocated_bytes")
    assert metric is not None
    return metric


def _cpu_baseline(runs: int = 5, environment: Environment | None = None, **fields: Any) -> Baseline:
    run = baseline_run(environment=environment or cpu_environment(), **fields)
    return baseline(*[run] * runs)


def _on_cpu(seconds: float = 1.0, environment: Environment | None = None, **fields: Any) -> Measurement:
    return _took(seconds, environment=environment or cpu_environment(), **fields)


# Time on a GPU


@pytest.mark.parametrize(
    ("seconds", "status"),
    [
        (1.0, "pass"),
        (1.03, "pass"),
        (1.03 + 1e-8, "regressed"),
        (1.5, "regressed"),
        (1 / 1.03, "pass"),
        (1 / 1.03 - 1e-8, "improved"),
        (0.5, "improved"),
    ],
)
def test_time_on_a_gpu_has_its_limit_at_the_tolerance(seconds: float, status: str) -> None:
    verdict = _judge(_took(seconds), baseline())
    assert (verdict.status, _time(verdict).status, _memory(verdict).status) == (status, status, "pass")


def test_time_metric_holds_value_baseline_and_limit() -> None:
    metric = _time(_judge(_took(2.0), baseline()))
    assert (metric.value, metric.baseline, metric.limit) == (2.0, 1.0, pytest.approx(1.03))
    assert (metric.baseline_runs, metric.runs, metric.votes) == (1, 3, 3)
    assert metric.sensitivity is not None
    assert 0.03 < metric.sensitivity < 0.08


def test_without_tolerance_the_baseline_itself_passes() -> None:
    assert _judge(_took(1.0), baseline(), tolerance=EXACT).status == "pass"


def test_time_is_the_median_of_the_runs_medians() -> None:
    runs = [measurement(step_seconds=seconds) for seconds in ((1.0, 1.0, 50.0), (9.0, 9.0, 9.0), (1.01, 1.01, 0.1))]
    assert _time(_judge(runs, baseline())).value == 1.01


def test_baseline_time_is_the_median_of_its_runs_medians() -> None:
    stored = baseline(*(baseline_run(step_seconds=(seconds, seconds, 99.0)) for seconds in (1.0, 2.0, 8.0)))
    assert _time(_judge(_took(2.0), stored)).baseline == 2.0


# Memory


@pytest.mark.parametrize(
    ("memory", "slack"),
    [
        (MemoryTolerance(ratio=0.02), 800_000_000),
        (MemoryTolerance(bytes=512 * MiB), 512 * MiB),
        (MemoryTolerance(), 0),
    ],
    ids=["ratio", "bytes", "none"],
)
@pytest.mark.parametrize(
    ("environment", "noise"), [(gpu_environment(), GPU_MEMORY_NOISE_BYTES), (cpu_environment(), 0)], ids=["gpu", "cpu"]
)
def test_memory_has_its_limit_at_tolerance_and_floor(
    memory: MemoryTolerance, slack: int, environment: Environment, noise: int
) -> None:
    tolerance = Tolerance(time=0.03, memory=memory)
    stored = baseline(baseline_run(environment=environment))
    limit = BASE_BYTES + slack + noise

    def status(peak: int) -> str:
        reply = measurement(environment=environment, peak_allocated_bytes=peak)
        return _memory(_judge(reply, stored, tolerance=tolerance)).status

    assert status(limit) == "pass"
    assert status(limit + 1) == "regressed"


def test_the_floor_of_a_gpu_is_64_mib() -> None:
    assert 64 * MiB == GPU_MEMORY_NOISE_BYTES


@pytest.mark.parametrize(("saved", "status"), [(64 * MiB, "pass"), (64 * MiB + 1, "improved")])
def test_less_memory_improves_beyond_the_floor_of_a_gpu(saved: int, status: str) -> None:
    reply = measurement(peak_allocated_bytes=BASE_BYTES - saved)
    assert _judge(reply, baseline(), tolerance=EXACT).status == status


@pytest.mark.parametrize("change", [1, -1])
def test_a_byte_on_a_cpu_is_a_change(change: int) -> None:
    verdict = _judge(_on_cpu(peak_allocated_bytes=BASE_BYTES + change), _cpu_baseline(), tolerance=EXACT)
    assert verdict.status == ("regressed" if change > 0 else "improved")


def test_a_change_within_the_limit_on_a_cpu_is_told() -> None:
    verdict = _judge(_on_cpu(peak_allocated_bytes=BASE_BYTES + 1000), _cpu_baseline())
    assert verdict.status == "pass"
    assert "+1,000 bytes" in verdict.sentence


def test_what_the_baseline_has_measured_on_a_cpu_is_no_change() -> None:
    peaks = (BASE_BYTES, BASE_BYTES + 500, BASE_BYTES + 1000)
    stored = baseline(*(baseline_run(peak_allocated_bytes=peak, environment=cpu_environment()) for peak in peaks))
    for peak in peaks:
        metric = _memory(_judge(_on_cpu(peak_allocated_bytes=peak), stored))
        assert (metric.status, metric.note) == ("pass", "")


def test_memory_regresses_if_every_one_of_the_runs_is_above_the_limit() -> None:
    peaks = [60 * GiB, 45 * GiB, 50 * GiB]
    verdict = _judge([measurement(peak_allocated_bytes=peak) for peak in peaks], baseline())
    assert (_memory(verdict).value, verdict.status) == (50 * GiB, "regressed")
    assert "in 3 runs" in verdict.sentence
    verdict = _judge([measurement(peak_allocated_bytes=peak) for peak in (*peaks[:2], BASE_BYTES)], baseline())
    assert verdict.status == "pass"


def test_memory_of_two_runs_is_the_higher() -> None:
    replies = [measurement(peak_allocated_bytes=peak) for peak in (60 * GiB, BASE_BYTES)]
    assert _memory(_judge(replies, baseline())).value == 60 * GiB


def test_memory_is_held_against_the_highest_peak_of_the_baseline() -> None:
    stored = baseline(*(baseline_run(peak_allocated_bytes=peak) for peak in (BASE_BYTES, 41_000_000_000)))
    assert _memory(_judge(measurement(peak_allocated_bytes=41_000_000_000), stored, tolerance=EXACT)).status == "pass"


def test_memory_improves_only_below_the_lowest_peak_of_the_baseline() -> None:
    stored = baseline(*(baseline_run(peak_allocated_bytes=peak) for peak in (BASE_BYTES, 80_000_000_000)))
    assert _memory(_judge(measurement(peak_allocated_bytes=BASE_BYTES), stored)).status == "pass"


def test_a_baseline_without_peak_leaves_memory_uncompared() -> None:
    verdict = _judge(measurement(), baseline(baseline_run(peak_allocated_bytes=None)))
    assert (_memory(verdict).status, verdict.status) == ("not-comparable", "pass")


# Time on a CPU


@pytest.mark.parametrize("seconds", [0.1, 9.0])
def test_time_on_a_cpu_is_shown_and_not_judged(seconds: float) -> None:
    verdict = _judge(_on_cpu(seconds), _cpu_baseline())
    assert (verdict.status, _time(verdict).status, _time(verdict).value) == ("pass", "not-comparable", seconds)
    assert "shown, not judged" in _time(verdict).note


@pytest.mark.parametrize("stored", [_cpu_baseline(1), _cpu_baseline(environment=cpu_environment(host="node-2"))])
def test_memory_on_a_cpu_decides_where_time_cannot(stored: Baseline) -> None:
    assert _judge(_on_cpu(peak_allocated_bytes=2 * BASE_BYTES), stored).status == "regressed"


def test_the_host_of_a_gpu_does_not_matter() -> None:
    verdict = _judge(_took(1.5), baseline(baseline_run(environment=gpu_environment(host="node-2", cpu_model="Xeon"))))
    assert _time(verdict).status == "regressed"


CPU_TIME = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02), cpu_time=True)


@pytest.mark.parametrize(
    ("stored", "status", "note"),
    [
        (_cpu_baseline(), "regressed", ""),
        (_cpu_baseline(4), "not-comparable", "judged against 5 runs or more, the baseline has 4"),
        (_cpu_baseline(environment=cpu_environment(host="node-2")), "not-comparable", "on the host node-2, here node-1"),
    ],
    ids=["five runs", "four runs", "another host"],
)
def test_time_on_a_cpu_can_be_judged_against_five_runs_of_its_host(stored: Baseline, status: str, note: str) -> None:
    metric = _time(_judge(_on_cpu(1.5), stored, tolerance=CPU_TIME))
    assert metric.status == status
    assert note in metric.note


# Doubt


def _judged(replies: Sequence[Reply], stored: Baseline, **circumstances: Any) -> GateResult:
    return judge(CASE, replies, stored, TOLERANCE, circumstances=Circumstances(**circumstances))


FIVE = baseline(*(baseline_run(step_seconds=(math.exp(x),)) for x in (-0.02, -0.01, 0.0, 0.01, 0.02)))


@pytest.mark.parametrize(
    ("replies", "settled"),
    [
        ([_took(1.0)], True),
        ([_took(1.2)], False),
        ([_took(1.2)] * 3, True),
        ([measurement(peak_allocated_bytes=2 * BASE_BYTES)], False),
        ([measurement(peak_allocated_bytes=2 * BASE_BYTES), measurement()], True),
        ([out_of_memory()], False),
        ([out_of_memory()] * 2, True),
        ([out_of_memory(), crashed()], True),
    ],
)
def test_what_looks_worse_wants_further_processes(replies: list[Reply], settled: bool) -> None:
    assert _judged(replies, FIVE).settled is settled


@pytest.mark.parametrize("reply", [_took(1.2), measurement(peak_allocated_bytes=2 * BASE_BYTES), out_of_memory()])
def test_without_further_processes_the_first_decides(reply: Reply) -> None:
    outcome = _judged([reply], FIVE, most=1)
    assert (outcome.settled, outcome.verdict.status) == (True, "regressed")


def test_a_cpu_counts_exactly_so_once_is_enough() -> None:
    outcome = _judged([_on_cpu(peak_allocated_bytes=2 * BASE_BYTES)], _cpu_baseline())
    assert (outcome.settled, outcome.verdict.status) == (True, "regressed")


def test_slower_than_tolerated_within_the_noise_is_inconclusive_and_told() -> None:
    noisy = baseline(*(baseline_run(step_seconds=(math.exp(x),)) for x in (-0.06, -0.03, 0.0, 0.03, 0.06)))
    verdict = _judged([_took(1.05)] * 3, noisy).verdict
    assert verdict.status == "inconclusive"
    assert "5.0 % slower at 1.05 s a step than baseline 1.00 s +- 0.03 (5 runs); limit " in verdict.sentence
    assert "0 of 3 fresh runs slower; this exceeds the tolerance of 3.0 %" in verdict.sentence


def test_what_the_whole_suite_shares_is_inconclusive_and_told() -> None:
    verdict = _judged([_took(1.05)], FIVE, shift=0.045).verdict
    assert verdict.status == "inconclusive"
    assert "the whole suite is +4.6 % today" in verdict.sentence


def test_a_pass_that_took_several_processes_is_told() -> None:
    verdict = _judged([_took(1.2), _took(1.0), _took(1.01), _took(1.0)], FIVE).verdict
    assert verdict.status == "pass"
    assert "measured 4 times: +20.0 %, +0.0 %, +1.0 %, +0.0 %" in verdict.sentence
    verdict = _judged([_took(1.029), _took(1 - 1e-9)], FIVE, most=2).verdict
    assert "measured 2 times: +2.9 %, +0.0 %" in verdict.sentence
    assert "times:" not in _judged([_took(1.029)], FIVE, most=1).verdict.sentence


def test_a_pass_tells_which_slowdown_would_have_been_caught() -> None:
    assert _judged([_took(1.0)], FIVE).verdict.sentence.endswith(": a slowdown of 6.0 % would be caught 99 times in 100")


def test_a_noisier_suite_takes_more_to_fail() -> None:
    stored = baseline()
    assert _judged([_took(1.1)] * 3, stored).verdict.status == "regressed"
    assert _judged([_took(1.1)] * 3, stored, prior=0.05).verdict.status == "inconclusive"


def test_the_first_run_is_told_for_the_suite_where_time_is_compared() -> None:
    assert first_ratio(CASE, [_took(1.2), _took(1.0)], FIVE, TOLERANCE) == pytest.approx(math.log(1.2))
    unfit = baseline(baseline_run(), *[baseline_run(outcome="out_of_memory", step_seconds=())] * 2)
    elsewhere = baseline(baseline_run(environment=gpu_environment(device_name="NVIDIA H200")))
    assert first_ratio(CASE, [_on_cpu()], _cpu_baseline(), TOLERANCE) is None
    for replies in ([], [_took(1.2), crashed()], [out_of_memory()]):
        assert first_ratio(CASE, replies, FIVE, TOLERANCE) is None
    for stored in (None, unfit, elsewhere, msgspec.structs.replace(FIVE, runs=())):
        assert first_ratio(CASE, [_took(1.2)], stored, TOLERANCE) is None
    assert first_ratio(CASE.replace(batch_size=3), [_took(1.2)], FIVE, TOLERANCE) is None


# What cannot be compared


def test_time_on_other_devices_is_not_compared_but_memory_is() -> None:
    stored = baseline(baseline_run(environment=gpu_environment(device_name="NVIDIA H200")))
    verdict = _judge(_took(9.0), stored)
    assert (verdict.status, _time(verdict).status, _memory(verdict).status) == ("pass", "not-comparable", "pass")
    assert _judge(_took(9.0, peak_allocated_bytes=2 * BASE_BYTES), stored).status == "regressed"


@pytest.mark.parametrize("peak_allocated_bytes", [BASE_BYTES // 2, 2 * BASE_BYTES])
def test_nothing_is_compared_with_another_number_of_processes(peak_allocated_bytes: int) -> None:
    stored = baseline(baseline_run(environment=gpu_environment(device_count=8)))
    verdict = _judge(_took(9.0, peak_allocated_bytes=peak_allocated_bytes), stored)
    assert verdict.status == "not-comparable"
    assert {metric.status for metric in verdict.metrics} == {"not-comparable"}
    assert "recorded with 8 processes, here 1" in verdict.sentence


@pytest.mark.parametrize("reply", [measurement(), _took(9.0, peak_allocated_bytes=2 * BASE_BYTES)])
def test_another_kind_of_device_is_not_comparable_at_all(reply: Measurement) -> None:
    verdict = _judge(reply, _cpu_baseline())
    assert verdict.status == "not-comparable"
    assert {metric.status for metric in verdict.metrics} == {"not-comparable"}
    assert "recorded on cpu, here NVIDIA H100 80GB HBM3" in verdict.sentence


def test_running_out_of_memory_on_another_kind_of_device_is_not_comparable() -> None:
    verdict = _judge(out_of_memory(environment=cpu_environment()), baseline())
    assert verdict.status == "not-comparable"
    assert verdict.sentence == (
        f"{CASE} cannot be compared with its baseline of 2026-01-31: recorded on NVIDIA H100 80GB HBM3, here cpu; "
        "record it with --gpu-baseline-update"
    )


def test_fitting_on_another_kind_of_device_is_not_comparable() -> None:
    assert _judge(_on_cpu(), baseline(oom_run())).status == "not-comparable"


@pytest.mark.parametrize("reply", [measurement(), out_of_memory()])
def test_a_changed_case_is_not_comparable_and_the_change_is_told(reply: Reply) -> None:
    verdict = _judge(reply, baseline(case=CASE.replace(batch_size=1)))
    assert verdict.status == "not-comparable"
    assert "batch_size 1 -> 2" in verdict.sentence


@pytest.mark.parametrize("change", [{"steps": 99}, {"warmup": 9}, {"platforms": ("h100",)}, {"named": ("batch_size",)}])
def test_other_steps_or_platforms_are_the_same_case(change: dict[str, Any]) -> None:
    assert _judge(measurement(), baseline(case=CASE.replace(**change))).status == "pass"


@pytest.mark.parametrize(
    ("stored_flops", "measured_flops", "compared"),
    [(100, 150, True), (None, 150, False), (0, 150, False), (100, None, False)],
)
def test_flops_that_one_side_does_not_know_are_not_compared(
    stored_flops: int | None, measured_flops: int | None, compared: bool
) -> None:
    verdict = _judge(measurement(flops_per_step=measured_flops), baseline(baseline_run(flops_per_step=stored_flops)))
    metric = verdict.metric("flops_per_step")
    assert metric is not None
    assert (metric.status == "regressed") == compared
    assert (metric.note in ("its FLOPs were not counted", "its baseline has no FLOPs; record it again")) != compared
    assert metric.note in verdict.sentence


def test_flops_of_another_number_of_processes_are_not_compared() -> None:
    stored = baseline(baseline_run(flops_per_step=100, environment=gpu_environment(device_count=8)))
    assert _judge(measurement(flops_per_step=150), stored).metric("flops_per_step") is None


def test_what_is_not_compared_is_shown_with_what_is_known_of_it() -> None:
    stored = baseline(baseline_run(step_seconds=(2.0,), environment=cpu_environment()))
    verdict = _judge(_took(9.0, peak_allocated_bytes=7), stored)
    why = "recorded on cpu, here NVIDIA H100 80GB HBM3"
    assert _time(verdict) == MetricVerdict(metric="step_seconds", status="not-comparable", value=9.0, baseline=2.0, note=why)
    assert _memory(verdict) == MetricVerdict(metric="peak_allocated_bytes", status="not-comparable", value=7, note=why)


# Beside others

HOLDERS = (Holder(pid=7, gpu=0, name="python"),)


@pytest.mark.parametrize(
    ("beside", "alone", "status"),
    [(3, 2, "regressed"), (5, 0, "inconclusive"), (1, 2, "inconclusive"), (0, 3, "regressed")],
)
def test_a_slower_case_beside_others_is_judged_by_its_runs_alone(beside: int, alone: int, status: str) -> None:
    """Of five runs that there may be: with two of three used up beside others, the rest may still speak."""
    verdict = _judge([_took(1.5, holders=HOLDERS)] * beside + [_took(1.5)] * alone, FIVE)
    assert verdict.status == status
    assert ("measured beside python (pid 7) on GPU 0" in verdict.sentence) == (status == "inconclusive")


def test_running_out_of_memory_beside_others_says_nothing_of_the_case() -> None:
    verdict = _judge(out_of_memory(other_processes=1), baseline(baseline_run(peak_allocated_bytes=40 * GiB)))
    assert verdict == Verdict(
        status="inconclusive",
        sentence=(
            f"{CASE} ran out of device memory (measure in step 2): CUDA out of memory.; "
            "1 other process computed on the GPU when it started, so the case may still fit; it fitted with "
            "40.0 GiB allocated"
        ),
    )


# Scaling efficiency


def test_a_missing_scaling_efficiency_is_no_pass() -> None:
    verdict = _judge(measurement(), baseline(), no_scaling="one worker alone ran out of device memory")
    assert verdict.status == "not-comparable"
    assert verdict.sentence == f"{CASE} has no scaling efficiency: one worker alone ran out of device memory"
    assert [metric.status for metric in verdict.metrics] == ["pass", "pass", "not-comparable"]
    assert verdict.metrics[-1].metric == "scaling_efficiency"


# Outcomes


def test_without_baseline_a_case_is_new() -> None:
    verdict = _judge(measurement(), None, hint="there are some for nvidia-h200")
    assert verdict.status == "new"
    assert "there are some for nvidia-h200" in verdict.sentence
    assert _judge(measurement(), None).sentence == f"{CASE} has no baseline; record it with --gpu-baseline-update-new-only"


def test_a_peak_of_several_threads_is_judged_by_the_tolerance_and_never_called_exact() -> None:
    stored = baseline(baseline_run(environment=cpu_environment(), peak_allocated_bytes=1000 * MiB))
    single, several = (
        measurement(environment=cpu_environment(), peak_allocated_bytes=1001 * MiB, counted_threads=threads)
        for threads in (1, 2)
    )
    assert _memory(_judge(single, stored)).note == "changed by +1,048,576 bytes, within the limit"
    assert _memory(_judge(several, stored)).note == ""
    above = msgspec.structs.replace(several, peak_allocated_bytes=1030 * MiB)
    assert not judge(CASE, [above], stored, TOLERANCE).settled
    assert _judge(above, stored).status == "regressed"


@pytest.mark.parametrize(("ratio", "status"), [(1.08, "pass"), (0.93, "pass"), (1.12, "regressed"), (0.88, "improved")])
def test_memory_of_several_processes_on_a_cpu_has_a_wider_limit(ratio: float, status: str) -> None:
    environment = cpu_environment(device_count=2)
    stored = baseline(baseline_run(environment=environment))
    verdict = _judge(measurement(environment=environment, peak_allocated_bytes=round(BASE_BYTES * ratio)), stored)
    assert _memory(verdict).status == status
    assert _memory(verdict).note == ""


def test_a_missing_scaling_efficiency_of_a_new_case_is_told() -> None:
    verdict = _judge(measurement(), None, no_scaling="one worker alone ran out of device memory")
    assert verdict.status == "new"
    assert "and no scaling efficiency (one worker alone ran out of device memory)" in verdict.sentence


@pytest.mark.parametrize("reply", [crashed(rank=3), out_of_memory(rank=3)])
def test_the_process_that_failed_is_named(reply: Crashed | OutOfMemory) -> None:
    assert ", rank 3): " in describe_failure(reply)
    assert "rank" not in describe_failure(msgspec.structs.replace(reply, rank=None))


BASELINES = {
    "none": None,
    "fits": baseline(),
    "oom": baseline(oom_run()),
    "another case": baseline(case=CASE.replace(gpus=2)),
}


@pytest.mark.parametrize("stored", BASELINES.values(), ids=BASELINES)
@pytest.mark.parametrize("reply", [crashed(), timed_out()], ids=["crashed", "timed out"])
def test_a_case_without_outcome_fails_whatever_the_baseline(reply: Reply, stored: Baseline | None) -> None:
    assert _judge(reply, stored).status == "failed"
    assert _judge([measurement(), measurement(), reply], stored).status == "failed"


@pytest.mark.parametrize(
    ("reply", "stored_outcome", "status"),
    [
        (measurement(), "fits", "pass"),
        (measurement(), "oom", "improved"),
        (out_of_memory(), "fits", "regressed"),
        (out_of_memory(), "oom", "pass"),
        (out_of_memory(), "none", "failed"),
    ],
)
def test_out_of_memory_is_an_outcome(reply: Reply, stored_outcome: str, status: str) -> None:
    assert _judge(reply, BASELINES[stored_outcome]).status == status


@pytest.mark.parametrize(
    ("fitting", "failing", "status"),
    [(4, 1, "inconclusive"), (2, 1, "inconclusive"), (1, 2, "regressed"), (0, 2, "regressed"), (0, 3, "regressed")],
)
def test_running_out_of_memory_is_a_regression_where_two_of_three_do(fitting: int, failing: int, status: str) -> None:
    replies = [measurement()] * fitting + [out_of_memory()] * failing
    verdict = _judge(replies, baseline())
    assert verdict.status == status
    assert f"in {failing} of {fitting + failing} runs" in verdict.sentence


@pytest.mark.parametrize(("fitting", "failing"), [(4, 1), (1, 1), (1, 2)])
def test_a_baseline_that_did_not_always_fit_is_what_most_runs_were(fitting: int, failing: int) -> None:
    stored = baseline(*[baseline_run()] * fitting, *[oom_run()] * failing)
    fits = fitting >= failing
    assert _judge(out_of_memory(), stored).status == ("regressed" if fits else "pass")
    assert _judge(measurement(), stored).status == ("pass" if fits else "improved")
    slower = [_took(1.5, peak_allocated_bytes=2 * BASE_BYTES)] * 3
    assert _judge(slower, stored).status == ("regressed" if fits else "improved")


def test_what_fits_or_does_not_as_before_or_newly_is_told_in_full() -> None:
    assert _judge(out_of_memory(), baseline(oom_run())).sentence.endswith(", as in its baseline of 2026-01-31")
    assert _judge(measurement(), baseline(oom_run())).sentence == (
        f"{CASE} fits in memory now; its baseline of 2026-01-31 did not; record it with --gpu-baseline-update"
    )


def test_a_single_run_that_ran_out_of_memory_is_not_counted_out() -> None:
    verdict = _judge([out_of_memory()], baseline(), most=1)
    assert verdict.metrics == (MetricVerdict(metric="peak_allocated_bytes", status="regressed", baseline=BASE_BYTES),)
    assert "CUDA out of memory.; its baseline" in verdict.sentence


def test_another_memory_than_the_baselines_fails() -> None:
    verdict = _judge(out_of_memory(where="host"), baseline(oom_run()))
    assert verdict.status == "failed"
    assert "ran out of device memory" in verdict.sentence


def test_a_regression_counts_before_an_improvement() -> None:
    verdict = _judge(_took(0.5, peak_allocated_bytes=2 * BASE_BYTES), baseline())
    assert (verdict.status, _time(verdict).status) == ("regressed", "improved")


# Sentences


def test_a_slower_case_is_told_with_all_that_matters() -> None:
    here = gpu_environment(packages={"torch": "2.13.0", "peft": "0.18"}, driver="580.20")
    there = gpu_environment(packages={"torch": "2.12.0"})
    verdict = _judge(_took(1.5, environment=here), baseline(baseline_run(environment=there)))
    for part in (
        str(CASE),
        "50.0 % slower at 1.50 s a step than baseline 1.00 s (1 run); limit 3.0 %; 3 of 3 fresh runs slower",
        "baseline of 2026-01-31",
        "torch 2.12.0 -> 2.13.0",
        "peft absent -> 0.18",
        "driver 580.10 -> 580.20",
    ):
        assert part in verdict.sentence
    assert "\n" not in verdict.sentence


def test_a_changed_topology_is_told_in_words() -> None:
    linked = gpu_environment(topology=(("X", "NV18"), ("NV18", "X")))
    split = gpu_environment(topology=(("X", "SYS"), ("SYS", "X")))
    verdict = _judge(_took(2.0, environment=split), baseline(baseline_run(environment=linked)))
    assert verdict.sentence.endswith("since then: topology NV18 -> SYS")


HOST = {
    "cudnn": "9.10.2",
    "nccl": "2.27.3",
    "cores": 48,
    "host_memory_bytes": 512 * GiB,
    "nics": ("8 x mlx5_core 400 Gb/sec (4X NDR)",),
}


def test_changed_libraries_of_the_gpu_and_a_changed_host_are_told_in_words() -> None:
    weaker = {
        "cudnn": "9.8.0",
        "nccl": "2.26.2",
        "cores": 16,
        "host_memory_bytes": 256 * GiB,
        "nics": ("1 x mlx5_core down", "7 x mlx5_core 400 Gb/sec (4X NDR)"),
    }
    recorded = baseline(baseline_run(environment=gpu_environment(**HOST)))
    verdict = _judge(_took(2.0, environment=gpu_environment(**weaker)), recorded)
    assert verdict.sentence.endswith(
        "since then: cuDNN 9.10.2 -> 9.8.0, NCCL 2.27.3 -> 2.26.2, CPU cores 48 -> 16, host memory 512 GiB -> 256 GiB, "
        "network cards 8 x mlx5_core 400 Gb/sec (4X NDR) -> 1 x mlx5_core down, 7 x mlx5_core 400 Gb/sec (4X NDR)"
    )
    on_amd = {"device_type": "rocm", "cudnn": "3.5.0", "nccl": "2.26.6"}
    recorded = baseline(baseline_run(environment=gpu_environment(device_type="rocm", cudnn="3.4.0", nccl="2.22.3")))
    verdict = _judge(_took(2.0, environment=gpu_environment(**on_amd)), recorded)
    assert verdict.sentence.endswith("since then: MIOpen 3.4.0 -> 3.5.0, RCCL 2.22.3 -> 2.26.6")


@pytest.mark.parametrize(
    ("there", "here"),
    [
        pytest.param({}, HOST, id="a baseline of an earlier version"),
        pytest.param(HOST, {**HOST, "host_memory_bytes": 512 * GiB - 4096}, id="another kernel on the same host"),
        pytest.param(HOST, {**HOST, "nics": msgspec.UNSET}, id="a host that does not tell"),
    ],
)
def test_what_is_not_known_of_a_host_is_no_change(there: dict[str, Any], here: dict[str, Any]) -> None:
    recorded = baseline(baseline_run(environment=gpu_environment(**there)))
    verdict = _judge(_took(2.0, environment=gpu_environment(**here)), recorded)
    assert verdict.sentence.endswith("; same environment")


def test_a_larger_case_is_told_with_all_that_matters() -> None:
    stored = baseline(baseline_run(peak_allocated_bytes=40 * GiB))
    verdict = _judge(measurement(peak_allocated_bytes=50 * GiB), stored)
    for part in (str(CASE), "25.0 %", "10.0 GiB", "50.0 GiB against 40.0 GiB", "limit 40.9 GiB", "same environment"):
        assert part in verdict.sentence
    assert "\n" not in verdict.sentence


def test_both_regressions_are_told() -> None:
    sentence = _judge(_took(1.5, peak_allocated_bytes=2 * BASE_BYTES), baseline()).sentence
    assert "slower" in sentence
    assert "more memory" in sentence


def test_a_changed_model_is_told_from_a_slower_one() -> None:
    stored = baseline(baseline_run(flops_per_step=100, model_bytes=GiB))
    sentence = _judge(_took(1.5, flops_per_step=102, model_bytes=2 * GiB), stored).sentence
    assert "+2.0 % FLOPs per step" in sentence
    assert "model memory 1.00 GiB -> 2.00 GiB" in sentence


@pytest.mark.parametrize(
    ("flops", "status", "sentence"),
    [
        (150, "regressed", "computes 50.0 % more: 150 FLOP against 100 FLOP a step; limit 3.0 %"),
        (102, "pass", "changed by +2.0 %, within the limit"),
        (50, "improved", "computes 50.0 % less: 50 FLOP against 100 FLOP a step"),
        (100, "pass", "within its limits"),
    ],
)
def test_flops_are_gated_where_time_is_not(flops: int, status: str, sentence: str) -> None:
    stored = baseline(baseline_run(flops_per_step=100, environment=cpu_environment()))
    verdict = _judge(measurement(flops_per_step=flops, environment=cpu_environment()), stored)
    assert verdict.status == status
    assert sentence in verdict.sentence
    assert verdict.sentence.count("FLOP") <= 2
    metric = verdict.metric("flops_per_step")
    assert metric is not None
    assert (metric.limit, bool(metric.note)) == (pytest.approx(103), flops == 102)


def test_the_same_flops_pass_without_tolerance() -> None:
    stored = baseline(baseline_run(flops_per_step=100))
    assert _judge(measurement(flops_per_step=100), stored, tolerance=EXACT).status == "pass"


def test_flops_alone_do_not_make_a_case_comparable() -> None:
    stored = baseline(baseline_run(flops_per_step=100, environment=cpu_environment()))
    assert _judge(measurement(flops_per_step=100), stored).status == "not-comparable"


def test_running_out_of_memory_is_told_with_what_fitted_before() -> None:
    stored = baseline(baseline_run(peak_allocated_bytes=40 * GiB, environment=gpu_environment(driver="570.1")))
    sentence = _judge(out_of_memory(), stored).sentence
    for part in (str(CASE), "ran out of device memory", "40.0 GiB", "2026-01-31", "driver 570.1 -> 580.10"):
        assert part in sentence


def test_an_improvement_says_how_to_keep_it() -> None:
    sentence = _judge(_took(0.5), baseline()).sentence
    assert "50.0 % faster" in sentence
    assert "--gpu-baseline-update" in sentence


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (crashed(phase="measure", step=2), "(measure in step 3): ValueError: loss is NaN"),
        (crashed(phase="build", step=None), "(build): ValueError: loss is NaN"),
        (timed_out(timeout_seconds=90.0), "was ended after 90.0 s (build); --gpu-timeout allows more"),
        (out_of_memory(where="host"), "ran out of host memory (measure in step 2): CUDA out of memory."),
    ],
)
def test_a_failure_is_told_with_its_place(reply: Reply, sentence: str) -> None:
    assert sentence in _judge(reply, None).sentence


# For any figures

SECONDS = st.floats(1e-4, 1e4)
STEPS = st.lists(SECONDS, min_size=1, max_size=5).map(tuple)
PEAKS = st.integers(1, 10**12)
ENVIRONMENTS = st.sampled_from([gpu_environment(), gpu_environment(device_name="NVIDIA H200"), cpu_environment()])
MEASURED = st.builds(
    lambda steps, peak, env: measurement(step_seconds=steps, peak_allocated_bytes=peak, environment=env),
    STEPS,
    PEAKS,
    ENVIRONMENTS,
)
REPLIES = st.lists(
    st.one_of(MEASURED, MEASURED, st.sampled_from([out_of_memory(), crashed(), timed_out()])), min_size=1, max_size=4
)
RUNS = st.builds(
    lambda steps, peak, env: baseline_run(step_seconds=steps, peak_allocated_bytes=peak, environment=env),
    STEPS,
    PEAKS,
    ENVIRONMENTS,
)
KNOWN = st.none() | st.lists(RUNS | st.just(oom_run()), min_size=1, max_size=6).map(lambda runs: baseline(*runs))
BADNESS = {"improved": 0, "pass": 1, "inconclusive": 2, "regressed": 3}


@given(SECONDS, SECONDS, SECONDS)
def test_more_time_is_never_a_better_verdict(base: float, first: float, other: float) -> None:
    stored = baseline(baseline_run(step_seconds=(base,)))
    less, more = (_judge(_took(seconds), stored).status for seconds in sorted([first, other]))
    assert BADNESS[less] <= BADNESS[more]


@example((571.0,), [(1.0,), (1.0,), (755.0,), (2168.0,), (755.0,)], 2.0)
@given(STEPS, st.lists(STEPS, min_size=1, max_size=5), st.floats(1, 3))
def test_a_slower_step_is_never_a_better_verdict(base: Any, runs: list[Any], factor: float) -> None:
    stored = baseline(baseline_run(step_seconds=base))
    slower = [tuple(factor * seconds for seconds in steps) for steps in runs]
    before, after = (_judge([measurement(step_seconds=s) for s in steps], stored).status for steps in (runs, slower))
    assert BADNESS[before] <= BADNESS[after]


@given(PEAKS, PEAKS, PEAKS, st.sampled_from([gpu_environment(), cpu_environment()]))
def test_more_memory_is_never_a_better_verdict(base: int, first: int, other: int, environment: Environment) -> None:
    stored = baseline(baseline_run(peak_allocated_bytes=base, environment=environment))
    less, more = (
        _judge(measurement(peak_allocated_bytes=peak, environment=environment), stored).status
        for peak in sorted([first, other])
    )
    assert BADNESS[less] <= BADNESS[more]


@given(SECONDS, st.floats(0, 0.9), st.floats(0, 0.9))
def test_a_wider_tolerance_never_fails_what_passed(seconds: float, first: float, other: float) -> None:
    narrow, wide = sorted([first, other])
    verdicts = [
        _judge(_took(seconds), baseline(), tolerance=Tolerance(time=ratio, memory=MemoryTolerance())).status
        for ratio in (narrow, wide)
    ]
    assert verdicts[0] == "regressed" or verdicts[1] != "regressed"


@given(REPLIES, KNOWN)
def test_the_same_figures_get_the_same_verdict(replies: list[Reply], stored: Baseline | None) -> None:
    assert _judge(replies, stored) == _judge(replies, stored)


@given(REPLIES, KNOWN)
def test_any_verdict_is_one_line_that_names_the_case(replies: list[Reply], stored: Baseline | None) -> None:
    verdict = _judge(replies, stored)
    assert verdict.sentence.startswith(str(CASE))
    assert len(verdict.sentence.splitlines()) == 1


@given(REPLIES, KNOWN, st.randoms(use_true_random=False))
def test_the_order_of_the_baseline_runs_does_not_matter(replies: list[Reply], stored: Baseline | None, random: Any) -> None:
    if stored is not None:
        shuffled = list(stored.runs)
        random.shuffle(shuffled)
        assert _judge(replies, baseline(*shuffled)).status == _judge(replies, stored).status
