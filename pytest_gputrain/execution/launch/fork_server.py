"""Forks workers from a process that has imported their libraries: most of a tiny case's time is imports.

Only for cases on a CPU and on an emulated GPU. A process that has used OpenMP or a GPU must not be forked; the ones here do
nothing but import, and refuse to fork should they ever have a second thread or have asked a driver for its GPUs. Own code is
forked from a process that has imported torch and nothing else that it may use, so that it finds what it would find in a
fresh interpreter.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from pytest_gputrain.execution.launch.processes import CASE_FOLDER, LocalProcess
from pytest_gputrain.hardware.emulation.environment import DEVICE
from pytest_gputrain.records import Task
from pytest_gputrain.utils.linux import Child
from pytest_gputrain.utils.reading import UNREADABLE

_POLL_SECONDS: Final = 0.01
_TOLD_SECONDS: Final = 5.0
"""How long after a worker's end the preloaded process has to report it. A worker may have stopped that process."""
_LONGEST_LINE: Final = 4096
_MOST_SOURCES: Final = 3
"""Each takes the memory of its libraries."""


class ForkServer:
    """The processes that workers are forked from, one for each environment; they are started when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[_Surroundings, _ForkingProcess] = {}
        """The one that was used last stands last."""
        self._refusing: list[_ForkingProcess] = []
        """Preloaded processes that must not fork any more, and still have workers."""
        self._refused: set[_Imports] = set()
        """The imports after which no process may be forked."""

    def fork(
        self, task: Task, folder: Path, rank: int, environment: Mapping[str, str], timeout_seconds: float
    ) -> ForkedProcess | None:
        """Return a forked process that runs rank ``rank`` of the case in ``folder``; None if the case needs a fresh
        interpreter. Several threads may call this.

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
                # A process has refused to fork after these imports. A new process would import the libraries only to refuse
                # as well.
                return None
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
        child = None
        try:
            child = source.fork(folder, rank, environment, timeout_seconds)
        finally:
            if not child:
                del self._sources[surroundings]
            if child == 0:
                self._refused.add(imports)
            if child is None or not (child or source.has_workers()):
                source.close()  # A late answer must not be read as the answer to the next request.
            elif not child:
                self._refusing.append(source)
        return ForkedProcess(source, child) if isinstance(child, Child) else None

    def close(self) -> None:
        """End the preloaded processes and all processes that were forked from them."""
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
    """The libraries that a preloaded process has imported, and the environment in which it did."""

    surroundings: _Surroundings
    deciding: tuple[str, ...]
    """The fields of a case that decide which libraries are imported."""


def _asked_at_imports(description: str) -> str:
    """Return the properties of an emulated GPU that libraries may read while they are imported. A forked process gets the
    others later."""
    fields = ("devices=", "major=", "minor=", "kernels=")
    return ",".join(field for field in description.split(",") if field.startswith(fields))


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    """A line that `worker.preload` writes when it has forked a process, or when a forked process has ended."""

    forked: int | None = None
    ended: int | None = None
    exit_code: int = 0


class _ForkingProcess:
    """A running process of `worker.preload`.

    Its workers can write into its pipe, as all processes of this user can. So what is heard is believed only of its own
    children, and nothing else gets a signal.
    """

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
        self._forked: list[Child | Literal[0]] = []
        self._workers: dict[int, Child] = {}
        self._ended: weakref.WeakKeyDictionary[Child, int] = weakref.WeakKeyDictionary()
        """Exit codes. They are not kept by number, because Linux gives a number again."""

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(
        self, folder: Path, rank: int, environment: Mapping[str, str], timeout_seconds: float
    ) -> Child | Literal[0] | None:
        """Return the new process, 0 if this process refuses to fork, or None if it does not answer."""
        if self._forked:  # An answer has come that nobody waited for.
            return None
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

    def exit_code(self, child: Child) -> int | None:
        """Return the exit code of a process forked here; None while it runs."""
        self._listen()
        ended_with_source = self._process.poll()
        return self._ended.get(child, ended_with_source)

    def kill_group(self, number: int) -> None:
        """Kill the processes that an ended worker has left in its process group: they are the preloaded process's now."""
        import psutil

        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            os.killpg(number, 0)  # Signal 0 only checks; mostly the group is gone.
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    if os.getpgid(child.pid) == number:
                        child.kill()

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
            *lines, rest = self._unread.split(b"\n")
            self._unread = rest[-_LONGEST_LINE:]
            for line in lines:
                with contextlib.suppress(ValueError, *UNREADABLE):
                    self._hear(msgspec.json.decode(line, type=_Said))

    def _hear(self, said: _Said) -> None:
        """Handle a line that the process has written.

        Raises:
            ValueError: it is of no child of the preloaded process, or not true.
        """
        if said.forked == 0:
            self._forked.append(0)
        elif said.forked is not None and said.forked not in self._workers:
            child = Child(said.forked, self._process.pid)
            self._forked.append(child)
            self._workers[child.pid] = child
        elif said.ended in self._workers and not self._workers[said.ended].is_running():
            self._ended[self._workers.pop(said.ended)] = said.exit_code


class ForkedProcess(LocalProcess):
    """A worker that was forked from a preloaded process. That process reports when the worker ends."""

    def __init__(self, source: _ForkingProcess, child: Child) -> None:
        self.pid = child.pid
        self._source, self._child = source, child

    def ask_for_stacks(self) -> None:
        self._child.send(signal.SIGUSR1)

    def kill_group(self) -> None:
        if not self._child.is_running():
            self._source.kill_group(self.pid)
            return
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(self.pid) == self.pid:  # A new process makes its group itself, a moment after its start.
                os.killpg(self.pid, signal.SIGKILL)
        self._child.send(signal.SIGKILL)

    def poll(self) -> int | None:
        return self._source.exit_code(self._child)

    def wait(self) -> None:
        last = math.inf
        while self.poll() is None and time.monotonic() < last:
            if last == math.inf and not self._child.is_running():
                last = time.monotonic() + _TOLD_SECONDS
            time.sleep(_POLL_SECONDS)
