"""One case at a time on a GPU, across xdist workers and pytest runs of one host."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_gputrain.hardware.devices import Gpu


@contextlib.contextmanager
def lease(gpus: Sequence[Gpu], count: int, folder: Path | None = None) -> Iterator[tuple[Gpu, ...]]:
    """``count`` of ``gpus`` for this process; waits until they are free. The locks end with the process, however it ends.

    A process may lease again what it holds: a test with the ``gpu`` fixture measures a case on that GPU.

    Args:
        folder: where the lock files lie; one folder per host unless a test says otherwise.
    """
    if count == 0:
        yield ()
        return
    from filelock import FileLock, Timeout

    folder = folder or Path(tempfile.gettempdir()) / "gputrain-leases"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user made it, for all
        folder.chmod(0o1777)
    if count > len(gpus):
        raise ValueError(f"{count} of {len(gpus)} GPUs cannot be had")
    with contextlib.ExitStack() as held:
        # Who gathers several devices goes first: two cases taking one each of two GPUs would wait for each other.
        with FileLock(folder / "queue.lock", mode=0o666):
            taken: list[Gpu] = []
            while len(taken) < count:
                for gpu in gpus:
                    if gpu in taken:
                        continue
                    try:
                        lock = FileLock(folder / f"{gpu.uuid}.lock", timeout=0.1, mode=0o666, is_singleton=True)
                        held.enter_context(lock)
                    except Timeout:
                        continue
                    taken.append(gpu)
                    if len(taken) == count:
                        break
        yield tuple(taken)
