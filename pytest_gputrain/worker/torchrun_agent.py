"""Runs torchrun's elastic agent for a node of a case: ``python -P -m pytest_gputrain.worker.torchrun_agent FOLDER [NODE
HOST]``.

Without NODE and HOST, Slurm's number of this task is the number of the node, and Slurm's name of the node is the host. The
agent runs this node's ranks and reports the exit of each one that failed. It ends with all of them when pytest says so, or
when pytest gives no new command for long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

from pytest_gputrain.records.node_protocol import (
    COMMAND,
    ENDPOINT,
    EXIT,
    JOINED,
    LEFT,
    NODES,
    SILENCE_SECONDS,
    BadRecord,
    Command,
    Endpoint,
    Joined,
    Left,
    Nodes,
    RankExit,
    node_folder,
    read_record,
    write_record,
)
from pytest_gputrain.utils.linux import PARENT, die_with_parent, oom_kills

_POLL_SECONDS: Final = 0.1
_KILLED_SECONDS: Final = 5.0
"""The time in which killed processes have to be gone."""


class Agent:
    """Runs this node's ranks of the case and watches them.

    Args:
        folder: the case's.
        node: number of this node among those of the case.
        host: name or address that the other nodes reach this one by.
    """

    def __init__(self, folder: Path, node: int, host: str) -> None:
        self._folder = folder
        self._node = node
        self._host, _, self._port = host.partition(":")
        self._own = node_folder(folder, node)
        self._leaving = threading.Lock()
        self._kills_before = oom_kills()

    def run(self) -> NoReturn:
        """Join the case, and stay until it is over."""
        nodes = read_record(self._folder / NODES, Nodes)
        if nodes is None:
            sys.exit("the case is over")
        self._own.mkdir(exist_ok=True)
        write_record(self._own / JOINED, Joined(host=self._host))
        threading.Thread(target=self._listen, daemon=True).start()
        exits: dict[int, int] = {}
        failure = ""
        try:
            exits = self._run_ranks(nodes)
        except Exception as error:
            failure = f"the agent of node {self._host} failed: {type(error).__name__}: {error}"
        self._leave(failure, exits)

    def _run_ranks(self, nodes: Nodes) -> dict[int, int]:
        """Run the ranks, and return the exit codes of those that failed, by rank."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # The agent starts the ranks, so it is their parent from now on.
        os.environ[PARENT] = str(os.getpid())
        seconds = int(nodes.join_seconds)
        configuration = LaunchConfig(
            min_nodes=nodes.count,
            max_nodes=nodes.count,
            nproc_per_node=nodes.processes_of(self._node),
            run_id=self._folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint=self._endpoint(nodes.join_seconds),
            rdzv_configs={"join_timeout": seconds, "read_timeout": seconds, "is_host": self._node == 0},
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
            # The folder of the case is removed at its end, and torchrun's own temporary folder would not be.
            logs_specs=DefaultLogsSpecs(log_dir=str(self._own)),
            local_addr=self._host,
        )
        launch = elastic_launch(configuration, sys.executable)
        try:
            launch("-P", "-m", "pytest_gputrain.worker", str(self._folder))
        except ChildFailedError as error:
            return {rank: failure.exitcode for rank, failure in error.failures.items()}
        return {}

    def _endpoint(self, seconds: float) -> str:
        """Return the address at which the agents meet. The first agent chooses a port and writes it to a file for the
        others.

        Raises:
            TimeoutError: it has not.
        """
        path = self._folder / ENDPOINT
        if self._node == 0:
            own = Endpoint(host=self._host, port=int(self._port) if self._port else _free_port())
            write_record(path, own)
            return f"{own.host}:{own.port}"
        deadline = time.monotonic() + seconds
        while (endpoint := read_record(path, Endpoint)) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError("the first node has not written its address")
            time.sleep(_POLL_SECONDS)
        return f"{endpoint.host}:{endpoint.port}"

    def _listen(self) -> None:
        """End this process when the case ends."""
        last_number, last_heard = -1, time.monotonic()
        stacks_asked = False
        while True:
            time.sleep(_POLL_SECONDS)
            try:
                command = read_record(self._folder / COMMAND, Command)
            except BadRecord as error:
                self._leave(f"the agent of node {self._host} failed: {error}", {})
            if command is None or command.action == "over" or time.monotonic() - last_heard > SILENCE_SECONDS:
                self._leave("", {})
            if command.number != last_number:
                last_number, last_heard = command.number, time.monotonic()
            if command.action == "stacks" and not stacks_asked:
                stacks_asked = True
                self._ask_for_stacks()

    def _ask_for_stacks(self) -> None:
        import psutil

        for child in psutil.Process().children():
            if "pytest_gputrain.worker" in child.cmdline():
                child.send_signal(signal.SIGUSR1)

    def _leave(self, failure: str, exits: Mapping[int, int]) -> NoReturn:
        """End this process and all processes that it started."""
        import psutil

        with self._leaving:  # A second thread that arrives here waits until the process ends.
            family = psutil.Process().children(recursive=True)
            for child in family:
                child.kill()
            psutil.wait_procs(family, timeout=_KILLED_SECONDS)
            killed_for_memory = oom_kills() > self._kills_before
            try:
                for rank, exit_code in exits.items():
                    rank_exit = RankExit(
                        exit_code=exit_code, killed_for_memory=killed_for_memory and exit_code == -signal.SIGKILL
                    )
                    write_record(self._folder / f"rank{rank}" / EXIT, rank_exit)
                write_record(self._own / LEFT, Left(failure=failure))
            except FileNotFoundError:
                pass  # The case is over, and its folder has been removed.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def main(arguments: list[str]) -> NoReturn:
    """Run the agent of a node.

    Raises:
        SystemExit: neither the arguments nor Slurm tell which of the nodes this one is.
    """
    die_with_parent()
    folder, *node_and_host = arguments
    if not node_and_host:
        host = reachable(os.environ.get("SLURMD_NODENAME", ""))
        node_and_host = [os.environ["SLURM_PROCID"], host]
    Agent(Path(folder), int(node_and_host[0]), node_and_host[1]).run()


def reachable(name: str) -> str:
    """Return Slurm's name of this node; without one, or if only Slurm can resolve it, the host's name."""
    with contextlib.suppress(OSError):
        if name and socket.getaddrinfo(name, None):
            return name
    return socket.gethostname()


if __name__ == "__main__":
    main(sys.argv[1:])
