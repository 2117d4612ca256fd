"""Finds the user's own line behind what autograd's threads do, where Python runs no line of the user's."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch


class AutogradLines:
    """Finds the own line of what runs: in a backward pass, that of the forward pass.

    Autograd numbers the nodes that a thread makes. Whoever calls this for each operator lets it know which numbers a line of
    the forward pass has led to. A node that runs in the backward pass tells its number.

    It is made in the thread that trains.

    Args:
        line_of: finds the own line of a frame; None where no code is the user's own, so that there are none.
    """

    def __init__(self, line_of: Callable[[FrameType | None], str] | None) -> None:
        self._line_of = line_of
        self._thread = threading.get_ident()
        self._starts: list[int] = []
        """The first number of each line."""
        self._lines: list[str] = []
        self._next = 0
        self._is_ambiguous = False
        """Whether another thread has made nodes: each thread counts its own, and a node does not tell its thread."""

    def current(self) -> str:
        """Return the own line of the operator that has just run on this thread, as ``train.py:41``.

        In a backward pass whose nodes tell no line of the forward pass it is the line of ``backward()``; empty where no line
        is known.
        """
        if self._line_of is None:
            return ""
        line = self._line_of(sys._getframe(1))
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._note(line)
            return line
        return line or self._of_node(node) or self._line_of(sys._current_frames().get(self._thread))

    def _note(self, line: str) -> None:
        """Give this line to the nodes that this thread has made since the last call."""
        upcoming = torch._C._autograd._get_sequence_nr()
        if threading.get_ident() != self._thread:
            self._is_ambiguous |= upcoming > 0
        elif upcoming > self._next:
            if not self._lines or self._lines[-1] != line:
                self._starts.append(self._next)
                self._lines.append(line)
            self._next = upcoming

    def _of_node(self, node: Any) -> str:
        number = node._sequence_nr()  # of a node that accumulates a gradient higher than any
        if self._is_ambiguous or number >= self._next or _is_recomputed():
            return ""
        place = bisect_right(self._starts, number) - 1
        return self._lines[place] if place >= 0 else ""


def _is_recomputed() -> bool:
    """Tell whether this thread runs the backward pass of what reentrant checkpointing has computed again, whose nodes were
    made, and counted, in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


class BackwardNotes:
    """Notes with each allocation of a backward pass, in torch's memory history, the own line of the forward pass.

    It is an observer of operators.

    Args:
        line_of: finds the own line of a frame.
    """

    def __init__(self, line_of: Callable[[FrameType | None], str]) -> None:
        self._lines = AutogradLines(line_of)
        # Versions of torch before 2.10 keep no notes.
        self._note: Callable[[str], None] = getattr(torch._C, "_cuda_setMemoryMetadata", lambda text: None)

    def begin(self, operator: str) -> None:
        """Take notice that an operator begins on this thread."""
        if torch._C._current_autograd_node() is not None:
            self._note(self._lines.current())

    def end(self, output: Any) -> None:
        """Take notice that the operator has returned."""
        if torch._C._current_autograd_node() is not None:
            self._note("")
        else:
            self._lines.current()
