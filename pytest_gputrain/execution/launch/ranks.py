"""Follows the ranks of a case until they have ended, and reads what each leaves in its folder as the case's reply."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from pytest_gputrain.execution.launch.merge import merge, merge_emulated
from pytest_gputrain.execution.launch.processes import Process
from pytest_gputrain.records import (
    FORMAT,
    Crashed,
    EmulatedRun,
    Event,
    Measurement,
    OutOfMemory,
    Phase,
    Reply,
    Served,
    TimedOut,
)
from pytest_gputrain.records.reply import UNPROFILED
from pytest_gputrain.utils.linux import oom_kills
from pytest_gputrain.utils.reading import TAIL_BYTES, UNREADABLE, opened, read_message, tail
from pytest_gputrain.utils.units import format_bytes, format_seconds

_OF_LIBRARIES: Final = re.compile(r"^Failed to load CPU gemm_4bit.*\n?", re.MULTILINE)
"""The line that bitsandbytes prints whenever it is imported on a CPU without an optional package."""
_POLL_SECONDS: Final = 0.02
_STACKS_SECONDS: Final = 1.0
_MOST_OUTPUT_BYTES: Final = 1 << 20
"""The most output of a worker that is kept; it is checked as often as its progress."""
_MOST_PROGRESS_BYTES: Final = 1 << 20
"""The most that is read at a time; a worker writes less than that in an hour."""
_AFTER_THE_STEPS: Final[frozenset[Phase]] = frozenset({"check", "profile", "reply"})
"""Phases in which to run out of memory says nothing of the steps, which have fitted."""
_SCARCE_BYTES: Final = 1 << 20
"""The free space below which a worker may not have been able to reply."""


class Rank:
    """One process of a case, and the folder that holds its files.

    Args:
        folder: the case's.
        process: starts rank number so-and-so of the case in that folder.
    """

    def __init__(self, number: int, folder: Path, process: Callable[[Path, int], Process]) -> None:
        self.number = number
        self.folder = folder / f"rank{number}"
        self.folder.mkdir(exist_ok=True)
        self.progress = _ProgressFile(self.folder / "progress.jsonl")
        self._outputs = [_Output(self.folder / name) for name in ("stdout.txt", "stderr.txt")]
        self._kills_before = oom_kills()
        self.process = process(folder, number)

    def failed(self) -> bool:
        """Tell whether the ended process left no figures, or did not fit its emulated GPU."""
        reply = self.reply()
        return not (reply.fits if isinstance(reply, EmulatedRun) else isinstance(reply, Measurement | Served))

    def failure_sort_key(self) -> tuple[bool, bool, int]:
        """Return the key that sorts failed ranks by how likely each is the cause of the others' failures.

        A rank that died without a word comes first, then one out of memory: others, who lose their partner, reply with an
        exception. Among equals the earlier.
        """
        reply = self.folder / "reply.json"
        written = reply.lstat().st_mtime_ns if os.path.lexists(reply) else 0
        return bool(written), not isinstance(self.reply(), OutOfMemory | EmulatedRun), written

    def reply(self) -> Reply | Served | EmulatedRun:
        """Return the reply that the ended process has written, or one that says how it ended."""
        self.progress.read()
        killed_for_memory = self.process.killed_for_memory(self._kills_before)
        output = "".join([*(output.end() for output in self._outputs), tail(self.folder / "stacks.txt")])
        return _read_reply(self.folder, self.process.poll() or 0, self.progress.last, killed_for_memory, output)

    def figures(self) -> Measurement | Served | EmulatedRun | None:
        """Return what the rank measured, even if it failed afterwards; None if it failed before."""
        with contextlib.suppress(*UNREADABLE, OSError):
            return msgspec.json.decode(read_message(self.folder / "figures.json"), type=Measurement | Served | EmulatedRun)
        return None

    def limit_output(self) -> None:
        """Empty the files that the worker prints to if they have grown too long."""
        for output in self._outputs:
            output.limit()

    def stacks(self) -> str:
        """Return the running worker's Python stacks; empty if it does not answer."""
        path = self.folder / "stacks.txt"
        self.process.ask_for_stacks()
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline and not tail(path):
            self.limit_output()
            time.sleep(_POLL_SECONDS)
        time.sleep(_POLL_SECONDS)
        return tail(path)


