"""Reads and appends the history: JSON lines, one for each case and pytest run, in a file that only grows at its end."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from pytest_gputrain.records import HistoryLine
from pytest_gputrain.utils.files import locked
from pytest_gputrain.utils.reading import UNREADABLE, opened
from pytest_gputrain.utils.sanitize import OneLineError

_Line = TypeVar("_Line")


_LONGEST_LINE: Final = 1 << 20
"""Bytes; a file without line ends is not read into memory as a whole."""
_LONGEST_END: Final = 1 << 26
"""The most bytes that are looked at behind the last line end."""
_BEGIN: Final = b'{"'
"""How every line of a history begins, also one that is cut off."""


class HistoryError(OneLineError):
    """A history cannot be read. The message is one sentence with the place and the remedy."""


def append(path: Path, lines: Iterable[HistoryLine]) -> str:
    """Append whole lines to the file in one write, or leave it as it was.

    Processes of one host take turns. A last line without its end, which a crash in mid-write leaves, is removed first;
    one that only lacks its line end gets it. A file whose first or last line is none of a history is somebody else's.

    Returns:
        A sentence where a torn line was removed, else nothing.

    Raises:
        HistoryError: the file is no history.
        OSError: the file cannot be written.
    """
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    with locked(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            size = status.st_size
            torn = _torn_end(descriptor, size)
            # A file system may have left zeros for lost bytes.
            begins = (os.pread(descriptor, 2, 0), torn.lstrip(b"\0")[:2])
            if len(torn) >= _LONGEST_END or not all(map(_BEGIN.startswith, begins)):
                raise HistoryError(f"{path} is no history, or its last line is none of one; give another file, or mend it")
            whole = size - len(torn)
            if torn and _is_json(torn):
                data, torn, whole = b"\n" + data, b"", size
            if torn:
                os.ftruncate(descriptor, whole)
            try:
                if os.write(descriptor, data) < len(data):
                    raise OSError(0, "the disk took only a part of it")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, whole)
                raise
        finally:
            os.close(descriptor)
    return f"the last line of {path} was cut off by a crash ({len(torn):,} bytes) and has been removed" if torn else ""


def _torn_end(descriptor: int, size: int) -> bytes:
    """Return what follows the last line end, or a part of it if it is too long to be a line."""
    block, end = b"", size
    while end > 0 and b"\n" not in block and len(block) < _LONGEST_END:
        start = max(0, end - _LONGEST_LINE)
        block = os.pread(descriptor, end - start, start) + block
        end = start
    return block.rpartition(b"\n")[2]


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except UNREADABLE:
        return False


def read(path: Path, type_: type[_Line], warn: Callable[[str], None]) -> Iterator[tuple[int, _Line]]:
    """Yield each line with its offset in bytes. Lines are read one by one, so that a long history takes no memory.

    Args:
        type_: a record of the keys that are wanted; others are passed over.
        warn: called with a sentence about a last line that a crash cut off, which is left out.

    Raises:
        HistoryError: the file cannot be read, or another line is none of a history.
    """
    decode = msgspec.json.Decoder(type_).decode
    begin = 0
    try:
        with opened(path) as file:
            for number, line in enumerate(iter(functools.partial(file.readline, _LONGEST_LINE), b""), 1):
                try:
                    yield begin, decode(line)
                except UNREADABLE as error:
                    if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                        warn(f"{path}:{number} was cut off by a crash and is left out; the next run that appends removes it")
                        return
                    remedy = "remove the line, or restore the file from a copy"
                    raise HistoryError(f"{path}:{number} is not a line of a history: {error}; {remedy}") from None
                begin += len(line)
    except OSError as error:
        raise HistoryError(f"{path} cannot be read: {error.strerror}") from error
