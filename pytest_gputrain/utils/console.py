"""Prints for the commands of ``gputrain``: results to standard output, everything else as a line of standard error."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final, NamedTuple

from pytest_gputrain.utils.sanitize import shown

_UNBOUNDED: Final = 1000


class StandardOutput(NamedTuple):
    """The width of standard output, and whether it shows colours."""

    width: int
    """Columns; many where no terminal limits them: a file, or the next command."""
    colour: bool


def standard_output() -> StandardOutput:
    """Return what standard output can show."""
    terminal = sys.stdout.isatty()
    return StandardOutput(width=shutil.get_terminal_size().columns if terminal else _UNBOUNDED, colour=terminal)


def put(text: str, *, end: str = "\n") -> None:
    """Print text to a reader that may close the pipe early, such as ``head``."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:  # The reader, such as head, has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(sentence: object) -> None:
    """Print a line for the user to standard error."""
    print(f"gputrain: {shown(str(sentence))}", file=sys.stderr, flush=True)