def follow(
    ranks: Sequence[Rank],
    timeout_seconds: float,
    watch: Callable[[Event], None],
    *,
    trouble: Callable[[], Crashed | None] = lambda: None,
    grace_seconds: float = 0.0,
) -> EmulatedRun | Reply:
    """Wait until the ranks have ended, and return the reply of the case. If one rank fails, the case fails, because the
    others would wait for that rank.

    Args:
        timeout_seconds: the seconds from now on after which the case is ended.
        watch: called with every progress event of the first rank.
        trouble: called again and again; returns a reason to end the case that no rank reports, or None.
        grace_seconds: time after the first bad news in which worse may come: of several ranks that fail, the cause need not
            be the first one heard of.
    """
    began = time.monotonic()
    over = math.inf
    cause: Crashed | None = None
    while True:
        ended = [rank for rank in ranks if rank.process.poll() is not None]
        # The events are read after looking which ranks have ended. Otherwise the last events of a rank would be lost.
        for event in ranks[0].progress.read():
            watch(event)
        for rank in ranks:
            rank.limit_output()
        failed = [rank for rank in ended if rank.failed()]
        wrong = trouble()
        now = time.monotonic()
        if over == math.inf and (failed or wrong):
            # The first failure is the cause, and what follows is its consequence.
            over, cause = now + grace_seconds, wrong
        if len(ended) == len(ranks) or now >= over:
            break
        if now >= began + timeout_seconds:
            return _with_figures(timed_out(ranks, timeout_seconds), ranks)
        time.sleep(_POLL_SECONDS)
    for event in ranks[0].progress.read():
        watch(event)
    if cause and len(ended) < len(ranks):
        return _with_figures(cause, ranks)
    if failed:
        first = min(failed, key=Rank.failure_sort_key)
        reply = first.reply()
        assert not isinstance(reply, Served)
        if isinstance(reply, EmulatedRun):
            note = f"rank {first.number} does not fit, and the others were ended"
            return msgspec.structs.replace(reply, notes=(*reply.notes, note)) if len(ranks) > 1 else reply
        return _with_figures(reply if len(ranks) == 1 else msgspec.structs.replace(reply, rank=first.number), ranks)
    return _merged([rank.reply() for rank in ranks])


def _merged(replies: Sequence[Reply | Served | EmulatedRun]) -> Measurement | EmulatedRun:
    emulated = [reply for reply in replies if isinstance(reply, EmulatedRun)]
    return merge_emulated(emulated) if emulated else merge(replies)


def _with_figures(reply: Reply, ranks: Sequence[Rank]) -> Reply:
    """Add what was measured to the reply of a failed case, if all of its ranks had measured before.

    A case that failed in its last steps, under a profiler, has passed all checks, and lacks nothing but GPU seconds.
    """
    if not isinstance(reply, Crashed | TimedOut):
        return reply
    measured = [figures for rank in ranks if (figures := rank.figures()) is not None]
    if not measured or len(measured) < len(ranks):
        return reply
    merged = _merged(measured)
    if reply.phase == "profile" and isinstance(merged, Measurement):
        why = reply.sentence if isinstance(reply, Crashed) else f"it did not end in {format_seconds(reply.timeout_seconds)}"
        return msgspec.structs.replace(merged, notes=(*merged.notes, f"{UNPROFILED} ({why})"))
    return msgspec.structs.replace(reply, measured=merged)


_COMPILERS: Final = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/async_compile.py", " in compile_fx_inner")
"""Files and a function that are on the stack while `torch.compile` compiles, and not while compiled code runs."""


