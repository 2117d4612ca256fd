"""Finds the lines of the program itself, not of libraries, and counts what happens at them."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Container
from types import FrameType
from typing import Final

_MOST_LINES: Final = 1000

_LIBRARIES: Final = tuple(
    os.path.join(path, "") for name in ("purelib", "platlib", "stdlib", "platstdlib") if (path := sysconfig.get_path(name))
)

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep

_OF_MODES: Final = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/_ops.py", "torch/utils/flop_counter.py")
"""Files of torch whose functions run between an operator and its caller in a dispatch mode, as one that counts FLOPs."""

BACKWARD: Final = "backward pass"
"""The text in place of a line: autograd's threads run without the program's frames."""


_NOT_IN_FILES: Final = {"<string>": "the code that python -c was given", "<stdin>": "standard input"}


def _of_no_file(file: str) -> str:
    """Name the program's own code that lies in no file of its own; empty for any other."""
    if file.startswith("<ipython-input-") or f"{os.sep}ipykernel_" in file:
        return "a cell of the notebook"
    # Libraries also make functions from text, as dataclasses do. Such text is the program's only if Python got the whole
    # program as text.
    return _NOT_IN_FILES.get(file, "") if sys.argv[:1] in (["-c"], ["-"], [""]) else ""


@functools.cache
def is_ours(file: str) -> bool:
    """Tell whether a file belongs to this package. Its path may contain ``..``, as entries of Python's search path may."""
    return os.path.abspath(file).startswith(_PACKAGE)


@functools.cache
def is_library(file: str) -> bool:
    if _of_no_file(file):
        return False
    return file.startswith(("<", *_LIBRARIES)) or "site-packages/" in file or "dist-packages/" in file or is_compiled(file)


def is_compiled(file: str) -> bool:
    """Tell whether torch.compile wrote this file."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{os.sep}torchinductor_") in file


def describe_line(file: str, line: int, function: str) -> str:
    """Describe a line in a sentence: ``train.py:41 in main``."""
    if name := _of_no_file(file):
        return f"line {line} of {name}" + ("" if function == "<module>" else f", in {function}")
    short = file.rpartition("site-packages/")[2] if "site-packages/" in file else name_of_file(file)
    return f"{short}:{line} in {function}"


def name_of_file(file: str) -> str:
    """Return the path of a file of the program from the current folder, or its whole path; empty for a file of a library."""
    if is_library(file):
        return ""
    shorter = _of_no_file(file) or os.path.relpath(file)
    return file if shorter.startswith("..") else shorter


class CountsByLine:
    """A count of events at each line of the program."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, what: str) -> tuple[str, str]:
        """Count an event, and return it with its line."""
        place = (what, _current_line())
        if place in self._counts or len(self._counts) < _MOST_LINES:
            self._counts[place] += 1
        return place

    def rows(self, chosen: Container[tuple[str, str]] | None = None) -> list[dict[str, str | int]]:
        """Return all events, or those that are chosen, the most frequent first."""
        return [
            {"what": what, "where": where, "count": count}
            for (what, where), count in self._counts.most_common()
            if chosen is None or (what, where) in chosen
        ]


def _current_line() -> str:
    return line_of(sys._getframe(1)) or BACKWARD


def line_of(frame: FrameType | None) -> str:
    """Describe the innermost line of the program that a frame comes from; empty if there is none."""
    own = own_frame(frame)
    return describe_line(own.f_code.co_filename, own.f_lineno, own.f_code.co_name) if own else ""


def outer_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called an operator, of the program or of a library, from a frame of this package below it."""
    while frame is not None and (is_ours(frame.f_code.co_filename) or frame.f_code.co_filename.endswith(_OF_MODES)):
        frame = frame.f_back
    return frame


def own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the program that a frame comes from."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_ours(file) and not is_library(file):
            return frame
        frame = frame.f_back
    return None
