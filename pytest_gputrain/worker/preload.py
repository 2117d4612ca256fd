"""Forks workers whose libraries are imported already: ``python -P -m pytest_gputrain.worker.preload``.

It reads requests from stdin, one JSON line each (folder, rank, cwd, variables). It answers each on stdout with the id of the
process that it forked, or with 0 if it must not fork, and later with that process's end. It ends when its stdin does.
What a worker leaves behind becomes a child of this process, which kills it when the last worker has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from pytest_gputrain.utils.linux import PARENT, adopt_orphans, die_with_parent
from pytest_gputrain.utils.reading import read_message
from pytest_gputrain.worker.__main__ import CASE, flush_output, main, redirect
from pytest_gputrain.worker.libraries import load_for, track_for_forks

_PRIVATE_READ: Final = 65_536
_OF_DRIVERS: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
"""The beginnings of the files through which a process reaches GPUs."""


def serve(requests: int, answers: int) -> None:
    """Fork a worker for each request until ``requests`` ends.

    Args:
        requests: file descriptor of JSON lines.
        answers: file descriptor to write some to.
    """
    # A signal that a child has ended writes a byte into this pipe, which ends the wait of the loop.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def answer(**fields: int) -> None:
        os.write(answers, json.dumps(fields).encode() + b"\n")

    workers: set[int] = set()
    unread = b""
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, _PRIVATE_READ)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in workers:
                    workers.remove(ended[0])
                    if not workers:
                        _end_orphans()
                    answer(ended=ended[0], exit_code=os.waitstatus_to_exitcode(ended[1]))
        if requests in ready:
            data = os.read(requests, _PRIVATE_READ)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                forked = _fork(json.loads(line), keep_out=(requests, answers, woken, wake))
                workers |= {forked} - {0}
                answer(forked=forked)


def _end_orphans() -> None:
    """Kill processes that ended workers have left behind, in any session. They are children of this process now."""
    import psutil

    for orphan in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()


def _holds_gpu() -> bool:
    """Tell whether a driver was asked for its GPUs. It keeps files open then, and no fork of this process could ask
    again."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # This descriptor listed the folder, and is closed already.
            if os.readlink(descriptor).startswith(_OF_DRIVERS):
                return True
    return False


def _fork(request: dict[str, Any], keep_out: tuple[int, ...]) -> int:
    """Return the new worker's pid; 0 if this process must not be forked."""
    folder, rank = Path(request["folder"]), int(request["rank"])
    is_own_code = is_emulated = False
    # The worker meets the same error again, and reports it.
    with contextlib.suppress(Exception):
        task = msgspec.json.decode(read_message(folder / CASE), type=Task)
        is_own_code, is_emulated = bool(task.case.code), bool(task.emulated)
        load_for(task, to_be_forked=True)
        if is_emulated:
            track_for_forks()
    if len(os.listdir("/proc/self/task")) > 1 or _holds_gpu() or (is_emulated and _used_gpu()):
        return 0
    # A garbage collection would write to the libraries' memory, which would then no longer be shared.
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
        os.environ.update({**request["variables"], PARENT: str(os.getppid())})
        if is_emulated:
            ctypes.CDLL(None).gputrain_read_gpu_again()
        main(folder, rank)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        flush_output()
    if is_own_code:
        sys.exit(code)  # This also calls the functions that the user's code has registered with atexit.
    os._exit(code)


def _used_gpu() -> bool:
    """Tell whether torch has used a GPU in this process, so that no worker can be forked from here. A fork finds this
    out."""
    import torch

    is_spoilt = getattr(torch._C, "_cuda_isInBadFork", None)
    if is_spoilt is None:  # This build of torch has no GPUs.
        return False
    pid = os.fork()
    if not pid:
        os._exit(int(is_spoilt()))
    return bool(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    die_with_parent()
    adopt_orphans()
    requests, answers = os.dup(0), os.dup(1)
    # Libraries print while they are imported, and standard output is for answers.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nowhere, standard)
    serve(requests, answers)
