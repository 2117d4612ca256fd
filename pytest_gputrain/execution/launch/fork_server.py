"""Forks workers from a process that has imported their libraries: most of a tiny case's time is imports.

Only for the zoo's cases on a CPU or an emulated GPU. A process that has used OpenMP or a GPU must not be forked; the one
here does nothing but import, and refuses to fork should it ever have a second thread.
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

from pytest_gputrain.execution.launch.processes import LocalProcess
from pytest_gputrain.records import Task

_POLL_SECONDS: Final = 0.01


class ForkServer:
    """The process that workers are forked from: started when needed, and again where it ended or its environment changed."""

    def __init__(self) -> None:
        self._source: _ForkingProcess | None = None

    def fork(
        self, task: Task, folder: Path, rank: int, environment: Mapping[str, str], timeout_seconds: float
    ) -> ForkedProcess | None:
        """Fork rank ``rank`` of the case in ``folder``; None where only a fresh interpreter will do.

        Args:
            timeout_seconds: imports that take longer are given up.
        """
        if task.case.code or (task.device_type != "cpu" and not task.emulated):
            return None
        if self._source is None or not self._source.serves(environment):
            self.close()
            self._source = _ForkingProcess(environment)
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


class _ForkingProcess:
    """A running process of `worker.preload`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        wishes_end, self._wishes = os.pipe()
        self._answers, answers_end = os.pipe()
        os.set_blocking(self._answers, False)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pytest_gputrain.worker.preload"],
            stdin=wishes_end,
            stdout=answers_end,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
        )
        os.close(wishes_end)
        os.close(answers_end)
        self._unread = b""
        self._forked: list[int] = []
        self._ended: dict[int, int] = {}

    def serves(self, environment: Mapping[str, str]) -> bool:
        return self._process.poll() is None and self._environment == environment

    def fork(self, folder: Path, rank: int, timeout_seconds: float) -> ForkedProcess | None:
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
        return ForkedProcess(self, pid) if pid else None

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a process forked here; None while it runs."""
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


class ForkedProcess(LocalProcess):
    """A worker whose parent is the preloaded process, which tells of its end."""

    def __init__(self, source: _ForkingProcess, pid: int) -> None:
        self.pid = pid
        self._source = source

    def poll(self) -> int | None:
        return self._source.exit_code(self.pid)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(_POLL_SECONDS)
