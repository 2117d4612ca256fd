"""The gate against published figures: ranges, tolerances, outcomes, and what cannot be compared."""

import msgspec
import pytest
from hypothesis import strategies as st
from unit_examples import CASE, crashed, emulated_run, gpu_environment, measurement, out_of_memory, timed_out, told

from pytest_gputrain import GiB, MiB
from pytest_gputrain.gate.contention import GPU_MEMORY_NOISE_BYTES
from pytest_gputrain.gate.new_device import TOLERANCE, judge_by_emulated, judge_by_published
from pytest_gputrain.gate.published import judge_published, step_seconds
from pytest_gputrain.records import Holder, Published, Verdict
from pytest_gputrain.records.published import Figure, Figures
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance


def figure(low, high=None, rounding=0.1):
    return Figure(low=low, high=low if high is None else high, rounding=rounding)


def row(*, case=CASE, outcome="measured", **figures):
    row_figures = figures or {"step_seconds": figure(1.0)}
    return Published(
        table="a-table",
        suite="llm",
        platform="h100",
        case=case,
        outcome=outcome,
        cells={},
        figures={"pytorch": Figures(**row_figures)},
        made_with="torch 2.5.1 on NVIDIA H100",
    )


def judged(published, *replies, case=CASE, time=0.03, memory=0.02, **given):
    tolerance = Tolerance(time=time, memory=MemoryTolerance(ratio=memory))
    return judge_published(case, replies or (measurement(),), published, tolerance, **{"scale": "full", **given})


def _timed(seconds, published, **given):
    verdict = judged(published, measurement(step_seconds=(seconds,)), **given)
    metric = verdict.metric("step_seconds")
    return metric.status


seconds = st.floats(0.01, 1000)


@pytest.mark.parametrize(
    ("printed", "measured"),
    [
        (figure(4.7), {4.89: "pass", 4.90: "regressed", 4.52: "pass", 4.51: "improved"}),  # 4.75 x 1.03, 4.65 / 1.03
        (figure(9, 11, rounding=1), {11.8: "pass", 11.9: "regressed", 8.3: "pass", 8.2: "improved"}),
    ],
    ids=["a figure", "a range"],
)
def test_limits_begin_where_the_rounding_of_what_was_printed_ends(printed, measured):
    assert {seconds: _timed(seconds, row(step_seconds=printed)) for seconds in measured} == measured


@pytest.mark.parametrize("name", ["peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"])
def test_memory_is_compared_with_its_like(name):
    published = row(**{name: figure(40 * GiB, rounding=GiB)})
    limit = 40.5 * GiB * 1.02 + GPU_MEMORY_NOISE_BYTES
    others = {"peak_allocated_bytes": GiB, "peak_reserved_bytes": GiB, "device_used_bytes": GiB}
    for value, status in ((int(limit), "pass"), (int(limit) + 1, "regressed")):
        verdict = judged(published, measurement(**{**others, name: value}))
        assert [(metric.metric, metric.status) for metric in verdict.metrics] == [(name, status)]


@pytest.mark.parametrize(
    ("case", "published", "ends"),
    [
        # Of all GPUs is of all their samples: 128 in 2 s, and 10 in 2.5 s of one.
        (
            CASE.replace(parallel="ddp", gpus=8, batch_size=16),
            {"samples_per_second": figure(64, rounding=1)},
            (128 / 64.5, 2.0, 128 / 63.5),
        ),
        (
            CASE.replace(parallel="fsdp", gpus=8, batch_size=10),
            {"samples_per_second_per_gpu": figure(4.0)},
            (10 / 4.05, 2.5, 10 / 3.95),
        ),
    ],
)
def test_throughput_is_of_the_samples_of_its_gpus_and_its_digits_are_ends_of_the_time(case, published, ends):
    seconds_of_step = step_seconds(case, Figures(**published))
    assert (seconds_of_step.least, seconds_of_step.middle, seconds_of_step.most) == pytest.approx(ends)


