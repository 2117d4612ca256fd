"""Defines the records that come back from a case's processes: events while they run, and the reply at their end."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from pytest_gputrain.records.emulated import EmulatedRun
from pytest_gputrain.records.measurement import Environment, Holder, Measurement
from pytest_gputrain.records.whole import Whole

Phase = Literal["start", "import", "build", "count", "warmup", "measure", "evaluate", "save", "check", "profile", "reply"]
"""The activity of a process of a case. ``count`` is the pass that counts allocations, and ``save`` saves a checkpoint."""
UNPROFILED: Final = "without GPU seconds, because a step under torch's profiler failed"
"""The beginning of a note. Before the phase ``profile`` a case has all its other figures, and has passed its checks."""


class Event(Struct, frozen=True, kw_only=True):
    """One line of the progress file."""

    phase: Phase
    step: Whole | None = None
    """Timed steps finished."""
    step_seconds: float | None = None
    allocated_bytes: Whole | None = None
    at: float | None = None
    """The time on the host's monotonic clock when a phase begins."""


class Served(Struct, frozen=True, kw_only=True, tag="served", tag_field="outcome"):
    """The reply of a parameter server, which takes no steps."""

    updates: Whole
    rows: Whole
    model_bytes: Whole
    """The memory of its tables' rows, without optimizer states."""
    peak_allocated_bytes: Whole
    peak_host_bytes: Whole


class OutOfMemory(Struct, frozen=True, kw_only=True, tag="out_of_memory", tag_field="outcome"):
    """The case does not fit. This can be a baseline, and it fails a test whose baseline did fit."""

    where: Literal["device", "host"]
    """The kind of memory that ran out."""
    phase: Phase
    """The activity of the process."""
    message: str
    """The allocator's own sentence."""
    step: Whole | None = None
    """The timed step, if one had begun."""
    rank: Whole | None = None
    """The one of several processes that ran out of memory."""
    peak_allocated_bytes: Whole | None = None
    """The highest sum of live tensor storages until then."""
    free_bytes: Whole | None = None
    """Free memory on the fullest of the case's GPUs before the case started."""
    other_processes: Whole | None = None
    """The number of other processes that computed on the case's GPUs before the case started."""
    holders: tuple[Holder, ...] = ()
    """The other processes on the case's GPUs before it started, and memory in use that no process seems to own."""
    environment: Environment | None = None
    """The machine and the software of the process."""


class Crashed(Struct, frozen=True, kw_only=True, tag="crashed", tag_field="outcome"):
    """No valid result: an exception, a failed check, a signal, or a reply that cannot be read."""

    sentence: str
    """A sentence that says what happened."""
    phase: Phase
    """The activity of the process."""
    step: Whole | None = None
    """The timed step, if one had begun."""
    detail: str = ""
    """The traceback, or the end of the worker's stderr."""
    exit_code: Whole | None = None
    """The exit status of the process."""
    refused: bool = False
    """Whether nothing broke, but a check found that the case is not what it claims to be."""
    rank: Whole | None = None
    """The one of several processes that crashed."""
    measured: Measurement | EmulatedRun | None = None
    """The figures of the timed steps, if the case failed after them. They are shown, and never judged or recorded."""


class TimedOut(Struct, frozen=True, kw_only=True, tag="timed_out", tag_field="outcome"):
    """The case was ended because it took too long."""

    timeout_seconds: float
    """The time that it had."""
    phase: Phase
    """The activity of the process."""
    step: Whole | None = None
    """The timed step, if one had begun."""
    detail: str = ""
    """The Python stacks of the worker at the end, if it could still give them."""
    advice: str = ""
    """Advice, in addition to more time."""
    measured: Measurement | EmulatedRun | None = None
    """The figures of the timed steps, as in `Crashed`."""


Cause = Literal[
    "node_died", "preempted", "cancelled", "not_scheduled", "queue_full", "no_delivery", "unfit_node", "unreachable"
]
"""Why a fleet did not run a case to its end."""


class Lost(Struct, frozen=True, kw_only=True, tag="lost", tag_field="outcome"):
    """Slurm or Ray did not run the case to its end. The code is not to blame, and nothing is known of the case."""

    cause: Cause
    """Why."""
    sentence: str
    """A sentence that says what happened and what to do."""
    job: str = ""
    """The scheduler's id of the job. Empty if it took none."""
    host: str = ""
    """The machine that ran it, as far as known."""
    detail: str = ""
    """The end of the job's output."""


Reply = Measurement | OutOfMemory | Crashed | TimedOut | Lost

Failure = Literal["out_of_memory", "crashed", "timed_out", "lost"]


def failure_of(reply: OutOfMemory | Crashed | TimedOut | Lost) -> Failure:
    """Return the kind of failure of a run without figures, in one word: the reply's tag in files."""
    match reply:
        case OutOfMemory():
            return "out_of_memory"
        case TimedOut():
            return "timed_out"
        case Crashed():
            return "crashed"
        case Lost():
            return "lost"
