"""Runs cases as jobs of a fleet's scheduler, for a pytest process that stays where it was started."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.execution.executor import Executor, WantedRuns, Watch, conditions_of, refuse_other_device
from pytest_gputrain.execution.fleet.job_queue import Fleet
from pytest_gputrain.execution.fleet.scheduler import Scheduler
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.hardware import catalog
from pytest_gputrain.records import Delivery, Host, Lost, Measurement, Order, OutOfMemory, Reply, Task
from pytest_gputrain.utils.errors import BadCase

CPUS_OF_A_GPU: Final = 4
"""CPUs that are requested for each process that trains on a GPU: it loads and compiles on more than one thread."""


def scheduler_of(settings: Settings, platform: str) -> Scheduler:
    """Make the scheduler of ``--gpu-executor``.

    Raises:
        ValueError: it is not there; the sentence to say so.
    """
    arguments = [argument for marker, group in settings.fleet_args if marker in ("", platform) for argument in group]
    if settings.fleet == "ray":
        from pytest_gputrain.execution.fleet.ray import Ray

        return Ray(arguments)
    from pytest_gputrain.execution.fleet.slurm import Slurm

    return Slurm(arguments)


class FleetExecutor(Executor[Reply]):
    """Runs each run of a case as a job of a fleet.

    Args:
        platform: catalog marker of the machines.
        seconds_of: about what a run of a task of a suite takes, 0 if that is not known: the longest are submitted first.
    """

    is_remote = True

    def __init__(
        self,
        settings: Settings,
        platform: str,
        scheduler: Scheduler,
        seconds_of: Callable[[str, Task], float] = lambda suite, task: 0.0,
    ) -> None:
        self._seconds_of = seconds_of
        gpus = 0 if platform == catalog.CPU else settings.fleet_gpus
        # Only the reply of a job tells which kind of H100 it ran on.
        self._requested = Host(name="", platform=platform, device=catalog.slug(platform), gpus=gpus)
        self._conditions = msgspec.structs.replace(conditions_of(settings), platform=platform)
        self._fleet = Fleet(
            scheduler, settings.shared, most_jobs=settings.fleet_jobs, wait_seconds=settings.fleet_wait_seconds
        )
        self._hosts: dict[bytes, Host] = {}
        """The first that ran each task."""
        self._firsts: dict[bytes, Task] = {}

    @property
    def host(self) -> Host:
        return self._requested

    def host_of(self, task: Task) -> Host:
        first = (outcome.host for outcome in self._fleet.arrived(self._order(task)) if isinstance(outcome, Delivery))
        return self._hosts.get(identity_of(task)) or next(first, self._requested)

    def run(self, task: Task, *, watch: Watch, inline: bool = False, builder: Any = None) -> Reply:
        order = self._order(task)
        try:
            with _shared():
                outcome = self._fleet.run(order)
            reply = self._reply(task, outcome)
        except BadCase:
            self._fleet.drop(order)
            raise
        if not isinstance(reply, Measurement | OutOfMemory):
            self._fleet.drop(order)  # Further runs of this case are not needed.
        return reply

    def want(self, wanted: Iterable[WantedRuns]) -> None:
        """Submit these runs: those that are wanted soon in their order, and all others by their duration, the longest
        first."""
        orders: list[tuple[float, int, Order]] = []
        with _shared():
            for suite, task, runs, soon in wanted:
                order = self._order(task)
                missing = runs - self._fleet.ordered(order)
                if soon:
                    self._fleet.expect([order] * missing, soon=True)
                    continue
                seconds = self._seconds_of(suite, task)
                # Runs of different cases alternate, and the case that has most work left comes first.
                orders += [(left * seconds, left, order) for left in range(1, missing + 1)]
            self._fleet.expect(order for _, _, order in sorted(orders, key=lambda entry: entry[:2], reverse=True))

    def wait(self, task: Task) -> Iterator[Task]:
        with _shared():
            for order in self._fleet.wait(self._order(task)):
                yield order.task

    def arrived(self, task: Task) -> list[Reply | None]:
        outcomes = self._fleet.arrived(self._order(task))
        return [outcome.reply if isinstance(outcome, Delivery) else outcome for outcome in outcomes]

    def drop(self, task: Task) -> None:
        self._fleet.drop(self._order(task))

    def only(self, tasks: Iterable[Task]) -> None:
        self._fleet.only(map(self._order, tasks))

    def close(self) -> None:
        self._fleet.close()

    def _reply(self, task: Task, outcome: Delivery | Lost) -> Reply:
        """Return the task's reply from the outcome of its job.

        Raises:
            BadCase: the node refused the case, or is another one than an earlier run's.
        """
        if isinstance(outcome, Lost):
            return outcome
        if outcome.reply is None:
            raise BadCase(f"{outcome.refusal} (on {outcome.host.name})")
        refuse_other_device(task.case, self._hosts.setdefault(identity_of(task), outcome.host), outcome.host)
        return outcome.reply

    def _order(self, task: Task) -> Order:
        # Equal tasks have the same figures. So a second case with an equal task gets the runs of the first one.
        task = self._firsts.setdefault(identity_of(task), task)
        gpus = min(task.case.gpus, self._requested.gpus)
        return Order(
            task=task,
            conditions=self._conditions,
            gpus=gpus,
            cpus=gpus * max(CPUS_OF_A_GPU, 1 + task.case.loader_workers) + math.ceil(task.servers / task.nodes)
            if gpus
            else math.ceil(task.cores / task.nodes),
        )


@contextlib.contextmanager
def _shared() -> Iterator[None]:
    """Provide a context that turns errors of the folder that all machines share into one sentence.

    Raises:
        BadCase: instead of what the folder that all machines share raises.
    """
    try:
        yield
    except OSError as error:
        raise BadCase(f"the folder of gpu_shared cannot be used: {error}; name one that this machine can write to") from None
