"""The limits of what a case without a baseline may need beside its prediction, or beside its published row."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from unit_examples import CASE, measurement, prediction

from pytest_gputrain.gate.new_device import TOLERANCE, judge_by_prediction, judge_by_published
from pytest_gputrain.records import Published, Verdict
from pytest_gputrain.records.published import Figure, Figures
from pytest_gputrain.utils.units import GiB, MiB

NEW = Verdict(status="new", sentence=f"{CASE} has no baseline; record it")
PEAK = 32 * GiB
LIMIT = round(PEAK * (1 + TOLERANCE.ratio) + TOLERANCE.bytes)


def _judged(*peaks: int, flops: int | None = 10**15, **fields: Any) -> Verdict:
    runs = [measurement(peak_allocated_bytes=peak, flops_per_step=flops) for peak in peaks]
    return judge_by_prediction(NEW, CASE, runs, prediction(peak_allocated_bytes=PEAK, **fields))


@pytest.mark.parametrize(("peak", "status"), [(1, "new"), (PEAK, "new"), (LIMIT, "new"), (LIMIT + 1, "regressed")])
def test_memory_may_grow_to_the_limit_and_shrink_at_will(peak: int, status: str) -> None:
    verdict = _judged(peak)
    assert (verdict.status, verdict.held_to) == (status, "prediction")


def test_one_bad_process_of_three_fails_nothing() -> None:
    assert _judged(PEAK, 2 * PEAK, PEAK).status == "new"
    assert _judged(2 * PEAK, 2 * PEAK, PEAK).status == "regressed"


@pytest.mark.parametrize(
    ("flops", "status"), [(103 * 10**13, "new"), (104 * 10**13, "regressed"), (None, "new"), (10**14, "new")]
)
def test_flops_may_grow_by_three_percent(flops: int | None, status: str) -> None:
    assert _judged(PEAK, flops=flops).status == status


def test_the_sentence_names_only_what_was_compared() -> None:
    assert "its memory and FLOPs are within what is predicted for h100 (32.0 GiB of 32.0 GiB)" in _judged(PEAK).sentence
    assert "its memory is within what is predicted" in _judged(PEAK, flops=None).sentence
    both = _judged(2 * PEAK, flops=2 * 10**15).sentence
    assert "needs 32.0 GiB (100.0 %) more memory" in both
    assert "computes 100.0 % more" in both


def _published(**figures: int) -> Published:
    printed = {name: Figure(low=value, high=value, rounding=0) for name, value in figures.items()}
    return Published(
        table="a-table",
        suite="llm",
        platform="h100",
        case=CASE,
        outcome="measured",
        cells={},
        figures={"pytorch": Figures(**printed)},
        made_with="torch 2.5.1 on NVIDIA H100",
    )


@pytest.mark.parametrize(("peak", "status"), [(PEAK, "new"), (LIMIT, "new"), (LIMIT + 70 * MiB, "regressed")])
def test_reserved_memory_is_held_to_the_published_row(peak: int, status: str) -> None:
    verdict = judge_by_published(NEW, CASE, [measurement(peak_reserved_bytes=peak)], _published(peak_reserved_bytes=PEAK))
    assert (verdict.status, verdict.held_to) == (status, "published")
    assert "published for h100 in a-table" in verdict.sentence


def test_a_row_without_memory_holds_nothing() -> None:
    runs = [measurement(peak_reserved_bytes=PEAK)]
    assert judge_by_published(NEW, CASE, runs, _published()) is NEW
    why = msgspec.structs.replace(_published(peak_reserved_bytes=PEAK), memory_not_judged="made with another engine")
    assert judge_by_published(NEW, CASE, runs, why) is NEW
    unmeasured = [measurement(device_used_bytes=None)]
    assert judge_by_published(NEW, CASE, unmeasured, _published(device_used_bytes=PEAK)) is NEW
