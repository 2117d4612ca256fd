"""One case at a time on a GPU, across xdist workers and pytest runs of one host."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_gputrain.hardware.devices import Gpu, HardwareError

_mine: list[Gpu] = []
"""What this process holds."""


@contextlib.contextmanager
def lease(gpus: Sequence[Gpu], count: int, folder: Path | None = None) -> Iterator[tuple[Gpu, ...]]:
    """``count`` of ``gpus`` for this process; waits until they are free. The locks end with the process, however it ends.

    A process is lent what it holds already: a test with the ``gpu`` fixture measures its case on that GPU.

    Args:
        folder: where the lock files lie; one folder per host unless a test says otherwise.

    Raises:
        HardwareError: more than there are, or more than this process holds while it holds some: it could wait for itself.
    """
    if count > len(gpus):
        raise HardwareError(f"{count} GPUs cannot be lent: there are {len(gpus)}")
    held = [gpu for gpu in gpus if gpu in _mine]
    if len(held) >= count:
        yield tuple(held[:count])
        return
    if held:
        raise HardwareError(f"{count} GPUs cannot be lent to a test that holds {len(held)} already; drop its gpu fixture")
    from filelock import FileLock, Timeout

    folder = folder or Path(tempfile.gettempdir()) / "gputrain-leases"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user made it, for all
        folder.chmod(0o1777)
    with contextlib.ExitStack() as locks:
        # Who gathers several devices goes first: two cases taking one each of two GPUs would wait for each other.
        with FileLock(folder / "queue.lock", mode=0o666):
            taken: list[Gpu] = []
            while len(taken) < count:
                for gpu in gpus:
                    if gpu in taken:
                        continue
                    try:
                        locks.enter_context(FileLock(folder / f"{gpu.uuid}.lock", timeout=0.1, mode=0o666))
                    except Timeout:
                        continue
                    taken.append(gpu)
                    if len(taken) == count:
                        break
        _mine.extend(taken)
        try:
            yield tuple(taken)
        finally:
            for gpu in taken:
                _mine.remove(gpu)
