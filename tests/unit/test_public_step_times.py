"""How well expected seconds foretell steps of other laboratories, on boards of which only published rates are known."""

import statistics

import public_step_times
import pytest

from pytest_gputrain.records.expected import ROUGH


def test_rough_intervals_hold_for_boards_that_are_left_out():
    by_gpu = public_step_times.ratios()
    assert len(by_gpu) >= 10
    inside = public_step_times.left_out(by_gpu)
    assert statistics.mean(share for _, _, share in inside.values()) >= 0.7
    wider = public_step_times.left_out(by_gpu, 0.85)
    assert statistics.mean(share for _, _, share in wider.values()) >= 0.8
    low, high = ROUGH
    held = [statistics.mean(low <= ratio <= high for ratio in steps.values()) for steps in by_gpu.values()]
    assert statistics.mean(held) >= 0.8


def test_an_interval_gives_each_gpu_the_same_weight():
    many, one = [1.0 + 0.001 * number for number in range(100)], [3.0]
    low, high = public_step_times.interval([many, one], 0.8)
    assert (low, high) == (pytest.approx(1.019), 3.0)
