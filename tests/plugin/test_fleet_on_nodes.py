"""Tests the fleet on a real Slurm and a real Ray, of two nodes each on this machine: verdicts, and ways to lose a case."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest
from leftovers import has_ended, wait_until
from plugin_project import BUILD
from slurm_here import lacking, slurm_here

from pytest_gputrain.execution.fleet import job_queue
from pytest_gputrain.execution.fleet.job_queue import Fleet
from pytest_gputrain.execution.fleet.ray import Ray
from pytest_gputrain.execution.fleet.slurm import Slurm
from pytest_gputrain.records import Case, Conditions, Delivery, Lost, Measurement, Order, Task

pytestmark = [
    pytest.mark.slow,
    # Ray's own, of its daemons' pipes and its use of what is deprecated.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
NEEDS = {
    "slurm": pytest.mark.skipif(bool(lacking()), reason=f"no Slurm can run here: {lacking()}"),
    "ray": pytest.mark.ray,
}

CODE = f"""
import os
import time
from pathlib import Path

{BUILD.replace("def build", "def sound")}

def sleeps(setup):
    Path(__file__).with_name("pid.txt").write_text(str(os.getpid()))
    time.sleep(600)


def waits(setup):
    Path(__file__).with_name("pid.txt").write_text(str(os.getpid()))
    while not Path(__file__).with_name("go.txt").exists():
        time.sleep(0.05)
    return sound(setup)


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


@dataclass(frozen=True)
class Nodes:
    """A scheduler with two nodes."""

    name: str
    here: Any
    """Of ``slurm_here`` or ``ray_here``."""

    def engine(self, *arguments):
        return Slurm(arguments) if self.name == "slurm" else Ray(arguments)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks) for name, marks in NEEDS.items()])
def started(request):
    if request.param == "slurm":
        with slurm_here() as slurm:
            yield Nodes("slurm", slurm)
    else:
        pytest.importorskip("ray", reason="needs Ray: pip install 'pytest-gputrain[ray]'")
        from ray_here import ray_here

        with ray_here() as ray:
            yield Nodes("ray", ray)


@pytest.fixture
def nodes(started, monkeypatch):
    """Those that are found from here."""
    for name, value in started.here.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job_queue, "ASK_SECONDS", 0.5)
    return started


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "code_of_mine.py").write_text(CODE)
    return tmp_path / "shared"


def order(name, shared, *, nodes=1, **knobs):
    code = {"model": name, "method": "custom", "code": f"code_of_mine.py::{name}"} if name != "ctr-dnn" else {"model": name}
    case = Case(**{**code, "precision": "fp32", "steps": 2, "warmup": 1, **knobs})
    task = Task(case=case, scale="tiny", device_type="cpu", processes=case.gpus, nodes=nodes, root=str(shared.parent))
    conditions = Conditions(platform="cpu", timeout_seconds=300, foreign="warn", shared=str(shared))
    return Order(task=task, conditions=conditions, gpus=0, cpus=1)


def outcome_of(engine, order, shared, *, as_it_runs=lambda: None, wait_seconds=60):
    due = [as_it_runs]

    def sleep(seconds):
        time.sleep(seconds)
        if due and (shared.parent / "pid.txt").exists():
            due.pop()()

    fleet = Fleet(engine, shared, most_jobs=10, wait_seconds=wait_seconds, sleep=sleep)
    try:
        return fleet.run(order)
    finally:
        fleet.close()


def assert_lost(outcome, cause, *fragments):
    assert isinstance(outcome, Lost), outcome
    assert outcome.cause == cause
    assert [fragment for fragment in fragments if fragment not in outcome.sentence] == [], outcome.sentence


def measurement(outcome):
    assert isinstance(outcome, Delivery), outcome
    assert isinstance(outcome.reply, Measurement), outcome.reply
    return outcome.reply


def assert_no_worker(folder):
    """The case's own process ends."""
    wait_until(lambda: has_ended(int((folder / "pid.txt").read_text())))


def assert_no_job(nodes):
    if nodes.name == "slurm":
        assert not {"RUNNING", "PENDING"} & set(
            nodes.here.command("squeue", "--noheader", "--states=all", "--format=%T").split()
        )


def test_the_verdicts_are_those_of_a_run_on_this_machine(project, nodes):
    project.write(code_of_mine=CODE, test_mine=SUITE)
    project.spawn("--gpu-baseline-update")
    file = project.baseline_file("mine")
    stored = json.loads(file.read_text())
    stored["cases"]["ctr-dnn-full-fp32@tiny"]["runs"][0]["peak_allocated_bytes"] //= 2
    del stored["cases"]["sound-fp32@tiny"]
    file.write_text(json.dumps(stored))
    project.spawn("--gpu-json=here.json")
    executor = f"--gpu-executor={nodes.name}"
    project.spawn("--gpu-json=there.json", executor).assert_outcomes(passed=2, failed=2)
    here, there = (
        {entry["key"]: (entry["verdict"]["status"], entry["device"], entry["replies"][-1]["outcome"]) for entry in results}
        for results in (project.report("here.json")["results"], project.report("there.json")["results"])
    )
    assert there == here
    assert project.verdicts("there.json") == {
        "ctr-dnn-full-fp32@tiny": "regressed",
        "ctr-dnn-full-fp32-ddp@tiny": "pass",
        "sound-fp32@tiny": "new",
        "raises-fp32@tiny": "failed",
    }
    assert list((project.path / ".gputrain").iterdir()) == []
    # What there is, is not asked for again, so that no node has to have what no node has.
    nowhere = "gpu_fleet_args=" + {"slurm": "--constraint=nothing", "ray": "first=9"}[nodes.name]
    resumed = project.spawn(executor, "--gpu-resume=there.json", "-k", "not raises", "-o", nowhere)
    resumed.assert_outcomes(passed=2, failed=1, deselected=1)
    resumed.stdout.fnmatch_lines(["3 cases taken from *there.json*"])


