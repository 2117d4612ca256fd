"""The plan of time of a borrowed GPU: its steps, and what its reports mean."""

import json
import math
import os
import subprocess

import gpu_time_plan
import msgspec
import pytest
from gpu_session import ROOT, Asked, steps
from gpu_time_plan import WIDTHS, busy_cores, criteria, rows, sd_bound
from leftovers import has_ended
from unit_examples import baseline, baseline_run, emulated_run, gpu_environment, measurement, report, result

from pytest_gputrain.gate import regression
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.regression import judge
from pytest_gputrain.records import Counts, GpuSteps, StepCounts
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance

HERE = gpu_environment(gpu_digests=("a",))


def _run(gpu, wall=1.0, waits=0, **fields):
    steps = GpuSteps(seconds=(gpu,), collective_seconds=(0.0,))
    counts = Counts(steps=(0,), kinds=(StepCounts(waits=waits, kernels=396),), profiled=True)
    return measurement(step_seconds=(wall,) * 3, gpu_steps=steps, counts=counts, environment=HERE, **fields)


def _stored(run):
    steps = {"step_seconds": run.step_seconds, "gpu_steps": run.gpu_steps, "counts": run.counts}
    return baseline_run(environment=HERE, peak_allocated_bytes=run.peak_allocated_bytes, **steps)


def _write(folder, name, *runs, case=None, **fields):
    """Write the report of the runs, judged as the plan does, or of an emulated run."""
    if runs:
        tolerance = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02))
        criteria = Criteria(case=result().case, scale="full", tolerance=tolerance, baseline=case)
        fields = {"replies": runs, "verdict": judge(criteria, runs).verdict if case else None}
    (folder / "reports").mkdir(exist_ok=True)
    (folder / "reports" / f"{name}.json").write_bytes(msgspec.json.encode(report(result(**fields))))


@pytest.fixture
def session(tmp_path, monkeypatch):
    """All reports of a GPU on which every criterion holds."""
    monkeypatch.setattr(regression, "WHY_GPU_SECONDS_ARE_HELD_COARSELY", "")
    cheapest = [_run(0.2 * (1 + at / 1000)) for at in range(5)]
    recorded = baseline(*map(_stored, cheapest), case=result().case)
    _write(tmp_path, f"pace-{WIDTHS[0]}", *cheapest)
    for at, width in enumerate(WIDTHS[1:], 1):
        _write(tmp_path, f"pace-{width}", _run(0.2 + at * 0.159), _run(0.2 + at * 0.16))
    _write(tmp_path, "busy", *[_run(0.203, wall=2.0, core_wait_share=0.5)], case=recorded)
    _write(tmp_path, "longer", *[_run(0.2108)] * 3, case=recorded)
    _write(tmp_path, "items", *[_run(0.2, waits=48)] * 2, case=recorded)
    counts = Counts(steps=(0,), kinds=(StepCounts(launches=253, library_calls=143),))
    _write(tmp_path, "emulated", reply=emulated_run(counts=counts))
    (tmp_path / f"times-{WIDTHS[0]}.json").write_text(json.dumps({"begins": [1, 2, 3, 4, 5, 6, 7], "end": 5.0}))
    return tmp_path, recorded


def _failing(folder):
    return [criterion.name for criterion in criteria(folder) if not criterion.holds]


def test_gpu_seconds_may_be_judged_where_every_criterion_holds(session, capsys):
    folder, _ = session
    assert _failing(folder) == []
    assert gpu_time_plan.report(folder) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[2] == "| width 64 | 1.00 s | 200 ms | 20 % | 0.40 % | 0 | 396 |"
    assert f"set GPU_PRIOR_SD to {1.25 * sd_bound(folder):.2g}" in printed


