"""The simulation of ``tools/measure_gate.py``: it holds for the rule, and fails for broken ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="the simulation needs numpy")

SEED = 20_261_121
"""Fixed: a test that fails once in a thousand runs tells nobody anything. The tool itself takes fresh ones."""
REPLICATES = 40_000


@pytest.fixture(scope="module")
def tool() -> Any:
    path = Path(__file__).parents[2] / "tools" / "measure_gate.py"
    spec = importlib.util.spec_from_file_location("measure_gate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def _broken_claims(tool: Any, rule: str) -> list[str]:
    """Claims that are missed by far: twice the false alarms, or half a percent of the power; of a few suites, five times."""
    rows = list(tool.rows(tool.Bench(SEED), tool.RULES[rule], REPLICATES))
    assert sum(row.limit is not None for row in rows) == 13
    missed = []
    for row in rows:
        if row.limit is None:
            continue
        allowed = row.limit - 0.5 if row.at_least else row.limit * (2 if row.unit else 5)
        if row.measured < allowed if row.at_least else row.measured > allowed:
            missed.append(f"{row.setting}: {row.claim}")
    return missed


def test_the_rule_keeps_its_claims(tool: Any) -> None:
    assert _broken_claims(tool, "vote") == []


@pytest.mark.parametrize(
    ("rule", "missed"),
    [
        ("mean", "5 runs, 2 % of processes bad: false alarms <= 0.05 %"),
        ("once", "5 runs, sd 1 %: power at +5% >= 98 %"),
    ],
)
def test_a_broken_rule_does_not(tool: Any, rule: str, missed: str) -> None:
    assert missed in _broken_claims(tool, rule)


def test_the_simulated_rule_is_the_products(tool: Any) -> None:
    assert tool.differs_from_the_rule(tool.Bench(SEED), cases=200) == ""


def test_another_rule_of_the_product_is_noticed(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.stats, "WINSOR", 1.0)
    monkeypatch.setattr(tool, "vote", tool.mean_of_three)
    assert "baseline [" in tool.differs_from_the_rule(tool.Bench(SEED), cases=200)


def test_the_exit_status_tells_of_a_missed_claim(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--replicates=5000", "--seed=1", "--rule=once"]) == 1
    assert "FAIL 5 runs, sd 1 %" in capsys.readouterr().out


def test_the_bound_is_wilsons(tool: Any) -> None:
    """No event in n leaves z^2 / (n + z^2)."""
    square = tool.ONE_SIDED**2
    assert tool.wilson(0.0, 100, upper=True) == pytest.approx(square / (100 + square))
    assert tool.wilson(1.0, 100, upper=False) == pytest.approx(100 / (100 + square))
