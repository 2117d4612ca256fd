"""Starts worker processes, asks them for their stacks, and ends them with all that they started."""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from pytest_gputrain.hardware.lease import held_locks
from pytest_gputrain.utils.linux import oom_kills

CASE_FOLDER: Final = "GPUTRAIN_CASE_FOLDER"
"""Environment variable that marks whatever a fresh worker started, so that it can be found and ended."""


class Process(abc.ABC):
    """A worker process, wherever it runs."""

    @abc.abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""

    @abc.abstractmethod
    def killed_for_memory(self, kills_before: int) -> bool:
        """Tell whether the kernel's OOM killer ended the worker.

        Args:
            kills_before: `oom_kills` before the worker started.
        """

    @abc.abstractmethod
    def ask_for_stacks(self) -> None:
        """Have the worker's faulthandler write its Python stacks."""

    @abc.abstractmethod
    def end(self) -> None:
        """Kill the worker and all processes that it started."""


class LocalProcess(Process):
    """A worker on this machine, which leads a process group of its own."""

    pid: int

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until the process has ended."""

    def killed_for_memory(self, kills_before: int) -> bool:
        return self.poll() == -signal.SIGKILL and oom_kills() > kills_before

    def ask_for_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kill the worker and its descendants.

        Not covered: a grandchild in a session of its own whose parent, the worker, has ended by itself (`end_all_of`).
        """
        import psutil

        family: list[Any] = []
        if self.poll() is None:  # Once this process has ended, another one may have its number.
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(self.pid).children(recursive=True)
        self.kill_group()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.wait()

    def kill_group(self) -> None:
        """Kill the process group of the worker."""
        # The group has the worker's number, which stays taken as long as any process of the group lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class FreshProcess(LocalProcess):
    """A worker in a fresh Python interpreter on this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> None:
        self._process.wait()


def end_all_of(folder: Path) -> None:
    """Kill processes that workers of the case in ``folder`` have left running, such as daemons in sessions of their own."""
    mark = os.fsencode(f"{CASE_FOLDER}={folder}\0")
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # The process is another user's, or has ended.
            if mark in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)


def start(folder: Path, rank: int, environment: Mapping[str, str]) -> FreshProcess:
    """Start a fresh interpreter that runs rank ``rank`` of the case in ``folder``."""
    own = folder / f"rank{rank}"
    # The files are opened to append, because they are emptied while the worker writes to them.
    with open(own / "stdout.txt", "ab") as stdout, open(own / "stderr.txt", "ab") as stderr:
        return run_module("pytest_gputrain.worker", [str(folder), str(rank)], environment, stdout, stderr)


def run_module(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    below: Sequence[str] = (),
) -> FreshProcess:
    """Start a fresh interpreter that runs ``module``.

    Args:
        below: the command, with its arguments, that starts the interpreter; none does by default.
    """
    process = subprocess.Popen(
        # With -P a user's file that is named like a standard module does not hide that module from `import torch`.
        [*below, sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=True,
        # The worker keeps the locks, too: if pytest is killed, others get its devices only after the worker has ended.
        pass_fds=held_locks(),
    )
    return FreshProcess(process)
