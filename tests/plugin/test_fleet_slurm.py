"""Tests the fleet on a real Slurm of two nodes on this machine: the verdicts of a local run, and ways to lose a case."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from plugin_project import Project
from slurm_here import SlurmHere, lacking, slurm_here

from pytest_gputrain.execution.fleet import job_queue as fleet_module
from pytest_gputrain.execution.fleet.job_queue import Fleet
from pytest_gputrain.execution.fleet.slurm import Slurm
from pytest_gputrain.records import Case, Conditions, Delivery, Lost, Measurement, Order, Task

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(lacking()), reason=f"no Slurm can run here: {lacking()}")]

CODE = """
def sound(setup):
    import torch

    weight = torch.zeros(64, 64, requires_grad=True)

    def step():
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    return step


def sleeps(setup):
    import time

    time.sleep(600)


def waits(setup):
    import time
    from pathlib import Path

    while not Path(__file__).with_name("go.txt").exists():
        time.sleep(0.05)
    return sound(setup)


def raises(setup):
    raise ValueError("a bad day")
"""

SUITE = """
import pytest
from code_of_mine import raises, sound
from pytest_gputrain import Case, grid

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
def slurm() -> Iterator[SlurmHere]:
    with slurm_here() as running:
        yield running


@pytest.fixture
def used(slurm: SlurmHere, monkeypatch: pytest.MonkeyPatch) -> SlurmHere:
    """The Slurm that commands reach from here."""
    use(slurm, monkeypatch)
    return slurm


def use(slurm: SlurmHere, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fleet_module, "ASK_SECONDS", 0.5)


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


@contextlib.contextmanager
def fleet(shared: Path, *arguments: str, then: Callable[[], object] = lambda: None, **limits: float) -> Iterator[Fleet]:
    """
    Args:
        then: done as soon as the first job runs.
    """
    due = [then]

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if due and "RUNNING" in states():
            due.pop()()

    options: Any = {"most_jobs": 10, "wait_seconds": 60.0, **limits}
    running = Fleet(Slurm(arguments), shared, sleep=sleep, **options)
    try:
        yield running
    finally:
        running.close()


