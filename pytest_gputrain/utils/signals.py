"""Turns signals that ask a run to end into exceptions, and defers them where a run must not be interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_ENDING: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came. pytest handles it as Ctrl-C, so that all measured figures are saved."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Provide a context in which SIGTERM, which schedulers and CI send, and SIGHUP raise `Terminated`, unless a handler for
    them is set.

    Without it they end this process at once, and what is not yet on disk is lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    free = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    mine = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == mine:
            raise Terminated(f"ended by {signal.Signals(number).name}")
        # A process that was forked from this one ends as if there were no handler.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in free:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def undisturbed(*, to_the_end: bool = False) -> Iterator[None]:
    """Provide a context that delays Ctrl-C, SIGTERM and SIGHUP to its end, because a second one must not interrupt the
    handling of the first.

    Args:
        to_the_end: the run ends anyway, so what came meanwhile is dropped instead of raised afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    with _held():
        before = {number: signal.getsignal(number) for number in _ENDING}
        # A signal that is ignored, as under nohup, stays ignored.
        handlers = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
        for number in handlers:
            signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        with _held():
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if came and not to_the_end:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _held() -> Iterator[None]:
    """Provide a context in which the kernel holds back SIGINT, SIGTERM and SIGHUP, so that none is lost between two
    handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
