"""Queues the jobs of one pytest process: submits them in the order in which tests need them, and sees how each ends."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.execution.fleet.scheduler import (
    DELIVERY,
    ORDER,
    OUTPUT,
    Doing,
    Job,
    JobRefused,
    QueueFull,
    Scheduler,
    Unreachable,
)
from pytest_gputrain.records import Cause, Delivery, Lost, Order
from pytest_gputrain.records.node_protocol import write_record
from pytest_gputrain.utils.reading import UNREADABLE, read_message, tail
from pytest_gputrain.utils.signals import undisturbed
from pytest_gputrain.utils.units import format_seconds

LOOK_SECONDS: Final = 0.25
"""The pause between two looks for the delivery that a test waits for."""

ASK_SECONDS: Final = 4.0
"""The longest pause between two questions to the scheduler, and the pause between attempts to submit to a full queue."""

GRACE_SECONDS: Final = 75.0
"""The time from the end of a job until its delivery must be seen: network file systems look again after up to a minute."""

LEAST_WAITING: Final = 8
"""Jobs that may wait in the scheduler's queue however few run."""

_NOT_BEGUN: Final = ("waiting", "held")
_NOT_STARTED: Final[tuple[Cause, str]] = "not_scheduled", "{scheduler} did not start it within {waited}{why}; {held}"
_LOST: Final[dict[Doing, tuple[Cause, str]]] = {
    "waiting": _NOT_STARTED,
    "held": _NOT_STARTED,
    "node_died": ("node_died", "the node of {it} died{on_and_why}; pytest --lf runs it again"),
    "preempted": ("preempted", "{it} was ended for another job{on}{why}; pytest --lf runs it again"),
    "cancelled": ("cancelled", "{it} was cancelled{on}{why}; pytest --lf runs it again"),
    "forgotten": (
        "no_delivery",
        "{scheduler} does not know its job {number}{on} any more; there is no delivery, and it is not known how it ended; "
        "pytest --lf runs it again",
    ),
    "ended": ("no_delivery", "{it} ended{on}{why} without a delivery; {undelivered}"),
}
"""The cause and the sentence of an order that is lost, by what its job did last."""


@dataclass(eq=False, slots=True)
class _Ticket:
    """An order with its job and its outcome."""

    order: Order
    folder: Path
    job: str = ""
    """The id of the job; empty before it is submitted."""
    since: float = 0.0
    """The time when it was submitted, or began to wait again."""
    seen: Job | None = None
    """The scheduler's last answer."""
    ended: float | None = None
    outcome: Delivery | Lost | None = None


