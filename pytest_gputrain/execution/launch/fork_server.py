"""Workers forked from a process that has imported their libraries: most of a tiny case's time is imports.

Only for the zoo's cases on a CPU. A process that has used OpenMP or a GPU must not be forked; the one here does nothing but
import, and refuses to fork should it ever have a second thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pytest_gputrain.execution.launch.processes import Local
from pytest_gputrain.records import Task

_POLL_SECONDS: Final = 0.01


class Preloaded:
    """The process that is forked: started when first needed, and anew where it has ended or its environment is another."""

    def __init__(self) -> None:
        self._source: _Source | None = None

    def fork(
        self, task: Task, folder: Path, rank: int, environment: Mapping[str, str], timeout_seconds: float
    ) -> Forked | None:
        """Rank ``rank`` of the case in ``folder``; None where only a fresh interpreter will do.

        Args:
            timeout_seconds: imports that take longer are given up.
        """
        if task.case.code or task.device_type != "cpu":
            return None
        if self._source is None or not self._source.serves(environment):
            self.close()
            self._source = _Source(environment)
        forked = None
        try:
            forked = self._source.fork(folder, rank, timeout_seconds)
        finally:
            if forked is None:
                self.close()  # an answer that nobody waited for would be taken for the next one
        return forked

    def close(self) -> None:
        """End the process, and with it any that was forked from it."""
        if self._source is not None:
            self._source.close()
        self._source = None


class _Source:
    """A running process of `worker.preload`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        asked, self._wishes = os.pipe()
        self._answers, told = os.pipe()
        os.set_blocking(self._answers, False)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pytest_gputrain.worker.preload"],
            stdin=asked,
            stdout=told,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
        )
        os.close(asked)
        os.close(told)
        self._unread = b""
        self._forked: list[int] = []
        self._ended: dict[int, int] = {}

    def serves(self, environment: Mapping[str, str]) -> bool:
        return self._process.poll() is None and self._environment == environment

    def fork(self, folder: Path, rank: int, timeout_seconds: float) -> Forked | None:
        deadline = time.monotonic() + timeout_seconds
        wish = {"folder": str(folder), "rank": rank, "cwd": os.getcwd()}
        try:
            os.write(self._wishes, json.dumps(wish).encode() + b"\n")
        except BrokenPipeError:
            return None
        while not self._forked:
            if self._process.poll() is not None or time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)
            self._listen()
        pid = self._forked.pop()
        return Forked(self, pid) if pid else None

    def exit_code(self, pid: int) -> int | None:
        """Of a process forked here; None while it runs."""
        self._listen()
        ended_with_source = self._process.poll()
        return self._ended.get(pid, ended_with_source)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listen()
        os.close(self._wishes)
        os.close(self._answers)

    def _listen(self) -> None:
        try:
            self._unread += os.read(self._answers, 65_536)
        except BlockingIOError:
            return
        *lines, self._unread = self._unread.split(b"\n")
        for said in map(json.loads, lines):
            self._hear(said)

    def _hear(self, said: dict[str, Any]) -> None:
        if "forked" in said:
            self._forked.append(said["forked"])
        else:
            self._ended[said["ended"]] = said["exit_code"]


class Forked(Local):
    """A worker whose parent is the preloaded process, which tells of its end."""

    def __init__(self, source: _Source, pid: int) -> None:
        self.pid = pid
        self._source = source

    def poll(self) -> int | None:
        return self._source.exit_code(self.pid)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(_POLL_SECONDS)
