"""The simulations of ``tools/``: their claims hold for the rules of the gate and of the trend, and fail for broken ones."""

from collections import Counter
from unittest import mock

import claims
import measure_gate
import measure_gate_here
import measure_trend
import pytest
from leftovers import has_ended

SEED = 20_261_121
"""Fixed, as the bounds here are for few draws: a test that fails once in a thousand runs tells nobody anything."""


def _of_gate(rule):
    """Claims that are missed by far: twice the false alarms, or half a percent of the power; of a few suites, five times.

    Of the rounds of ``gputrain ab`` every claim that is missed.
    """
    rows = list(measure_gate.rows(measure_gate.SimulatedMachine(SEED), measure_gate.RULES[rule], 40_000))
    assert sum(row.limit is not None for row in rows) == 31
    return _missed(rows, spare=0.5, factor=lambda row: 1 if row.unit == " rounds" else 2 if row.unit else 5)


def _of_trend(rule):
    """Claims that are missed by far: three times the alarms, half as long again, or three percent found; none of a time."""
    with mock.patch.multiple(measure_trend.change_points, **measure_trend.RULES[rule]):
        rows = list(measure_trend.rows(measure_trend.Simulation(SEED), 100))
    assert sum(row.limit is not None for row in rows) == 15
    rows = [row for row in rows if "seconds" not in row.claim]
    return _missed(rows, spare=3, factor=lambda row: 1.5 if "after runs" in row.claim else 3)


def _missed(rows, spare, factor):
    def holds(row):
        assert row.limit is not None
        return row.measured >= row.limit - spare if row.at_least else row.measured <= factor(row) * row.limit

    return [f"{row.setting}: {row.claim}" for row in rows if row.limit is not None and not holds(row)]


def test_the_rule_of_the_gate_keeps_its_claims():
    assert _of_gate("vote") == []


def test_the_simulated_rule_is_the_products(monkeypatch):
    assert measure_gate.differs_from_the_rule(measure_gate.SimulatedMachine(SEED), cases=200) == ""
    monkeypatch.setattr(measure_gate.stats, "WINSOR", 1.0)
    monkeypatch.setattr(measure_gate, "vote", measure_gate.mean_of_three)
    assert "baseline [" in measure_gate.differs_from_the_rule(measure_gate.SimulatedMachine(SEED), cases=200)


def test_the_simulated_rule_of_cases_that_wait_for_the_host_is_the_products(monkeypatch):
    machine = measure_gate.SimulatedMachine(SEED)
    assert measure_gate.waiting_differs_from_the_gate(machine, cases=60) == ""
    for broken in ({"prior": 0.01}, {"doubted_from": 0.5}):
        monkeypatch.setattr(measure_gate, "ON_THE_HOST", measure_gate.ON_THE_HOST._replace(**broken))
        assert measure_gate.waiting_differs_from_the_gate(machine, cases=60)
        monkeypatch.undo()
    monkeypatch.setattr(measure_gate, "ON_THE_GPU", measure_gate.Terms())
    assert measure_gate.waiting_differs_from_the_gate(machine, cases=60)


def test_the_method_of_the_trend_keeps_its_claims():
    assert _of_trend("winsorised") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "arguments", "failed"),
    [
        (measure_gate, ["--replicates=5000", "--seed=1", "--rule=once"], "FAIL 5 runs, sd 1 %"),
        (measure_trend, ["--replicates=20", "--seed=1", "--rule=greedy"], "FAIL sd 1 %  "),
    ],
)
def test_the_exit_status_tells_of_a_missed_claim(capsys, tool, arguments, failed):
    assert tool.main(arguments) == 1
    assert failed in capsys.readouterr().out
    assert measure_trend.change_points.PENALTY == 5.0


def test_bounds_are_those_of_the_books():
    """By Wilson no event in n leaves z^2 / (n + z^2); of a Poisson count it leaves a mean of log 100 = 4.6."""
    square = claims.ONE_SIDED**2
    assert claims.wilson(0.0, 100, upper=True) == pytest.approx(square / (100 + square))
    assert claims.wilson(1.0, 100, upper=False) == pytest.approx(100 / (100 + square))
    assert measure_trend.rate_bound(0, 1000) == pytest.approx(4.605, rel=0.02)


def test_neighbours_compute_and_are_gone_in_the_end():
    with measure_gate_here.neighbours(2, seed=1) as ids:
        assert not any(map(has_ended, ids))
        assert len(set(ids)) == 2
    assert all(map(has_ended, ids))


def test_the_table_counts_every_verdict_once():
    counts = {
        ("idle", 0.0): Counter({"pass": 3, "regressed": 1}),
        ("idle", 0.1): Counter({"failed": 1}),
        ("busy", 0.0): Counter(),
    }
    assert measure_gate_here.table(counts).splitlines()[2:] == [
        "| idle | 0% | 4 | 3 (75%) | 0 (0%) | 0 (0%) | 1 (25%) | 0 |",
        "| idle | 10% | 1 | 0 (0%) | 0 (0%) | 0 (0%) | 0 (0%) | 1 |",
        "| busy | 0% | 0 |  |  |  |  | 0 |",
    ]


@pytest.mark.slow
def test_its_suite_is_code_that_slows_its_steps_down_by_the_share_that_it_is_told(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("GATE_SLOWER", "0.5")
    now = [0.0]

    def clock():
        now[0] += 0.001
        return now[0]

    space = {}
    source = measure_gate_here.SUITE.format(sizes=[8]).replace(
        "        loss = train()", "        loss = None\n        tick(1.0)"
    )
    exec(compile(source, "suite", "exec"), space)
    space["time"] = type("Clock", (), {"perf_counter": staticmethod(clock)})
    space["tick"] = lambda seconds: now.__setitem__(0, now[0] + seconds)
    step = space["build"](type("Setup", (), {"case": type("Of", (), {"batch_size": 8})}))
    before = now[0]
    step()
    assert now[0] - before == pytest.approx(1.5, rel=0.01)
