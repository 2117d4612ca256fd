"""Lets dispatch modes see what other threads of Python compute: torch keeps the modes of each thread apart."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import thread as pools
from typing import Any, Final
from unittest import mock

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

_entered: Final[list[SharedMode]] = []
"""The modes that count now."""


class SharedMode(TorchDispatchMode):
    """A dispatch mode that also sees the operators of threads that `countable_threads` knows, while it is entered.

    Its ``__torch_dispatch__`` is called on all of them, so it guards what it keeps by ``lock`` and notes by `note_thread`
    whom it sees.

    Attributes:
        lock: may be taken again by the thread that has it: tensors are freed anywhere.
        threads: the threads on which operators ran, by the operating system's numbers.
        trouble: the first failure of what counts, after which its figures are not known; empty without one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lock = threading.RLock()
        self.threads: set[int] = set()
        self.trouble = ""

    def __enter__(self) -> Any:
        _entered.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        _entered.remove(self)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Provide a context in which this mode sees no operators. It must be the mode that was entered last."""
        SharedMode.__exit__(self, None, None, None)
        try:
            yield
        finally:
            SharedMode.__enter__(self)

    def note_thread(self) -> None:
        """Note that an operator runs on this thread."""
        self.threads.add(threading.get_native_id())

    def note_trouble(self, error: Exception) -> None:
        """Record that counting has failed. The program is not at fault and continues."""
        self.trouble = self.trouble or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


@contextlib.contextmanager
def on_this_thread(mode: TorchDispatchMode) -> Iterator[None]:
    """Provide a context in which ``mode``, which other threads may have entered, sees the operators of this thread.

    Entering a mode by ``with`` changes flags of the whole process, from which torch.compile sees that it must not compile;
    threads that leave in another order than they entered would leave them set.
    """
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()


class _Relay(TorchDispatchMode):
    """Shows each operator of a thread to the modes that count at that moment, as long as the thread lives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with contextlib.ExitStack() as stack:
            for mode in tuple(_entered):
                stack.enter_context(on_this_thread(mode))
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def countable_threads() -> Iterator[None]:
    """Provide a context in which shared modes see threads that start while such a mode is entered, and threads of older
    pools.

    A relay triples the time of a small operator. So threads that start while nothing is counted get none, and those of a
    pool have one only for the work that they do while something is counted.
    """
    bootstrap, work = threading.Thread._bootstrap_inner, pools._WorkItem.run  # type: ignore[attr-defined]

    def start(thread: threading.Thread) -> None:
        with contextlib.nullcontext() if _is_of_a_plain_pool(thread) else _relayed():
            bootstrap(thread)

    def run(item: Any, *args: Any) -> None:
        with _relayed():
            work(item, *args)

    with mock.patch.object(threading.Thread, "_bootstrap_inner", start), mock.patch.object(pools._WorkItem, "run", run):
        yield


def _relayed() -> contextlib.AbstractContextManager[None]:
    """Provide a context in which shared modes see this thread."""
    seen = any(isinstance(mode, _Relay | SharedMode) for mode in _get_current_dispatch_mode_stack())
    if seen or not _entered:
        return contextlib.nullcontext()
    return on_this_thread(_Relay())  # type: ignore[no-untyped-call]


def _is_of_a_plain_pool(thread: Any) -> bool:
    """Tell whether a thread belongs to a pool without an initializer, so that it only computes what the pool is given."""
    if getattr(thread, "_target", None) is not pools._worker:
        return False
    pool = thread._args[0]()
    return getattr(pool, "_initializer", pool) is None
