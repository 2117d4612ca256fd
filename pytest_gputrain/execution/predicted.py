"""Predicts tasks instead of running them: on fake tensors, in a process of its own, at full size."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pytest_gputrain.execution.executor import Watch, not_started
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.execution.unmeasured import ANY_NUMBER, UnmeasuredExecutor
from pytest_gputrain.hardware import catalog
from pytest_gputrain.hardware.lease import lease_cores
from pytest_gputrain.hardware.targets import target_of
from pytest_gputrain.records import Crashed, Host, OutOfMemory, Prediction, Task, TimedOut
from pytest_gputrain.storage.recorded import PREDICTED
from pytest_gputrain.storage.result_cache import ResultCache

PredictionReply = Prediction | OutOfMemory | Crashed | TimedOut
"""The failures are those of the process that was to predict."""


def predict(
    task: Task,
    cache: ResultCache[Prediction],
    *,
    timeout_seconds: float,
    environ: Mapping[str, str],
    fork_server: ForkServer | None,
    watch: Watch = lambda event: None,
) -> PredictionReply:
    """Return the prediction of a task that the cache keeps, or make it in a process of its own.

    Args:
        environ: variables of the process.
        fork_server: where it is forked from; a fresh interpreter without it.

    Raises:
        BadCase: no process can be started.
    """
    if (kept := cache.get(task)) is not None:
        return kept
    try:
        with lease_cores(1):
            reply = launcher.predict(
                task, timeout_seconds=timeout_seconds, watch=watch, fork_server=fork_server, environ=environ
            )
    except OSError as error:
        raise not_started(task.case, error) from None
    if isinstance(reply, Prediction):
        cache.put(task, reply)
    return reply


class PredictingExecutor(UnmeasuredExecutor[PredictionReply]):
    """Predicts tasks for one platform.

    Args:
        platform: catalog marker.
    """

    def __init__(
        self,
        platform: str,
        cache: ResultCache[Prediction],
        timeout_seconds: float,
        environ: Mapping[str, str],
        fork_server: ForkServer | None,
    ) -> None:
        gpus = 0 if platform == catalog.CPU else ANY_NUMBER
        host = Host(name="", platform=platform, device=f"{PREDICTED}/{platform}", gpus=gpus)
        super().__init__(host, timeout_seconds, environ, fork_server)
        self.target = target_of(platform)
        self._cache = cache

    def _identity(self, task: Task) -> bytes:
        # Steps and warm-up change nothing: what they repeat is predicted once.
        return msgspec.json.encode((task.case.identity(), task.scale, task.processes, task.servers, task.variables))

    def _reply(self, task: Task, watch: Watch) -> PredictionReply:
        return predict(
            task,
            self._cache,
            timeout_seconds=self._timeout_seconds,
            environ=self._environ,
            fork_server=self._fork_server,
            watch=watch,
        )
