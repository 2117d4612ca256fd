"""Runs cases over several nodes: torch's elastic agent on each starts that node's ranks (torchrun).

The nodes share a folder: the case's lies in it, and pytest and the agents talk through files there (see
`pytest_gputrain.records.node_protocol`). Inside a Slurm allocation srun starts the agents; elsewhere pytest starts that of
its own node, and ``gputrain node`` (`node_service`) those of the others.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pytest_gputrain.execution.launch.case_folder import folder_of
from pytest_gputrain.execution.launch.environment import CHOOSING, refuse_recursion, worker_environment
from pytest_gputrain.execution.launch.processes import FreshProcess, Process, run_module
from pytest_gputrain.execution.launch.ranks import Rank, exit_text, follow
from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.records import Crashed, EmulatedRun, Event, Reply, Task
from pytest_gputrain.records.node_protocol import (
    COMMAND,
    COMMAND_EVERY_SECONDS,
    EXIT,
    JOINED,
    LEFT,
    NODES,
    OUTPUT,
    BadRecord,
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
from pytest_gputrain.utils.reading import tail

JOIN_SECONDS: Final = 300.0
"""The time from a case's start until all its nodes must be there; at most half of the case's time-out."""

_GRACE_SECONDS: Final = 2.0
"""A rank that lost its partner tells so at once; that the partner was killed comes from an agent, a moment later."""

_CLOSING_SECONDS: Final = 15.0
"""The time in which agents have to end."""

_POLL_SECONDS: Final = 0.1

_AGENT: Final = "pytest_gputrain.worker.torchrun_agent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Describes where cases of several nodes run."""

    nodes: int
    """The number of nodes of the case."""
    shared: Path
    """Folder that all nodes see."""
    rendezvous: str = ""
    """``HOST`` or ``HOST:PORT`` of this node as the others reach it; empty for its name and any free port."""

    @property
    def by_slurm(self) -> bool:
        """Whether this is an allocation of several nodes."""
        return not self.rendezvous and int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1


def on_nodes(
    task: Task,
    *,
    gpus: Sequence[Gpu],
    timeout_seconds: float,
    cluster: Cluster,
    watch: Callable[[Event], None] = lambda event: None,
    environ: Mapping[str, str] | None = None,
) -> Reply:
    """Run ``task`` with its processes spread over several nodes.

    Args:
        gpus: of this node, the only ones that its processes will see; none hides them all.
        timeout_seconds: the processes and their children are killed after this time.
        watch: called with every progress event of the first rank, on this thread.
        environ: variables of the processes that this node starts, with those that the task changes; by default those of
            this one.
    """
    refuse_recursion()
    nodes = Nodes(count=cluster.nodes, processes=task.processes, join_seconds=min(JOIN_SECONDS, timeout_seconds / 2))
    cluster.shared.mkdir(parents=True, exist_ok=True)
    with (
        folder_of(task, cluster.shared) as folder,
        _agents(folder, nodes, cluster, worker_environment(task, gpus, environ)) as agents,
    ):
        ranks = [Rank(number, folder, agents.rank) for number in range(task.processes)]
        agents.start()
        try:
            reply = follow(ranks, timeout_seconds, watch, trouble=agents.trouble, grace_seconds=_GRACE_SECONDS)
        except BadRecord as error:
            return agents.crashed(str(error))
        assert not isinstance(reply, EmulatedRun), "nobody asked for one"
        return reply


@contextlib.contextmanager
def _agents(folder: Path, nodes: Nodes, cluster: Cluster, environment: dict[str, str]) -> Iterator[_Agents]:
    agents = _Agents(folder, nodes, cluster, environment)
    try:
        yield agents
    finally:
        agents.close()


