"""Agents of a case over several nodes, as pytest and ``gputrain node`` see them: who is there, and what ends the case."""

import shutil
import signal
import socket
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from unit_examples import CASE, measurement

from pytest_gputrain.execution.launch import node_service, torchrun
from pytest_gputrain.execution.launch.torchrun import Cluster, on_nodes
from pytest_gputrain.hardware import drivers
from pytest_gputrain.records import Crashed, Task
from pytest_gputrain.records.node_protocol import (
    COMMAND,
    EXIT,
    JOINED,
    LEFT,
    NODES,
    OUTPUT,
    Command,
    Joined,
    Left,
    Nodes,
    RankExit,
    node_folder,
    read_record,
    write_record,
)
from pytest_gputrain.utils.linux import PARENT
from pytest_gputrain.worker import torchrun_agent

TASK = Task(case=CASE, scale="full", device_type="cpu", processes=4, root=".")


class Agent:
    """A process that a test ends."""

    def __init__(self):
        self.exit_code = None
        self.ended = 0

    def poll(self):
        return self.exit_code

    def end(self):
        self.ended += 1


@pytest.fixture
def clock(monkeypatch):
    """Seconds of a clock that sleeping moves on."""
    now = [1000.0]

    def sleep(seconds):
        now[0] += seconds

    with monkeypatch.context() as patch:
        patch.setattr(torchrun.time, "monotonic", lambda: now[0])
        patch.setattr(torchrun.time, "sleep", sleep)
        yield now


@pytest.fixture
def agent(monkeypatch):
    """Stands for those that pytest or a node would start."""
    started = Agent()
    started.started = []

    def start(*arguments, **options):
        started.started.append((*arguments, *options.values()))
        return started

    monkeypatch.setattr(torchrun, "run_module", start)
    return started


def _agents(folder, nodes=2, rendezvous="first:29500"):
    cluster = torchrun.Cluster(nodes=nodes, shared=folder.parent, rendezvous=rendezvous)
    return torchrun._Agents(folder, Nodes(count=nodes, processes=4, join_seconds=10), cluster, {"A": "1", PARENT: "7"})


@pytest.fixture
def agents(tmp_path, agent, clock):
    """Those of two nodes, that of the first of which has started."""
    started = _agents(tmp_path)
    started.start()
    return started


def _join(folder, node, host):
    node_folder(folder, node).mkdir(exist_ok=True)
    write_record(node_folder(folder, node) / JOINED, Joined(host=host))


@pytest.mark.parametrize(("rendezvous", "host"), [("first:29500", "first:29500"), ("", "this-host")])
def test_the_agent_of_this_node_gets_the_first_node_and_all_others_are_told(
    tmp_path, agent, clock, rendezvous, host, monkeypatch
):
    monkeypatch.setattr(torchrun.socket, "gethostname", lambda: "this-host")
    _agents(tmp_path, rendezvous=rendezvous).start()
    ((module, arguments, environment, *_),) = agent.started
    assert (module, arguments) == ("pytest_gputrain.worker.torchrun_agent", [str(tmp_path), "0", host])
    assert environment == {"A": "1", PARENT: "7"}
    assert read_record(tmp_path / NODES, Nodes) == Nodes(count=2, processes=4, join_seconds=10)
    assert read_record(tmp_path / COMMAND, Command) == Command(number=1, action="train")
    assert (tmp_path / "node0" / OUTPUT).exists()


def test_the_agents_hear_again_and_again_that_pytest_lives(tmp_path, agents, clock):
    def heard():
        assert agents.trouble() is None
        return read_record(tmp_path / COMMAND, Command)

    assert heard() == Command(number=1, action="train")
    clock[0] += torchrun.COMMAND_EVERY_SECONDS
    assert heard() == Command(number=2, action="train")
    agents.ask_for_stacks()
    assert heard() == heard() == Command(number=3, action="stacks")


def test_nodes_that_do_not_come_in_time_are_missed(tmp_path, agent, clock):
    agents = _agents(tmp_path, nodes=3)
    agents.start()
    remedy = f"leave `gputrain node {tmp_path.parent}` running on each other node"
    clock[0] += 9.9
    assert agents.trouble() is None
    clock[0] += 0.1
    assert agents.trouble().sentence == f"3 of 3 nodes did not join within 10 s (there: none); {remedy}"
    _join(tmp_path, 0, "first")
    _join(tmp_path, 2, "third")
    assert agents.trouble().sentence == f"1 of 3 nodes did not join within 10 s (there: first, third); {remedy}"
    _join(tmp_path, 1, "second")
    assert agents.trouble() is None


