"""Leases GPUs and CPU cores, so that one case at a time uses each, across xdist workers and pytest runs of one host.

A lease is a lock on a file for each device. The kernel lets go of it when the last process that has the file open ends: the
one that took it, or the worker that it was passed to. A GPU whose pytest was killed is free when its worker is gone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_gputrain.hardware.devices import Gpu, HardwareError
from pytest_gputrain.utils.host import usable_cores, usable_memory_bytes
from pytest_gputrain.utils.units import GiB

_POLL_SECONDS: Final = 0.05

EMULATED_HOST_BYTES: Final = 2 * GiB
"""Host memory for each emulated GPU: models of the suites take 0.6 to 1.1 GiB."""

_held: dict[str, int] = {}
"""File descriptors of the locks that this process holds, by name of the device."""


@contextlib.contextmanager
def lease(gpus: Sequence[Gpu], count: int, folder: Path | None = None) -> Iterator[tuple[Gpu, ...]]:
    """Reserve ``count`` of ``gpus`` for this process, once they are free.

    A process is lent what it holds already: a test with the ``gpu`` fixture measures its case on that GPU.

    Args:
        folder: where the lock files lie; one folder per host unless a test says otherwise.

    Raises:
        HardwareError: more than there are, or more than this process holds while it holds some: it could wait for itself.
    """
    if count > len(gpus):
        raise HardwareError(f"{count} GPUs cannot be lent: there are {len(gpus)}")
    held = [gpu for gpu in gpus if gpu.uuid in _held]
    if len(held) >= count:
        yield tuple(held[:count])
        return
    if held:
        raise HardwareError(f"{count} GPUs cannot be lent to a test that holds {len(held)} already; drop its gpu fixture")
    with _lock_devices("gpu", [gpu.uuid for gpu in gpus], count, folder) as names:
        yield tuple(gpu for gpu in gpus if gpu.uuid in names)


@contextlib.contextmanager
def lease_cores(count: int, folder: Path | None = None) -> Iterator[None]:
    """Reserve ``count`` of the usable CPU cores, or all if there are fewer, once they are free.

    A lease of a core only counts: nothing is pinned to it.
    """
    cores = [f"core-{number}" for number in usable_cores()]
    if any(name in _held for name in cores):
        yield
        return
    with _lock_devices("core", cores, min(count, len(cores)), folder):
        yield


@contextlib.contextmanager
def lease_emulated(count: int = 1, folder: Path | None = None) -> Iterator[None]:
    """Reserve ``count`` emulated GPUs, or all if there are fewer, once they are free.

    The host's cores and memory decide how many there are. Each also takes a core, like a case on a CPU. Their locks are
    not those of real GPUs.
    """
    names = [f"emulated-{number}" for number in range(emulated_gpus())]
    with lease_cores(count, folder), _lock_devices("emulated", names, min(count, len(names)), folder):
        yield


def emulated_gpus() -> int:
    """Return how many emulated GPUs this host has. Each trains in a process that takes a core and some memory."""
    return max(1, min(len(usable_cores()), usable_memory_bytes() // EMULATED_HOST_BYTES))


def held_locks() -> tuple[int, ...]:
    """Return the descriptors of the lock files that this process holds, for its workers to inherit."""
    return tuple(_held.values())


@contextlib.contextmanager
def _lock_devices(pool: str, names: Sequence[str], count: int, folder: Path | None) -> Iterator[set[str]]:
    folder = folder or _folder()
    _make_common(folder)
    taken: dict[str, int] = {}
    try:
        # Only one process at a time gathers devices. Otherwise two cases that each hold one of two GPUs would wait for each
        # other for ever.
        queue = _lock(folder / f"{pool}-queue.lock", wait=True)
        assert queue is not None
        try:
            while len(taken) < count:
                for name in names:
                    if name not in taken and len(taken) < count:
                        descriptor = _lock(folder / f"{name}.lock")
                        if descriptor is not None:
                            taken[name] = descriptor
                if len(taken) < count:
                    time.sleep(_POLL_SECONDS)
        finally:
            os.close(queue)
        _held.update(taken)
        yield set(taken)
    finally:
        for name, descriptor in taken.items():
            _held.pop(name, None)
            os.close(descriptor)


def check_folder() -> Path:
    """Return the folder of the locks, once a lock can be taken there.

    Raises:
        HardwareError: something else has its name.
        OSError: this user cannot lock files there.
    """
    folder = _folder()
    _make_common(folder)
    descriptor = _lock(folder / "doctor.lock")
    if descriptor is not None:
        os.close(descriptor)
    return folder


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / "gputrain-leases"


def _make_common(folder: Path) -> None:
    """Make a folder in which all users of the host can make files, and in which nobody can remove files of others.

    Raises:
        HardwareError: something else has its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # A path could be replaced by a link to another folder, which would then be opened to all users.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise HardwareError(f"{folder} is not a folder of leases ({error.strerror}); remove it") from None
    try:
        with contextlib.suppress(PermissionError):  # Another user owns the folder, and has opened it to all users already.
            os.fchmod(descriptor, 0o1777)
    finally:
        os.close(descriptor)


def _lock(path: Path, *, wait: bool = False) -> int | None:
    """Open and lock a file, and return the lock; None if another process holds it and ``wait`` is false. A link is not
    followed."""
    import fcntl

    try:
        # In a folder like /tmp Linux refuses O_CREAT for another user's file, so the first try goes without it.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with contextlib.suppress(PermissionError):
            os.fchmod(descriptor, 0o666)  # every user takes this lock, whatever the umask is
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor
