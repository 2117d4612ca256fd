"""Asks Linux to end a process with its parent, to hand it orphans, and how often it killed processes for want of memory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Final

PARENT: Final = "GPUTRAIN_PARENT"
"""Environment variable: id of the process that a worker must not outlive."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_COUNTERS: Final = Path("/proc/vmstat")


def die_with_parent() -> None:
    """Ask for this process to be killed when its parent dies, so that no worker is left training alone."""
    end_with_parent()
    if os.environ.get(PARENT) not in (None, str(os.getppid())):
        sys.exit("the process that asked for this case is gone")


def end_with_parent() -> None:
    """Ask for this process to be killed when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of processes whose parents have ended, if these descend from this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # pytest reads the name of the variable above in every project

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value)


def oom_kills() -> int:
    """Tell how often this host's kernel killed a process for memory since it started."""
    with contextlib.suppress(OSError), _COUNTERS.open() as lines:
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
