"""The simulation of ``tools/measure_trend.py``: its claims hold for the method, and fail for broken ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

SEED = 20_261_121
"""Fixed, as the bounds here are for few series. The tool itself takes fresh ones."""
REPLICATES = 100


@pytest.fixture(scope="module")
def tool() -> Any:
    path = Path(__file__).parents[2] / "tools" / "measure_trend.py"
    spec = importlib.util.spec_from_file_location("measure_trend", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def _broken_claims(tool: Any, rule: str) -> list[str]:
    """Claims that are missed by far: three times the alarms, half as long again, twice the time, or three percent found."""
    with mock.patch.multiple(tool.change_points, **tool.RULES[rule]):
        rows = list(tool.rows(tool.Bench(SEED), REPLICATES))
    assert sum(row.limit is not None for row in rows) == 15
    missed = []
    for row in rows:
        if row.limit is None:
            continue
        factor = 1.5 if "after runs" in row.claim else 2 if "seconds" in row.claim else 3
        bad = row.measured < row.limit - 3 if row.at_least else row.measured > factor * row.limit
        missed += [f"{row.setting}: {row.claim}"] if bad else []
    return missed


def test_the_method_keeps_its_claims(tool: Any) -> None:
    assert _broken_claims(tool, "winsorised") == []


def test_residuals_that_are_not_cut_off_break_them(tool: Any) -> None:
    missed = _broken_claims(tool, "plain")
    assert "sd 1 %, 2 % of runs bad: offline, alarms per 1000 <= 0.01" in missed
    assert "sd 1 %, 2 % of runs bad: online, first 200 runs, alarms per 1000 <= 1" in missed
    assert not any(claim.startswith("sd 1 %:") for claim in missed), "without bad runs it makes no difference"


def test_a_step_that_is_not_found_breaks_them(tool: Any) -> None:
    with mock.patch.object(tool.change_points, "PENALTY", 40):
        missed = [str(row.claim) for row in tool.rows(tool.Bench(SEED), REPLICATES) if row.limit and not row.holds]
    assert "+3%: found >= 98 %" in missed
    assert "+3%: told after runs <= 4" in missed


def test_the_exit_status_tells_of_a_missed_claim(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--replicates=20", "--seed=1", "--rule=greedy"]) == 1
    assert "FAIL sd 1 %  " in capsys.readouterr().out
    assert tool.change_points.PENALTY == 5.0


def test_the_bound_of_a_rate_without_events_is_the_logarithm_of_a_hundred(tool: Any) -> None:
    """Of a Poisson count, 0 events leave a mean of log 100 = 4.6 possible."""
    assert tool.rate_bound(0, 1000) == pytest.approx(4.605, rel=0.02)