class Fleet:
    """Runs orders through a scheduler, as many at once as its queue should hold.

    Args:
        shared: folder that all machines see.
        most_jobs: the most jobs of this pytest process that the scheduler's queue is to hold.
        wait_seconds: how long a job may wait while no job of the fleet begins or ends.
        now, sleep: the clock, in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        shared: Path,
        *,
        most_jobs: int,
        wait_seconds: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scheduler = scheduler
        self._shared = shared
        self._folder: Path | None = None
        self._most_jobs = most_jobs
        self._wait_seconds = wait_seconds
        self._now = now
        self._sleep = sleep
        self._open: dict[bytes, deque[_Ticket]] = {}
        """Tickets that no test has taken yet, by order."""
        self._requested: Counter[bytes] = Counter()
        """How many tickets tests have taken, by order."""
        self._arrivals: deque[Order] = deque()
        self._to_submit: deque[_Ticket] = deque()
        self._live: list[_Ticket] = []
        self._dropped: list[str] = []
        """Jobs that were to be cancelled."""
        self._progress = now()
        """The time when a job last began, ended, or was taken by the scheduler."""
        self._refused: QueueFull | Unreachable | None = None
        self._silent_since: float | None = None
        self._ask_at = self._submit_at = -math.inf
        self._number = 0

    def expect(self, orders: Iterable[Order], *, soon: bool = False) -> None:
        """Announce orders that `run` will get. They are submitted one after the other, as the scheduler's queue has space.

        Args:
            soon: before those that were expected earlier.
        """
        tickets = [self._new_ticket(order) for order in orders]
        if soon:
            self._to_submit.extendleft(reversed(tickets))
        else:
            self._to_submit.extend(tickets)
        self.step()

    def ordered(self, order: Order) -> int:
        """Return how many runs of an order were expected or started, without those that were dropped."""
        key = _key(order)
        return self._requested[key] + len(self._open.get(key, ()))

    def arrived(self, order: Order) -> list[Delivery | Lost]:
        """Return the outcomes of those runs of an order that no test has taken yet. They end before the first run that is
        still open."""
        outcomes: list[Delivery | Lost] = []
        for ticket in self._open.get(_key(order), ()):
            if ticket.outcome is None:
                break
            outcomes.append(ticket.outcome)
        return outcomes

    def wait(self, order: Order) -> Iterator[Order]:
        """Wait until the outcome of an order is known, which `run` then returns.

        Yields:
            Other orders, when something comes of them that no test has taken.
        """
        key = _key(order)
        if not self._open.get(key):
            self._new_ticket(order)
        ticket = self._open[key][0]
        if not ticket.job and ticket.outcome is None:
            with contextlib.suppress(ValueError):
                self._to_submit.remove(ticket)
            self._to_submit.appendleft(ticket)  # a test waits for this one
        while True:
            self.step()
            while self._arrivals:
                arrived = _key(arrival := self._arrivals.popleft())
                if arrived != key and not self._requested[arrived]:
                    yield arrival
            if ticket.outcome is None and ticket.job:
                self._collect(ticket)
            if ticket.outcome is not None:
                return
            self._sleep(LOOK_SECONDS)

    def run(self, order: Order) -> Delivery | Lost:
        """Run an order, wait until its outcome is known, and return it."""
        key = _key(order)
        if not self._open.get(key) or self._open[key][0].outcome is None:
            for _ in self.wait(order):
                pass
        ticket = self._open[key].popleft()
        self._requested[key] += 1
        assert ticket.outcome is not None, "it was waited for"
        shutil.rmtree(ticket.folder, ignore_errors=True)
        return ticket.outcome

    def drop(self, order: Order) -> None:
        """Cancel the runs of this order that were expected and that no test has taken. Known outcomes are kept."""
        self._drop([_key(order)])

    def only(self, orders: Iterable[Order]) -> None:
        """Drop all other orders."""
        self._drop(self._open.keys() - {_key(order) for order in orders})

    def _drop(self, keys: Iterable[bytes]) -> None:
        dropped = set[_Ticket]()
        for key in keys:
            tickets = self._open.pop(key, deque())
            self._open[key] = deque(ticket for ticket in tickets if ticket.outcome is not None)
            dropped.update(ticket for ticket in tickets if ticket.outcome is None)
        if dropped:
            jobs = [ticket.job for ticket in dropped if ticket.job]
            self._dropped += jobs
            self._to_submit = deque(ticket for ticket in self._to_submit if ticket not in dropped)
            self._live = [ticket for ticket in self._live if ticket not in dropped]
            self._scheduler.cancel(jobs)

    def close(self) -> None:
        """Cancel all jobs that have not ended. Dropped jobs are cancelled again, because Ctrl-C or a silent scheduler may
        have prevented it."""
        jobs, self._live, self._dropped = [*(ticket.job for ticket in self._live), *self._dropped], [], []
        self._to_submit.clear()
        self._open.clear()
        if jobs:
            self._scheduler.cancel(jobs)
        self._scheduler.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def step(self) -> None:
        """Submit as many orders as the scheduler's queue has space for, and ask what the submitted jobs do."""
        now = self._now()
        if now >= self._ask_at:
            self._ask_at = now + min(ASK_SECONDS, self._scheduler.ask_seconds)
            self._ask()
        if now >= self._submit_at:
            self._submit()

    def _new_ticket(self, order: Order) -> _Ticket:
        self._number += 1
        if self._folder is None:
            self._shared.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="fleet-", dir=self._shared))
            self._folder.chmod(0o755)  # a job on a node may run as another user
        ticket = _Ticket(order, self._folder / str(self._number))
        self._open.setdefault(_key(order), deque()).append(ticket)
        return ticket

    def _submit(self) -> None:
        while self._to_submit and self._has_capacity():
            ticket = self._to_submit[0]
            try:
                with undisturbed():  # Nobody would cancel a job that the scheduler has taken and that is not noted here.
                    ticket.folder.mkdir(exist_ok=True)
                    write_record(ticket.folder / ORDER, ticket.order)
                    ticket.job = self._scheduler.submit(ticket.order, ticket.folder)
                    self._live.append(ticket)
            except OSError as error:
                self._to_submit.popleft()
                self._lose(ticket, "not_scheduled", f"its order cannot be written: {error}; see the folder of gpu_shared")
                continue
            except JobRefused as refusal:
                self._to_submit.popleft()
                self._lose(ticket, "not_scheduled", f"{refusal}; {self._scheduler.remedies['refused']}")
                continue
            except (QueueFull, Unreachable) as refusal:
                self._put_off(refusal)
                return
            self._to_submit.popleft()
            self._refused = None
            ticket.since = self._progress = self._now()

    def _has_capacity(self) -> bool:
        """Tell whether the scheduler's queue should hold another job.

        As many jobs may wait as run, which keeps the machines busy. If more waited, a test that needs a further run would
        wait for all cases of the tests after it. A held job does not count as waiting, because it must not keep others from
        their turn.
        """
        doing = Counter(ticket.seen.doing for ticket in self._live if ticket.seen is not None)
        most = doing["held"] + doing["running"] + max(doing["running"], LEAST_WAITING)
        return len(self._live) < min(self._most_jobs, most)

    def _put_off(self, refusal: QueueFull | Unreachable) -> None:
        """Wait before the next try to submit. If no job has begun or ended for too long, all waiting orders are lost."""
        now = self._now()
        self._submit_at = now + ASK_SECONDS
        if self._refused is None and not self._live:
            self._progress = now
        self._refused = refusal
        if now - self._progress < self._wait_seconds:
            return
        cause: Cause = "queue_full" if isinstance(refusal, QueueFull) else "unreachable"
        what = "takes no further job" if isinstance(refusal, QueueFull) else "does not answer"
        remedy = "a lower gpu_fleet_jobs submits fewer at once" if isinstance(refusal, QueueFull) else self._unreachable
        while self._to_submit:
            ticket = self._to_submit.popleft()
            self._lose(ticket, cause, f"{self._scheduler.name} {what} for {self._waited} ({refusal}); {remedy}")

    @property
    def _waited(self) -> str:
        return f"{format_seconds(self._wait_seconds)} (gpu_fleet_wait)"

    @property
    def _unreachable(self) -> str:
        return self._scheduler.remedies["unreachable"]

    def _ask(self) -> None:
        """Ask the scheduler what the jobs do."""
        if not self._live:
            return
        now = self._now()
        try:
            jobs = self._scheduler.jobs([ticket.job for ticket in self._live])
        except Unreachable as silence:
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since >= self._wait_seconds:
                for ticket in list(self._live):
                    sentence = f"{self._scheduler.name} does not answer for {self._waited} ({silence}); {self._unreachable}"
                    self._lose(ticket, "unreachable", sentence)
        else:
            self._silent_since = None
            for ticket in list(self._live):
                self._handle(ticket, jobs.get(ticket.job, Job("forgotten")))

    def _handle(self, ticket: _Ticket, job: Job) -> None:
        """Update a ticket by what its job does."""
        now, before = self._now(), ticket.seen
        if before is None or before.doing != job.doing:
            self._progress = now if job.doing not in _NOT_BEGUN else self._progress
            had_begun = before is not None and before.doing not in _NOT_BEGUN
            ticket.since = now if had_begun else ticket.since
        ticket.seen = job if job.host or before is None else job._replace(host=before.host)
        if not self._is_lost(ticket, job, now):
            return
        cause, sentence = _LOST[job.doing]
        host, scheduler = ticket.seen.host, self._scheduler.name
        found = ", ".join(filter(None, (host, job.why)))
        words: dict[str, str] = {
            **{str(name): remedy for name, remedy in self._scheduler.remedies.items()},
            "scheduler": scheduler,
            "number": ticket.job,
            "it": f"{scheduler}'s job {ticket.job}",
            "on": f" on {host}" if host else "",
            "why": f" ({job.why})" if job.why else "",
            "on_and_why": f" ({found})" if found else "",
            "waited": self._waited,
        }
        self._lose(ticket, cause, sentence.format_map(words))

    def _is_lost(self, ticket: _Ticket, job: Job, now: float) -> bool:
        """Tell whether a job is lost: it has waited for too long, or it has ended without a delivery."""
        if job.doing in _NOT_BEGUN:
            # While other jobs of this fleet begin or end, the queue moves, so a waiting job is not given up.
            since = max(ticket.since, self._progress) if job.doing == "waiting" else ticket.since
            if now - since < self._wait_seconds:
                return False
            self._scheduler.cancel([ticket.job])
            return True
        if job.doing == "running":
            return False
        self._collect(ticket)
        ticket.ended = now if ticket.ended is None else ticket.ended
        may_come = job.doing == "forgotten" or (job.doing == "ended" and not job.final)
        return ticket.outcome is None and not (may_come and now - ticket.ended < GRACE_SECONDS)

    def _collect(self, ticket: _Ticket) -> None:
        """Take the delivery of a job, if it is there."""
        try:
            delivery = msgspec.json.decode(read_message(ticket.folder / DELIVERY), type=Delivery)
        except OSError:  # The file is not there yet, or the network file system does not answer.
            return
        except UNREADABLE as error:
            self._lose(
                ticket, "no_delivery", f"its delivery cannot be read: {error}; do all machines have the same version?"
            )
            return
        self._progress = self._now()
        if delivery.unfit:
            sentence = f"the node {delivery.host.name} is not fit for it: {delivery.unfit}"
            self._lose(ticket, "unfit_node", f"{sentence}; {self._scheduler.remedies['refused']}")
        else:
            self._settle(ticket, delivery)

    def _lose(self, ticket: _Ticket, cause: Cause, sentence: str) -> None:
        host, output = ticket.seen.host if ticket.seen else "", tail(ticket.folder / OUTPUT)
        self._settle(ticket, Lost(cause=cause, sentence=sentence, job=ticket.job, host=host, detail=output))

    def _settle(self, ticket: _Ticket, outcome: Delivery | Lost) -> None:
        ticket.outcome = outcome
        self._arrivals.append(ticket.order)
        self._live = [live for live in self._live if live is not ticket]


def _key(order: Order) -> bytes:
    """Return a key that is the same for equal orders."""
    return msgspec.json.encode(order)
