"""Asks Linux to end a process with its parent, to hand it orphans, how often it killed processes for want of memory, and how
long a thread waited for a CPU core."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PARENT: Final = "GPUTRAIN_PARENT"
"""Environment variable: id of the process that a worker must not outlive."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROOT: Final = Path("/")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that no worker is left training alone."""
    end_with_parent()
    if os.environ.get(PARENT) not in (None, str(os.getppid())):
        sys.exit("the process that asked for this case is gone")


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the new parent of its descendants whose parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # pytest imports this module in every project, and most never need ctypes.

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value)


_AUTOGRAD: Final = "pt_autograd"
"""Begins the names that torch gives to the threads in which the backward pass on a GPU runs."""


class CoreWait:
    """Measures how long this thread, or autograd's in a backward pass on a GPU, waits for a CPU core while it is ready to
    run.

    Others may wait for one without delaying it.
    """

    def __init__(self) -> None:
        self._tasks = _ROOT / "proc/self/task"
        self._thread = str(threading.get_native_id())
        self._begin = time.monotonic_ns(), self._waited()

    def share(self) -> float | None:
        """Return the share of time without a core, from 0 to 1; None if the kernel does not report it, or if the thread has
        ended."""
        (begin, before), now = self._begin, self._waited()
        if before is None or now is None:
            return None
        return min(1.0, max(0.0, (now - before) / max(1, time.monotonic_ns() - begin)))

    def _waited(self) -> int | None:
        """Return the nanoseconds that the thread has waited for a core until now."""
        each: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for task in self._tasks.iterdir():
                with contextlib.suppress(OSError, ValueError):  # The thread has ended meanwhile.
                    if task.name == self._thread or (task / "comm").read_text().startswith(_AUTOGRAD):
                        ran, waited, _ = map(int, (task / "schedstat").read_text().split())
                        each |= {task.name: waited} if ran else {}  # a kernel that does not count these times writes zeros
        return sum(each.values()) if self._thread in each else None


class Child:
    """A child process. Signals are sent only while it is a child of the given parent.

    Args:
        pid: the id of the process, as another process reported it.
        parent: the process that must have started it.

    Raises:
        ValueError: another process has this number, or none can have it.
    """

    def __init__(self, pid: int, parent: int) -> None:
        if not 1 < pid < 1 << 31:
            raise ValueError(f"{pid} is no process that this one may end")
        self.pid, self._parent = pid, parent
        self._descriptor: int | None = None
        # The kernel or the system has no pidfd, or the process has ended.
        with contextlib.suppress(OSError, AttributeError):
            self._descriptor = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._descriptor)
        # The parent is checked after opening, because from then on no other process gets the number.
        if _parent_of(pid) not in (parent, None):
            raise ValueError(f"process {pid} is not a child of {parent}")

    def is_running(self) -> bool:
        """Tell whether the process runs. A zombie has ended."""
        if self._descriptor is None:
            return _parent_of(self.pid) == self._parent
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif self.is_running():
                os.kill(self.pid, number)


def _parent_of(pid: int) -> int | None:
    """Return the parent of a process; None for a process that has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(parent)


def oom_kills() -> int:
    """Return how often the kernel has killed a process for memory since this process's control group was made.

    Without a group that counts it, those of the whole host count, since it started.
    """
    for counters in (*_of_control_group(), _ROOT / "proc/vmstat"):
        with contextlib.suppress(OSError), counters.open() as lines:
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _of_control_group() -> Iterator[Path]:
    """Yield the files that may count kills in this control group. In a container its root may be mounted in its place."""
    groups = _ROOT / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from (groups / path.lstrip("/") / "memory.events", groups / "memory.events")
            elif controllers == "memory":
                yield from (groups / each / "memory.oom_control" for each in (f"memory/{path.lstrip('/')}", "memory"))
