"""The ranks of a case: what each leaves in its folder while it runs and when it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.launch.processes import Process
from pytest_gputrain.records import Crashed, Event, Measurement, OutOfMemory, Prediction, Reply, Served, TimedOut

_POLL_SECONDS: Final = 0.02
_STACKS_SECONDS: Final = 1.0
_TAIL_BYTES: Final = 8_000


class Rank:
    """One process of a case and the folder that it leaves its traces in.

    Args:
        folder: the case's.
        process: starts rank number so-and-so of the case in that folder.
    """

    def __init__(self, number: int, folder: Path, process: Callable[[Path, int], Process]) -> None:
        self.number = number
        self.folder = folder / f"rank{number}"
        self.folder.mkdir()
        self.progress = _ProgressFile(self.folder / "progress.jsonl")
        self._kills_before = _kernel_oom_kills()
        self.process = process(folder, number)

    def failed(self) -> bool:
        """Whether the ended process left no figures."""
        return not isinstance(self.reply(), Measurement | Served | Prediction)

    def order(self) -> tuple[bool, bool, int]:
        """Sorts failed ranks by how likely each is the cause of the others' failures.

        A rank that died without a word comes first, then one out of memory: others, who lose their partner, reply with an
        exception. Among equals the earlier.
        """
        reply = self.folder / "reply.json"
        written = reply.stat().st_mtime_ns if reply.exists() else 0
        return bool(written), not isinstance(self.reply(), OutOfMemory), written

    def reply(self) -> Reply | Served | Prediction:
        """What the ended process left behind."""
        self.progress.read()
        return _read_reply(self.folder, self.process.poll() or 0, self.progress.last, self._kills_before)

    def stacks(self) -> str:
        """The running worker's Python stacks; empty where it does not answer."""
        path = self.folder / "stacks.txt"
        self.process.ask_for_stacks()
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline and not _tail(path):
            time.sleep(_POLL_SECONDS)
        time.sleep(_POLL_SECONDS)
        return _tail(path)


def timed_out(ranks: Sequence[Rank], timeout_seconds: float) -> TimedOut:
    """The reply for ranks that are all alive or have measured; their stacks tell who waits for whom."""
    stacks = {rank.number: rank.stacks() for rank in ranks}
    for rank in ranks:
        rank.progress.read()
    last = ranks[0].progress.last
    several = len(ranks) > 1
    detail = "\n".join(f"rank {number}:\n{text}" if several else text for number, text in stacks.items())
    return TimedOut(timeout_seconds=timeout_seconds, phase=last.phase, step=last.step, detail=detail)


def _read_reply(folder: Path, exit_code: int, last: Event, kills_before: int) -> Reply | Served | Prediction:
    """What the ended process left behind, as a reply."""

    output = "".join(_tail(folder / name) for name in ("stdout.txt", "stderr.txt", "stacks.txt"))

    def crashed(sentence: str) -> Crashed:
        return Crashed(sentence=sentence, phase=last.phase, step=last.step, detail=output, exit_code=exit_code)

    reply_file = folder / "reply.json"
    if reply_file.exists():
        try:
            reply: Reply | Served | Prediction = msgspec.json.decode(
                reply_file.read_bytes(), type=Reply | Served | Prediction
            )
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
