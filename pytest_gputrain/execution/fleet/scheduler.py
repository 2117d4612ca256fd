"""Defines what a fleet asks of a scheduler. Each scheduler translates its own words into these once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from pytest_gputrain.records import Order

SPARE_SECONDS: Final = 600.0
"""The time that a job may run beyond the limit of its case: to start, to wait for devices, to end."""

Doing = Literal["waiting", "held", "running", "ended", "node_died", "preempted", "cancelled", "forgotten"]
"""The state of a job.

waiting     its turn has not come, or its machines are busy
held        something else than its turn keeps it from starting; it may never start
running     on its nodes, or about to leave them
ended       by itself, whether well or not
node_died   it was running on a node that is gone
preempted   ended for another job
cancelled   ended by the scheduler or by somebody, for another reason
forgotten   the scheduler does not know it, or not any more
"""


class Job(NamedTuple):
    """What a scheduler reports of a job."""

    doing: Doing
    why: str = ""
    """The scheduler's own words for it: a reason, an exit code."""
    host: str = ""
    """The node of the job; empty if it is not known."""
    final: bool = False
    """Whether the job has ended and a missing delivery cannot come any more."""


class QueueFull(Exception):
    """The scheduler takes no job at the moment, because its queue is full. The message is the scheduler's own."""


class JobRefused(Exception):
    """The scheduler refuses this job. The message is the scheduler's own."""


class Unreachable(Exception):
    """The scheduler does not answer; the message says what happened instead."""


class Scheduler(Protocol):
    """Submits jobs to a scheduler and asks what they do. Only one thread calls it."""

    name: str
    """The name of the scheduler in sentences."""
    ask_seconds: float
    """Least time between questions: how often the scheduler may be asked."""
    remedies: Mapping[Literal["held", "refused", "unreachable", "undelivered"], str]
    """The remedies for jobs that do not start, are not taken, nobody answers for, or end without a delivery: ends of
    sentences."""

    def submit(self, order: Order, folder: Path) -> str:
        """Have ``python -P -m pytest_gputrain.execution.fleet.job folder`` run once, on the first of as many nodes as the
        order takes, with the GPUs and CPUs that it takes of each.

        Args:
            folder: shared by all machines. It holds the order; the delivery has to appear in it, whole, before the job
                ends. What the job writes to its standard streams belongs into `OUTPUT` there.

        Returns:
            What the scheduler calls the job.

        Raises:
            QueueFull, JobRefused, Unreachable: the job was not taken.
        """

    def jobs(self, ids: Sequence[str]) -> Mapping[str, Job]:
        """Return what each of these jobs does; one that the scheduler has forgotten is left out.

        Raises:
            Unreachable
        """

    def cancel(self, ids: Sequence[str]) -> None:
        """End these jobs without waiting. Jobs that have ended or cannot be reached are ignored."""

    def close(self) -> None:
        """Disconnect from the scheduler. By now every job has ended or is cancelled."""


ORDER, DELIVERY, OUTPUT = "order.json", "delivery.json", "output.txt"
"""Files in the folder of a job."""
