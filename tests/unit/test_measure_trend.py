"""The simulation of ``tools/measure_trend.py``: its claims hold for the method, and fail for broken ones."""

from __future__ import annotations

from unittest import mock

import measure_trend
import pytest

SEED = 20_261_121
"""Fixed, as the bounds here are for few series. The tool itself takes fresh ones."""
REPLICATES = 100


def _broken_claims(rule: str) -> list[str]:
    """Claims that are missed by far: three times the alarms, half as long again, twice the time, or three percent found."""
    with mock.patch.multiple(measure_trend.change_points, **measure_trend.RULES[rule]):
        rows = list(measure_trend.rows(measure_trend.Simulation(SEED), REPLICATES))
    assert sum(row.limit is not None for row in rows) == 15
    missed = []
    for row in rows:
        if row.limit is None:
            continue
        factor = 1.5 if "after runs" in row.claim else 2 if "seconds" in row.claim else 3
        bad = row.measured < row.limit - 3 if row.at_least else row.measured > factor * row.limit
        missed += [f"{row.setting}: {row.claim}"] if bad else []
    return missed


def test_the_method_keeps_its_claims() -> None:
    assert _broken_claims("winsorised") == []


def test_residuals_that_are_not_cut_off_break_them() -> None:
    missed = _broken_claims("plain")
    assert "sd 1 %, 2 % of runs bad: offline, alarms per 1000 <= 0.01" in missed
    assert "sd 1 %, 2 % of runs bad: online, first 200 runs, alarms per 1000 <= 1" in missed
    assert not any(claim.startswith("sd 1 %:") for claim in missed), "without bad runs it makes no difference"


def test_a_step_that_is_not_found_breaks_them() -> None:
    with mock.patch.object(measure_trend.change_points, "PENALTY", 40):
        missed = [
            str(row.claim)
            for row in measure_trend.rows(measure_trend.Simulation(SEED), REPLICATES)
            if row.limit and not row.holds
        ]
    assert "+3%: found >= 98 %" in missed
    assert "+3%: told after runs <= 4" in missed


def test_the_exit_status_tells_of_a_missed_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_trend.main(["--replicates=20", "--seed=1", "--rule=greedy"]) == 1
    assert "FAIL sd 1 %  " in capsys.readouterr().out
    assert measure_trend.change_points.PENALTY == 5.0


def test_the_bound_of_a_rate_without_events_is_the_logarithm_of_a_hundred() -> None:
    """Of a Poisson count, 0 events leave a mean of log 100 = 4.6 possible."""
    assert measure_trend.rate_bound(0, 1000) == pytest.approx(4.605, rel=0.02)
