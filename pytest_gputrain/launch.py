"""A task in, a reply out: the case runs in fresh processes, one a rank, and whatever becomes of them is a reply.

The ranks of a case are started directly: that gives a true exit code for each, and half the start-up time of torchrun. They
meet through a file in the case's folder, so no port is taken that another case might want.

Not covered: several nodes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.findings import Rank
from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.records import Crashed, Event, Measurement, OutOfMemory, Reply, Task, TimedOut

_POLL_SECONDS: Final = 0.02
_STACKS_SECONDS: Final = 1.0
_TAIL_BYTES: Final = 8_000

Watch = Callable[[Event], None]


def in_process(task: Task, *, gpus: Sequence[Gpu], timeout_seconds: float, watch: Watch = lambda event: None) -> Reply:
    """Run ``task`` in processes of its own, one a rank.

    Args:
        gpus: the only GPUs the processes will see; none hides them all.
        timeout_seconds: the processes and their children are killed after this time.
        watch: called with every progress event of the first rank, on this thread.
    """
    if "GPUTRAIN_PARENT" in os.environ:
        raise RuntimeError("a worker of pytest-gputrain must not start workers: do not measure at a module's top level")
    folder = Path(tempfile.mkdtemp(prefix="gputrain-"))
    try:
        (folder / "case.json").write_bytes(msgspec.json.encode(task))
        return _run(task, folder, _environment(task, gpus), timeout_seconds, watch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def inline(task: Task, builder: Any = None) -> Reply:
    """Run ``task`` in this process, for closures and debuggers: imports torch here, shares its state, knows no time-out."""
    import gc

    import torch

    from pytest_gputrain.worker.progress import Progress
    from pytest_gputrain.worker.run import run

    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    try:
        return run(task, Progress(None), builder)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
        gc.unfreeze()


def _run(task: Task, folder: Path, environment: Mapping[str, str], timeout_seconds: float, watch: Watch) -> Reply:
    deadline = time.monotonic() + timeout_seconds
    ranks: list[_Rank] = []
    try:
        ranks += [_Rank(number, folder, environment) for number in range(task.processes)]
        while True:
            for event in ranks[0].progress.read():
                watch(event)
            ended = [rank for rank in ranks if rank.process.poll() is not None]
            # One rank's end ends the others: they would wait for it until the time-out.
            failed = [rank for rank in ended if rank.failed()]
            if failed or len(ended) == len(ranks):
                break
            if time.monotonic() >= deadline:
                return _timed_out(ranks, timeout_seconds)
            time.sleep(_POLL_SECONDS)
    finally:
        for rank in ranks:
            _kill(rank.process)
    for event in ranks[0].progress.read():
        watch(event)
    if failed:
        first = min(failed, key=_Rank.order)
        return first.reply() if len(ranks) == 1 else msgspec.structs.replace(first.reply(), rank=first.number)
    return merge([rank.reply() for rank in ranks])


def _timed_out(ranks: Sequence[_Rank], timeout_seconds: float) -> TimedOut:
    """The reply for ranks that are all alive or have measured; their stacks tell who waits for whom."""
    stacks = {rank.number: _ask_for_stacks(rank.process, rank.folder / "stacks.txt") for rank in ranks}
    for rank in ranks:
        rank.progress.read()
    last = ranks[0].progress.last
    several = len(ranks) > 1
    detail = "\n".join(f"rank {number}:\n{text}" if several else text for number, text in stacks.items())
    return TimedOut(timeout_seconds=timeout_seconds, phase=last.phase, step=last.step, detail=detail)


class _Rank:
    """One process of a case and the folder that it leaves its traces in."""

    def __init__(self, number: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.number = number
        self.folder = folder / f"rank{number}"
        self.folder.mkdir()
        self.progress = _ProgressFile(self.folder / "progress.jsonl")
        self._kills_before = _kernel_oom_kills()
        with open(self.folder / "stdout.txt", "wb") as stdout, open(self.folder / "stderr.txt", "wb") as stderr:
            # -P: a file of the user's named like one of the standard library must not shadow it inside `import torch`.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pytest_gputrain.worker", str(folder), str(number)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )

    def failed(self) -> bool:
        """Whether the ended process left no measurement."""
        return not isinstance(self.reply(), Measurement)

    def order(self) -> tuple[bool, bool, int]:
        """Sorts failed ranks by how likely each is the cause of the others' failures.

        A rank that died without a word comes first, then one out of memory: others, who lose their partner, reply with an
        exception. Among equals the earlier.
        """
        reply = self.folder / "reply.json"
        written = reply.stat().st_mtime_ns if reply.exists() else 0
        return bool(written), not isinstance(self.reply(), OutOfMemory), written

    def reply(self) -> Reply:
        """What the ended process left behind."""
        self.progress.read()
        return _read_reply(self.folder, self.process.returncode, self.progress.last, self._kills_before)


def merge(replies: Sequence[Reply]) -> Reply:
    """The measurements of all ranks, in their order, as the case's."""
    measured = [reply for reply in replies if isinstance(reply, Measurement)]
    if len(measured) == 1:
        return measured[0]
    first = measured[0]
    slowest = zip(*(reply.step_seconds for reply in measured), strict=True)
    slowest_warmup = zip(*(reply.warmup_seconds for reply in measured), strict=True)
    return msgspec.structs.replace(
        first,
        step_seconds=tuple(map(max, slowest)),
        warmup_seconds=tuple(map(max, slowest_warmup)),
        losses=tuple(sum(step) / len(measured) for step in zip(*(reply.losses for reply in measured), strict=False)),
        batch_size=sum(reply.batch_size for reply in measured),
        peak_allocated_bytes=max(reply.peak_allocated_bytes for reply in measured),
        peak_reserved_bytes=_largest(reply.peak_reserved_bytes for reply in measured),
        device_used_bytes=_largest(reply.device_used_bytes for reply in measured),
        peak_host_bytes=sum(reply.peak_host_bytes for reply in measured),
        flops_per_step=_total(reply.flops_per_step for reply in measured),
        recomputed_flops_per_step=_total(reply.recomputed_flops_per_step for reply in measured),
        own_seconds=(),
        ranks=tuple(
            Rank(
                step_seconds=reply.step_seconds,
                peak_allocated_bytes=reply.peak_allocated_bytes,
                peak_reserved_bytes=reply.peak_reserved_bytes,
                peak_host_bytes=reply.peak_host_bytes,
                own_seconds=reply.own_seconds,
            )
            for reply in measured
        ),
    )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _read_reply(folder: Path, exit_code: int, last: Event, kills_before: int) -> Reply:
    """What the ended process left behind, as a reply."""

    output = "".join(_tail(folder / name) for name in ("stdout.txt", "stderr.txt", "stacks.txt"))

    def crashed(sentence: str) -> Crashed:
        return Crashed(sentence=sentence, phase=last.phase, step=last.step, detail=output, exit_code=exit_code)

    reply_file = folder / "reply.json"
    if reply_file.exists():
        try:
            reply: Reply = msgspec.json.decode(reply_file.read_bytes(), type=Reply)
        except msgspec.DecodeError as error:
            return crashed(f"the worker's reply cannot be read: {error}")
        if exit_code != 0:
            return crashed(f"the worker replied, then ended {_exit_text(exit_code)}")
        # The traceback last: it is what the end of a long detail should show.
        return msgspec.structs.replace(reply, detail=output + reply.detail) if isinstance(reply, Crashed) else reply
    if exit_code == -signal.SIGKILL and _kernel_oom_kills() > kills_before:
        return OutOfMemory(where="host", phase=last.phase, step=last.step, message="killed by the kernel's OOM killer")
    return crashed(f"the worker ended {_exit_text(exit_code)} without a reply")


