"""Tests the fleet on a real Ray of two nodes on this machine: the verdicts of a local run, and each way to lose a case."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from plugin_project import BUILD, Project

from pytest_gputrain.execution.fleet.job_queue import Fleet
from pytest_gputrain.execution.fleet.ray import Ray
from pytest_gputrain.records import Case, Conditions, Delivery, Lost, Measurement, Order, Task

pytest.importorskip("ray", reason="needs Ray: pip install 'pytest-gputrain[ray]'")
from ray_here import RayHere, ray_here

pytestmark = [
    pytest.mark.slow,
    # Ray's own, of its daemons' pipes and its use of what is deprecated.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

CODE = f"""
import os
import time
from pathlib import Path

{BUILD.replace("def build", "def sound")}

def sleeps(setup):
    Path(__file__).with_name("pid.txt").write_text(str(os.getpid()))
    time.sleep(600)


def raises(setup):
    of_ray = sorted({{"RAY_JOB_ID", "RAY_NODE_ID", "RAY_RAYLET_PID"}} & set(os.environ))
    raise ValueError(f"threads {{os.environ['OMP_NUM_THREADS']}}, of Ray {{of_ray}}")
"""

SUITE = """
import pytest
from code_of_mine import raises, sound
from pytest_gputrain import Case

CLICKS = Case(model="ctr-dnn", precision="fp32", batch_size=50, optimizer="adam", learning_rate=1e-2, steps=3, warmup=1)
CASES = [CLICKS, CLICKS.replace(parallel="ddp", gpus=2)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_clicks(gputrain, case):
    gputrain.check(case)


def test_sound(gputrain):
    gputrain.check(sound, precision="fp32", steps=3)


def test_raises(gputrain):
    gputrain.check(raises, precision="fp32", steps=3)
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[RayHere]:
    with ray_here() as running:
        yield running


@pytest.fixture
def used(ray: RayHere, monkeypatch: pytest.MonkeyPatch) -> RayHere:
    """The cluster that is found from here."""
    monkeypatch.setenv("RAY_ADDRESS", ray.address)
    return ray


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "code_of_mine.py").write_text(CODE)
    return tmp_path / "shared"


def order(name: str, shared: Path, *, nodes: int = 1, **knobs: Any) -> Order:
    code = {"model": name, "method": "custom", "code": f"code_of_mine.py::{name}"} if name != "ctr-dnn" else {"model": name}
    case = Case(**{**code, "precision": "fp32", "steps": 2, "warmup": 1, **knobs})
    task = Task(case=case, scale="tiny", device_type="cpu", processes=case.gpus, nodes=nodes, root=str(shared.parent))
    conditions = Conditions(platform="cpu", timeout_seconds=300, foreign="warn", shared=str(shared))
    return Order(task=task, conditions=conditions, gpus=0, cpus=1)


def outcome_of(
    order: Order,
    shared: Path,
    *arguments: str,
    then: Callable[[Ray], object] = lambda engine: None,
    wait_seconds: float = 60,
) -> Delivery | Lost:
    """
    Args:
        then: done as soon as the case runs.
    """
    due, engine = [then], Ray(arguments)

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if due and (shared.parent / "pid.txt").exists():
            due.pop()(engine)

    fleet = Fleet(engine, shared, most_jobs=10, wait_seconds=wait_seconds, sleep=sleep)
    try:
        return fleet.run(order)
    finally:
        fleet.close()


def lost(outcome: Delivery | Lost) -> Lost:
    assert isinstance(outcome, Lost), outcome
    return outcome


def worker_of(shared: Path) -> psutil.Process:
    """The case's own process."""
    return psutil.Process(int((shared.parent / "pid.txt").read_text()))


def test_the_verdicts_are_those_of_a_run_on_this_machine(project: Project, used: RayHere) -> None:
    project.write(code_of_mine=CODE, test_mine=SUITE)
    project.spawn("--gpu-baseline-update")
    file = project.baseline_file("mine")
    stored = json.loads(file.read_text())
    stored["cases"]["ctr-dnn-full-fp32@tiny"]["runs"][0]["peak_allocated_bytes"] //= 2
    del stored["cases"]["sound-fp32@tiny"]
    file.write_text(json.dumps(stored))
    project.spawn("--gpu-json=here.json")
    project.spawn("--gpu-json=there.json", "--gpu-executor=ray").assert_outcomes(passed=2, failed=2)
    assert project.comparable("there.json") == project.comparable("here.json")
    assert project.verdicts("there.json") == {
        "ctr-dnn-full-fp32@tiny": "regressed",
        "ctr-dnn-full-fp32-ddp@tiny": "pass",
        "sound-fp32@tiny": "new",
        "raises-fp32@tiny": "failed",
    }
    assert list((project.path / ".gputrain").iterdir()) == []
    # What there is, is not asked for again.
    resumed = project.spawn(
        "--gpu-executor=ray", "--gpu-resume=there.json", "-k", "not raises", "-o", "gpu_fleet_args=first=9"
    )
    resumed.assert_outcomes(passed=2, failed=1, deselected=1)
    resumed.stdout.fnmatch_lines(["3 cases taken from *there.json*"])


