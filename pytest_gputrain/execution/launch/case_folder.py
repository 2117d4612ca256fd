"""Makes the folder of a case, and removes it with all that the workers have started, at the latest in the next run."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.execution.launch.processes import end_all_of
from pytest_gputrain.records import Task
from pytest_gputrain.utils.signals import undisturbed

_PREFIX: Final = "gputrain-"
_LOCK: Final = "owner.lock"
"""A file that the process whose case it is has locked. The kernel unlocks it when that process ends, however it does."""

_running: Final[dict[Path, int]] = {}
"""Folders of cases that are not over, with the descriptors of their locks."""
_swept: Final[set[Path]] = set()
"""Folders for temporary files from which this process has removed what ended processes left."""


@contextlib.contextmanager
def folder_of(task: Task, shared: Path | None = None) -> Iterator[Path]:
    """Provide a folder with the case's task. At the end it is removed, and every process that its workers started is killed.

    Args:
        shared: where to make it; a place of this machine for temporary files by default.
    """
    if shared is None:
        _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared))
    try:
        _running[folder] = _take(folder)
        (folder / "case.json").write_bytes(msgspec.json.encode(task))
        yield folder
    finally:
        with undisturbed():
            _clear(folder)


def _take(folder: Path) -> int:
    """Lock the folder for as long as this process lives. The lock file is locked before it gets its name."""
    part = folder / f"{_LOCK}.part"
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # On a file system without locks nobody ever removes the folder.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.rename(folder / _LOCK)
    return descriptor


def _sweep(temporary: Path) -> None:
    """Remove the folders of cases whose process was killed. Folders of others, such as torch's caches, stay."""
    if temporary in _swept:
        return
    _swept.add(temporary)
    for lock in temporary.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # The folder is in use, belongs to another user, or has been removed meanwhile.
            if lock.parent.is_symlink() or lock.parent.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(lock.parent)
            finally:
                os.close(descriptor)


def _clear(folder: Path) -> None:
    end_all_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if (descriptor := _running.pop(folder, None)) is not None:
        os.close(descriptor)


os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _clear_all() -> None:
    """Remove the folders of cases that are still there, because a second Ctrl-C may have interrupted their removal."""
    for folder in list(_running):
        _clear(folder)
