"""Runs torch's own databases of operators, modules and optimizers on an emulated GPU, and prints a table in Markdown.

    python tools/operator_database.py                        all of it, which takes about ten minutes on two cores
    python tools/operator_database.py --sample 20 --seed 1   a part that is drawn by this seed
    python tools/operator_database.py --only operator:isin   these alone

It needs a CUDA build of torch and a C compiler. Each operator, module and optimizer runs in a process of its own.

An operator runs forward and backward with the samples of torch's tests, once with inputs that were copied from the host
("known"), and once with floating point numbers that the emulation does not know ("unknown"). A sample agrees if all outputs
and gradients have the size, type and strides that they have on the CPU, or those of torch's FakeTensor on a GPU, where the
two differ. A size that rests on unknown values agrees if the report of the run says so. A number that was read from unknown
values is left out. Values that the emulation takes as known are compared with those of the CPU.

The exit status is 1 if a process crashed or took too long, or if a share is lower than ``--least`` demands.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from operator_outcomes import CRASHED, Outcome, share, table

if TYPE_CHECKING:
    from operator_samples import Database

ROOT: Final = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from pytest_gputrain.hardware.emulation import boards, build, libraries  # noqa: E402 - of this repository, and not of another
from pytest_gputrain.hardware.emulation.environment import DEVICE, STARTUP, TORCH, emulated_environment  # noqa: E402

CPU_SECONDS: Final = 120
"""The processor time that a process may take, of which a busy machine takes no more. Most take less than two."""

CAP_SECONDS: Final = 1200.0
"""The time after which a process counts as hanging."""

Entry = tuple[str, str]
"""A kind and a name: operator, module or optimizer, or the checks of memory."""


class Process(NamedTuple):
    """A process that runs an operator."""

    number: int
    entry: Entry
    file: Path
    started: float


def start(database: Database, entry: Entry, file: Path) -> Process:
    """Fork the process of an operator, which writes a line for each outcome."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        return Process(number, entry, file, time.monotonic())
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        with file.open("w") as lines:
            for outcome in database.run(*entry):
                lines.write(json.dumps(outcome) + "\n")
                lines.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # without the ends of the parent's threads and files


def finish(process: Process, status: int | None) -> list[Outcome]:
    """Read the outcomes of a process that has ended, the last of which says how it failed, if it did."""
    lines = process.file.read_text().splitlines() if process.file.exists() else []
    outcomes = [Outcome(*json.loads(line)) for line in lines if line.endswith("]")]
    process.file.unlink(missing_ok=True)
    if status != 0:
        late = {None: f"took longer than {CAP_SECONDS:.0f} s", -signal.SIGKILL: f"took more than {CPU_SECONDS} s of a core"}
        kind, name = process.entry
        how = late.get(status, f"ended with status {status}")
        outcomes.append(Outcome("known" if kind == "operator" else kind, name, CRASHED, f"the process {how}", len(outcomes)))
    return outcomes


def run_all(database: Database, entries: Iterable[Entry], jobs: int) -> Iterator[tuple[Entry, list[Outcome]]]:
    """Run each entry in a process of its own, so many at a time."""
    waiting, running = collections.deque(entries), list[Process]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(database, waiting.popleft(), Path(folder, f"{len(waiting)}.jsonl")))
            for process in tuple(running):
                number, status = os.waitpid(process.number, os.WNOHANG)
                late = not number and time.monotonic() > process.started + CAP_SECONDS
                if late:
                    os.kill(process.number, signal.SIGKILL)
                    os.waitpid(process.number, 0)
                if late or number:
                    running.remove(process)
                    yield process.entry, finish(process, None if late else os.waitstatus_to_exitcode(status))
            time.sleep(0.01)


def emulated_h100() -> dict[str, str]:
    """Make the environment that `gputrain emulate` gives to a program."""
    torch, board = libraries.find_torch(), boards.board("h100")
    stand_ins = build.stand_ins(torch)
    kernels = boards.find_kernels(board, stand_ins.architectures, torch.version)
    environ = emulated_environment(os.environ, stand_ins, boards.describe(board, kernels=kernels, devices=1))
    paths = [str(STARTUP), str(ROOT), environ.get("PYTHONPATH", "")]
    return {**environ, TORCH: str(torch.folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def choose(database: Database, options: argparse.Namespace) -> list[Entry]:
    """Choose what runs."""
    entries = database.entries()
    if options.only:
        wanted = set(options.only)
        return [entry for entry in entries if ":".join(entry) in wanted or entry[0] in wanted]
    if options.sample:
        return sorted(random.Random(options.seed).sample(entries, min(options.sample, len(entries))))
    return entries


def run_or_resume(options: argparse.Namespace) -> list[Outcome]:
    """Run what is chosen and not yet in the file, and return the outcomes of both."""
    # Otherwise torch asks the driver whether there is a GPU, after which it forbids forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import operator_samples

    database = operator_samples.Database()
    gc.freeze()  # collecting takes long with so many objects, and none of these goes
    done: dict[Entry, list[Outcome]] = {}
    if options.resume is not None and options.resume.exists():
        for line in options.resume.read_text().splitlines():
            entry, found = json.loads(line)
            done[tuple(entry)] = [Outcome(*one) for one in found]
    chosen = choose(database, options)
    for entry, outcomes in run_all(database, [one for one in chosen if one not in done], options.jobs):
        done[entry] = outcomes
        if options.resume is not None:
            with options.resume.open("a") as lines:
                lines.write(json.dumps([entry, outcomes]) + "\n")
    return [outcome for entry in chosen for outcome in done[entry]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="run N operators, modules and optimizers that are drawn")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="what they are drawn by (default: 0)")
    parser.add_argument(
        "--only", nargs="+", metavar="KIND:NAME", help="run these alone, as operator:isin, or all of a kind: module"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at a time")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep the outcomes here, and run what it lacks")
    parser.add_argument(
        "--least", nargs="+", default=(), metavar="KIND=PERCENT", help="fail below these shares, as known=99.9"
    )
    options = parser.parse_args(arguments)
    if DEVICE not in os.environ:
        own = sys.argv[1:] if arguments is None else arguments
        os.execve(sys.executable, [sys.executable, os.path.abspath(__file__), *own], emulated_h100())
    outcomes = run_or_resume(options)
    print(table(outcomes))
    least = {kind: float(percent) for kind, _, percent in (one.partition("=") for one in options.least)}
    shares = {kind: share(one for one in outcomes if one.kind == kind) for kind in least}
    too_few = any(100 * agree < least[kind] * of for kind, (agree, of) in shares.items())
    return int(too_few or any(outcome.verdict == CRASHED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
