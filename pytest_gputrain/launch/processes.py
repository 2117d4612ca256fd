"""Worker processes: started, asked for their stacks, ended with all that they started."""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gputrain.hardware.lease import held_locks


class Process(abc.ABC):
    """One worker, leader of a process group of its own."""

    pid: int

    @abc.abstractmethod
    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Until the process has ended."""

    def ask_for_stacks(self) -> None:
        """Have the worker's faulthandler write its Python stacks."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kill the worker and what it started.

        Not covered: a grandchild in a session of its own whose parent, the worker, has ended by itself.
        """
        import psutil

        family: list[Any] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.pid).children(recursive=True)
        # The group's id is the worker's; it stays taken as long as any process of the group lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.wait()


class Fresh(Process):
    """An interpreter of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> None:
        self._process.wait()


def start(folder: Path, rank: int, environment: Mapping[str, str]) -> Fresh:
    """A fresh interpreter that runs rank ``rank`` of the case in ``folder``."""
    own = folder / f"rank{rank}"
    with open(own / "stdout.txt", "wb") as stdout, open(own / "stderr.txt", "wb") as stderr:
        process = subprocess.Popen(
            # -P: a file of the user's named like one of the standard library must not shadow it inside `import torch`.
            [sys.executable, "-P", "-m", "pytest_gputrain.worker", str(folder), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
            # Should pytest be killed, its devices are lent to others only when this worker has left them.
            pass_fds=held_locks(),
        )
    return Fresh(process)