def test_a_case_of_two_nodes_is_one_job_on_both(nodes, shared):
    knobs = {"batch_size": 50, "optimizer": "adam", "parallel": "ddp", "gpus": 2}
    reply = measurement(outcome_of(nodes.engine(), order("ctr-dnn", shared, nodes=2, **knobs), shared))
    assert len(reply.ranks) == 2
    # Both agents of Ray were there, which pytest waits for; that they have one host name is this machine's doing.
    if nodes.name == "slurm":
        assert nodes.here.command("squeue", "--noheader", "--states=all", "--format=%D").split()[-1] == "2"


def test_a_node_that_dies_loses_its_case_and_no_other(nodes, shared):
    if nodes.name == "slurm":
        engine, node, name = nodes.engine("--nodelist=n1"), "n1", "Slurm"
    else:
        node = nodes.here.add_node(third=1)
        engine, name = nodes.engine("third=1"), "Ray"
    outcome = outcome_of(engine, order("sleeps", shared), shared, as_it_runs=lambda: nodes.here.kill_node(node))
    assert_lost(outcome, "node_died", f"the node of {name}'s job {outcome.job} died")
    assert_no_worker(shared.parent)
    measurement(outcome_of(nodes.engine(), order("sound", shared), shared))
    if nodes.name == "slurm":
        nodes.here.revive_node("n1")


def test_a_job_that_somebody_cancels_is_told_and_leaves_nothing(nodes, shared):
    engine = nodes.engine()
    cancel = {
        "slurm": lambda: nodes.here.command("scancel", "--user=root"),
        "ray": lambda: engine.cancel(["1"]),
    }
    assert_lost(outcome_of(engine, order("sleeps", shared), shared, as_it_runs=cancel[nodes.name]), "cancelled")
    assert_no_worker(shared.parent)


def test_an_end_by_a_signal_cancels_what_runs_and_writes_the_report(project, nodes):
    sleeping = "from code_of_mine import sleeps\n\n\ndef test_sleeps(gputrain):\n    gputrain.check(sleeps)\n"
    project.write(code_of_mine=CODE, test_mine=sleeping)
    command = [sys.executable, "-m", "pytest", f"--gpu-executor={nodes.name}", "--gpu-json=report.json"]
    with subprocess.Popen(command, cwd=project.path, stdout=subprocess.DEVNULL) as run:
        pid = project.path / "pid.txt"
        wait_until(lambda: run.poll() is not None or (pid.exists() and pid.read_text()), 200)
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) == pytest.ExitCode.INTERRUPTED
    assert_no_worker(project.path)
    assert project.report()["exit_status"] == pytest.ExitCode.INTERRUPTED
    assert list((project.path / ".gputrain").iterdir()) == []
    assert_no_job(nodes)


@pytest.mark.parametrize(
    ("started", "argument", "count", "reason"),
    [
        pytest.param("slurm", (), 3, "(PartitionNodeLimit)", marks=NEEDS["slurm"]),
        pytest.param("ray", ("h100=8",), 1, "(no node has CPU 1, h100 8); see `ray status`", marks=NEEDS["ray"]),
        pytest.param("ray", ("first=1",), 2, "(1 nodes have, of 2 that it takes, CPU 1, first 1)", marks=NEEDS["ray"]),
    ],
    indirect=["started"],
)
def test_a_job_that_can_never_start_is_given_up_with_its_reason(nodes, shared, argument, count, reason):
    outcome = outcome_of(nodes.engine(*argument), order("sound", shared, nodes=count), shared, wait_seconds=3)
    assert_lost(outcome, "not_scheduled", reason)
    assert_no_job(nodes)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("argument", "address", "sentence"),
    [
        ("h100", "auto", "gpu_fleet_args: 'h100' is neither a resource of Ray's with an amount, *"),
        ("h100={racks}", "auto", "gpu_fleet_args: 'h100={racks}' is neither a resource of *"),
        ("first=1", "ray://localhost:1", "--gpu-executor=ray: ray://localhost:1 is for Ray's client; start pytest on *"),
        ("first=1", "localhost:1", "--gpu-executor=ray finds no cluster at localhost:1: Connection refused"),
    ],
)
def test_what_is_no_cluster_or_no_resource_is_refused(monkeypatch, argument, address, sentence):
    pytest.importorskip("ray", reason="needs Ray: pip install 'pytest-gputrain[ray]'")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=r"^(gpu_fleet_args|--gpu-executor)") as caught:
        Ray([argument])
    pytest.LineMatcher(str(caught.value).splitlines()).fnmatch_lines([sentence])
