"""Finds the user's own line behind what autograd's threads do, where Python runs no line of the user's."""

from __future__ import annotations

import functools
import re
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch


class AutogradLines:
    """Finds the own line of the running operator. In a backward pass it is that of the forward pass.

    Autograd numbers the nodes that a thread makes. Whoever calls this for each operator lets it know which numbers a line of
    the forward pass has led to. A node that runs in the backward pass tells its number.

    It is made in the thread that trains. Each thread numbers its own nodes, and a node does not show its thread. So a number
    that a node of another thread may also have gets no line.

    Args:
        line_of: finds the own line of a frame; None if no code is the user's own, so that there are none.
    """

    def __init__(self, line_of: Callable[[FrameType | None], str] | None) -> None:
        self._line_of = line_of
        self._thread = threading.get_ident()
        self._starts: list[int] = []
        """The first number of each line."""
        self._lines: list[str] = []
        self._next = 0
        self._last_line = ""
        self._elsewhere = threading.local()
        """The number of nodes that each other thread had made when it was looked at last."""
        self._ambiguous = (sys.maxsize, 0)
        """The least number of a node of another thread, and the number behind the highest."""

    def current(self) -> str:
        """Return the own line of the operator that has just run on this thread, as ``train.py:41``.

        In a backward pass whose nodes tell no line of the forward pass it is the line of ``backward()``; empty if no line
        is known.
        """
        if self._line_of is None:
            return ""
        line = self._line_of(sys._getframe(1))
        node: Any = torch._C._current_autograd_node()
        if threading.get_ident() != self._thread:
            self._note_elsewhere()
        elif node is None:
            self._note(line)
        return line if node is None else line or self._of_node(node) or self._of_backward()

    def _note(self, line: str) -> None:
        """Give this line to the node of the operator that has just run.

        Views run no operator of CUDA. Their nodes, which were made since the last call, get the line only where the operator
        before them had it, too.
        """
        upcoming = torch._C._autograd._get_sequence_nr()
        if upcoming > self._next:
            self._give(self._next, line if line == self._last_line else "")
            self._give(upcoming - 1, line)
            self._next = upcoming
        self._last_line = line

    def _give(self, start: int, line: str) -> None:
        if self._starts and self._starts[-1] == start:
            self._lines[-1] = line
        elif not self._lines or self._lines[-1] != line:
            self._starts.append(start)
            self._lines.append(line)

    def _note_elsewhere(self) -> None:
        """Note the numbers of autograd's nodes that this thread, which does not train, has made."""
        before, upcoming = getattr(self._elsewhere, "next", 0), torch._C._autograd._get_sequence_nr()
        if upcoming > before:
            self._elsewhere.next = upcoming
            if not _computes_activations_again():
                low, high = self._ambiguous
                self._ambiguous = min(low, before), max(high, upcoming)

    def _of_node(self, node: Any) -> str:
        number = node._sequence_nr()  # a node that accumulates a gradient has a number above all others
        low, high = self._ambiguous
        if number >= self._next or low <= number < high or _is_view(node.name()):
            return ""
        place = bisect_right(self._starts, number) - 1
        return self._lines[place] if place >= 0 else ""

    def _of_backward(self) -> str:
        """Return the line of ``backward()`` where the thread that trains is in it."""
        assert self._line_of is not None
        frame = sys._current_frames().get(self._thread)
        return self._line_of(frame) if is_in_backward(frame) else ""


def is_in_backward(frame: FrameType | None) -> bool:
    """Tell whether the thread with this innermost frame waits for a backward pass."""
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


@functools.cache
def _is_view(name: str) -> bool:
    """Tell whether a node belongs to a view. Views are made between two operators of CUDA, so their lines were not noted."""
    return _VIEWS.fullmatch(name) is not None


_VIEWS: Final = re.compile(
    r"(Slice|Select|Expand|Split\w*|Unbind|View\w*|Transpose|T|Permute|Squeeze|Unsqueeze|AsStrided|Unfold|Diagonal|Alias|"
    r"ReshapeAlias|UnsafeView|UnsafeSplit\w*)Backward\d*"
)


def _computes_activations_again() -> bool:
    """Tell whether this thread computes activations again for non-reentrant checkpointing, whose new nodes never run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


class BackwardNotes:
    """Notes with each allocation of a backward pass, in torch's memory history, the own line of the forward pass.

    It is an observer of operators.

    Args:
        line_of: finds the own line of a frame.
        note_line: called with that line before each operator of a backward pass, and with none afterwards.
    """

    def __init__(self, line_of: Callable[[FrameType | None], str], note_line: Callable[[str], None]) -> None:
        self._lines = AutogradLines(line_of)
        # torch before 2.10 cannot attach text to an allocation.
        self._note: Callable[[str], None] = getattr(torch._C, "_cuda_setMemoryMetadata", lambda text: None)
        self._note_line = note_line

    def begin(self, operator: str) -> None:
        """Note that an operator begins on this thread."""
        if torch._C._current_autograd_node() is not None:
            line = self._lines.current()
            self._note(line)
            self._note_line(line)

    def end(self, output: Any) -> None:
        """Note that the operator has returned."""
        if torch._C._current_autograd_node() is not None:
            self._note("")
            self._note_line("")
        else:
            self._lines.current()
