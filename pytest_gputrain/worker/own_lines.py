"""Finds the line of the user's own files that runs."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from pytest_gputrain.records import Place, Task

_PYTHON: Final = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_OTHERS: Final = (*_PYTHON, *(folder.resolve() for folder in _PYTHON))
"""Folders of Python and of installed packages. A virtual environment may be below the user's folder."""
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_PACKAGE: Final = Path(__file__).resolve().parents[1]
_BETWEEN: Final = tuple(
    Path(__file__).resolve().with_name(name)
    for name in ("allocations.py", "batches_in_turn.py", "loads_and_updates.py", "threads.py")
)
"""Files that operators, loops over torch's DataLoader and the user's threads call: the line further out is the user's."""

MOST_TEXT: Final = 120
"""Characters of a line that are kept."""

_BY_US: Final = "pytest_gputrain"
_BY_OTHERS: Final = ""


class OwnLines:
    """Finds the line of the user's own files that the current call comes from.

    In a backward pass that is the line of ``backward()``: the lines of the forward pass are no longer known there.

    Args:
        folders: what is below one of them is the user's, but for Python itself, installed packages and this package. Lines
            are told by their path from the first of them that they are below.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._names: dict[str, str] = {}
        """The names of files as in frames."""

    @classmethod
    def of_case(cls, task: Task, builder: Callable[..., Any] | None = None) -> OwnLines:
        """Return the finder for files below the task's root, or in the folder of ``builder``."""
        file = getattr(getattr(builder, "__code__", None), "co_filename", None)
        return cls([Path(task.root), *([Path(file).parent] if file else [])])

    def current(self) -> str:
        """Return ``tests/test_mine.py:41``, or nothing if no line of the user's runs."""
        return self.of_frame(sys._getframe(1))

    def of_frame(self, frame: FrameType | None) -> str:
        """Return the line that `current` would return, for another frame, such as one of another thread."""
        asking = True
        while frame is not None:
            name = self.name_of(frame.f_code.co_filename)
            if name == _BY_US:
                if not asking:
                    # This package called the operator. Frames further out may be those of a test, and say nothing.
                    return ""
            else:
                asking = False
                if name:
                    return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def of_traceback(self, traceback: TracebackType | None) -> str:
        """Return the innermost own line of a traceback; empty if there is none."""
        line = ""
        while traceback is not None:
            name = self.name_of(traceback.tb_frame.f_code.co_filename)
            if name not in (_BY_US, _BY_OTHERS):
                line = f"{name}:{traceback.tb_lineno}"
            traceback = traceback.tb_next
        return line

    def name_of(self, file: str) -> str:
        """Return the name of a file as lines show it: empty for a file that is not the user's, and "pytest_gputrain" for our
        own."""
        name = self._names.get(file)
        if name is None:
            name = self._names[file] = self._name(file)
        return name

    def _name(self, file: str) -> str:
        if file.startswith("<"):  # Code that `exec` runs, such as methods of dataclasses, has no file.
            return _BY_OTHERS
        path = Path(file).resolve()
        if path.is_relative_to(_PACKAGE):
            return _BY_OTHERS if path in _BETWEEN else _BY_US
        if is_installed(path):
            return _BY_OTHERS
        own = (path.relative_to(folder).as_posix() for folder in self._folders if path.is_relative_to(folder))
        return next(own, _BY_OTHERS)


def is_installed(path: Path) -> bool:
    """Tell if a file belongs to Python itself or to an installed package."""
    if _INSTALLED.intersection(path.parts) or any(path.is_relative_to(folder) for folder in _OTHERS):
        return True
    return any(_holds_packages(entry) for entry in sys.path if entry and path.is_relative_to(entry))


def own_place(name: str, file: str, function: str, line: int) -> Place:
    """Return the place of a line in a file of the user's, under this name of the file."""
    return Place(name, function, linecache.getline(file, line).strip()[:MOST_TEXT], line)


def name_in_library(file: str) -> str:
    """Return the path of a file of an installed package from its folder of packages; empty for one that was generated."""
    if file.startswith("<") or not is_installed(Path(file)):
        return ""
    folders = [folder for folder in sys.path if folder and file.startswith(folder.rstrip(os.sep) + os.sep)]
    return file[len(max(folders, key=len)) :].lstrip(os.sep) if folders else os.path.basename(file)


@functools.cache
def _holds_packages(folder: str) -> bool:
    """Tell if pip has installed packages into a folder, as ``pip install --target`` does."""
    return any(Path(folder).glob("*.dist-info"))
