"""Asks Linux to end a process with its parent, and how often it killed processes for want of memory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Final

PARENT: Final = "GPUTRAIN_PARENT"
"""Environment variable: id of the process that a worker must not outlive."""

_COUNTERS: Final = Path("/proc/vmstat")


def die_with_parent() -> None:
    """Ask for this process to be killed when its parent dies, so that no worker is left training alone."""
    end_with_parent()
    if os.environ.get(PARENT) not in (None, str(os.getppid())):
        sys.exit("the process that asked for this case is gone")


def end_with_parent() -> None:
    """Ask for this process to be killed when its parent dies."""
    if sys.platform == "linux":
        import ctypes  # pytest reads the name of the variable above in every project

        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def oom_kills() -> int:
    """How often this host's kernel killed a process for memory since it started."""
    with contextlib.suppress(OSError), _COUNTERS.open() as lines:
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
