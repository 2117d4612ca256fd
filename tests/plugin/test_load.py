"""Tests with a few hundred recorded replies that no cost of a run grows faster than the number of its cases."""

import json

import load_here
import pytest

FEW, MANY, STEPS = 20, 80, 6000


@pytest.fixture
def folder(project, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio -p no:benchmark")
    return project.path


@pytest.mark.slow
def test_memory_and_time_do_not_grow_faster_than_the_cases(folder):
    """A step takes some 200 bytes: its time and its loss in the results, and its time in the baselines, new and stored."""
    runs = {}
    for count in (FEW, MANY):
        (folder / str(count)).mkdir()
        runs[count] = load_here.run(folder / str(count), count, STEPS, ["--gpu-baseline-update"])
    grown = load_here.peak(runs[MANY]) - load_here.peak(runs[FEW])
    assert grown < 300 * STEPS * (MANY - FEW), grown
    assert load_here.closing(runs[MANY]) < 8 * load_here.closing(runs[FEW]) + 1, "four times the cases"
    report = json.loads((folder / str(MANY) / "report.json").read_text())
    assert len(report["results"]) == MANY
    assert {len(result["replies"][0]["step_seconds"]) for result in report["results"]} == {STEPS}
    baselines = json.loads(next((folder / str(MANY) / "baselines").rglob("*.json")).read_text())
    assert len(baselines["cases"]) == MANY


def test_time_does_not_grow_faster_than_the_steps(folder):
    runs = {}
    for steps in (500, 8000):
        (folder / str(steps)).mkdir()
        runs[steps] = load_here.run(folder / str(steps), 5, steps, [])
    assert load_here.closing(runs[8000]) < 32 * load_here.closing(runs[500]), "sixteen times the steps"
