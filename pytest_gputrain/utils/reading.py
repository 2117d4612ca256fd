"""Reads files that others may have written or replaced, up to a limit and without waiting."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for bytes that are not the JSON of a record: none at all, another's, not UTF-8, nested too deep."""

_MOST_BYTES: Final = 1 << 30
"""The most bytes of a file that is read into memory: a report of 10,000 cases has a tenth of that."""
_MOST_OF_A_MESSAGE: Final = 1 << 26
"""The most bytes of what processes of a case write for each other: a reply of 100,000 steps has a tenth of that."""
TAIL_BYTES: Final = 8_000
"""The most bytes of what a process printed that are shown."""


@contextlib.contextmanager
def opened(path: Path, *, pipe: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file. Anything else is refused, because reading it may wait or never end.

    Args:
        pipe: whether a pipe of this process will do as well: what a shell puts for ``<(command)``.

    Raises:
        OSError: the file cannot be opened, or it is a device, a FIFO or a folder.
    """
    _refuse_device(os.stat(path).st_mode)  # opening a device may start something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        _refuse_device(mode)
        if stat.S_ISFIFO(mode) and not (pipe and os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:")):
            raise OSError(errno.EINVAL, "it is a FIFO")
        if pipe and stat.S_ISFIFO(mode):
            os.set_blocking(descriptor, True)
        yield file


def _refuse_device(mode: int) -> None:
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a device")


def read_whole(path: Path, *, pipe: bool = False) -> bytes:
    """Return the content of a regular file of a reasonable size.

    Args:
        pipe: as of `opened`.

    Raises:
        OSError: it cannot be read, is something else, or has no end in sight.
    """
    return _read(path, _MOST_BYTES, pipe)


def read_message(path: Path) -> bytes:
    """Return what a process of a case has written for another one, such as its task and its reply.

    Raises:
        OSError: as of `read_whole`; a link is not followed.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link")
    return _read(path, _MOST_OF_A_MESSAGE, pipe=False)


def _read(path: Path, most: int, pipe: bool) -> bytes:
    with opened(path, pipe=pipe) as file:
        data = file.read(most + 1) or b""  # a file of the kernel may have nothing to read yet
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20:,} MiB")
    return data


def tail(path: Path, most: int = TAIL_BYTES) -> str:
    """Return the end of a text file, at most this many bytes; empty if there is no such file."""
    with contextlib.suppress(OSError), opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most).decode(errors="replace")
    return ""