def test_a_case_of_two_nodes_is_spread_over_both(used: RayHere, shared: Path) -> None:
    knobs: dict[str, Any] = {"batch_size": 50, "optimizer": "adam", "parallel": "ddp", "gpus": 2}
    outcome = outcome_of(order("ctr-dnn", shared, nodes=2, **knobs), shared)
    assert isinstance(outcome, Delivery), outcome
    assert isinstance(outcome.reply, Measurement), outcome.reply
    # Both agents were there, which pytest waits for; that they have one host name is this machine's doing.
    assert len(outcome.reply.ranks) == 2


def test_a_node_that_dies_loses_its_case(used: RayHere, shared: Path) -> None:
    third = used.add_node(third=1)
    outcome = lost(outcome_of(order("sleeps", shared), shared, "third=1", then=lambda engine: used.kill_node(third)))
    assert outcome.cause == "node_died"
    assert f"Ray's job {outcome.job} ran on" in outcome.sentence
    _wait_for(lambda: not psutil.pid_exists(int((shared.parent / "pid.txt").read_text())))


def test_a_task_that_is_killed_is_lost_at_once_with_the_words_of_ray(used: RayHere, shared: Path) -> None:
    def kill(engine: Ray) -> None:
        (task,) = [process for process in worker_of(shared).parents() if process.name().startswith("ray::")]
        task.kill()

    began = time.monotonic()
    outcome = lost(outcome_of(order("sleeps", shared), shared, then=kill))
    assert outcome.cause == "no_delivery"
    assert "without a delivery" in outcome.sentence
    assert time.monotonic() - began < 60
    _wait_for(lambda: not psutil.pid_exists(int((shared.parent / "pid.txt").read_text())))


def test_a_task_that_is_cancelled_is_told_and_leaves_nothing(
    used: RayHere, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = lost(outcome_of(order("sleeps", shared), shared, then=lambda engine: engine.cancel(["1"])))
    assert outcome.cause == "cancelled"
    _wait_for(lambda: not psutil.pid_exists(int((shared.parent / "pid.txt").read_text())))


def test_a_task_that_no_node_can_run_is_given_up_with_what_it_asks_for(used: RayHere, shared: Path) -> None:
    outcome = lost(outcome_of(order("sound", shared), shared, "h100=8", wait_seconds=2))
    assert outcome.cause == "not_scheduled"
    assert "(no node has CPU 1, h100 8); see `ray status`" in outcome.sentence
    outcome = lost(outcome_of(order("sound", shared, nodes=2), shared, "first=1", wait_seconds=2))
    assert "(1 nodes have, of 2 that it takes, CPU 1, first 1)" in outcome.sentence


def test_ctrl_c_cancels_what_runs_and_writes_the_report(project: Project, used: RayHere) -> None:
    waiting = "from code_of_mine import sleeps\n\n\ndef test_sleeps(gputrain):\n    gputrain.check(sleeps)\n"
    project.write(code_of_mine=CODE, test_waiting=waiting)
    command = [sys.executable, "-m", "pytest", "--gpu-executor=ray", "--gpu-json=report.json"]
    with subprocess.Popen(command, cwd=project.path, stdout=subprocess.DEVNULL) as run:
        pid = project.path / "pid.txt"
        _wait_for(lambda: pid.exists() and pid.read_text())
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == pytest.ExitCode.INTERRUPTED
    assert not psutil.pid_exists(int(pid.read_text()))
    assert project.report()["exit_status"] == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("argument", "address", "sentence"),
    [
        ("h100", "auto", "gpu_fleet_args: 'h100' is neither a resource of Ray's with an amount, *"),
        ("h100={racks}", "auto", "gpu_fleet_args: 'h100={racks}' is neither a resource of *"),
        (
            "first=1",
            "ray://localhost:10001",
            "--gpu-executor=ray: ray://localhost:10001 is for Ray's client; start pytest on *",
        ),
        ("first=1", "localhost:1", "--gpu-executor=ray finds no cluster at localhost:1: Connection refused"),
    ],
)
def test_what_is_no_cluster_or_no_resource_is_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch, argument: str, address: str, sentence: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=r"^(gpu_fleet_args|--gpu-executor)") as caught:
        Ray([argument])
    pytest.LineMatcher(str(caught.value).splitlines()).fnmatch_lines([sentence])


def _wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