def test_an_agent_that_fails_or_is_gone_ends_the_case_with_what_agents_printed(tmp_path, agent, agents):
    (tmp_path / "node0" / OUTPUT).write_text("of the first; ")
    _join(tmp_path, 1, "second")
    (tmp_path / "node1" / OUTPUT).write_text("of the second")
    agent.exit_code = 3
    assert agents.trouble() == Crashed(
        sentence="the agent of this node ended with exit code 3 before the case was over",
        phase="start",
        detail="of the first; of the second",
        exit_code=3,
    )
    write_record(tmp_path / "node0" / LEFT, Left())  # it has reported: its ranks tell the rest
    assert agents.trouble() is None
    write_record(tmp_path / "node1" / LEFT, Left(failure="node second is on fire"))
    assert (agents.trouble().sentence, agents.trouble().exit_code) == ("node second is on fire", None)


def test_agents_are_told_that_the_case_is_over_and_waited_for(tmp_path, agent, agents, clock):
    _agents(tmp_path / "gone").close()
    assert clock[0] == 1000.0, "nobody is waited for where the folder is gone"
    _join(tmp_path, 1, "second")
    agent.exit_code = 0
    agents.close()
    assert read_record(tmp_path / COMMAND, Command) == Command(number=2, action="over")
    assert clock[0] == pytest.approx(1000 + torchrun._CLOSING_SECONDS, abs=0.2)  # for the second, in vain
    assert agent.ended == 1
    write_record(tmp_path / "node1" / LEFT, Left())
    before = clock[0]
    agents.close()
    assert clock[0] == before
    agent.exit_code = None
    agents.close()
    assert clock[0] >= before + torchrun._CLOSING_SECONDS


def test_a_distant_rank_is_known_by_what_lies_in_its_folder(tmp_path, agent, clock):
    folder = tmp_path / "rank1"
    folder.mkdir()
    process = _agents(tmp_path).rank(tmp_path, 1)
    assert (process.poll(), process.killed_for_memory(0)) == (None, False)
    (folder / "reply.json").write_bytes(b"{}")
    assert (process.poll(), process.killed_for_memory(0)) == (0, False)
    for exit_code, killed in ((-9, True), (3, False)):
        write_record(folder / EXIT, RankExit(exit_code=exit_code, killed_for_memory=killed))
        assert (process.poll(), process.killed_for_memory(0)) == (exit_code, killed)
    process.ask_for_stacks()
    assert read_record(tmp_path / COMMAND, Command) == Command(number=1, action="stacks")


@pytest.mark.parametrize(("count", "rendezvous", "by_slurm"), [("2", "", True), ("1", "", False), ("2", "here", False)])
def test_slurm_starts_what_runs_in_an_allocation_of_several_nodes(count, rendezvous, by_slurm, monkeypatch):
    cluster = torchrun.Cluster(nodes=2, shared=Path("shared"), rendezvous=rendezvous)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    assert not cluster.by_slurm
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", count)
    assert cluster.by_slurm == by_slurm


