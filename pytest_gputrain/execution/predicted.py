"""Predicts tasks instead of running them: on fake tensors, in a process of its own, at full size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pytest_gputrain.execution.executor import Executor, Watch, not_started
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.hardware import catalog
from pytest_gputrain.hardware.lease import lease_cores
from pytest_gputrain.hardware.targets import target_of
from pytest_gputrain.records import Crashed, Host, OutOfMemory, Prediction, Task, TimedOut
from pytest_gputrain.storage.prediction_cache import PredictionCache
from pytest_gputrain.storage.predictions import FOLDER

PredictionReply = Prediction | OutOfMemory | Crashed | TimedOut
"""The failures are those of the process that was to predict."""

_ANY_NUMBER: Final = 1 << 20
"""GPUs of a machine that is not there: no case is refused for taking many."""


class PredictingExecutor(Executor[PredictionReply]):
    """Predicts tasks for one platform, each once. Of this machine it takes a core.

    Args:
        platform: catalog marker.
        environ: variables of the session.
        fork_server: where the processes are forked from; fresh interpreters without it.
    """

    def __init__(
        self,
        platform: str,
        cache: PredictionCache,
        timeout_seconds: float,
        environ: Mapping[str, str],
        fork_server: ForkServer | None,
    ) -> None:
        gpus = 0 if platform == catalog.CPU else _ANY_NUMBER
        self._host = Host(name="", platform=platform, device=f"{FOLDER}/{platform}", gpus=gpus)
        self.target = target_of(platform)
        self._cache = cache
        self._timeout_seconds = timeout_seconds
        self._environ = environ
        self._fork_server = fork_server
        self._replies: dict[bytes, PredictionReply] = {}

    @property
    def host(self) -> Host:
        return self._host

    def run(self, task: Task, *, watch: Watch, inline: bool = False, builder: Any = None) -> PredictionReply:
        # Steps and warm-up change nothing: what they repeat is predicted once.
        identity = msgspec.json.encode((task.case.identity(), task.scale, task.processes, task.servers, task.variables))
        if identity not in self._replies:
            reply: PredictionReply | None = self._cache.get(task)
            if reply is None:
                reply = self._predict(task, watch)
                if isinstance(reply, Prediction):
                    self._cache.put(task, reply)
            self._replies[identity] = reply
        return self._replies[identity]

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    def _predict(self, task: Task, watch: Watch) -> PredictionReply:
        try:
            with lease_cores(1):
                return launcher.predict(
                    task,
                    timeout_seconds=self._timeout_seconds,
                    watch=watch,
                    fork_server=self._fork_server,
                    environ=self._environ,
                )
        except OSError as error:
            raise not_started(task.case, error) from None
