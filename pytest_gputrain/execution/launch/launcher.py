"""Runs one task in processes on this node; `ranks` follows them, and turns however they end into the reply.

The ranks of a case on this node are started directly: that gives a true exit code for each, and half the start-up time of
torchrun. They meet through a file in the case's folder, so no port is taken that another case might want. A case that takes
several nodes is started by torchrun's agents, one a node (`torchrun`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.execution.launch.case_folder import folder_of
from pytest_gputrain.execution.launch.environment import refuse_recursion, worker_environment
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.execution.launch.processes import CASE_FOLDER, Process, start
from pytest_gputrain.execution.launch.ranks import Rank, follow
from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.records import (
    Crashed,
    EmulatedRun,
    Event,
    Lost,
    Measurement,
    OutOfMemory,
    Reply,
    Served,
    Task,
    TimedOut,
)
from pytest_gputrain.utils.signals import undisturbed

_ADVICE: Final = ", and a function that trains in a loop of its own has to yield after each step"
"""The advice after a time-out of a function that does not return."""

_GRACE_SECONDS: Final = 1.0
"""A rank whose partner is killed may reply with its own exception before the kernel has ended the partner."""

Watch = Callable[[Event], None]


def in_process(
    task: Task,
    *,
    gpus: Sequence[Gpu],
    timeout_seconds: float,
    watch: Watch = lambda event: None,
    fork_server: ForkServer | None = None,
    environ: Mapping[str, str] | None = None,
) -> Reply:
    """Run ``task`` with one process for each rank, and return its reply.

    Args:
        gpus: the only GPUs the processes will see; none hides them all.
        timeout_seconds: the processes and their children are killed after this time.
        watch: called with every progress event of the first rank, on this thread.
        fork_server: where the processes are forked from; fresh interpreters without it.
        environ: variables of the processes, with those that the task changes; by default those of this one.
    """
    reply = _run_processes(task, gpus, timeout_seconds, watch, fork_server, environ)
    assert not isinstance(reply, EmulatedRun), "nobody asked for one, and a worker that was not asked refuses"
    return reply


def emulate(
    task: Task,
    *,
    timeout_seconds: float,
    environ: Mapping[str, str],
    watch: Watch = lambda event: None,
    fork_server: ForkServer | None = None,
) -> EmulatedRun | OutOfMemory | Crashed | TimedOut:
    """Run ``task`` on emulated GPUs, and return its reply. Each rank has a process, or only the first rank has one.

    Args:
        environ: variables of the processes, with those that find emulated GPUs.
        timeout_seconds, watch, fork_server: as in `in_process`.

    Returns:
        The figures; another reply if there are none.
    """
    assert task.emulated, "a worker refuses stand-ins that nobody asked for"
    reply = _run_processes(task, (), timeout_seconds, watch, fork_server, environ)
    assert not isinstance(reply, Measurement | Lost), "a worker asked to emulate measures nothing"
    return reply


def _run_processes(
    task: Task,
    gpus: Sequence[Gpu],
    timeout_seconds: float,
    watch: Watch,
    fork_server: ForkServer | None,
    environ: Mapping[str, str] | None,
) -> EmulatedRun | Reply:
    refuse_recursion()
    environment = worker_environment(task, gpus, environ)

    def process(folder: Path, rank: int) -> Process:
        forked = fork_server.fork(task, folder, rank, environment, timeout_seconds) if fork_server else None
        return forked or start(folder, rank, {**environment, CASE_FOLDER: str(folder)})

    with folder_of(task) as folder:
        ranks: list[Rank] = []
        try:
            for number in range(1 if task.simulated else task.processes + task.servers):
                # Each process is put into `ranks` at once, so that all are ended if the next one does not start.
                ranks.append(Rank(number, folder, process))
            reply = follow(ranks, timeout_seconds, watch, grace_seconds=_GRACE_SECONDS if len(ranks) > 1 else 0.0)
            if isinstance(reply, TimedOut) and reply.phase == "build" and task.case.method == "custom":
                return msgspec.structs.replace(reply, advice=f"{reply.advice}{_ADVICE}")
            return reply
        finally:
            with undisturbed():
                for rank in ranks:
                    rank.process.end()


def inline(task: Task, builder: Any = None) -> Reply:
    """Run ``task`` in this process, for closures and debuggers. This imports torch here, shares its state, and has no
    time-out."""
    import gc

    import torch

    from pytest_gputrain.worker.progress import Progress
    from pytest_gputrain.worker.run import run

    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    variables = dict(os.environ)
    try:
        figures: list[Any] = []
        reply = run(task, Progress(None), builder, keep=figures.append)
        assert not isinstance(reply, Served | EmulatedRun), "the only process of a case serves nobody, and is not emulated"
        return msgspec.structs.replace(reply, measured=figures[0]) if isinstance(reply, Crashed) and figures else reply
    finally:
        # The training may have changed variables, and the next test must not see these changes.
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
        gc.unfreeze()
        # A failed case leaves its tensors in reference cycles with the traceback, and torch's allocator keeps their memory.
        # The next case needs this memory.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