BROKEN = {
    "processes differ": lambda write, stored: write("pace-128", _run(0.3), _run(0.4)),
    "all keep the GPU busy": lambda write, stored: write("pace-64", *[_run(0.99)] * 5),
    "a busy host changes GPU seconds": lambda write, stored: write("busy", _run(0.21, wall=2.0), case=stored),
    "a busy host fails": lambda write, stored: write("busy", *[_run(0.2, wall=2.0)] * 3, case=stored),
    "a longer GPU passes": lambda write, stored: write("longer", *[_run(0.203)] * 3, case=stored),
    "values that are read pass": lambda write, stored: write("items", *[_run(0.2)] * 3, case=stored),
    "the profiler counts other waits": lambda write, stored: write("pace-64", *[_run(0.2, waits=1)] * 5),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_gpu_seconds_keep_their_coarse_limit_where_a_criterion_fails(session, broken, capsys):
    folder, stored = session
    BROKEN[broken](lambda name, *runs, **fields: _write(folder, name, *runs, **fields), stored)
    assert _failing(folder)
    assert gpu_time_plan.report(folder) == 1
    assert "GPU seconds keep their coarse limit" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["busy", "longer", "items", "emulated", *(f"pace-{width}" for width in WIDTHS[:1])])
def test_a_session_that_has_not_ended_decides_nothing(session, name):
    folder, _ = session
    (folder / "reports" / f"{name}.json").unlink()
    assert None in [criterion.holds for criterion in criteria(folder)]


def test_three_cases_are_the_fewest_that_tell_the_noise(session):
    folder, _ = session
    for width in WIDTHS[3:]:
        (folder / "reports" / f"pace-{width}.json").unlink()
    assert sd_bound(folder) is not None
    (folder / "reports" / f"pace-{WIDTHS[2]}.json").unlink()
    assert sd_bound(folder) is None


def test_the_bound_of_the_noise_is_that_of_the_books(tmp_path):
    """Of chi-squared with nine degrees of freedom the 5 % quantile is 3.325."""
    step = 0.01 * math.sqrt(2)
    for width in WIDTHS[1:]:
        _write(tmp_path, f"pace-{width}", _run(0.5), _run(0.5 * math.exp(step)))
    _write(tmp_path, f"pace-{WIDTHS[0]}", *(_run(0.5 * math.exp(at * 0.01)) for at in (1, -1, 1, -1, 0)))
    assert sd_bound(tmp_path) == pytest.approx(0.01 * math.sqrt(9 / 3.325), rel=0.01)
    assert len(list(rows(tmp_path))) == 6


def test_the_plan_measures_cases_records_first_and_has_the_gpu_work_five_percent_longer(session):
    folder, _ = session
    planned = {step.name: step for step in steps(Asked(folder, "h200", "", 1, "time"))}
    assert list(planned)[:6] == [f"width {width}" for width in WIDTHS]
    assert "PLAN_SLEEP=0.010020000" in planned["GPU works longer"].command
    assert [step.name for step in planned.values() if step.status] == ["GPU works longer", "values are read"]
    dry = {step.name: step for step in steps(Asked(folder, "h200", "", 1, "time", True))}
    assert dry.keys() == planned.keys()
    assert all("--gpu-emulate" in step.command and "--gpu-runs=2" not in step.command for step in dry.values())


def test_every_core_is_busy_and_free_again():
    with busy_cores() as ids:
        assert len(ids) == os.cpu_count()
        assert not any(map(has_ended, ids))
    assert all(map(has_ended, ids))


@pytest.mark.slow
@pytest.mark.weekly
def test_the_suite_of_the_plan_trains_on_a_cpu_where_values_that_it_reads_fail_too(tmp_path):
    pytest.importorskip("torch", reason="the case trains")
    plan = {name: command for name, command, _ in gpu_time_plan.steps(tmp_path, "cpu", dry=False)}
    statuses = {}
    for name in ("width 64", "values are read"):
        done = subprocess.run(plan[name], cwd=ROOT, capture_output=True, text=True, check=False)
        statuses[name] = done.returncode
    assert statuses == {"width 64": 0, "values are read": 1}
    assert "reads" in done.stdout
    times = json.loads((tmp_path / "times-64.json").read_text())
    assert len(times["begins"]) == 7
    assert times["begins"][-1] < times["end"]
