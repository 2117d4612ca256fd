"""Writes files that are whole or absent, locks them for one process at a time, and keeps paths within their folder."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_PART: Final = ".part"
_WRITABLE: Final = 0o222
_WRITABLE_BY_OTHERS: Final = 0o022
_NOBODY: Final = 65534
"""The owner that a folder has in a container that does not know the user; there nobody can be this one."""
_MARKER: Final = re.compile(rb"^(?:<{7}|\|{7}|={7}|>{7})(?=[ \r\n]|\Z)", re.MULTILINE)


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write ``data`` to a file beside ``path`` and rename it, so that readers see either the old file or the whole new one.

    A link stays, and its target is replaced. A device, a FIFO and what this process prints to are written to as they are.

    Args:
        data: in parts where it is not all to be in memory at once.

    Raises:
        OSError: the folder or the file cannot be written; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [data] if isinstance(data, bytes) else data
    status = _status(path)
    if status is not None and ((printed_to := _printed_to(status)) is not None or not stat.S_ISREG(status.st_mode)):
        descriptor = _open_now(path) if printed_to is None else os.dup(printed_to)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        return
    path = path.resolve()
    if status is not None and not status.st_mode & _WRITABLE:
        raise PermissionError(errno.EACCES, "it is read-only")  # replacing the file would ignore its rights
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PART)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)  # mkstemp makes files for their owner only
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def prepare(path: Path) -> None:
    """Make the folder of a file that the end of a run will write, and raise an error if that will be impossible.

    Raises:
        OSError: it cannot be written, which should show before hours of measuring.
    """
    status = _status(path)
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if status is not None and _printed_to(status) is not None:
        raise OSError(errno.EINVAL, "it is what pytest prints to")
    if status is not None and not (status.st_mode & _WRITABLE and os.access(path, os.W_OK)):
        raise PermissionError(errno.EACCES, "it is read-only")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.resolve().parent):
        pass


def _status(path: Path) -> os.stat_result | None:
    """Return the status of the file that all links lead to; None if there is none.

    Raises:
        OSError: links in a circle, or a file where a folder should be.
    """
    _refuse_links_of_others(path)
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _refuse_links_of_others(path: Path) -> None:
    """Raise an error where Linux does with fs.protected_symlinks: for another user's link in a folder that all may write to.

    Whoever writes ``/tmp/report.json`` would replace a file that somebody else has chosen. One's own links are followed.
    """
    for part in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status, above = part.lstat(), part.parent.stat()
            by_all = stat.S_ISVTX | stat.S_IWOTH
            if stat.S_ISLNK(status.st_mode) and above.st_mode & by_all == by_all and _is_foreign(status):
                raise PermissionError(errno.EACCES, f"{part} is a link that another user made")


def _is_foreign(status: os.stat_result) -> bool:
    return status.st_uid not in (0, os.geteuid())


def _printed_to(status: os.stat_result) -> int | None:
    """Return standard output or error if it leads to this file. If the file were replaced, printed text would be lost."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # The descriptor is closed.
            if os.path.samestat(status, os.fstat(descriptor)):
                return descriptor
    return None


def _open_now(path: Path) -> int:
    """Open for writing what is not a regular file, without waiting for a reader of a FIFO."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "nobody reads it") from None
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def sweep(path: Path) -> None:
    """Remove what killed writers of ``path`` left before their rename. The caller holds the lock of `locked`."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*{_PART}"):
        with contextlib.suppress(OSError):
            part.unlink()


def within(folder: Path, *names: str) -> Path:
    """Return the path of these names below ``folder``.

    Raises:
        ValueError: it is not in there: a name is none of a file, or a symbolic link leads out.
    """
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a file")
    path = folder.joinpath(*names)
    try:
        target = Path(os.path.realpath(path, strict=True))
    except OSError as error:
        # Path.resolve would not raise for a loop of links from Python 3.13 on.
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} leads nowhere ({error.strerror})") from None
        target = Path(os.path.realpath(path))  # A missing file is no error here, because opening it raises the right one.
    if not target.is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to {target}, which is not in {folder}")
    return path


def conflicts(data: bytes) -> list[int]:
    """Return the numbers of the lines with a conflict that a merge has left."""
    signs = (7 * sign for sign in (b"<", b"|", b"=", b">"))
    marker_starts = (line.start() for line in _MARKER.finditer(data)) if any(sign in data for sign in signs) else ()
    numbers, number, before = [], 1, 0
    for begin in marker_starts:
        number += data.count(b"\n", before, begin)
        before = begin
        numbers.append(number)
    return numbers


def make_own(folder: Path) -> None:
    """Make a folder in which nobody else can make links.

    Raises:
        OSError: it is there, and another user's or open to others.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(errno.EACCES, "it is not a folder of this user alone; remove it", str(folder))


def cache_folder(name: str) -> Path:
    """Return the folder of this name in the user's cache, below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / name


def writable_ancestor(folder: Path) -> Path | None:
    """Return a folder above this one in which another user could replace a part of its path; None if there is none.

    In a sticky folder, such as the one for temporary files, no other user can replace files. A group that has only this user
    may write.
    """
    for above in folder.resolve().parents:
        with contextlib.suppress(FileNotFoundError):
            status = above.stat()
            by_others = status.st_mode & (stat.S_IWOTH if _is_own_group(status.st_gid) else _WRITABLE_BY_OTHERS)
            foreign = status.st_uid not in (0, os.geteuid(), _NOBODY)
            if foreign or (by_others and not status.st_mode & stat.S_ISVTX):
                return above
    return None


def _is_own_group(number: int) -> bool:
    """Tell whether a group was made for this user alone, or is root's."""
    import grp
    import pwd

    try:
        group = grp.getgrgid(number)
        return number == 0 or (group.gr_name == pwd.getpwuid(os.geteuid()).pw_name and len(group.gr_mem) <= 1)
    except KeyError:
        return False


def own_locks() -> Path:
    """Return the folder of this user's locks, among temporary files."""
    return Path(tempfile.gettempdir()) / f"gputrain-locks-{os.geteuid()}"


_POLL_SECONDS: Final = 0.02
_PATIENCE_SECONDS: Final = 60.0
"""The time to wait for a lock: files are written in less, and a process that is stopped must not stop others."""


@contextlib.contextmanager
def locked(path: Path, patience_seconds: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Provide a lock that one process at a time holds. All files of a folder share it, and the folder is made.

    The folder itself is locked: a file for the lock would be committed with the others.

    Raises:
        OSError: the lock cannot be made, or another process has held it for this time.
    """
    import fcntl

    folder = Path(os.path.realpath(path)).parent
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        last = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= last:
                    sentence = f"another process has held the lock of {folder} for {patience_seconds:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, sentence) from None
                time.sleep(_POLL_SECONDS)
            except OSError:  # A network file system may not lock folders.
                with _locked_elsewhere(path, patience_seconds):
                    yield
                return
            else:
                yield
                return
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked_elsewhere(path: Path, patience_seconds: float) -> Iterator[None]:
    """Provide the lock of `locked` for processes of this user and host that share the folder for temporary files."""
    from filelock import FileLock, Timeout

    locks = own_locks()
    lock = FileLock(locks / hashlib.sha256(os.fsencode(path.resolve())).hexdigest())
    try:
        make_own(locks)
        lock.acquire(timeout=patience_seconds)
    except Timeout:
        raise TimeoutError(
            errno.ETIMEDOUT, f"another process has held {lock.lock_file} for {patience_seconds:g} s"
        ) from None
    except OSError as error:
        raise OSError(error.errno, f"no lock in {locks}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
