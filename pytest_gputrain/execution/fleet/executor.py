"""Runs cases as jobs of a fleet's scheduler, for a pytest process that stays where it was started."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.execution.executor import Executor, conditions_of
from pytest_gputrain.execution.fleet.job_queue import Fleet
from pytest_gputrain.execution.fleet.scheduler import Scheduler
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.resume import ResumedReplies, ResumedReport
from pytest_gputrain.hardware import catalog
from pytest_gputrain.hardware.machine import Machine
from pytest_gputrain.records import Case, Delivery, Host, Lost, Measurement, Order, OutOfMemory, Reply, Task
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.utils.errors import BadCase

CPUS_OF_A_GPU: Final = 4
"""CPUs that are requested for each process that trains on a GPU: it loads and compiles on more than one thread."""


def scheduler_of(settings: Settings, platform: str) -> Scheduler:
    """The scheduler of ``--gpu-executor``.

    Raises:
        ValueError: it is not there; the sentence to say so.
    """
    arguments = [argument for marker, group in settings.fleet_args if marker in ("", platform) for argument in group]
    if settings.fleet == "ray":
        from pytest_gputrain.execution.fleet.ray import Ray

        return Ray(arguments)
    from pytest_gputrain.execution.fleet.slurm import Slurm

    return Slurm(arguments)


class FleetExecutor(Executor):
    """Has every run of a case done somewhere in a fleet.

    Args:
        platform: catalog marker of the machines.
        seconds_of: about what a run of a task of a suite takes, 0 where that is not known: the longest are submitted first.
    """

    def __init__(
        self,
        settings: Settings,
        platform: str,
        scheduler: Scheduler,
        seconds_of: Callable[[str, Task], float] = lambda suite, task: 0.0,
        resumed_report: ResumedReport | None = None,
        environment: SessionEnvironment | None = None,
    ) -> None:
        super().__init__(settings, resumed_report, environment)
        self._began = False
        self._seconds_of = seconds_of
        gpus = 0 if platform == catalog.CPU else settings.fleet_gpus
        # What kind of H100 it is, its delivery will tell.
        self._requested = Host(name="", platform=platform, device=catalog.slug(platform), gpus=gpus)
        self._conditions = msgspec.structs.replace(conditions_of(settings), platform=platform)
        self._fleet = Fleet(
            scheduler,
            settings.shared,
            most_jobs=settings.fleet_jobs,
            wait_seconds=settings.fleet_wait_seconds,
            on_arrival=self._look_ahead,
        )
        self._hosts: dict[bytes, Host] = {}
        """The first that ran each task."""
        self._firsts: dict[bytes, Task] = {}

    @property
    def machine(self) -> Machine:
        raise BadCase(
            "the scheduler of --gpu-executor runs cases on other machines than this one; deselect what needs a GPU here"
        )

    @property
    def host(self) -> Host:
        return self._requested

    def host_of(self, task: Task, inline: bool = False) -> Host:
        if inline:
            raise BadCase(
                f"{task.case} runs inline, in the pytest process, and the scheduler of --gpu-executor runs cases elsewhere; "
                "deselect its test"
            )
        self.measure(task, False, None, 1)
        return self._hosts.get(identity_of(task), self._requested)

    def expect(self, task: Task, runs: int, *, soon: bool = False) -> None:
        if all(isinstance(reply, Measurement | OutOfMemory) for reply in self.measure(task, False, None, 1)):
            with _shared():
                self._fleet.expect(self._missing(task, runs), soon=soon)

    def drop(self, task: Task) -> None:
        self._fleet.drop(self._order(task))

    def only(self, tasks: Iterable[Task]) -> None:
        self._fleet.only(map(self._order, tasks))

    def resumed(self, task: Task, inline: bool, builder: Any = None) -> ResumedReplies:
        resumed = super().resumed(task, inline, builder)
        if resumed.host is not None:
            self._hosts.setdefault(identity_of(task), resumed.host)
        return resumed

    def with_one_worker(self, task: Task, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], str]:
        if all(isinstance(reply, Measurement) for reply in replies):
            rest = len(replies) - len(self.resumed(task, False).one_worker_seconds)
            with _shared():
                self._fleet.expect(self._missing(self.alone(task), rest), soon=True)
        beside, why_not = super().with_one_worker(task, replies)
        alone = self._hosts.get(identity_of(self.alone(task)))
        if not why_not and alone is not None:
            self._check_device(task.case, self._hosts[identity_of(task)], alone)
        return beside, why_not

    def close(self) -> None:
        super().close()
        self._fleet.close()

    def _launch(self, task: Task, inline: bool, builder: Any, run: int) -> Reply:
        order = self._order(task)
        try:
            with _shared():
                self._begin()
                outcome = self._fleet.run(order)
            reply = self._reply(task, outcome)
        except BadCase:
            self._fleet.drop(order)
            raise
        if not isinstance(reply, Measurement | OutOfMemory):
            self._fleet.drop(order)  # what was to follow
        elif run == 1:
            with _shared():
                self._look_ahead(order, reply)
        return reply

    def _reply(self, task: Task, outcome: Delivery | Lost) -> Reply:
        """
        Raises:
            BadCase: the node refused the case, or is another one than an earlier run's.
        """
        if isinstance(outcome, Lost):
            return outcome
        if outcome.reply is None:
            raise BadCase(f"{outcome.refusal} (on {outcome.host.name})")
        first = self._hosts.setdefault(identity_of(task), outcome.host)
        self._check_device(task.case, first, outcome.host)
        return outcome.reply

    def _begin(self) -> None:
        """Submit what tests will ask for, the longest first, or else in turn: they find it done, or under way."""
        if self._began:
            return
        self._began = True
        orders: list[tuple[float, int, Order]] = []
        prefetched = list(self.expected_runs())
        for suite, task, runs, _ in prefetched:
            seconds = self._seconds_of(suite, task)
            # Several runs of a case count as long as those that are left, which spreads them among those of other cases.
            orders += [
                (runs_left * seconds, runs_left, order) for runs_left, order in enumerate(self._missing(task, runs), 1)
            ]
        self._fleet.expect(order for _, _, order in sorted(orders, key=lambda entry: entry[:2], reverse=True))
        for _, task, _, _ in prefetched:
            if self.resumed(task, False).replies:
                self._look_ahead(self._order(task))

    def _look_ahead(self, order: Order, *asked: Reply) -> None:
        """Submit what the first runs of an order make tests ask for, before they do.

        Args:
            asked: what came of one that a test has asked for, and does not have yet.
        """
        resumed, outcomes = self.resumed(order.task, False), self._fleet.arrived(order)
        first = next((outcome.host for outcome in outcomes if isinstance(outcome, Delivery)), self._requested)
        host = self._hosts.get(identity_of(order.task), first)
        replies = [
            *resumed.replies,
            *asked,
            *(outcome.reply if isinstance(outcome, Delivery) else outcome for outcome in outcomes),
        ]
        if not replies:  # a later run came before the first
            return
        figures = [reply for reply in replies if isinstance(reply, Measurement | OutOfMemory)]
        if len(figures) < len(replies):  # no test asks for more
            self._fleet.drop(order)
            figures = []
        for _, task, runs, soon in self.further_runs(order.task, figures, host):
            self._fleet.expect(self._missing(task, runs), soon=soon)

    def _missing(self, task: Task, runs: int) -> list[Order]:
        """Orders of the runs that are neither there nor under way."""
        order = self._order(task)
        return [order] * (runs - len(self.resumed(task, False).replies) - self._fleet.ordered(order))

    def _order(self, task: Task) -> Order:
        # Figures are shared by what a task is; so must the runs be, by whichever of its names it is asked for.
        task = self._firsts.setdefault(identity_of(task), task)
        nodes = self.nodes(task.case)
        processes = math.ceil((task.processes + task.servers) / nodes)
        gpus = min(task.case.gpus, self._requested.gpus)
        return Order(
            task=task,
            conditions=self._conditions,
            nodes=nodes,
            gpus=gpus,
            cpus=gpus * CPUS_OF_A_GPU + math.ceil(task.servers / nodes) if gpus else processes,
        )

    def _check_device(self, case: Case, first: Host, other: Host) -> None:
        """Raises:
        BadCase: they are different ones, and their figures say nothing of each other.
        """
        if first.device != other.device:
            raise BadCase(
                f"{case} ran on {first.device} ({first.name}) and on {other.device} ({other.name}), whose figures say "
                f"nothing of each other; have gpu_fleet_args ask for one kind of {self._requested.platform}"
            )


@contextlib.contextmanager
def _shared() -> Iterator[None]:
    """
    Raises:
        BadCase: instead of what the folder that all machines share raises.
    """
    try:
        yield
    except OSError as error:
        raise BadCase(f"the folder of gpu_shared cannot be used: {error}; name one that this machine can write to") from None
