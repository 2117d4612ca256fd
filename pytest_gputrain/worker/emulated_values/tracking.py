"""Switches the tracking of values on, and tells what it found."""

from __future__ import annotations

import threading

from .operators import Observer, Operators

_lock = threading.Lock()
_operators: Operators | None = None


def enable(observer: Observer | None = None) -> None:
    """Track values from now on, in all threads of this process, which runs on an emulated GPU.

    Args:
        observer: follows the operators; it is taken from the first call alone.
    """
    global _operators  # noqa: PLW0603
    with _lock:
        if _operators is None:
            _operators = Operators(observer)
            _operators.replace_all()


def report() -> dict[str, list[dict[str, str | int]]]:
    """Tell what read unknown values, and whose choices were dealt in turn, each with its line and how often."""
    if _operators is None:
        return {"unknown_reads": [], "dealt": []}
    return {"unknown_reads": _operators.reads.rows(), "dealt": _operators.dealt.rows()}
