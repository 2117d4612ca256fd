"""The parts of ``tools/measure_gate_here.py`` that need no half hour."""

from __future__ import annotations

from collections import Counter
from typing import Any

import measure_gate_here
import psutil
import pytest


def test_neighbours_compute_and_are_gone_in_the_end() -> None:
    with measure_gate_here.neighbours(2, seed=1) as ids:
        assert all(psutil.Process(process).status() != psutil.STATUS_ZOMBIE for process in ids)
        assert len(set(ids)) == 2
    assert not any(psutil.pid_exists(process) for process in ids)


def test_the_table_counts_every_verdict_once() -> None:
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


def test_its_suite_is_code_that_slows_its_steps_down_by_the_share_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATE_SLOWER", "0.5")
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    space: dict[str, Any] = {}
    source = measure_gate_here.SUITE.format(sizes=[8]).replace(
        "        loss = train()", "        loss = None\n        tick(1.0)"
    )
    exec(compile(source, "suite", "exec"), space)
    space["time"] = type("Clock", (), {"perf_counter": staticmethod(clock)})
    space["tick"] = lambda seconds: now.__setitem__(0, now[0] + seconds)
    pytest.importorskip("torch")
    setup = type("Setup", (), {"case": type("Of", (), {"batch_size": 8})})
    step = space["build"](setup)
    before = now[0]
    step()
    assert now[0] - before == pytest.approx(1.5, rel=0.01)
