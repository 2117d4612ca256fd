"""A task in, a reply out: the case runs in processes of its own, and whatever becomes of them is a reply.

The ranks of a case are started directly: that gives a true exit code for each, and half the start-up time of torchrun. They
meet through a file in the case's folder, so no port is taken that another case might want.

Not covered: several nodes.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.launch.environment import refuse_recursion, worker_environment
from pytest_gputrain.launch.merge import merge
from pytest_gputrain.launch.preloaded import Preloaded
from pytest_gputrain.launch.processes import Process, start
from pytest_gputrain.launch.ranks import Rank, timed_out
from pytest_gputrain.records import Event, Prediction, Reply, Served, Task

__all__ = ["Preloaded", "Watch", "in_process", "inline", "predict"]

_POLL_SECONDS = 0.02

Watch = Callable[[Event], None]


def in_process(
    task: Task,
    *,
    gpus: Sequence[Gpu],
    timeout_seconds: float,
    watch: Watch = lambda event: None,
    preloaded: Preloaded | None = None,
) -> Reply:
    """Run ``task`` in processes of its own, one a rank.

    Args:
        gpus: the only GPUs the processes will see; none hides them all.
        timeout_seconds: the processes and their children are killed after this time.
        watch: called with every progress event of the first rank, on this thread.
        preloaded: where the processes are forked from; fresh interpreters without it.
    """
    reply = _launched(task, gpus, timeout_seconds, watch, preloaded)
    assert not isinstance(reply, Prediction), "nobody asked for one"
    return reply


def predict(
    task: Task, *, timeout_seconds: float, watch: Watch = lambda event: None, preloaded: Preloaded | None = None
) -> Prediction | Reply:
    """Run ``task``, which names a target, on fake tensors in a process of its own: it may abort, and it patches libraries.

    Args:
        timeout_seconds, watch, preloaded: as in `in_process`.

    Returns:
        The prediction; another reply where there is none.
    """
    assert task.target is not None, "a prediction is for a device"
    return _launched(task, (), timeout_seconds, watch, preloaded)


def _launched(
    task: Task, gpus: Sequence[Gpu], timeout_seconds: float, watch: Watch, preloaded: Preloaded | None
) -> Prediction | Reply:
    refuse_recursion()
    environment = worker_environment(task, gpus)

    def process(folder: Path, rank: int) -> Process:
        forked = preloaded.fork(task, folder, rank, environment, timeout_seconds) if preloaded else None
        return forked or start(folder, rank, environment)

    with _folder_of(task) as folder:
        return _run(folder, task.processes + task.servers, process, timeout_seconds, watch)


def inline(task: Task, builder: Any = None) -> Reply:
    """Run ``task`` in this process, for closures and debuggers: imports torch here, shares its state, knows no time-out."""
    import gc

    import torch

    from pytest_gputrain.worker.progress import Progress
    from pytest_gputrain.worker.run import run

    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    try:
        reply = run(task, Progress(None), builder)
        assert not isinstance(reply, Served), "the only process of a case serves nobody"
        return reply
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
        gc.unfreeze()


@contextmanager
def _folder_of(task: Task) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gputrain-"))
    try:
        (folder / "case.json").write_bytes(msgspec.json.encode(task))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    folder: Path, count: int, process: Callable[[Path, int], Process], timeout_seconds: float, watch: Watch
) -> Prediction | Reply:
    deadline = time.monotonic() + timeout_seconds
    ranks: list[Rank] = []
    try:
        ranks += [Rank(number, folder, process) for number in range(count)]
        while True:
            for event in ranks[0].progress.read():
                watch(event)
            ended = [rank for rank in ranks if rank.process.poll() is not None]
            # One rank's end ends the others: they would wait for it until the time-out.
            failed = [rank for rank in ended if rank.failed()]
            if failed or len(ended) == len(ranks):
                break
            if time.monotonic() >= deadline:
                return timed_out(ranks, timeout_seconds)
            time.sleep(_POLL_SECONDS)
    finally:
        for rank in ranks:
            rank.process.end()
    for event in ranks[0].progress.read():
        watch(event)
    if failed:
        first = min(failed, key=Rank.order)
        reply = first.reply()
        assert not isinstance(reply, Served | Prediction)
        return reply if count == 1 else msgspec.structs.replace(reply, rank=first.number)
    replies = [rank.reply() for rank in ranks]
    return replies[0] if isinstance(replies[0], Prediction) else merge(replies)