class _Agents:
    """The agents that start the ranks of one case, one agent on each node."""

    def __init__(self, folder: Path, nodes: Nodes, cluster: Cluster, environment: dict[str, str]) -> None:
        self._folder = folder
        self._nodes = nodes
        self._cluster = cluster
        self._environment = environment
        self._node_folders = [node_folder(folder, node) for node in range(nodes.count)]
        self._process: FreshProcess | None = None
        self._command = Command(number=0, action="train")
        self._spoke = self._began = time.monotonic()

    def start(self) -> None:
        """Tell the agents to start the ranks."""
        self._say("train")
        self._began = time.monotonic()
        if self._cluster.by_slurm:
            self._process = _start_by_slurm(self._folder, self._nodes.count, self._environment)
        else:
            self._node_folders[0].mkdir()
            host = self._cluster.rendezvous or socket.gethostname()
            self._process = start_agent(self._folder, 0, host, self._environment)
        # This file is written last, so that nodes that wait for cases find everything else in place.
        write_record(self._folder / NODES, self._nodes)

    def rank(self, folder: Path, number: int) -> Process:
        """Return a rank of the case, which one of the agents starts."""
        return _RemoteProcess(folder / f"rank{number}", self)

    def trouble(self) -> Crashed | None:
        """Return a reason to end the case that no rank reports; None if there is none. Each call also tells the agents that
        pytest still runs."""
        if time.monotonic() - self._spoke >= COMMAND_EVERY_SECONDS:
            self._say(self._command.action)
        departures = [read_record(node / LEFT, Left) for node in self._node_folders]
        for agent in departures:
            if agent and agent.failure:
                return self.crashed(agent.failure)
        exit_code = self._process.poll() if self._process else None
        if exit_code is not None and (self._cluster.by_slurm or departures[0] is None):
            what = "srun" if self._cluster.by_slurm else "the agent of this node"
            return self.crashed(f"{what} ended {exit_text(exit_code)} before the case was over", exit_code)
        if time.monotonic() - self._began < self._nodes.join_seconds:
            return None
        hosts = [joined.host for joined in (read_record(node / JOINED, Joined) for node in self._node_folders) if joined]
        missing = self._nodes.count - len(hosts)
        if not missing:
            return None
        remedy = (
            "see whether srun could start there"
            if self._cluster.by_slurm
            else f"leave `gputrain node {self._cluster.shared}` running on each other node"
        )
        return self.crashed(
            f"{missing} of {self._nodes.count} nodes did not join within {self._nodes.join_seconds:g} s "
            f"(there: {', '.join(hosts) or 'none'}); {remedy}"
        )

    def ask_for_stacks(self) -> None:
        """Have all ranks write their Python stacks."""
        self._say("stacks")

    def close(self) -> None:
        """End the agents, and with them all ranks."""
        with contextlib.suppress(FileNotFoundError):
            self._say("over")
        deadline = time.monotonic() + _CLOSING_SECONDS
        while time.monotonic() < deadline and not self._gone():
            time.sleep(_POLL_SECONDS)
        if self._process:
            self._process.end()

    def _gone(self) -> bool:
        taken = [node for node in self._node_folders if node.exists()]
        ended = self._process is None or self._process.poll() is not None
        # This node, the first one, need not report, because its agent may have been killed before. Under Slurm no node needs
        # to report, because srun itself waits for all agents.
        reporting = [] if self._cluster.by_slurm else taken[1:]
        return ended and all((node / LEFT).exists() for node in reporting)

    def _say(self, action: Literal["train", "stacks", "over"]) -> None:
        self._command = Command(number=self._command.number + 1, action=action)
        self._spoke = time.monotonic()
        write_record(self._folder / COMMAND, self._command)

    def crashed(self, sentence: str, exit_code: int | None = None) -> Crashed:
        """Return the reply of a crashed case, with what the agents printed."""
        output = "".join(map(tail, sorted(self._folder.glob(f"**/{OUTPUT}"))))
        return Crashed(sentence=sentence, phase="start", detail=output, exit_code=exit_code)


class _RemoteProcess(Process):
    """A worker that an agent has started, perhaps on another node. Its state is read from the files in its folder."""

    def __init__(self, folder: Path, agents: _Agents) -> None:
        self._folder = folder
        self._agents = agents

    def poll(self) -> int | None:
        how = read_record(self._folder / EXIT, RankExit)
        if how is not None:
            return how.exit_code
        return 0 if (self._folder / "reply.json").exists() else None

    def killed_for_memory(self, kills_before: int) -> bool:
        how = read_record(self._folder / EXIT, RankExit)
        return how is not None and how.killed_for_memory

    def ask_for_stacks(self) -> None:
        self._agents.ask_for_stacks()

    def end(self) -> None:
        """Do nothing, because the agent ends the worker."""


def start_agent(folder: Path, node: int, host: str, environment: Mapping[str, str]) -> FreshProcess:
    """Start the agent of this node for the case in ``folder``, whose node number this machine has taken."""
    with open(node_folder(folder, node) / OUTPUT, "wb") as output:
        return run_module(_AGENT, [str(folder), str(node), host], environment, output, output)


def _start_by_slurm(folder: Path, count: int, environment: Mapping[str, str]) -> FreshProcess:
    """Start one agent on each of ``count`` nodes of the allocation."""
    environment = {name: value for name, value in environment.items() if name != PARENT}
    if any(environment.get(name) for name in CHOOSING):
        # The GPUs have other names on other nodes. So these nodes get the variables as they were when pytest started, or
        # those of Slurm.
        environment = {name: value for name, value in environment.items() if name not in CHOOSING}
        environment |= {name: value for name, value in os.environ.items() if name in CHOOSING}
    srun = [
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--overlap",
        "--kill-on-bad-exit=1",
    ]
    with open(folder / OUTPUT, "wb") as output:
        return run_module(_AGENT, [str(folder)], environment, output, output, below=srun)
