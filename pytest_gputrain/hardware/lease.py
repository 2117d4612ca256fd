"""One case at a time on a GPU, across xdist workers and pytest runs of one host."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_gputrain.hardware.devices import Gpu


@contextlib.contextmanager
def lease(gpus: Sequence[Gpu], count: int, folder: Path | None = None) -> Iterator[tuple[Gpu, ...]]:
    """``count`` of ``gpus`` for oneself; waits until they are free. The locks end with this process, however it ends.

    Args:
        folder: where the lock files lie; one folder per host and user unless a test says otherwise.
    """
    if count == 0:
        yield ()
        return
    from filelock import FileLock, Timeout

    folder = folder or Path(tempfile.gettempdir()) / "gputrain-leases"
    folder.mkdir(mode=0o777, parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        # Who gathers several devices goes first: two cases taking one each of two GPUs would wait for each other.
        with FileLock(folder / "queue.lock"):
            taken: list[Gpu] = []
            while len(taken) < count:
                for gpu in gpus:
                    if gpu in taken:
                        continue
                    try:
                        held.enter_context(FileLock(folder / f"{gpu.uuid}.lock", timeout=0.1))
                    except Timeout:
                        continue
                    taken.append(gpu)
                    if len(taken) == count:
                        break
        yield tuple(taken)
