"""Cases over two nodes, as two agents on loopback: what they compute, how they fail, what they leave."""

import os
import signal
import socket
import stat
import subprocess
import sys

import pytest
from leftovers import FAULTS, REASONS, assert_hung, assert_told, own_case
from several_processes import CLICKS, measured
from zoo_examples import task_of

from pytest_gputrain.execution.launch.torchrun import Cluster, on_nodes
from pytest_gputrain.records import Crashed, Measurement
from pytest_gputrain.records.node_protocol import SILENCE_SECONDS

pytestmark = pytest.mark.slow

# Addresses of the same machine; torch numbers the nodes by them.
FIRST, SECOND = "127.0.0.1", "127.0.0.2"

SRUN = """#!{python}
import os, subprocess, sys
options = [word for word in sys.argv[1:sys.argv.index({python!r})]]
with open({log!r}, "w") as log:
    log.write(" ".join(options))
command = sys.argv[len(options) + 1:]
count = int(dict(option.lstrip("-").partition("=")[::2] for option in options)["ntasks"])
agents = [
    subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": str(node), "SLURMD_NODENAME": f"127.0.0.{{node + 1}}"}})
    for node in range(count)
]
sys.exit(max(agent.wait() for agent in agents))
"""


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "code.py").write_text(FAULTS)
    return tmp_path / "shared"


@pytest.fixture
def second_node(shared, leftovers):
    """A running ``gputrain node``."""
    command = "import sys; from pytest_gputrain.cli.main import main; sys.exit(main())"
    node = subprocess.Popen(
        [sys.executable, "-c", command, "node", str(shared), "--host", SECOND], stdout=subprocess.PIPE, text=True
    )
    assert "waits for cases" in node.stdout.readline()
    yield node
    node.send_signal(signal.SIGINT)
    node.communicate(timeout=600)
    assert node.returncode == 0
    assert leftovers.all() == []


def run(case, shared, *, rendezvous=FIRST, timeout_seconds=300.0, watch=lambda event: None):
    task = task_of(case, processes=2, root=str(shared.parent))
    cluster = Cluster(nodes=2, shared=shared, rendezvous=rendezvous)
    return on_nodes(task, gpus=(), timeout_seconds=timeout_seconds, cluster=cluster, watch=watch)


def assert_nothing_left(leftovers, shared, *nodes):
    assert leftovers.all(but=[node.pid for node in nodes]) == []
    assert [path.name for path in shared.iterdir()] == []


def test_two_nodes_train_as_one_does(shared, second_node, leftovers):
    case = CLICKS.replace(parallel="ddp", gpus=2)
    events = []
    reply = run(case, shared, watch=events.append)
    assert isinstance(reply, Measurement), reply
    assert reply.losses == measured(case, preloaded=None).losses
    assert reply.environment.device_count == len(reply.ranks) == 2
    assert [event.phase for event in events if event.step is None].count("measure") == 1
    assert_nothing_left(leftovers, shared, second_node)


@pytest.mark.parametrize(
    "name", ["killed", "hangs", *(pytest.param(name, marks=pytest.mark.weekly) for name in REASONS if name != "killed")]
)
def test_a_rank_of_the_second_node_ends_the_case_with_its_own_reason(shared, second_node, leftovers, name):
    with socket.socket() as probe:
        probe.bind((FIRST, 0))
        port = probe.getsockname()[1]
    hangs = name == "hangs"
    reply = run(own_case(name), shared, rendezvous=f"{FIRST}:{port}", timeout_seconds=40 if hangs else 300)
    assert_hung(reply) if hangs else assert_told(reply, name)
    assert_nothing_left(leftovers, shared, second_node)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def test_a_node_that_is_switched_off_ends_the_case(shared, second_node, leftovers):
    def watch(event):
        if event.phase == "count":
            second_node.send_signal(signal.SIGINT)

    reply = run(own_case("hangs"), shared, watch=watch)
    assert isinstance(reply, Crashed), reply
    assert reply.sentence == f"`gputrain node` on node {SECOND} was ended before the case was over"
    assert_nothing_left(leftovers, shared)


@pytest.fixture
def killed_pytest(shared, leftovers, project):
    """Runs a pytest over a case of two nodes, and kills it when both ranks have started."""

    def run_and_kill(*options):
        process = project("test_hangs", "-o", "gpu_nodes=2", "-o", f"gpu_shared={shared}", *options)
        assert len(leftovers.processes(but=[process.pid])) >= 4
        process.kill()
        process.wait()

    return run_and_kill


def test_nobody_outlives_a_killed_pytest_on_any_node(killed_pytest, second_node, leftovers):
    killed_pytest("-o", f"gpu_rendezvous={FIRST}")
    # Sooner than by its silence: this node's agent goes with pytest, the other's when it misses the first.
    assert leftovers.all(but=[second_node.pid], seconds=SILENCE_SECONDS / 2) == []


def test_agents_that_slurm_started_end_by_the_silence_of_a_killed_pytest(killed_pytest, slurm, leftovers):
    killed_pytest()
    assert leftovers.all(seconds=SILENCE_SECONDS + 15) == []


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """An allocation of two nodes, with an srun that starts all tasks here; the file that its options are written to."""
    log = tmp_path / "options.txt"
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN.format(python=sys.executable, log=str(log)))
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{srun.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    return log


@pytest.mark.parametrize(("name", "kind"), [("sound", Measurement), ("killed", Crashed)])
def test_slurm_starts_an_agent_on_each_node(shared, slurm, leftovers, name, kind):
    reply = run(own_case(name), shared, rendezvous="")
    assert isinstance(reply, kind), reply
    options = "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --overlap --kill-on-bad-exit=1"
    assert slurm.read_text() == options
    if kind is Crashed:
        assert (reply.rank, reply.exit_code) == (1, -signal.SIGKILL)
    assert_nothing_left(leftovers, shared)
