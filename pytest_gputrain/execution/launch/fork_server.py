"""Forks workers from a process that has imported their libraries: most of a tiny case's time is imports.

Only for cases on a CPU and on an emulated GPU. A process that has used OpenMP or a GPU must not be forked; the ones here do
nothing but import, and refuse to fork should they ever have a second thread or have asked a driver for its GPUs. Own code is
forked from a process that has imported torch and nothing else that it may use, so that it finds what it would find in a
fresh interpreter.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_gputrain.execution.launch.processes import CASE_FOLDER, LocalProcess
from pytest_gputrain.hardware.emulation.environment import DEVICE
from pytest_gputrain.records import Task

_POLL_SECONDS: Final = 0.01
_MOST_SOURCES: Final = 3
"""Each takes the memory of its libraries."""


class ForkServer:
    """The processes that workers are forked from, one for each environment; they are started when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[_Surroundings, _ForkingProcess] = {}
        """The one that was used last stands last."""
        self._refusing: list[_ForkingProcess] = []
        """Those that must not fork any more, and have workers."""
        self._refused: set[_Imports] = set()
        """The imports after which no process may be forked."""

    def fork(
        self, task: Task, folder: Path, rank: int, environment: Mapping[str, str], timeout_seconds: float
    ) -> ForkedProcess | None:
        """Fork rank ``rank`` of the case in ``folder``; None where only a fresh interpreter will do. Threads may share this.

        Args:
            timeout_seconds: imports that take longer are given up.
        """
        if task.device_type != "cpu" and not task.emulated:
            return None
        case = task.case
        imports = _Imports(
            _Surroundings.of(task, environment), (case.model, case.method, case.parallel, case.optimizer, case.compile)
        )
        with self._lock:
            if imports in self._refused:
                return None  # another process would import the libraries only to refuse, too
            return self._fork(imports, folder, rank, environment, timeout_seconds)

    def _fork(
        self, imports: _Imports, folder: Path, rank: int, environment: Mapping[str, str], timeout_seconds: float
    ) -> ForkedProcess | None:
        surroundings = imports.surroundings
        source = self._sources.pop(surroundings, None)
        if source is not None and source.has_ended():
            source.close()
            source = None
        if source is None:
            for idle in [of for of, other in self._sources.items() if not other.has_workers()]:
                if len(self._sources) >= _MOST_SOURCES:
                    self._sources.pop(idle).close()
            source = _ForkingProcess(environment)
        self._sources[surroundings] = source
        pid = None
        try:
            pid = source.fork(folder, rank, environment, timeout_seconds)
        finally:
            if not pid:
                del self._sources[surroundings]
            if pid == 0:
                self._refused.add(imports)
            if pid is None or not (pid or source.has_workers()):
                source.close()  # an answer that nobody waited for would be taken for the next one
            elif not pid:
                self._refusing.append(source)
        return ForkedProcess(source, pid) if pid else None

    def close(self) -> None:
        """End the processes, and with them any that was forked from them."""
        for source in (*self._sources.values(), *self._refusing):
            source.close()
        self._sources.clear()
        self._refusing.clear()


class _Surroundings(NamedTuple):
    """The properties that a process has from its start and passes on to its forks."""

    is_own_code: bool
    """Whether the fork finds only torch imported; a case of the zoo also finds other libraries."""
    variables: frozenset[tuple[str, str]]
    limits: tuple[tuple[int, int], ...]
    cores: frozenset[int]

    @classmethod
    def of(cls, task: Task, environment: Mapping[str, str]) -> _Surroundings:
        limits = tuple(resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_"))
        variables = {**environment, **({DEVICE: _asked_at_imports(environment[DEVICE])} if task.emulated else {})}
        return cls(bool(task.case.code), frozenset(variables.items()), limits, frozenset(os.sched_getaffinity(0)))


class _Imports(NamedTuple):
    """The libraries that a process has imported, and where."""

    surroundings: _Surroundings
    deciding: tuple[str, ...]
    """The fields of a case that decide which libraries are imported."""


def _asked_at_imports(description: str) -> str:
    """Return what libraries may ask of an emulated GPU when they are imported. Of the rest its forks are told."""
    fields = ("devices=", "major=", "minor=", "kernels=")
    return ",".join(field for field in description.split(",") if field.startswith(fields))


class _ForkingProcess:
    """A running process of `worker.preload`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        wishes_end, self._wishes = os.pipe()
        self._answers, answers_end = os.pipe()
        os.set_blocking(self._answers, False)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pytest_gputrain.worker.preload"],
            stdin=wishes_end,
            stdout=answers_end,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )
        os.close(wishes_end)
        os.close(answers_end)
        self._unread = b""
        self._hearing = threading.Lock()
        self._forked: list[int] = []
        self._workers: set[int] = set()
        self._ended: dict[int, int] = {}

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, folder: Path, rank: int, environment: Mapping[str, str], timeout_seconds: float) -> int | None:
        """Return the pid of the new process; 0 where none may be forked from here, None where nothing was answered."""
        deadline = time.monotonic() + timeout_seconds
        variables = {CASE_FOLDER: str(folder), **{name: environment[name] for name in (DEVICE,) if name in environment}}
        wish = {"folder": str(folder), "rank": rank, "cwd": os.getcwd(), "variables": variables}
        try:
            os.write(self._wishes, json.dumps(wish).encode() + b"\n")
        except BrokenPipeError:
            return None
        while not self._forked:
            if self._process.poll() is not None or time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)
            self._listen()
        return self._forked.pop()

    def has_workers(self) -> bool:
        self._listen()
        return bool(self._workers)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a process forked here; None while it runs."""
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
        with self._hearing:
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
            self._workers |= {said["forked"]} - {0}
        else:
            self._workers.discard(said["ended"])
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
