"""What a loss curve is said to do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.gate.loss_trend import gap, trend
from pytest_gputrain.utils.bounds import LEAST_STEPS

lengths = st.integers(LEAST_STEPS, 400)
curves = st.lists(st.integers(-1000, 1000).map(float), min_size=LEAST_STEPS, max_size=60)

NOISES: dict[str, Callable[[random.Random], float]] = {
    "gaussian": lambda draw: draw.gauss(0, 1),
    "heavy tails": lambda draw: draw.gauss(0, 1) / math.sqrt(draw.gammavariate(1, 1)),
    "log-normal": lambda draw: draw.lognormvariate(0, 1),
    "steps of bf16": lambda draw: float(round(draw.gauss(0, 0.3))),
}


@given(lengths, st.floats(1e-5, 0.4))
def test_a_smooth_fall_converges_and_a_smooth_rise_diverges(steps: int, rate: float) -> None:
    falling = [10 * math.exp(-rate * step) for step in range(steps)]
    assert trend(falling) == "converging"
    assert trend([-loss for loss in falling]) == "diverging"


@given(lengths, st.floats(-1e3, 1e3))
def test_a_constant_is_flat(steps: int, level: float) -> None:
    assert trend([level] * steps) == "flat"


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("steps", [LEAST_STEPS, 50, 200])
def test_noise_alone_is_flat_in_nearly_all_draws(noise: str, steps: int) -> None:
    draw = random.Random(20240101)
    wrong = sum(trend([NOISES[noise](draw) for _ in range(steps)]) != "flat" for _ in range(1000))
    assert wrong <= 10


@pytest.mark.parametrize(("steps", "fall"), [(LEAST_STEPS, 20), (50, 10), (200, 4), (1000, 2)])
def test_a_fall_is_seen_through_noise(steps: int, fall: float) -> None:
    draw = random.Random(20240101)
    seen = sum(trend([draw.gauss(0, 1) - fall * step / steps for step in range(steps)]) == "converging" for _ in range(100))
    assert seen >= 98


@given(st.integers(0, 100).flatmap(lambda count: st.lists(st.floats(-10, 10), min_size=count, max_size=count)))
def test_a_loss_that_is_not_finite_diverges_wherever_it_comes(losses: list[float]) -> None:
    assert trend(losses, finite=False) == "diverging"


def test_a_curve_that_fell_and_rose_again_diverges() -> None:
    assert trend([10 - step for step in range(10)] + [float(step) for step in range(10)]) == "diverging"


@pytest.mark.parametrize("steps", [50, 200, 1500])
def test_a_fall_inside_of_the_first_fifth_converges_and_a_rise_inside_of_the_last_diverges(steps: int) -> None:
    draw = random.Random(20240101)
    fallen = [draw.gauss(0, 0.01) + (1 - step / 6 if step < 6 else 0) for step in range(steps)]
    assert trend(fallen) == "converging"
    assert trend(fallen[::-1]) == "diverging"


def test_wobbling_near_zero_is_no_divergence() -> None:
    memorised = [10 * math.exp(-step / 5) for step in range(80)] + [1e-3 * (1 + step % 3) for step in range(20)]
    assert trend(memorised) == "converging"


def test_one_step_of_a_coarse_number_is_no_trend() -> None:
    assert trend([10.375] * 60 + [10.3125] * 40) == "flat"
    assert trend([10.375 - 0.0625 * (step // 20) for step in range(100)]) == "converging"


def test_spikes_change_nothing() -> None:
    falling = [100 - step / 2 for step in range(100)]
    spiked = [loss + (1e6 if step % 11 == 0 else 0) for step, loss in enumerate(falling)]
    assert trend(spiked) == trend(falling) == "converging"


@given(curves, st.integers(-20, 20), st.integers(-1000, 1000))
def test_neither_unit_nor_offset_counts(losses: list[float], power: int, offset: int) -> None:
    # Powers of two and whole numbers: exact in floating point, so that the decision must be the same.
    assert trend([loss * 2.0**power for loss in losses]) == trend(losses) == trend([loss + offset for loss in losses])


@given(curves)
def test_no_curve_has_a_gap_to_itself(losses: list[float]) -> None:
    assert gap(losses, losses) in (0.0, None)


def test_the_gap_is_a_share_of_where_the_reference_begins() -> None:
    reference = [8.0] * 10 + [4.0] * 30
    assert gap([8.0] * 10 + [6.0] * 30, reference) == 0.25
    assert gap([8.0] * 10 + [3.0] * 30, reference) == -0.125


@pytest.mark.parametrize(
    ("losses", "reference"), [([1.0] * 19, [1.0] * 40), ([1.0] * 40, [1.0] * 19), ([1.0] * 20, [0.0] * 20), ([], [])]
)
def test_there_is_no_gap_where_it_would_mean_nothing(losses: list[float], reference: list[float]) -> None:
    assert gap(losses, reference) is None
