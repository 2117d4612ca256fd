"""Serves ``gputrain node``: runs this machine's ranks of the cases that pytest spreads over several nodes."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pytest_gputrain.execution.launch.environment import refuse_recursion, worker_environment
from pytest_gputrain.execution.launch.processes import FreshProcess
from pytest_gputrain.execution.launch.ranks import exit_text
from pytest_gputrain.execution.launch.torchrun import start_agent
from pytest_gputrain.hardware.devices import Gpu, HardwareError
from pytest_gputrain.hardware.machine import detect
from pytest_gputrain.records import Task
from pytest_gputrain.records.node_protocol import LEFT, NODES, BadRecord, Left, Nodes, node_folder, read_record, write_record

_POLL_SECONDS: Final = 0.2


def serve(shared: Path, host: str, say: Callable[[str], None]) -> None:
    """Run this node's ranks of every case of this user that appears in ``shared``, until interrupted.

    A case is code that this process runs, so those of others are left alone.

    Args:
        host: name or address that the other nodes reach this one by.
        say: called with a line for each case.
    """
    refuse_recursion()
    shared.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=shared) as own:
        owner = os.stat(own).st_uid  # A file server may give files another owner than the process has.
    nodes_of_cases: dict[Path, _NodeOfCase] = {}
    say(f"{host} waits for cases in {shared}; Ctrl-C ends it")
    try:
        while True:
            for folder in (file.parent for file in shared.glob(f"*/{NODES}")):
                if folder not in nodes_of_cases and _is_of(folder, owner) and (number := _claim_node(folder)) is not None:
                    nodes_of_cases[folder] = _NodeOfCase(folder, number, host)
                    say(nodes_of_cases[folder].title)
            nodes_of_cases = {folder: node for folder, node in nodes_of_cases.items() if node.is_running()}
            time.sleep(_POLL_SECONDS)
    finally:
        for node in nodes_of_cases.values():
            node.leave()


def _is_of(folder: Path, owner: int) -> bool:
    """Tell whether nobody but ``owner`` can have made the folder and its content."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == owner and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _claim_node(folder: Path) -> int | None:
    """Return a node number of the case in ``folder`` that no other machine has claimed, and claim it; None if there is none.
    The first number belongs to pytest's machine."""
    with contextlib.suppress(FileNotFoundError, BadRecord):
        nodes = read_record(folder / NODES, Nodes)
        for number in range(1, nodes.count if nodes else 0):
            with contextlib.suppress(FileExistsError):
                node_folder(folder, number).mkdir()
                return number
    return None


class _NodeOfCase:
    """Runs this node's ranks of one case."""

    def __init__(self, folder: Path, number: int, host: str) -> None:
        self._folder = folder
        self._left = node_folder(folder, number) / LEFT
        self._host = host
        self._agent: FreshProcess | None = None
        self.title = f"a case that is over ({folder.name})"
        try:
            task, nodes = read_record(folder / "case.json", Task), read_record(folder / NODES, Nodes)
            if task is None or nodes is None:
                return
            self.title = str(task.case)
            environment = worker_environment(task, _gpus(task, nodes.processes_of(number)))
            self._agent = start_agent(folder, number, host, environment)
        except FileNotFoundError:
            pass  # The case is over, and its folder has been removed.
        except (HardwareError, BadRecord) as error:
            self._tell(f"node {host} cannot take part: {error}")

    def is_running(self) -> bool:
        """Tell whether the case is still there; report an agent that has ended without a report."""
        if self._agent and (exit_code := self._agent.poll()) is not None:
            self._agent = None
            if not self._left.exists():
                self._tell(f"the agent of node {self._host} ended {exit_text(exit_code)} before the case was over")
        return self._agent is not None or self._folder.exists()

    def leave(self) -> None:
        """End the ranks of this node."""
        if self._agent:
            # This reason is written before those of the other nodes, whose ranks say only that they lost a partner.
            self._tell(f"`gputrain node` on node {self._host} was ended before the case was over")
            self._agent.end()

    def _tell(self, failure: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            write_record(self._left, Left(failure=failure))


def _gpus(task: Task, count: int) -> tuple[Gpu, ...]:
    """Return this node's GPUs, all of which the case uses; none for a case on CPUs.

    Raises:
        HardwareError: it has more or fewer.
    """
    if task.device_type == "cpu":
        return ()
    machine = detect()
    gpus = machine.gpus
    if len(gpus) != count:
        why = f" ({machine.unseen})" if machine.unseen else ""
        raise HardwareError(
            f"it has {len(gpus)} GPUs{why}, and the case takes {count} of every node; show {count} of them alike"
        )
    return gpus
