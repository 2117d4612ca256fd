"""Defines what runs the tasks of a session. A session has one: `local`, `fleet.executor` or `emulated`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.records import Case, Conditions, Event, Host, Task
from pytest_gputrain.utils.errors import BadCase

Watch = Callable[[Event], None]
"""Called with each progress event of a run."""
ReplyT = TypeVar("ReplyT")


class WantedRuns(NamedTuple):
    """Runs of a task that tests will need."""

    suite: str
    task: Task
    runs: int
    """The number of runs in all, including those already requested."""
    soon: bool = False
    """Whether they go before the runs of other tasks."""


class Executor(abc.ABC, Generic[ReplyT]):
    """Runs tasks in fresh processes. Only a fleet starts runs before `run` is called, so `want`, `drop` and `only` do
    nothing in other executors."""

    is_remote = False
    """Whether the runs are done on other machines, of which nothing is known before."""

    @property
    @abc.abstractmethod
    def host(self) -> Host:
        """The machine that cases are selected for.

        Raises:
            BadCase: the hardware is not what the options ask for.
        """

    @abc.abstractmethod
    def run(self, task: Task, *, watch: Watch, inline: bool = False, builder: Any = None) -> ReplyT:
        """Run the task once, and return its reply.

        Args:
            inline: run in this process.
            builder: the user's function itself, for an inline run that has no address.

        Raises:
            BadCase: no process can be started, or the devices cannot be had.
        """

    def host_of(self, task: Task) -> Host:
        """Return the machine of the task's first run that has arrived; before that, the machine that cases are selected
        for."""
        return self.host

    def want(self, wanted: Iterable[WantedRuns]) -> None:
        """Start these runs, except for runs that are done or running already."""

    def wait(self, task: Task) -> Iterator[Task]:
        """Wait until the next run of the task has ended. Yield each other task of which a run ends meanwhile."""
        return iter(())

    def arrived(self, task: Task) -> list[ReplyT | None]:
        """Return the task's replies that no test has taken yet, in the order of its runs, up to the first unfinished run.

        A run that its machine refused has None.
        """
        return []

    def drop(self, task: Task) -> None:
        """Cancel the runs of the task that no test has taken."""

    def only(self, tasks: Iterable[Task]) -> None:
        """Cancel the runs of all other tasks."""

    def close(self) -> None:
        """End the processes that were kept for later cases."""


def conditions_of(settings: Settings) -> Conditions:
    """Return the options that decide how a case runs, on this machine or in a job."""
    return Conditions(
        platform=settings.platform,
        gpu_ids=settings.gpu_ids,
        timeout_seconds=settings.timeout_seconds,
        foreign=settings.foreign,
        shared=str(settings.shared),
        rendezvous=settings.rendezvous,
    )


def refuse_other_device(case: Case, first: Host, other: Host) -> None:
    """Raise an error if the runs of a case had different kinds of GPU.

    Raises:
        BadCase: the machines are different ones, and their figures say nothing of each other.
    """
    if first.device != other.device:
        raise BadCase(
            f"{case} ran on {first.device} ({first.name}) and on {other.device} ({other.name}), which cannot be "
            f"compared; choose one kind of {first.platform} with gpu_fleet_args"
        )


def not_started(case: Case, error: OSError) -> BadCase:
    """Return the refusal of a case whose process could not be started."""
    return BadCase(
        f"{case} was not measured, because its process could not be started: {error}; check the free space of the folder "
        "for temporary files (TMPDIR) and the limits of this user (ulimit -a)"
    )
