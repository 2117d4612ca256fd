"""What a loss curve is said to do."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.gate.loss_trend import gap, trend
from pytest_gputrain.utils.bounds import LEAST_STEPS

lengths = st.integers(LEAST_STEPS, 400)
curves = st.lists(st.integers(-1000, 1000).map(float), min_size=LEAST_STEPS, max_size=60)

NOISES = {
    "gaussian": lambda draw: draw.gauss(0, 1),
    "heavy tails": lambda draw: draw.gauss(0, 1) / math.sqrt(draw.gammavariate(1, 1)),
    "log-normal": lambda draw: draw.lognormvariate(0, 1),
    "steps of bf16": lambda draw: float(round(draw.gauss(0, 0.3))),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("steps", [LEAST_STEPS, 50, 200])
def test_noise_alone_is_flat_in_nearly_all_draws(noise, steps):
    draw = random.Random(20240101)
    wrong = sum(trend([NOISES[noise](draw) for _ in range(steps)]) != "flat" for _ in range(1000))
    assert wrong <= 10


@pytest.mark.parametrize(("steps", "fall"), [(LEAST_STEPS, 20), (50, 10), (200, 4), (1000, 2)])
def test_a_fall_is_seen_through_noise(steps, fall):
    draw = random.Random(20240101)
    seen = sum(trend([draw.gauss(0, 1) - fall * step / steps for step in range(steps)]) == "converging" for _ in range(100))
    assert seen >= 98


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-amp", "fp16-amp"])
@given(st.integers(0, 100).flatmap(lambda count: st.lists(st.floats(-10, 10), min_size=count, max_size=count)))
def test_a_loss_that_is_not_finite_diverges_wherever_it_comes(precision, losses):
    assert trend(losses, finite=False) == "diverging"
    assert trend(losses, precision=precision, reference=[1.0] * 20, finite=False) == "diverging"


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([10 - step for step in range(10)] + [float(step) for step in range(10)], "diverging"),
        # Wobbling near zero is no divergence, and one step of a coarse number no trend.
        ([10 * math.exp(-step / 5) for step in range(80)] + [1e-3 * (1 + step % 3) for step in range(20)], "converging"),
        ([10.375] * 60 + [10.3125] * 40, "flat"),
        ([10.375 - 0.0625 * (step // 20) for step in range(100)], "converging"),
        ([100 - step / 2 for step in range(100)], "converging"),
        ([7.0] * 100, "flat"),
        ([100 - step / 2 + (1e6 if step % 11 == 0 else 0) for step in range(100)], "converging"),
    ],
    ids=["fell and rose", "memorised", "one coarse step", "coarse steps", "smooth", "constant", "spikes"],
)
def test_a_curve_does_what_it_seems_to(losses, expected):
    assert trend(losses) == expected


@pytest.mark.parametrize("steps", [50, 200, 1500])
def test_a_fall_inside_of_the_first_fifth_converges_and_a_rise_inside_of_the_last_diverges(steps):
    draw = random.Random(20240101)
    fallen = [draw.gauss(0, 0.01) + (1 - step / 6 if step < 6 else 0) for step in range(steps)]
    assert trend(fallen) == "converging"
    assert trend(fallen[::-1]) == "diverging"


@given(curves, st.integers(-20, 20), st.integers(-1000, 1000))
def test_neither_unit_nor_offset_counts(losses, power, offset):
    # Powers of two and whole numbers: exact in floating point, so that the decision must be the same.
    assert trend([loss * 2.0**power for loss in losses]) == trend(losses) == trend([loss + offset for loss in losses])


# What the rounding of a precision explains

RESOLUTIONS = {"bf16": 2.0**-8, "bf16-amp": 2.0**-8, "fp16-amp": 2.0**-11}
in_16_bits = st.sampled_from(sorted(RESOLUTIONS))


def _wandering(draw, steps, width):
    """A walk that turns back at its ends: roundings remember, since weights hardly move from a step to the next."""
    place = draw.uniform(-width, width)
    walk = []
    for _ in range(steps):
        place = max(-width, min(width, place + draw.uniform(-width, width) / 3))
        walk.append(place)
    return walk


def _slowly_falling(steps, start, share=1e-5):
    return [start * (1 - share * step / steps) for step in range(steps)]


@given(in_16_bits, st.integers(0, 2**32), st.integers(LEAST_STEPS, 300), st.floats(1e-6, 1e6))
def test_no_wandering_of_a_loss_within_its_resolution_diverges(precision, seed, steps, start):
    reference = _slowly_falling(steps, start)
    # Fifteen times as wide as FLUX.1-dev's. The rise may be twice what is allowed: the distance from fp32 decides then.
    walk = _wandering(random.Random(seed), steps, 0.99 * RESOLUTIONS[precision])
    losses = [loss + start * place for loss, place in zip(reference, walk, strict=True)]
    assert trend(losses, precision=precision, reference=reference) != "diverging"
    halved = [loss + start * place / 2 for loss, place in zip(reference, walk, strict=True)]
    assert trend(halved, precision=precision) != "diverging", "nor without fp32, within half of it"


@given(in_16_bits, st.integers(0, 2**32), st.floats(1e-6, 1e6))
def test_a_rise_by_a_hundredth_while_fp32_falls_diverges(precision, seed, start):
    reference = _slowly_falling(20, start)
    walk = _wandering(random.Random(seed), 20, RESOLUTIONS[precision] / 30)
    losses = [start * (1 + 0.01 * step / 19 + place) for step, place in enumerate(walk)]
    assert trend(losses, precision=precision, reference=reference) == "diverging"
    assert trend(losses, precision=precision) == "diverging"


def test_a_rise_that_ends_no_higher_than_fp32_is_no_divergence_of_the_precision():
    reference = [10.0] * 40
    overshot = [10 - min(step, 40 - step) / 10 for step in range(40)]
    assert trend(overshot, precision="bf16") == "diverging"
    assert trend(overshot, precision="bf16", reference=reference) == "flat"
    assert trend(overshot, precision="bf16", reference=[loss - 2 for loss in reference]) == "diverging"


@pytest.mark.parametrize("steps", [50, 200, 1500])
def test_a_rise_inside_of_the_last_fifth_is_compared_with_the_same_part_of_fp32(steps):
    reference = _slowly_falling(steps, 1.0)
    losses = [loss + (0.5 if step >= steps - 8 else 0) for step, loss in enumerate(reference)]
    assert trend(losses, precision="bf16-amp", reference=reference) == "diverging"


def test_the_gap_is_a_share_of_where_the_reference_begins():
    reference = [8.0] * 10 + [4.0] * 30
    assert [gap([8.0] * 10 + [end] * 30, reference) for end in (6.0, 3.0, 4.0)] == [0.25, -0.125, 0.0]


@pytest.mark.parametrize(
    ("losses", "reference"), [([1.0] * 19, [1.0] * 40), ([1.0] * 40, [1.0] * 19), ([1.0] * 20, [0.0] * 20), ([], [])]
)
def test_there_is_no_gap_where_it_would_mean_nothing(losses, reference):
    assert gap(losses, reference) is None
