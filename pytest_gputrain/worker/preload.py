"""Forks workers that find their libraries imported: ``python -P -m pytest_gputrain.worker.preload``.

It reads requests from stdin, one JSON line each (folder, rank, cwd). It answers each on stdout with the id of the process
that it forked, or with 0 where it must not fork, and later with that process's end. It ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.records import Task
from pytest_gputrain.utils.linux import PARENT, die_with_parent
from pytest_gputrain.worker.__main__ import CASE, main, redirect
from pytest_gputrain.worker.libraries import load

_PRIVATE_READ: Final = 65_536


def serve(requests: int, answers: int) -> None:
    """Fork as requested until ``requests`` ends.

    Args:
        requests: file descriptor of JSON lines.
        answers: file descriptor to write some to.
    """
    # A child's end wakes the loop: its handler's byte makes the pipe readable.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def answer(**fields: int) -> None:
        os.write(answers, json.dumps(fields).encode() + b"\n")

    unread = b""
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, _PRIVATE_READ)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                answer(ended=ended[0], exit_code=os.waitstatus_to_exitcode(ended[1]))
        if requests in ready:
            data = os.read(requests, _PRIVATE_READ)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                answer(forked=_fork(json.loads(line), keep_out=(requests, answers, woken, wake)))


def _fork(request: dict[str, Any], keep_out: tuple[int, ...]) -> int:
    """Return the new worker's pid; 0 where this process must not be forked."""
    folder, rank = Path(request["folder"]), int(request["rank"])
    # What fails here fails again in the worker, which reports it.
    with contextlib.suppress(Exception):
        task = msgspec.json.decode((folder / CASE).read_bytes(), type=Task)
        load(task.case, predicted=task.target is not None, beside_gpu=bool(task.emulated))
    if len(os.listdir("/proc/self/task")) > 1 or _used_gpu():
        return 0
    # Keeps the libraries' memory shared: a collection would write to all of it.
    gc.freeze()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for descriptor in keep_out:
            os.close(descriptor)
        redirect(folder / f"rank{rank}")
        os.chdir(request["cwd"])
        os.environ[PARENT] = str(os.getppid())
        main(folder, rank)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _used_gpu() -> bool:
    """Tell whether something here has used a GPU, so that a process forked from here cannot; only such a process knows."""
    import torch

    is_spoilt = getattr(torch._C, "_cuda_isInBadFork", None)
    if is_spoilt is None:  # a build without GPUs
        return False
    pid = os.fork()
    if not pid:
        os._exit(int(is_spoilt()))
    return bool(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    die_with_parent()
    requests, answers = os.dup(0), os.dup(1)
    # Libraries print while they are imported.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nowhere, standard)
    serve(requests, answers)
