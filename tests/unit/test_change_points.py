"""Changes of level: found where they are, and nowhere else. ``tools/measure_trend.py`` counts how often."""

import math
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.gate.change_points import LEAST_LENGTH, LEAST_SD, levels
from pytest_gputrain.utils.units import MiB


def noisy(*parts, sd=0.01, seed=1):
    """Figures of levels with so many runs each."""
    draw = random.Random(seed)
    return [level * math.exp(draw.gauss(0, sd)) for level, runs in parts for _ in range(runs)]


@given(
    st.lists(st.integers(LEAST_LENGTH, 60), min_size=1, max_size=5),
    st.lists(st.sampled_from([1.05, 1 / 1.05, 1.3, 0.5]), min_size=4, max_size=4),
    st.sampled_from([1e-4, 1.0, 4e10]),
)
def test_without_noise_every_level_is_found_exactly(runs, ratios, unit):
    figures = []
    for index, length in enumerate(runs):
        figures += [unit * math.prod(ratios[:index])] * length
    series_levels = levels(figures)
    if len(figures) < 2 * LEAST_LENGTH:
        assert series_levels.starts == (0,)
        return
    edges = [sum(runs[:index]) for index in range(len(runs))]
    assert set(series_levels.starts) <= set(edges)
    if len(runs) == 2:
        assert series_levels.starts == tuple(edges)
        assert series_levels.medians == (figures[0], figures[-1])


@pytest.mark.parametrize(
    "parts",
    [
        *(((1.0, at), (1.05, 200 - at)) for at in (4, 100, 196)),
        ((1.0, 240), (1.04, 15), (1.0, 245)),  # a slowdown that was mended
        tuple((level, 40) for level in (1.0, 1.04, 1.08, 1.02, 0.9)),
    ],
)
def test_several_steps_are_all_found(parts):
    series_levels = levels(noisy(*parts))
    edges = [sum(runs for _, runs in parts[:at]) for at in range(len(parts))]
    assert list(series_levels.starts) == pytest.approx(edges, abs=2)
    assert series_levels.medians == pytest.approx([level for level, _ in parts], rel=0.02)
    assert series_levels.sd == pytest.approx(0.01, rel=0.15), "of neighbours, not of levels"


def test_a_few_bad_runs_in_a_row_are_no_level():
    figures = noisy((1.0, 300))
    for index in (50, 51, 52, 150, 152, 153):
        figures[index] *= 1.4
    assert levels(figures).starts == (0,)


def test_noise_widens_what_it_takes():
    assert len(levels(noisy((1.0, 50), (1.03, 50), sd=0.005)).starts) == 2
    assert len(levels(noisy((1.0, 50), (1.03, 50), sd=0.06)).starts) == 1


@pytest.mark.parametrize(("runs", "starts"), [(2, (0,)), (3, (0, 60)), (4, (0, 60)), (50, (0, 60))])
def test_an_exact_count_that_grows_by_half_a_percent_is_told_after_three_runs(runs, starts):
    assert levels([*[40_000 * MiB] * 60, *[40_200 * MiB] * runs], LEAST_SD).starts == starts


def test_an_allocator_that_wavers_between_two_peaks_has_one_level():
    draw = random.Random(1)
    figures = [40_000 * MiB + (64 * MiB if draw.random() < 0.2 else 0) for _ in range(2000)]
    assert levels(figures, LEAST_SD).starts == (0,)


def test_few_runs_are_one_level_and_a_compact_array_is_read_as_it_is():
    for runs in (1, 2, 7):
        assert levels([float(number) for number in range(1, runs + 1)]).starts == (0,)
    figures = noisy((1.0, 30), (1.1, 30))
    assert levels(array("d", figures)) == levels(figures)


@pytest.mark.parametrize("figures", [[], [1.0, 0.0], [1.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_figures_without_a_logarithm_are_refused(figures):
    with pytest.raises(ValueError, match="a series needs figures, all of them above 0 and finite"):
        levels(figures)
