"""The simulation of ``tools/fleet_makespan.py``: its claims hold for the product's order, and fail for others."""

import json

import fleet_makespan
import pytest
from fleet_makespan import Fleet, Job, Suites, least

SEED = 20_261_121
"""Fixed, as few suites are drawn here. The tool itself takes fresh ones."""


def _rows(rule):
    """What was measured, and whether it keeps what is claimed, by setting."""
    rows = list(fleet_makespan.rows(Suites(SEED), fleet_makespan.RULES[rule], 10))
    assert sum(row.limit is not None for row in rows) == 8
    return {row.setting: (row.measured, row.holds) for row in rows}


@pytest.mark.slow
def test_the_longest_first_keeps_its_claims():
    measured = _rows("longest")
    assert all(holds for _, holds in measured.values())
    # What docs/fleet.md says of doubt.
    assert measured["500 cases, 11 % in doubt, tests ask"][0] > 300


@pytest.mark.slow
def test_the_exit_status_tells_of_a_missed_claim(capsys):
    assert fleet_makespan.main(["--replicates=1", "--seed=1", "--rule=shortest"]) == 1
    assert "FAIL 500 cases " in capsys.readouterr().out


def job(seconds, nodes=1, *, in_doubt=False):
    return Job(seconds, nodes, seconds, in_doubt)


AT_ONCE = {"submit_seconds": 0.0, "ask_seconds": 0.5}


def test_a_schedule_that_can_be_worked_out_by_hand():
    jobs = [job(1), job(2), job(3), job(4)]
    assert least(jobs, 2) == 5
    assert Fleet(nodes=2, **AT_ONCE).makespan(jobs, [3, 2, 1, 0]) == 5
    assert Fleet(nodes=2, **AT_ONCE).makespan(jobs, [0, 1, 2, 3]) == 6
    # The second takes both nodes, so the third waits for it although one node is free.
    assert Fleet(nodes=2, **AT_ONCE).makespan([job(4), job(1, 2), job(2)], [0, 1, 2]) == 7
    assert Fleet(nodes=2, submit_seconds=0.5).makespan([job(2), job(2)], [0, 1]) == 3
    # Eight wait until 4, when two are seen to run; the window has more.
    assert Fleet(nodes=2, submit_seconds=0).makespan([job(1)] * 10, list(range(10))) == 5
    # One job in the queue at a time, whose end is seen at 4 and 8.
    assert Fleet(nodes=2, window=1, submit_seconds=0, ask_seconds=4).makespan([job(3), job(3), job(3)], [0, 1, 2]) == 11


def test_doubt_is_asked_for_in_the_order_of_the_tests_or_at_once():
    jobs = [job(2, in_doubt=True), job(2, in_doubt=True)]
    assert least(jobs, 2, doubts=True) == 6
    assert least(jobs, 4, doubts=True) == 4
    assert Fleet(nodes=4, doubt="asked for", **AT_ONCE).makespan(jobs, [0, 1]) == 2 + 2 * 2 * 2
    assert Fleet(nodes=4, doubt="at once", **AT_ONCE).makespan(jobs, [0, 1]) == 4
    # Seen at 4, when the third has begun: before the fourth, or behind it.
    jobs = [job(2, in_doubt=True), job(6), job(6), job(6)]
    slow = {"submit_seconds": 0.0, "ask_seconds": 4.0, "window": 2}
    assert Fleet(nodes=1, doubt="at once", **slow).makespan(jobs, [0, 1, 2, 3]) == 24


def test_a_history_counts_before_emulated_runs(tmp_path):
    history = tmp_path / "history.jsonl"
    line = {"suite": "collective", "key": "bert-large-full-fp32", "platform": "h100", "median_step_seconds": 100.0}
    history.write_text(json.dumps(line) + "\n" + json.dumps(line | {"platform": "a100", "median_step_seconds": 1.0}) + "\n")
    measured = [known.steps_seconds for known in Suites(SEED, history).recorded if known.steps_seconds is not None]
    assert measured == [100.0 * 13]
