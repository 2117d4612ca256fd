"""Stragglers: how far the processes of a case lie apart, and what people read of it."""

import msgspec
import pytest
from unit_examples import CASE, measurement, result

from pytest_gputrain.gate.rank_spread import widest
from pytest_gputrain.records import Rank, RankSpread
from pytest_gputrain.report.explanations import explain


def _rank(*own, peak=1000):
    return Rank(step_seconds=(1.0,) * 3, own_seconds=own, peak_allocated_bytes=peak, peak_host_bytes=1)


def test_one_process_lies_nowhere_apart():
    assert widest([measurement(), measurement(ranks=(_rank(1.0),))]) is None


@pytest.mark.parametrize(
    ("ranks", "slowest", "lag"),
    [
        ((_rank(0.3, 0.4, 0.5), _rank(0.5, 0.5, 0.5), _rank(0.4, 0.4, 9.0)), 1, (0.25, 0.1)),
        ((_rank(0.4, 0.8, 0.4, 0.8), _rank(0.8, 0.4, 0.8, 0.4)), 0, (0, 0)),  # late by turns
    ],
)
def test_the_slowest_is_the_one_whose_own_work_takes_longest(ranks, slowest, lag):
    spread = widest([measurement(ranks=ranks)])
    assert (spread.slowest, (spread.lag, spread.lag_seconds)) == (slowest, pytest.approx(lag))


def test_memory_is_that_of_the_least_and_of_the_most():
    spread = widest([measurement(ranks=(_rank(peak=20), _rank(peak=10), _rank(peak=30)))])
    assert spread == RankSpread(
        slowest=None, lag=None, lag_seconds=None, least_peak_allocated_bytes=10, most_peak_allocated_bytes=30
    )


def test_of_several_runs_it_is_the_widest():
    near, far = (measurement(ranks=(_rank(0.5), _rank(late))) for late in (0.51, 0.9))
    assert widest([near, far]) == widest([far, near]) == widest([far])


def _result_with_spread(lag, seconds, least=1000, device="nvidia-h100-80gb-hbm3"):
    spread = RankSpread(
        slowest=3, lag=lag, lag_seconds=seconds, least_peak_allocated_bytes=least, most_peak_allocated_bytes=1000
    )
    plain = result(CASE)
    return result(CASE, device=device, summary=msgspec.structs.replace(plain.summary, median_step_seconds=1.0, ranks=spread))


@pytest.mark.parametrize(
    ("spread", "told"),
    [
        (
            {"lag": 0.12, "seconds": 0.048},
            "rank 3 is slowest: it works 12.0 % (48.0 ms a step) longer than the fastest before they exchange anything",
        ),
        # What is little of the work, or of the step, is not told.
        ({"lag": 0.09, "seconds": 0.09}, ""),
        ({"lag": 5.0, "seconds": 0.009}, ""),
        ({"lag": 0.0, "seconds": 0.0, "least": 950}, ""),
        ({"lag": 0.0, "seconds": 0.0, "least": 500}, "peak memory of its processes is 500 B to 1000 B"),
        # On a CPU only a process half as fast is.
        ({"lag": 0.9, "seconds": 0.5, "device": "cpu"}, ""),
        (
            {"lag": 1.1, "seconds": 0.5, "device": "cpu"},
            "rank 3 is slowest: it works 110.0 % (500 ms a step) longer than the fastest before they exchange anything",
        ),
    ],
)
def test_processes_that_lie_apart_are_told(spread, told):
    assert explain([_result_with_spread(**spread)]) == ([f"{CASE}: {told}"] if told else [])
