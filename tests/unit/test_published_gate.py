"""The gate against published figures: ranges, tolerances, outcomes, and what cannot be compared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit_examples import CASE, crashed, gpu_environment, measurement, out_of_memory, timed_out

from pytest_gputrain import GiB, MiB
from pytest_gputrain.gate.contention import GPU_MEMORY_NOISE_BYTES
from pytest_gputrain.gate.published import judge_published, step_seconds
from pytest_gputrain.records import Case, Holder, Published, Reply, Verdict
from pytest_gputrain.records.published import Figure, Figures
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance

ORDER = ["improved", "pass", "regressed"]


def figure(low: float, high: float | None = None, rounding: float = 0.1) -> Figure:
    return Figure(low=low, high=low if high is None else high, rounding=rounding)


def row(*, case: Case = CASE, outcome: Any = "measured", **figures: Figure) -> Published:
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


def judged(
    published: Published | None, *replies: Reply, case: Case = CASE, time: float = 0.03, memory: float = 0.02, **given: Any
) -> Verdict:
    tolerance = Tolerance(time=time, memory=MemoryTolerance(ratio=memory))
    return judge_published(case, replies or (measurement(),), published, tolerance, **{"scale": "full", **given})


def _timed(seconds: float, published: Published, **given: Any) -> str:
    verdict = judged(published, measurement(step_seconds=(seconds,)), **given)
    metric = verdict.metric("step_seconds")
    assert metric is not None
    return metric.status


seconds = st.floats(0.01, 1000)


@given(low=seconds, width=st.floats(0, 10), rounding=st.sampled_from([0.01, 0.1, 1.0]), share=st.floats(0, 1))
def test_what_would_be_printed_so_passes(low: float, width: float, rounding: float, share: float) -> None:
    assume(low > rounding)
    published = row(step_seconds=figure(low, low + width, rounding))
    inside = low - rounding / 2 + share * (width + rounding)
    assert _timed(inside, published) == "pass"


@given(base=st.floats(1, 100), first=seconds, other=seconds, tolerance=st.floats(0, 0.5))
def test_slower_is_never_better(base: float, first: float, other: float, tolerance: float) -> None:
    published = row(step_seconds=figure(base))
    fast, slow = (ORDER.index(_timed(value, published, time=tolerance)) for value in sorted((first, other)))
    assert fast <= slow


@given(base=st.integers(1, 100), first=st.integers(0, 2**40), other=st.integers(0, 2**40))
def test_more_memory_is_never_better(base: int, first: int, other: int) -> None:
    published = row(peak_reserved_bytes=figure(base * GiB, rounding=GiB))
    verdicts = [judged(published, measurement(peak_reserved_bytes=value)) for value in sorted((first, other))]
    small, big = (ORDER.index(verdict.status) for verdict in verdicts)
    assert small <= big


@pytest.mark.parametrize(("measured", "status"), [(4.89, "pass"), (4.90, "regressed"), (4.52, "pass"), (4.51, "improved")])
def test_limits_begin_where_the_rounding_ends(measured: float, status: str) -> None:
    assert _timed(measured, row(step_seconds=figure(4.7))) == status  # (4.75 x 1.03, 4.65 / 1.03)


@pytest.mark.parametrize(("measured", "status"), [(11.8, "pass"), (11.9, "regressed"), (8.3, "pass"), (8.2, "improved")])
def test_a_printed_range_is_taken_from_end_to_end(measured: float, status: str) -> None:
    assert _timed(measured, row(step_seconds=figure(9, 11, rounding=1))) == status


@pytest.mark.parametrize("name", ["peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"])
def test_memory_is_compared_with_its_like(name: Any) -> None:
    published = row(**{name: figure(40 * GiB, rounding=GiB)})
    limit = 40.5 * GiB * 1.02 + GPU_MEMORY_NOISE_BYTES
    others: dict[str, Any] = {"peak_allocated_bytes": GiB, "peak_reserved_bytes": GiB, "device_used_bytes": GiB}
    for value, status in ((int(limit), "pass"), (int(limit) + 1, "regressed")):
        verdict = judged(published, measurement(**{**others, name: value}))
        assert [(metric.metric, metric.status) for metric in verdict.metrics] == [(name, status)]


def test_a_regression_says_what_the_table_was_made_with() -> None:
    here = gpu_environment(packages={"torch": "2.13.0"})
    verdict = judged(row(step_seconds=figure(4.7)), measurement(step_seconds=(6.3,), environment=here))
    assert verdict.status == "regressed"
    assert verdict.sentence == (
        "llama-3.1-8b-lora-bf16 is 34.0 % slower: 6.30 s against 4.70 s a step, limit 4.89 s (published in a-table with "
        "torch 2.5.1 on NVIDIA H100; here with torch 2.13.0 on NVIDIA H100 80GB HBM3)"
    )


def test_memory_in_a_regression_is_named_by_its_kind() -> None:
    published = row(device_used_bytes=figure(9406 * MiB, rounding=MiB))
    assert "in use on the device" in judged(published, measurement(device_used_bytes=20 * GiB)).sentence


@pytest.mark.parametrize("used", [10 * GiB, 90 * GiB])
def test_memory_that_cannot_be_judged_is_shown_with_the_reason(used: int) -> None:
    printed = row(step_seconds=figure(1.0), device_used_bytes=figure(40 * GiB, rounding=GiB))
    published = msgspec.structs.replace(printed, memory_not_judged="published with FSDP1")
    verdict = judged(published, measurement(step_seconds=(1.0,), device_used_bytes=used))
    metric = verdict.metric("device_used_bytes")
    assert metric is not None
    assert (verdict.status, metric.status, metric.note) == ("pass", "not-comparable", "published with FSDP1")
    assert (metric.value, metric.baseline) == (used, 40 * GiB)
    slower = judged(published, measurement(step_seconds=(2.0,), device_used_bytes=used))
    assert slower.status == "regressed"


def test_memory_that_was_not_measured_here_is_not_compared() -> None:
    published = row(step_seconds=figure(1.0), peak_reserved_bytes=figure(40 * GiB, rounding=GiB))
    verdict = judged(published, measurement(step_seconds=(1.0,), peak_reserved_bytes=None))
    assert verdict.status == "pass"
    metric = verdict.metric("peak_reserved_bytes")
    assert metric is not None
    assert (metric.status, metric.note) == ("not-comparable", "not measured here")


def test_a_case_whose_only_figure_was_not_measured_is_not_comparable() -> None:
    published = row(peak_reserved_bytes=figure(40 * GiB, rounding=GiB))
    assert judged(published, measurement(peak_reserved_bytes=None)).status == "not-comparable"


def test_throughput_of_all_gpus_is_of_all_their_samples() -> None:
    case = CASE.replace(parallel="ddp", gpus=8, batch_size=16)
    seconds_of_step = step_seconds(case, Figures(samples_per_second=figure(64, rounding=1)))
    assert seconds_of_step is not None
    assert (seconds_of_step.middle, seconds_of_step.least, seconds_of_step.most) == (2.0, 128 / 64.5, 128 / 63.5)


def test_throughput_of_one_gpu_is_of_its_samples() -> None:
    case = CASE.replace(parallel="fsdp", gpus=8, batch_size=10)
    seconds_of_step = step_seconds(case, Figures(samples_per_second_per_gpu=figure(4.0)))
    assert seconds_of_step is not None
    assert seconds_of_step.middle == 2.5


def test_pytorch_is_the_gate_where_two_frameworks_are_published() -> None:
    both = row(samples_per_second=figure(2.0))
    both = Published(**{name: getattr(both, name) for name in both.__struct_fields__} | {"figures": {
        "pytorch": Figures(samples_per_second=figure(2.0)),
        "paddle": Figures(samples_per_second=figure(4.0), peak_allocated_bytes=figure(GiB, rounding=GiB)),
    }})  # fmt: skip
    verdict = judged(both, measurement(step_seconds=(1.0,), peak_allocated_bytes=50 * GiB))
    assert verdict.status == "pass"
    metric = verdict.metric("peak_allocated_bytes")
    assert metric is not None
    assert (metric.status, metric.note) == ("not-comparable", "published for paddle, not pytorch")


@pytest.mark.parametrize(
    ("outcome", "reply", "status", "words"),
    [
        ("out_of_memory", out_of_memory(), "pass", "as published in a-table"),
        ("out_of_memory", out_of_memory(where="host"), "failed", "it runs out of device memory"),
        ("out_of_memory", measurement(), "improved", "fits in memory here"),
        ("error", measurement(), "improved", "trains here"),
        ("error", out_of_memory(), "failed", "it ends with an error"),
        ("measured", out_of_memory(), "regressed", "as published in a-table with torch 2.5.1 on NVIDIA H100 it fits"),
        ("measured", crashed(), "failed", "gave no measurement"),
        ("out_of_memory", crashed(), "failed", "gave no measurement"),
        ("error", timed_out(), "failed", "was ended after"),
    ],
)
def test_outcomes(outcome: Any, reply: Reply, status: str, words: str) -> None:
    verdict = judged(row(outcome=outcome), reply)
    assert verdict.status == status
    assert words in verdict.sentence


@pytest.mark.parametrize(
    ("published", "given", "words"),
    [
        (None, {"elsewhere": ("a100", "h100")}, "published for a100, h100 only"),
        (None, {}, "no published table has it"),
        (row(), {"scale": "tiny"}, "this is the tiny scale"),
        (row(case=CASE.replace(batch_size=4)), {}, "it is not the case of its row in a-table (batch_size 4 -> 2)"),
    ],
)
def test_what_has_nothing_to_compare_with_says_why(published: Any, given: Any, words: str) -> None:
    verdict = judged(published, **given)
    assert verdict.status == "not-comparable"
    assert words in verdict.sentence
    failed = judged(published, out_of_memory(), **given)
    assert failed.status == "failed"
    assert words in failed.sentence


def test_pictures_are_no_figures() -> None:
    pictured = row()
    fields = {name: getattr(pictured, name) for name in pictured.__struct_fields__}
    verdict = judged(Published(**{**fields, "figures": {}}))
    assert verdict.status == "not-comparable"
    assert "has pictures, not figures" in verdict.sentence


def test_slower_than_published_beside_another_process_is_in_doubt_and_says_whose() -> None:
    other = (Holder(pid=4711, gpu=0, name="python"),)
    for seconds, holders, status, note in (
        (2.0, other, "inconclusive", "measured beside python (pid 4711) on GPU 0"),
        (2.0, (), "regressed", ""),
        (1.0, other, "pass", ""),
    ):
        metric = judged(row(), measurement(step_seconds=(seconds,), holders=holders)).metric("step_seconds")
        assert metric is not None
        assert (metric.status, metric.note) == (status, note)


def test_faster_than_published_is_improved_with_its_figure() -> None:
    verdict = judged(row(), measurement(step_seconds=(0.5,)))
    assert (verdict.status, "is 50.0 % faster" in verdict.sentence) == ("improved", True)
