"""Finds operators that ran on threads if nothing counts them, by torch's own profiler."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator
from multiprocessing.process import BaseProcess  # noqa: TID251 - it only starts processes
from pathlib import Path
from typing import Final
from unittest import mock

from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler

_SILENT: Final = "99"


def silence_profiler() -> None:
    """Keep torch's profiler from writing to stderr, unless the user has set its level. The profiler reads this at its first
    use."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)


class ThreadOperators:
    """The operators that ran on each thread, by the number of the thread in the operating system.

    Attributes:
        operators: the names of the operators of each thread, in no particular order; empty if torch did not report them.
    """

    def __init__(self) -> None:
        self.operators: dict[int, list[str]] = {}
        self._names = _names_of_threads()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Provide a context that records the operators of all threads."""
        config = _ExperimentalConfig(profile_all_threads=True)
        silence_profiler()
        with profiler.profile(use_cpu=True, use_kineto=True, experimental_config=config) as profiled:
            yield
        self._names |= _names_of_threads()
        for event in profiled.kineto_results.events():
            if _is_operator(name := event.name()):
                self.operators.setdefault(event.device_resource_id(), []).append(name)

    def missed(self, counted: Collection[int], *, matters: Callable[[str], bool], others: bool) -> str:
        """Describe operators that ran on other threads than ``counted``; empty if none did.

        Args:
            counted: the threads on which operators were counted.
            matters: says whether an operator matters.
            others: whether threads that Python did not start count, too.
        """
        for thread, operators in self.operators.items():
            missed = [operator for operator in operators if matters(operator)]
            if thread not in counted and missed and (others or thread in self._names):
                return f"runs operators on {self._describe(thread)}, where they are not counted (first: {missed[0]})"
        return ""

    @property
    def are_unknown(self) -> bool:
        """Whether there were other threads whose operators torch did not report."""
        return not self.operators and threading.active_count() > 1

    def _describe(self, thread: int) -> str:
        if name := self._names.get(thread):
            return f"the thread {name!r}"
        unnamed = "a thread that Python's threading did not start"
        try:
            return f"{unnamed} ({Path(f'/proc/self/task/{thread}/comm').read_text().strip()!r})"
        except OSError:  # The thread has ended.
            return unnamed


def _names_of_threads() -> dict[int, str]:
    return {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}


def _is_operator(name: str) -> bool:
    """Tell whether an event of a profile is an operator, such as ``aten::mm``."""
    return "::" in name and not name.startswith(("autograd::", "torch::", "c10d::"))


@contextlib.contextmanager
def started_processes() -> Iterator[list[str]]:
    """Provide a context that records the names of processes that Python's multiprocessing starts, as a DataLoader does."""
    names: list[str] = []
    start = BaseProcess.start

    def noted(process: BaseProcess) -> None:
        start(process)
        names.append(process.name)

    with mock.patch.object(BaseProcess, "start", noted):
        yield names
