"""Predicts many tasks at once: as many processes as cores, each forked from one that has imported the libraries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import msgspec

from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.execution.predicted import PredictionReply, predict
from pytest_gputrain.records import Task
from pytest_gputrain.storage.prediction_cache import PredictionCache

Job = TypeVar("Job")
Answer = TypeVar("Answer")


class PredictionPool:
    """Predicts each task once.

    Args:
        processes: how many predict at the same time.
        environ: variables of the processes.
    """

    def __init__(self, processes: int, cache: PredictionCache, timeout_seconds: float, environ: Mapping[str, str]) -> None:
        self._cache = cache
        self._timeout_seconds = timeout_seconds
        self._environ = environ
        self._threads = ThreadPoolExecutor(processes, "predict")
        self._own = threading.local()
        """Each thread has its fork server, whose pipe one thread may use at a time."""
        self._servers: list[ForkServer] = []
        self._replies: dict[bytes, PredictionReply] = {}

    def predict(self, task: Task) -> PredictionReply:
        """Return the prediction of a task; another reply where there is none.

        Raises:
            BadCase: no process can be started.
        """
        identity = msgspec.json.encode(task)
        if identity not in self._replies:
            self._replies[identity] = predict(
                task,
                self._cache,
                timeout_seconds=self._timeout_seconds,
                environ=self._environ,
                fork_server=self._server(),
            )
        return self._replies[identity]

    def map(self, work: Callable[[Job], Answer], jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs, each on one of the threads, which may call `predict`; yield each when it is done."""
        futures = {self._threads.submit(work, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            server.close()
        self._threads.shutdown(wait=True)

    def _server(self) -> ForkServer:
        server: ForkServer | None = getattr(self._own, "server", None)
        if server is None:
            server = self._own.server = ForkServer()
            self._servers.append(server)
        return server
