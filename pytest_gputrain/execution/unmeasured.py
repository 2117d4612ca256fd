"""Defines the executors of figures that are the same in every process: predictions, and runs on emulated GPUs."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Final

from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.execution.executor import Executor, ReplyT, Watch
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.records import Host, Task

ANY_NUMBER: Final = 1 << 20
"""GPUs of a machine that is not there: no case is refused for taking many."""


class UnmeasuredExecutor(Executor[ReplyT]):
    """Answers tasks for one platform, each once. Of this machine it takes memory and a core, and no GPU.

    Args:
        host: the machine that is not there.
        environ: variables of the session.
        fork_server: where the processes are forked from; fresh interpreters without it.
    """

    def __init__(
        self, host: Host, timeout_seconds: float, environ: Mapping[str, str], fork_server: ForkServer | None
    ) -> None:
        self._host = host
        self._timeout_seconds = timeout_seconds
        self._environ = environ
        self._fork_server = fork_server
        self._replies: dict[tuple[bytes, int], ReplyT] = {}

    @property
    def host(self) -> Host:
        return self._host

    def run(self, task: Task, *, watch: Watch, inline: bool = False, builder: Any = None) -> ReplyT:
        return self._once(task, 1, watch)

    def run_again(self, task: Task, *, watch: Watch) -> ReplyT:
        """Answer a task from a second process, which is fresh, too; likewise once."""
        return self._once(task, 2, watch)

    def _once(self, task: Task, process: int, watch: Watch) -> ReplyT:
        key = self._identity(task), process
        if key not in self._replies:
            self._replies[key] = self._reply(task, watch)
        return self._replies[key]

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    def _identity(self, task: Task) -> bytes:
        return identity_of(task)

    @abc.abstractmethod
    def _reply(self, task: Task, watch: Watch) -> ReplyT:
        """Answer a task that was not asked before."""
