"""Switches the tracking of values on, and tells what it found."""

from __future__ import annotations

import threading
from typing import Final

import torch

from .operators import Observer, Operators

_lock = threading.Lock()

_HELD: Final = "_gputrain_operators"
"""The attribute of torch that holds the replaced operators for all copies of this module: a worker imports one from its
package, and `sitecustomize` another by its path. Operators that were replaced twice would call each other for ever."""


def enable(observer: Observer | None = None) -> None:
    """Track values from now on, in all threads of this process, which runs on an emulated GPU.

    Args:
        observer: follows the operators.

    Raises:
        RuntimeError: values are tracked already, so that nothing more can follow the operators.
    """
    with _lock:
        if getattr(torch, _HELD, None) is None:
            operators = Operators(observer)
            setattr(torch, _HELD, operators)
            operators.replace_all()
        elif observer is not None:
            raise RuntimeError("the operators of this process are replaced already; run this case in a process of its own")


def report() -> dict[str, list[dict[str, str | int]]]:
    """Return how often what happened at which line: reads of unknown values, made-up choices that decide sizes or what the
    host does, and assumptions; and the products that Inductor might pad."""
    operators: Operators | None = getattr(torch, _HELD, None)
    if operators is None:
        return {"unknown_reads": [], "dealt": [], "assumed": [], "unpadded": []}
    operators.tell_unanswered("a library")
    return {
        "unknown_reads": operators.reads.rows(),
        "dealt": operators.dealt.rows(operators.deciding),
        "assumed": operators.assumed.rows(),
        "unpadded": operators.padding.rows(),
    }


def slow() -> str:
    """Say where following took the time of this process, if it took longer than all else; nothing if it did not."""
    operators: Operators | None = getattr(torch, _HELD, None)
    return "" if operators is None else operators.time.sentence()


def graphs() -> dict[str, int]:
    """Return the figures of this process's CUDA graphs, see `Graphs.report`; empty if it has captured none."""
    operators: Operators | None = getattr(torch, _HELD, None)
    return {} if operators is None else operators.graphs.report()
