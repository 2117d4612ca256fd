"""``gputrain node``: who gets a seat, and what is told of a node that cannot take part."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
from unit_examples import CASE

from pytest_gputrain.execution.launch.node_service import serve
from pytest_gputrain.hardware import drivers
from pytest_gputrain.records import Task
from pytest_gputrain.records.node_protocol import LEFT, NODES, Left, Nodes, node_folder, read_record, write_record
from pytest_gputrain.worker import torchrun_agent


def _case(shared: Path, *, nodes: int, device_type: str = "gpu") -> Path:
    folder = shared / "gputrain-case"
    folder.mkdir(parents=True)
    task = {"case": CASE, "scale": "full", "device_type": device_type, "processes": 16, "root": "."}
    (folder / "case.json").write_bytes(msgspec.json.encode(msgspec.convert(task, Task)))
    write_record(folder / NODES, Nodes(count=nodes, processes=16, join_seconds=60))
    return folder


def _serve_once(shared: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What it says until its first pause, in which somebody types Ctrl-C."""
    said: list[str] = []

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pytest_gputrain.execution.launch.node_service.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        serve(shared, "node-2", said.append)
    return said


def test_a_node_of_other_gpus_tells_why_it_cannot_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "gpus", lambda: ())
    folder = _case(tmp_path, nodes=2)
    assert _serve_once(tmp_path, monkeypatch)[1:] == [str(CASE)]
    left = read_record(node_folder(folder, 1) / LEFT, Left)
    assert left is not None
    assert left.failure.startswith("node node-2 cannot take part: it has 0 GPUs, and the case takes 8 of every node")


def test_every_seat_is_taken_once_and_the_first_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "gpus", lambda: ())
    folder = _case(tmp_path, nodes=3)
    for taken in (["node1"], ["node1", "node2"], ["node1", "node2"]):
        _serve_once(tmp_path, monkeypatch)
        assert sorted(path.name for path in folder.glob("node[0-9]")) == taken


def test_a_case_that_cannot_be_read_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _case(tmp_path, nodes=2)
    (folder / "case.json").write_text('{"case": {}, "of_a_later_version": 1}')
    _serve_once(tmp_path, monkeypatch)
    left = read_record(node_folder(folder, 1) / LEFT, Left)
    assert left is not None
    assert "cannot take part" in left.failure


@pytest.mark.parametrize(("count", "processes", "shares"), [(2, 16, [8, 8]), (2, 3, [2, 1]), (3, 8, [3, 3, 2])])
def test_processes_are_spread_evenly(count: int, processes: int, shares: list[int]) -> None:
    nodes = Nodes(count=count, processes=processes, join_seconds=1)
    assert [nodes.processes_of(seat) for seat in range(count)] == shares


@pytest.mark.parametrize(("name", "host"), [("localhost", "localhost"), ("n1.invalid", "this-host"), ("", "this-host")])
def test_an_agent_goes_by_the_name_that_slurm_has_for_its_node_where_that_is_one(
    name: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(asked: str, port: None) -> list[str]:
        if asked != "localhost":
            raise socket.gaierror(-2, "Name or service not known")
        return ["127.0.0.1"]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "this-host")
    assert torchrun_agent.reachable(name) == host
