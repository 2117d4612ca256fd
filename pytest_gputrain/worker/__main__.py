"""Runs one rank of a case, from its case file to its reply file: ``python -P -m pytest_gputrain.worker FOLDER [RANK]``.

The folder holds ``case.json``. Its subfolder of the rank receives ``progress.jsonl``, ``figures.json`` (what was measured,
before it is checked), ``reply.json`` (by atomic rename, last of all) and ``stacks.txt`` (Python stacks on a fatal signal, or
when the parent asks for them with SIGUSR1).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from pytest_gputrain.cases.libraries import how_to_install, missing
from pytest_gputrain.records import FORMAT, Crashed, EmulatedRun, Measurement, Reply, Served, Task
from pytest_gputrain.records.node_protocol import write_record
from pytest_gputrain.utils.errors import WrongTorch
from pytest_gputrain.utils.linux import die_with_parent
from pytest_gputrain.utils.reading import read_message
from pytest_gputrain.worker.progress import Progress

CASE, PROGRESS, REPLY, STACKS, RENDEZVOUS = "case.json", "progress.jsonl", "reply.json", "stacks.txt", "rendezvous"
FIGURES = "figures.json"


def main(case_folder: Path, rank: int, local_rank: int | None = None, meeting: str = "") -> None:
    """Run one rank of the case.

    Args:
        local_rank: its number on this node; the same as ``rank`` on the only one.
        meeting: where torch.distributed finds the other ranks; a file in the folder if empty.
    """
    die_with_parent()
    folder = case_folder / f"rank{rank}"
    stacks = open(folder / STACKS, "w")  # noqa: SIM115 - faulthandler needs it to the very end
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    progress = Progress(folder / PROGRESS)
    progress.enter("start")
    task = _prepared(msgspec.json.decode(read_message(case_folder / CASE), type=Task))
    if task.emulated:
        # Compiling allocates on the GPU, and loading compiled code does not. So each run starts with an empty folder.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    if task.emulated and not task.simulated:
        os.environ["GPUTRAIN_EMULATED_STATE"] = str(case_folder)  # the stand-in of NCCL exchanges data through this folder
        # Without this a thread of torch keeps the tensors of a collective for a time that differs between two runs.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    progress.enter("import")
    reply: Reply | Served | EmulatedRun
    try:
        from pytest_gputrain.worker.libraries import load_for

        load_for(task)
        # Objects of imports never become garbage. Frozen objects are skipped by each later collection.
        gc.freeze()
        from pytest_gputrain.worker.group import Group
        from pytest_gputrain.worker.own_lines import OwnLines
        from pytest_gputrain.worker.run import crash, run
        from pytest_gputrain.worker.seeds import seed_python
    except Exception as error:  # torch raises a ValueError or an OSError where it does not find a library of CUDA
        detail = "" if isinstance(error, ImportError) else traceback.format_exc()
        reply = Crashed(sentence=_cannot_import(task, error), phase="import", detail=detail)
    else:
        seed_python()
        if task.case.method == "script":
            from pytest_gputrain.worker.script import run_script

            reply = run_script(task, progress, folder)
        else:
            meeting = meeting or (case_folder / RENDEZVOUS).absolute().as_uri()
            local_rank = rank if local_rank is None else local_rank
            group = Group(rank, task.processes, local_rank, meeting, task.servers, simulated=task.simulated)

            def keep(figures: Measurement | Served | EmulatedRun) -> None:
                with contextlib.suppress(OSError):  # A full disk must not end the case.
                    write_record(folder / FIGURES, figures)

            try:
                reply = run(task, progress, group=group, keep=keep)
            except BaseException as error:  # The user's training may raise even KeyboardInterrupt.
                reply = crash(error, progress, OwnLines.of_case(task))
    progress.enter("reply")
    write_record(folder / REPLY, {**msgspec.to_builtins(reply), "format": FORMAT})
    if task.processes + task.servers > 1:
        # If a rank is lost, ending the process group in the normal way may wait for ever.
        flush_output()
        os._exit(0)


def _prepared(task: Task) -> Task:
    """Set the import path and the command line that the case's own code expects, and return the task."""
    sys.path += [path for path in task.import_paths if path not in sys.path]
    # Own code that reads the command line, for example by argparse, finds no arguments and the name of its own file.
    sys.argv[:] = [str(Path(task.root, task.case.code.partition("::")[0]))] if task.case.code else sys.argv[:1]
    return task


def _cannot_import(task: Task, error: Exception) -> str:
    """Return the crash of a worker that cannot import its libraries. It names all that are not installed, or one that is
    broken."""
    if isinstance(error, WrongTorch):
        return str(error)
    if not isinstance(error, ImportError):
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"{sys.executable} cannot import the libraries of this case ({why})"
    if names := missing([task.case]):
        return f"{sys.executable} cannot import {' and '.join(names)}; {how_to_install(names)}"
    return f"{sys.executable} cannot import {error.name or 'torch'} ({error}); install it, or pytest-gputrain[suite]"


def flush_output() -> None:
    """Write buffered output, unless the case has closed its streams or replaced them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def redirect(folder: Path) -> None:
    """Send this process's output to files in ``folder``."""
    for descriptor, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)


if __name__ == "__main__":
    if sys.argv[2:]:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        number = int(os.environ["RANK"])
        redirect(Path(sys.argv[1]) / f"rank{number}")
        main(Path(sys.argv[1]), number, int(os.environ["LOCAL_RANK"]), "env://")
