"""The rule that tells a slower step from a noisy one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.gate.step_times import (
    LIMIT_SDS,
    MOST_RUNS,
    PRIOR_SD,
    decide,
    exceeds,
    runs_out,
    suite_prior,
    suite_shift,
)

STEADY = (1.0,) * 5
TOLERANCE = 0.03
BADNESS = {"improved": 0, "pass": 1, "inconclusive": 2, "regressed": 3}

SECONDS = st.floats(1e-4, 1e4)
NOISY = [math.exp(x) for x in (-0.06, -0.03, 0.0, 0.03, 0.06)]
LESS_NOISY = [math.exp(x) for x in (-0.02, -0.01, 0.0, 0.01, 0.02)]
NOISE = st.floats(-0.2, 0.2)
BASES = st.builds(lambda s, logs: [s * math.exp(x) for x in logs], SECONDS, st.lists(NOISE, min_size=1, max_size=20))
STREAMS = st.lists(NOISE, min_size=MOST_RUNS, max_size=MOST_RUNS)


def _decide(new, base=STEADY, **options):
    return decide(base, new, **{"tolerance": TOLERANCE, **options})


def _in_turn(stream, base=STEADY, **options):
    """What comes of runs that are made only as long as they are asked for, and how many that takes."""
    for runs in range(1, len(stream) + 1):
        decision = _decide(stream[:runs], base, **options)
        if decision.settled:
            return decision, runs
    raise AssertionError("more runs are asked for than there may be")


def test_limit_and_sd_are_those_of_the_formula_by_hand():
    """Baseline of deviations -2, -1, 0, 1, 2 %, first run at 3 %."""
    base = [math.exp(x / 100) for x in (-2, -1, 0, 1, 2)]
    decision = _decide([math.exp(0.03)], base)
    first = math.sqrt((4 * 0.01**2 + 5 * (1.4826 * 0.01) ** 2) / 9)
    assert 3 * first > 0.02  # so nothing is cut off
    sd = math.sqrt((4 * 0.01**2 + 2 * 0.01**2 + 2 * 0.02**2) / 8)
    assert decision.sd == pytest.approx(sd)
    assert decision.limit == pytest.approx(2.6 * sd * math.sqrt(0.65 + 1.15 / 5))
    assert decision.sensitivity == pytest.approx(decision.limit + 2.7 * sd * math.sqrt(0.29 + 1.15 / 5))
    assert decision.ratios == pytest.approx([0.03])
    # The same with two runs more, at 1 and 12 %: deviations 0, 2 and 9 % from their median, the last cut off at 3 s1.
    decision = _decide([math.exp(x / 100) for x in (3, 1, 12)], base)
    first = math.sqrt((4 * 0.01**2 + 8 * (1.4826 * 0.015) ** 2) / 12)
    assert 0.02 < 3 * first < 0.09
    total = 4 * 0.01**2 + 10 * 0.01**2 + 0.02**2 + (3 * first) ** 2
    assert decision.sd == pytest.approx(math.sqrt(total / 10))


def test_a_single_run_has_the_limit_of_the_prior_and_equal_times_have_none_but_rounding():
    alone = _decide([1.0], [1.0])
    assert (alone.sd, alone.limit) == (PRIOR_SD, pytest.approx(LIMIT_SDS * PRIOR_SD * math.sqrt(1.8)))
    for slower, outcome in ((1.0, "pass"), (1.001, "regressed")):
        assert _in_turn([slower] * 5, tolerance=0.0, prior=0.0)[0].outcome == outcome


CUT_OFF = 4 * 0.01**2 + (3 * math.sqrt(4 * 0.01**2 / 7)) ** 2


@pytest.mark.parametrize(
    ("base", "new", "squares", "weight"),
    [
        # A run alone deviates from nothing, nor does it make the others' deviations look smaller: one of three is cut off.
        ((0.0, 0.0, 0.2), (0.0,), CUT_OFF, 6),
        ((0.0,), (0.0, 0.0, 0.2), CUT_OFF, 6),
        ((-0.01, 0.03), (0.0, 0.02), 4 * 0.01**2 + 2 * 0.02**2 + 2 * 0.01**2, 6),
    ],
)
def test_runs_deviate_from_the_middle_of_their_side(base, new, squares, weight):
    decision = _decide([math.exp(x) for x in new], [math.exp(x) for x in base], tolerance=0.0)
    assert decision.sd == pytest.approx(math.sqrt(squares / weight))


def test_the_centre_is_a_median_until_the_fastest_and_the_slowest_can_be_left_out():
    logs = (0.0, 0.01, 0.02, 0.06, 0.5)
    four, five = ([math.exp(x) for x in some] for some in (logs[:4], logs))
    assert _decide([1.0], four).ratios == pytest.approx([-0.015])
    assert _decide([1.0], five).ratios == pytest.approx([-0.03])


@pytest.mark.parametrize(
    ("stream", "outcome", "runs"),
    [
        ([1.0], "pass", 1),
        ([1.014], "pass", 1),
        ([0.972], "pass", 1),
        ([1.2, 1.2, 1.2], "regressed", 3),
        ([1.2, 1.0, 1.2, 1.0, 1.2], "regressed", 5),
        ([1.2, 1.0, 1.2, 1.0, 1.0], "pass", 5),
        ([1.2, 1.0, 1.0, 1.0], "pass", 4),
        ([1.02, 1.02, 1.02], "pass", 3),
        ([0.8, 0.8, 0.8], "improved", 3),
        ([0.8, 1.0, 1.0, 0.8, 0.8], "improved", 5),
        ([0.8, 1.2, 1.0, 0.8, 1.2], "pass", 5),
    ],
)
def test_runs_vote_until_three_agree(stream, outcome, runs):
    decision, taken = _in_turn(stream)
    assert (decision.outcome, taken) == (outcome, runs)


def test_without_re_measurement_one_run_is_held_against_a_wider_limit():
    alone = _decide([1.04], LESS_NOISY, most=1)
    assert alone.limit == pytest.approx(4.0 * alone.sd)
    assert alone.settled
    assert [_decide([seconds], LESS_NOISY, most=1).outcome for seconds in (1.03, 1.04, 1.08, 0.9)] == [
        "pass",
        "inconclusive",
        "regressed",
        "improved",
    ]


def test_most_of_the_runs_that_there_may_be_have_to_agree():
    assert _in_turn([1.2, 1.2], most=2)[0].outcome == "regressed"
    assert _in_turn([1.2, 1.0], most=2)[0].outcome != "regressed"
    assert _decide([1.2] * 4 + [1.0] * 5).outcome == "pass"
    assert _decide([1.2] * 5 + [1.0] * 4).outcome == "regressed"
    three = _decide([1.0], tolerance=0.0, most=3)
    assert three.limit == pytest.approx(LIMIT_SDS * three.sd * math.sqrt(0.88))


def test_a_suite_of_ten_tells_its_own_prior():
    assert suite_prior([LESS_NOISY] * 9) == PRIOR_SD
    assert suite_prior([LESS_NOISY] * 9 + [[1.0]]) == PRIOR_SD
    assert suite_prior([LESS_NOISY] * 10) == pytest.approx(math.sqrt(0.001 / 4) / 0.95)
    assert suite_prior([[1.0, math.exp(0.02)]] * 10) == pytest.approx(0.02 / math.sqrt(2) / 0.875)
    assert _decide([1.0], [1.0], prior=0.03).sd == 0.03


def test_a_suite_of_ten_tells_its_shift():
    assert suite_shift([0.02] * 9) is None
    assert suite_shift([0.02] * 6 + [0.0] * 4) == 0.02


@pytest.mark.parametrize(
    ("run", "shift", "outcome", "runs"),
    [
        (0.05, 0.0, "regressed", 3),
        (0.035, 0.009, "regressed", 3),  # too little to count
        (0.05, 0.045, "inconclusive", 1),  # all of it is the suite's
        (0.10, 0.045, "regressed", 3),  # and more than the suite's
        (0.02, -0.045, "pass", 3),  # slower than the others, not than before
        (-0.05, -0.045, "pass", 1),
        (-0.10, -0.045, "improved", 3),
        (0.02, 0.02, "pass", 1),
    ],
)
def test_a_case_regresses_only_with_and_without_the_suites_shift(run, shift, outcome, runs):
    decision, taken = _in_turn([math.exp(run)] * 5, shift=shift)
    assert (decision.outcome, taken) == (outcome, runs)
    assert [_decide([1.05], NOISY, shift=of_suite).suspicious for of_suite in (0.0, 0.045)] == [True, False]


@pytest.mark.parametrize(
    ("above", "most", "expected"),
    [
        ("-", 5, False),
        ("+", 5, None),
        ("++", 5, None),
        ("+++", 5, True),
        ("++-", 5, False),
        ("+++--", 5, True),
        ("++---", 5, False),
        ("++--", 5, False),
        ("+", 1, True),
        ("++", 2, True),
    ],
)
def test_memory_regresses_only_if_every_one_of_three_processes_does(above, most, expected):
    assert exceeds([11 if run == "+" else 10 for run in above], 10, most) is expected


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (5, {(1, 1): None, (2, 2): True, (1, 2): None, (2, 3): True, (1, 3): False, (2, 5): False, (3, 5): True}),
        (2, {(1, 2): False}),
        (1, {(1, 1): True}),
    ],
)
def test_running_out_of_memory_takes_two_of_three(most, expected):
    assert {(out, runs): runs_out(out, runs, most) for out, runs in expected} == expected


@pytest.mark.parametrize(
    ("base", "new", "options"),
    [
        *(([1.0, bad], [1.0], {}) for bad in (0.0, -1.0, math.nan, math.inf)),
        *(([1.0], [1.0, bad], {}) for bad in (0.0, -1.0, math.nan, math.inf)),
        *(([], [1.0], {}), ([1.0], [], {})),
        *(([1.0], [1.0], {"tolerance": bad}) for bad in (-0.1, math.nan, math.inf)),
        *(([1.0], [1.0], {"prior": bad}) for bad in (math.nan, math.inf)),
        *(([1.0], [1.0], options) for options in ({"shift": math.inf}, {"most": 0})),
    ],
)
def test_what_is_no_comparison_of_times_is_refused(base, new, options):
    with pytest.raises(ValueError, match=r"is not the time of a step|needs runs|out of range"):
        _decide(new, base, **options)


@given(BASES, STREAMS, st.floats(0, 0.3), st.floats(-0.1, 0.1))
def test_what_is_within_the_tolerance_never_regresses(base, logs, tolerance, shift):
    centre = -_decide([1.0], base).ratios[0]
    within = [math.exp(centre + min(x, 0.999 * math.log1p(tolerance))) for x in logs]
    decision, _ = _in_turn(within, base, tolerance=tolerance, shift=shift)
    assert decision.outcome != "regressed"
    assert math.log1p(tolerance) <= decision.limit <= decision.sensitivity < math.inf


@given(BASES, STREAMS, st.floats(1, 2))
def test_a_slower_step_is_never_a_better_outcome(base, logs, factor):
    stream = [math.exp(x) for x in logs]
    before, after = (_decide([s * f for s in stream], base).outcome for f in (1.0, factor))
    assert BADNESS[before] <= BADNESS[after]


@given(BASES, STREAMS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_neither_order_nor_unit_of_runs_matters(base, logs, runs, order):
    new = [math.exp(x) for x in logs[:runs]]
    here = _decide(new, base)
    order.shuffle(base)
    order.shuffle(new)
    there = _decide(new, base)
    assert (there.outcome, there.settled, there.votes) == (here.outcome, here.settled, here.votes)
    assert there.limit == pytest.approx(here.limit)
    assert _decide([3600 * x for x in new], [3600 * x for x in base]).ratios == pytest.approx(there.ratios, abs=1e-9)