def test_srun_is_what_failed_and_what_to_look_at(tmp_path, agent, clock, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    agents = _agents(tmp_path, rendezvous="")
    agents.start()
    assert not (tmp_path / "node0").exists(), "each agent takes a node number of its own"
    assert (tmp_path / OUTPUT).exists()
    clock[0] += 10
    assert agents.trouble().sentence.endswith("(there: none); see whether srun could start there")
    agent.exit_code = 1
    assert agents.trouble().sentence == "srun ended with exit code 1 before the case was over"
    for node in range(2):
        _join(tmp_path, node, "node")
    agents.close()
    assert clock[0] == 1010.0, "srun has waited for them"


@pytest.mark.parametrize("chosen", ["GPU-1", ""])
def test_gpus_are_named_to_slurm_as_before_pytest_chose(tmp_path, agent, clock, chosen, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    mine = {"A": "1", PARENT: "7", "CUDA_VISIBLE_DEVICES": chosen, "ROCR_VISIBLE_DEVICES": ""}
    torchrun._start_by_slurm(tmp_path, 2, mine)
    ((_, arguments, environment, *_, below),) = agent.started
    assert arguments == [str(tmp_path)]
    srun = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --overlap --kill-on-bad-exit=1"
    assert below == srun.split()
    shown = {"CUDA_VISIBLE_DEVICES": "0,1"} if chosen else {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    assert environment == {"A": "1"} | shown


@pytest.mark.parametrize(("timeout_seconds", "join_seconds"), [(100.0, 50.0), (10_000.0, 300.0)])
def test_a_case_over_nodes_gets_its_reply_and_leaves_nothing(tmp_path, agent, monkeypatch, timeout_seconds, join_seconds):
    shared = tmp_path / "of" / "all"
    told = []

    def start(module, arguments, *others):
        folder = Path(arguments[0])
        for number in range(4):
            (folder / f"rank{number}" / "reply.json").write_bytes(msgspec.json.encode(measurement()))
        assert folder.parent == shared
        agent.exit_code = 0
        return agent

    def written(path, record):
        told.extend([record] if isinstance(record, Nodes) else [])
        write_record(path, record)

    monkeypatch.setattr(torchrun, "run_module", start)
    monkeypatch.setattr(torchrun, "write_record", written)
    cluster = Cluster(nodes=2, shared=shared, rendezvous="first")
    reply = on_nodes(TASK, gpus=(), timeout_seconds=timeout_seconds, cluster=cluster)
    assert len(reply.ranks) == 4
    assert told == [Nodes(count=2, processes=4, join_seconds=join_seconds)]
    assert agent.ended == 1
    assert list(shared.iterdir()) == []


@pytest.fixture
def node_of_case(tmp_path, agent, monkeypatch):
    """The second node of a case, which the node "second" has taken."""
    folder = tmp_path / "case"
    folder.mkdir()
    (folder / "case.json").write_bytes(msgspec.json.encode(TASK))
    write_record(folder / NODES, Nodes(count=2, processes=4, join_seconds=60))
    node_folder(folder, 1).mkdir()
    monkeypatch.setattr(node_service, "start_agent", torchrun.start_agent)
    return node_service._NodeOfCase(folder, 1, "second")


def test_a_node_takes_part_until_its_agent_ends_and_the_case_is_over(tmp_path, agent, node_of_case):
    folder = tmp_path / "case"
    assert node_of_case.title == str(CASE)
    ((_, arguments, environment, *_),) = agent.started
    assert arguments == [str(folder), "1", "second"]
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert node_of_case.is_running()
    agent.exit_code = -signal.SIGKILL
    assert node_of_case.is_running(), "the case is still there"
    left = folder / "node1" / LEFT
    gone = Left(failure="the agent of node second ended by SIGKILL before the case was over")
    assert read_record(left, Left) == gone
    left.unlink()
    assert node_of_case.is_running()
    assert not left.exists(), "told once"
    write_record(left, Left(failure="its own words"))
    again = node_service._NodeOfCase(folder, 1, "second")
    assert again.is_running()
    assert read_record(left, Left) == Left(failure="its own words")
    shutil.rmtree(folder)
    assert not node_of_case.is_running()


def test_a_node_that_is_ended_tells_so_and_ends_its_agent(tmp_path, agent, node_of_case):
    node_of_case.leave()
    assert agent.ended == 1
    over = node_service._NodeOfCase(tmp_path / "over", 1, "second")
    assert (over.title, over.is_running()) == ("a case that is over (over)", False)
    over.leave()
    ended = Left(failure="`gputrain node` on node second was ended before the case was over")
    assert read_record(tmp_path / "case" / "node1" / LEFT, Left) == ended


def _serve_once(shared, monkeypatch):
    """What it says until its first pause, in which somebody types Ctrl-C."""
    said = []
    monkeypatch.setattr(node_service.time, "sleep", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        node_service.serve(shared, "node-2", said.append)
    return said


@pytest.fixture
def of_gpus(tmp_path, monkeypatch):
    """A case of 24 GPUs on three nodes, beside a node that has none."""
    monkeypatch.setattr(drivers, "gpus", lambda: ())
    folder = tmp_path / "gputrain-case"
    folder.mkdir()
    task = msgspec.structs.replace(TASK, device_type="gpu", processes=24)
    (folder / "case.json").write_bytes(msgspec.json.encode(task))
    write_record(folder / NODES, Nodes(count=3, processes=24, join_seconds=60))
    return folder


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (None, "it has 0 GPUs, and the case takes 8 of every node"),
        ('{"case": {}, "of_a_later_version": 1}', "Object contains unknown field"),
    ],
)
def test_a_node_that_cannot_take_part_tells_why(tmp_path, of_gpus, case, why, monkeypatch):
    if case is not None:
        (of_gpus / "case.json").write_text(case)
    for taken in (["node1"], ["node1", "node2"], ["node1", "node2"]):  # each once, and the first never
        said = _serve_once(tmp_path, monkeypatch)[1:]
        assert sorted(path.name for path in of_gpus.glob("node[0-9]")) == taken
    assert said == []
    left = read_record(node_folder(of_gpus, 1) / LEFT, Left)
    assert left.failure.startswith("node node-2 cannot take part: ")
    assert why in left.failure


@pytest.mark.parametrize(("count", "processes", "shares"), [(2, 16, [8, 8]), (2, 3, [2, 1]), (3, 8, [3, 3, 2])])
def test_processes_are_spread_evenly(count, processes, shares):
    nodes = Nodes(count=count, processes=processes, join_seconds=1)
    assert [nodes.processes_of(node) for node in range(count)] == shares


@pytest.mark.parametrize(("name", "host"), [("localhost", "localhost"), ("n1.invalid", "this-host"), ("", "this-host")])
def test_an_agent_goes_by_the_name_that_slurm_has_for_its_node_where_that_is_one(name, host, monkeypatch):
    def look_up(asked, port):
        if asked != "localhost":
            raise socket.gaierror(-2, "Name or service not known")
        return ["127.0.0.1"]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "this-host")
    assert torchrun_agent.reachable(name) == host