def test_verdicts_are_told_with_what_the_table_was_made_with(snapshot):
    here = gpu_environment(packages={"torch": "2.13.0"})
    slower = measurement(step_seconds=(6.3,), environment=here)
    reserved, used = (
        {"peak_reserved_bytes": figure(40 * GiB, rounding=GiB)},
        {"device_used_bytes": figure(9406 * MiB, rounding=MiB)},
    )
    unmeasured = measurement(peak_reserved_bytes=None)
    of_paddle = Figures(samples_per_second=figure(4.0), peak_allocated_bytes=figure(GiB, rounding=GiB))
    both = {"pytorch": Figures(samples_per_second=figure(2.0)), "paddle": of_paddle}
    beside = measurement(step_seconds=(2.0,), holders=(Holder(pid=4711, gpu=0, name="python"),))
    verdicts = {
        "slower": judged(row(step_seconds=figure(4.7)), slower),
        "slower beside another process": judged(row(), beside),
        "as slow beside another process": judged(row(step_seconds=figure(2.0)), beside),
        "faster": judged(row(), measurement(step_seconds=(0.5,))),
        "larger": judged(row(**used), measurement(device_used_bytes=20 * GiB)),
        "memory not measured": judged(row(step_seconds=figure(1.0), **reserved), unmeasured),
        "nothing measured": judged(row(**reserved), unmeasured),
        "two frameworks": judged(msgspec.structs.replace(row(), figures=both), measurement(peak_allocated_bytes=50 * GiB)),
        "pictures": judged(msgspec.structs.replace(row(), figures={})),
    }
    replies = {"oom": out_of_memory(), "host oom": out_of_memory(where="host"), "fits": measurement()}
    replies |= {"crashed": crashed(), "timed out": timed_out()}
    not_judged = msgspec.structs.replace(row(step_seconds=figure(1.0), **used), memory_not_judged="published with FSDP1")
    for size in (GiB, 90 * GiB):
        for took in (1.0, 2.0):
            reply = measurement(step_seconds=(took,), device_used_bytes=size)
            verdicts[f"memory is not judged: {size >> 30} GiB, {took} s"] = judged(not_judged, reply)
    outcomes = ("measured", "out_of_memory", "error")
    verdicts |= {f"{was}, now {now}": judged(row(outcome=was), replies[now]) for was in outcomes for now in replies}
    nothing = {
        "elsewhere": (None, {"elsewhere": ("a100", "h100")}),
        "nowhere": (None, {}),
        "tiny": (row(), {"scale": "tiny"}),
        "another case": (row(case=CASE.replace(batch_size=4)), {}),
    }
    for name, (published, given_) in nothing.items():
        verdicts[name] = judged(published, **given_)
        verdicts[f"{name}, out of memory"] = judged(published, out_of_memory(), **given_)
    assert told(verdicts) == snapshot


# A case without a baseline, beside its emulated run or its published row

NEW = Verdict(status="new", sentence=f"{CASE} has no baseline; record it")
PEAK = 32 * GiB
LIMIT = round(PEAK * (1 + TOLERANCE.ratio) + TOLERANCE.bytes)


def _beside_emulated(*peaks, flops=10**15, **fields):
    runs = [measurement(peak_allocated_bytes=peak, flops_per_step=flops) for peak in peaks]
    return judge_by_emulated(NEW, CASE, runs, emulated_run(peak_allocated_bytes=PEAK, **fields))


@pytest.mark.parametrize(
    ("peaks", "flops", "status"),
    [
        *(((peak,), 10**15, "new") for peak in (1, PEAK, LIMIT)),
        ((LIMIT + 1,), 10**15, "regressed"),
        ((PEAK, 2 * PEAK, PEAK), 10**15, "new"),  # one bad process of three fails nothing
        ((2 * PEAK, 2 * PEAK, PEAK), 10**15, "regressed"),
        *(((PEAK,), flops, "new") for flops in (103 * 10**13, 10**14, None)),
        ((PEAK,), 104 * 10**13, "regressed"),
    ],
)
def test_memory_and_flops_may_grow_to_the_limit_and_shrink_at_will(peaks, flops, status):
    verdict = _beside_emulated(*peaks, flops=flops)
    assert (verdict.status, verdict.held_to) == (status, "emulated")


def test_what_a_new_case_is_held_to_is_told(snapshot):
    of_row = _exactly(peak_reserved_bytes=PEAK)
    verdicts = {
        "memory and FLOPs": _beside_emulated(PEAK),
        "memory alone": _beside_emulated(PEAK, flops=None),
        "more of both": _beside_emulated(2 * PEAK, flops=2 * 10**15),
        **{
            f"a published row, {peak} B": judge_by_published(NEW, CASE, [measurement(peak_reserved_bytes=peak)], of_row)
            for peak in (PEAK, LIMIT, LIMIT + 70 * MiB)
        },
    }
    assert told(verdicts) == snapshot
    assert [verdict.held_to for verdict in verdicts.values()] == ["emulated"] * 3 + ["published"] * 3


@pytest.mark.parametrize(("alone", "flops"), [(True, 8 * 10**15), (False, 10**15)])
def test_flops_are_those_of_all_processes(alone, flops):
    several = {"processes": 8, "allocated_by_rank": () if alone else (PEAK,) * 8}
    for value, status in ((flops, "new"), (round(1.04 * flops), "regressed")):
        assert _beside_emulated(PEAK, flops=value, **several).status == status


def test_a_run_that_tells_only_the_least_memory_holds_nothing():
    assert _beside_emulated(2 * PEAK, not_counted=("cuDNN's workspaces",)) == NEW


def _exactly(**figures):
    return row(**{name: figure(value, rounding=0) for name, value in figures.items()}) if figures else row()


def test_a_row_without_memory_holds_nothing():
    runs = [measurement(peak_reserved_bytes=PEAK)]
    assert judge_by_published(NEW, CASE, runs, _exactly()) is NEW
    why = msgspec.structs.replace(_exactly(peak_reserved_bytes=PEAK), memory_not_judged="made with another engine")
    assert judge_by_published(NEW, CASE, runs, why) is NEW
    unmeasured = [measurement(device_used_bytes=None)]
    assert judge_by_published(NEW, CASE, unmeasured, _exactly(device_used_bytes=PEAK)) is NEW