def _exit_text(exit_code: int) -> str:
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    try:
        return f"by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"by signal {-exit_code}"


def _environment(task: Task, gpus: Sequence[Gpu]) -> dict[str, str]:
    """The worker's environment variables: this process's, with what must not vary fixed."""
    environment = dict(os.environ)
    visible = ",".join(gpu.uuid for gpu in gpus)
    # Left over from a launcher that pytest itself runs under, they would confuse the ranks.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    environment |= {
        "GPUTRAIN_PARENT": str(os.getpid()),
        "CUDA_VISIBLE_DEVICES": visible,
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        # The interpreter's folder holds the tools of its environment (ninja), whether or not that is activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")]),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not task.case.code:
        # The zoo's models are built, never fetched; an attempt to reach a hub would only cost its time-out.
        environment["HF_HUB_OFFLINE"] = "1"
    if task.device_type == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return environment


class _ProgressFile:
    """Reads what has been added to the progress file; a line still being written waits for the next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.last = Event(phase="start")

    def read(self) -> list[Event]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for line in whole.splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                events.append(msgspec.json.decode(line, type=Event))
        if events:
            self.last = events[-1]
        return events


def _ask_for_stacks(process: subprocess.Popen[bytes], path: Path) -> str:
    """The worker's Python stacks, by its faulthandler; empty where it does not answer."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < deadline and not _tail(path):
        time.sleep(_POLL_SECONDS)
    time.sleep(_POLL_SECONDS)
    return _tail(path)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the worker and what it started.

    Not covered: a grandchild in a session of its own whose parent, the worker, has ended by itself.
    """
    import psutil

    family: list[Any] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    # The group's id is the worker's; it stays taken as long as any process of the group lives.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def _kernel_oom_kills() -> int:
    """How often this host's kernel killed a process for memory since it started."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as lines:
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
