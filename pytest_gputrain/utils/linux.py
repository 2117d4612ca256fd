"""Asks Linux to end a process with its parent, to hand it orphans, how often it killed processes for want of memory, and how
long threads waited for a CPU core."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PARENT: Final = "GPUTRAIN_PARENT"
"""Environment variable: id of the process that a worker must not outlive."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROOT: Final = Path("/")


def die_with_parent() -> None:
    """Ask for this process to be killed when its parent dies, so that no worker is left training alone."""
    end_with_parent()
    if os.environ.get(PARENT) not in (None, str(os.getppid())):
        sys.exit("the process that asked for this case is gone")


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask for this process to get the signal with this number when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of processes whose parents have ended, if these descend from this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # pytest reads the name of the variable above in every project

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value)


class CoreWait:
    """How long threads of this process are ready to run and have no CPU core, from now on."""

    def __init__(self) -> None:
        self._begin = time.monotonic_ns(), self._waited()

    def share(self) -> float | None:
        """Return that share of the time, at most 1 for all threads together; None where the kernel does not tell."""
        (begin, before), now = self._begin, self._waited()
        return None if before is None or now is None else min(1.0, (now - before) / (time.monotonic_ns() - begin))

    @staticmethod
    def _waited() -> int | None:
        """Return the nanoseconds until now."""
        waited = []
        for path in (_ROOT / "proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # of a thread that has just ended
                waited.append(int(path.read_text().split()[1]))
        return sum(waited) if waited else None


def oom_kills() -> int:
    """Tell how often the kernel killed a process for memory, since the control group of this process was made.

    Without a group that counts it, those of the whole host count, since it started.
    """
    for counters in (*_of_control_group(), _ROOT / "proc/vmstat"):
        with contextlib.suppress(OSError), counters.open() as lines:
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _of_control_group() -> Iterator[Path]:
    """Yield the files that may count the kills of this control group. A container may have it mounted as the root."""
    groups = _ROOT / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from (groups / path.lstrip("/") / "memory.events", groups / "memory.events")
            elif controllers == "memory":
                yield from (groups / each / "memory.oom_control" for each in (f"memory/{path.lstrip('/')}", "memory"))