def timed_out(ranks: Sequence[Rank], timeout_seconds: float) -> TimedOut:
    """Return the reply of a case that timed out. The stacks of its ranks show which rank waits for which."""
    stacks = {rank.number: rank.stacks() for rank in ranks}
    for rank in ranks:
        rank.progress.read()
    last = ranks[0].progress.last
    several = len(ranks) > 1
    detail = "\n".join(f"rank {number}:\n{text}" if several else text for number, text in stacks.items())
    # The import of torch also has files of its compiler on the stack, without compiling anything.
    compiles = last.phase != "import" and any(files in detail for files in _COMPILERS)
    advice = ", and torch.compile was compiling" if compiles else ""
    return TimedOut(timeout_seconds=timeout_seconds, phase=last.phase, step=last.step, detail=detail, advice=advice)


def _read_reply(
    folder: Path, exit_code: int, last: Event, killed_for_memory: bool, output: str
) -> Reply | Served | EmulatedRun:
    """Return the reply that the ended process has written, or one made from its exit code and its output.

    Args:
        output: the end of what it printed.
    """

    def crashed(sentence: str) -> Crashed:
        return Crashed(sentence=sentence, phase=last.phase, step=last.step, detail=output, exit_code=exit_code)

    reply_file = folder / "reply.json"
    if os.path.lexists(reply_file):
        try:
            data = read_message(reply_file)
            if (version := msgspec.json.decode(data, type=_Versioned).format) != FORMAT:
                return crashed(
                    f"the worker's reply has format {version}, this version reads format {FORMAT}: the worker imports "
                    "another pytest-gputrain than pytest does; look at PYTHONPATH"
                )
            reply = msgspec.json.decode(data, type=Reply | Served | EmulatedRun)
        except (OSError, *UNREADABLE) as error:
            return crashed(f"the worker's reply cannot be read: {getattr(error, 'strerror', error)}")
        if exit_code != 0:
            return crashed(f"the worker replied, then ended {exit_text(exit_code)}")
        # The traceback comes last, because a long detail is shown by its end.
        return msgspec.structs.replace(reply, detail=output + reply.detail) if isinstance(reply, Crashed) else reply
    if killed_for_memory and last.phase in _AFTER_THE_STEPS:
        return crashed("the kernel's OOM killer ended the worker after its timed steps")
    if killed_for_memory:
        return OutOfMemory(where="host", phase=last.phase, step=last.step, message="killed by the kernel's OOM killer")
    why = ""
    with contextlib.suppress(OSError):  # The folder may be gone.
        free = shutil.disk_usage(folder).free
        why = f"; {format_bytes(free)} is free in {folder.parent.parent}" if free < _SCARCE_BYTES else ""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and exit_code in (1, -signal.SIGXFSZ):
        why += f"; files may have at most {format_bytes(most)} here (ulimit -f), which may be too little for its reply"
    return crashed(f"the worker ended {exit_text(exit_code)} without a reply{why}")


class _Versioned(Struct):
    format: int = FORMAT


def exit_text(exit_code: int) -> str:
    """Return a description of how a process ended."""
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    try:
        return f"by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"by signal {-exit_code}"


class _Output:
    """A file that a worker prints to. Only its end is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = ""

    def limit(self) -> None:
        """Empty the file if it has grown too long, and remember its end."""
        with contextlib.suppress(OSError):  # The file may not be there yet.
            # `lstat` takes a link as it is, so no other file is emptied.
            if self._path.lstat().st_size > _MOST_OUTPUT_BYTES:
                self._before = tail(self._path)
                os.truncate(self._path, 0)

    def end(self) -> str:
        """Return the end of the output, without lines of libraries that have nothing to do with the case."""
        return _OF_LIBRARIES.sub("", (self._before + tail(self._path)))[-TAIL_BYTES:]


class _ProgressFile:
    """Reads what has been added to the progress file; a line still being written waits for the next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.last = Event(phase="start")

    def read(self) -> list[Event]:
        try:
            with opened(self._path) as file:
                file.seek(self._offset)
                data = file.read(_MOST_PROGRESS_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == _MOST_PROGRESS_BYTES:  # A line of this length is no event, and is skipped.
            whole = data
        self._offset += len(whole)
        events = []
        for line in whole.splitlines():
            with contextlib.suppress(*UNREADABLE):
                events.append(msgspec.json.decode(line, type=Event))
        if events:
            self.last = events[-1]
        return events
