"""``python -P -m pytest_gputrain.worker FOLDER RANK``: case file in, reply file out.

The folder holds ``case.json``. Its subfolder of the rank receives ``progress.jsonl``, ``reply.json`` (by atomic rename, last
of all) and ``stacks.txt`` (Python stacks on a fatal signal, or when the parent asks for them with SIGUSR1).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import signal
import sys
from pathlib import Path

import msgspec

from pytest_gputrain.records import Crashed, Prediction, Reply, Served, Task
from pytest_gputrain.worker.progress import Progress

CASE, PROGRESS, REPLY, STACKS, RENDEZVOUS = "case.json", "progress.jsonl", "reply.json", "stacks.txt", "rendezvous"


def main(case_folder: Path, rank: int) -> None:
    die_with_parent()
    folder = case_folder / f"rank{rank}"
    stacks = open(folder / STACKS, "w")  # noqa: SIM115 - faulthandler needs it to the very end
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    progress = Progress(folder / PROGRESS)
    progress.enter("start")
    task = msgspec.json.decode((case_folder / CASE).read_bytes(), type=Task)
    sys.path += [path for path in task.import_paths if path not in sys.path]
    progress.enter("import")
    reply: Reply | Served | Prediction
    try:
        from pytest_gputrain.worker.libraries import load

        load(task.case)
        from pytest_gputrain.worker.group import Group
        from pytest_gputrain.worker.run import run
    except ImportError as error:
        missing = error.name or "torch"
        reply = Crashed(
            sentence=f"{sys.executable} cannot import {missing} ({error}); install it, or pytest-gputrain[suite]",
            phase="import",
        )
    else:
        random.seed(0)
        if task.target is None:
            reply = run(task, progress, group=Group(rank, task.processes, case_folder / RENDEZVOUS, task.servers))
        else:
            from pytest_gputrain.worker.dry_run.predict import predict

            reply = predict(task, progress)
    progress.enter("reply")
    unfinished = folder / f"{REPLY}.part"
    unfinished.write_bytes(msgspec.json.encode(reply))
    os.replace(unfinished, folder / REPLY)
    if task.processes + task.servers > 1:
        # A process group that lost a rank may wait for it for ever while it is torn down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def die_with_parent() -> None:
    """Ask Linux to kill this process when pytest dies, so that no worker is left training alone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.environ.get("GPUTRAIN_PARENT") not in (None, str(os.getppid())):
        sys.exit("the pytest process that asked for this case is gone")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