def states() -> list[str]:
    listed = subprocess.run(
        ["squeue", "--noheader", "--states=all", "--format=%T"], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


def lost(outcome: Delivery | Lost) -> Lost:
    assert isinstance(outcome, Lost), outcome
    return outcome


def test_the_verdicts_are_those_of_a_run_on_this_machine(project: Project, used: SlurmHere) -> None:
    project.write(code_of_mine=CODE, test_mine=SUITE)
    project.spawn("--gpu-baseline-update")
    file = project.baseline_file("mine")
    stored = json.loads(file.read_text())
    smaller = stored["cases"]["ctr-dnn-full-fp32@tiny"]["runs"][0]
    smaller["peak_allocated_bytes"] //= 2
    del stored["cases"]["sound-fp32@tiny"]
    file.write_text(json.dumps(stored))
    project.spawn("--gpu-json=here.json")
    project.spawn("--gpu-json=there.json", "--gpu-executor=slurm").assert_outcomes(passed=2, failed=2)
    assert project.comparable("there.json") == project.comparable("here.json")
    assert project.verdicts("there.json") == {
        "ctr-dnn-full-fp32@tiny": "regressed",
        "ctr-dnn-full-fp32-ddp@tiny": "pass",
        "sound-fp32@tiny": "new",
        "raises-fp32@tiny": "failed",
    }
    assert list((project.path / ".gputrain").iterdir()) == []


def test_a_case_of_two_nodes_is_one_job_on_both(used: SlurmHere, shared: Path) -> None:
    case: dict[str, Any] = {"batch_size": 50, "optimizer": "adam", "parallel": "ddp", "gpus": 2}
    with fleet(shared) as running:
        outcome = running.run(order("ctr-dnn", shared, nodes=2, **case))
    assert isinstance(outcome, Delivery), outcome
    assert isinstance(outcome.reply, Measurement), outcome.reply
    assert len(outcome.reply.ranks) == 2
    assert used.command("squeue", "--noheader", "--states=all", "--format=%D").split()[-1] == "2"


def test_a_node_that_dies_loses_its_case_and_no_other(used: SlurmHere, shared: Path) -> None:
    with fleet(shared, "--nodelist=n1", then=lambda: used.kill_node("n1")) as dying:
        outcome = lost(dying.run(order("sleeps", shared)))
    assert (outcome.cause, outcome.host) == ("node_died", "n1")
    assert f"Slurm's job {outcome.job} ran on (n1" in outcome.sentence
    with fleet(shared) as running:
        delivery = running.run(order("sound", shared))
    assert isinstance(delivery, Delivery)
    assert isinstance(delivery.reply, Measurement)
    used.revive_node("n1")


def test_a_job_that_makes_room_for_another_is_preempted(used: SlurmHere, shared: Path) -> None:
    def need_all() -> None:
        used.command("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")

    with fleet(shared, "--partition=low", then=need_all) as running:
        outcome = lost(running.run(order("sleeps", shared)))
    assert outcome.cause == "preempted"
    assert "for the sake of another" in outcome.sentence


def test_a_job_that_somebody_cancels_is_told(used: SlurmHere, shared: Path) -> None:
    with fleet(shared, then=lambda: used.command("scancel", "--user=root")) as running:
        assert lost(running.run(order("sleeps", shared))).cause == "cancelled"


def test_a_job_that_can_never_start_is_given_up_with_its_reason(used: SlurmHere, shared: Path) -> None:
    with fleet(shared, wait_seconds=3.0) as running:
        outcome = lost(running.run(order("sound", shared, nodes=3)))
    assert outcome.cause == "not_scheduled"
    assert "(PartitionNodeLimit)" in outcome.sentence
    assert "RUNNING" not in states()
    assert "PENDING" not in states()


def test_a_job_that_is_refused_is_told_with_the_words_of_slurm(used: SlurmHere, shared: Path) -> None:
    with fleet(shared, "--constraint=nothing") as running:
        outcome = lost(running.run(order("sound", shared)))
    assert outcome.cause == "not_scheduled"
    assert "Invalid feature specification" in outcome.sentence
    assert "gpu_fleet_args" in outcome.sentence


def test_a_delivery_that_is_gone_is_a_lost_reply(used: SlurmHere, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_the_folder() -> None:
        for folder in shared.glob("*/*/"):
            shutil.rmtree(folder)
        (shared.parent / "go.txt").touch()

    monkeypatch.setattr(fleet_module, "GRACE_SECONDS", 2.0)
    with fleet(shared, then=lose_the_folder) as running:
        outcome = lost(running.run(order("waits", shared)))
    assert (outcome.cause, outcome.detail) == ("no_delivery", "")
    assert "ended on n" in outcome.sentence
    assert "gpu_shared" in outcome.sentence


def test_a_full_queue_is_waited_for_and_then_lost(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slurm_here(most_jobs=2) as small:
        use(small, monkeypatch)
        with fleet(shared, wait_seconds=3.0) as running:
            running.expect([order("sleeps", shared, batch_size=2)])  # it holds a place for itself, and takes no turn
            running.expect([order("sleeps", shared, batch_size=3)])
            outcome = lost(running.run(order("sound", shared)))
    assert outcome.cause == "queue_full"
    assert "temporarily unable to accept job" in outcome.sentence


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_end_by_a_signal_cancels_the_jobs(project: Project, used: SlurmHere, number: signal.Signals) -> None:
    sleeping = "import pytest\nfrom code_of_mine import sleeps\n\n\ndef test_sleeps(gputrain):\n    gputrain.check(sleeps)\n"
    project.write(code_of_mine=CODE, test_mine=sleeping)
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--gpu-executor=slurm"], cwd=project.path, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while "RUNNING" not in states():
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.2)
    run.send_signal(number)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, output
    assert not {"RUNNING", "PENDING"} & set(states())
    assert list((project.path / ".gputrain").iterdir()) == []
    deadline = time.monotonic() + 20
    while (processes := workers(project.path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes == []


def workers(below: Path) -> list[str]:
    """Nodes' programs of jobs in a folder."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [
        " ".join(command)
        for command in commands
        if "pytest_gputrain.execution.fleet.job" in command and Path(command[-1]).is_relative_to(below)
    ]
