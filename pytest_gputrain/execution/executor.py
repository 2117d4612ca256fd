"""Runs cases in fresh processes of this machine and keeps their replies; `fleet.executor` runs them elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.execution.local import LocalMachine, describe_refusal
from pytest_gputrain.execution.resume import ResumedReplies, ResumedReport
from pytest_gputrain.gate import contention
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.gate.scaling import one_worker
from pytest_gputrain.hardware.devices import HardwareError
from pytest_gputrain.hardware.machine import Machine
from pytest_gputrain.records import Case, Conditions, Event, Host, Measurement, OutOfMemory, Reply, Scale, Task
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.utils.errors import BadCase

Watch = Callable[[Case, Event, int], None]
"""Called with each progress event of a case and the number of its fresh process, from 1."""


class ExpectedRuns(NamedTuple):
    """Runs that tests will ask for, which a fleet may begin before they do."""

    suite: str
    task: Task
    runs: int
    """In all, those that are there already included."""
    soon: bool = False
    """Whether they go before the runs of other cases."""


def conditions_of(settings: Settings) -> Conditions:
    """The options that decide how a case runs, wherever it does."""
    return Conditions(
        platform=settings.platform,
        gpu_ids=settings.gpu_ids,
        timeout_seconds=settings.timeout_seconds,
        foreign=settings.foreign,
        shared=str(settings.shared),
        rendezvous=settings.rendezvous,
    )


class Executor:
    """Measures cases for one pytest process; a case is measured once however many tests ask for it."""

    def __init__(
        self,
        settings: Settings,
        resumed_report: ResumedReport | None = None,
        environment: SessionEnvironment | None = None,
    ) -> None:
        """
        Args:
            environment: the variables of the session; those of this moment by default.
        """
        self.settings = settings
        self._resumed_report = resumed_report
        self.watch: Watch = lambda case, event, run: None
        self.fork_server = ForkServer() if settings.isolation == "auto" else None
        self.environment = environment or SessionEnvironment()
        self._local_machine = LocalMachine(conditions_of(settings), self.fork_server, self.environment.began)
        self.expected_runs: Callable[[], Iterable[ExpectedRuns]] = tuple
        """Returns all runs that tests will ask for; a fleet begins with them."""
        self.further_runs: Callable[[Task, Sequence[Reply], Host], Iterable[ExpectedRuns]] = lambda task, replies, host: ()
        """Returns the runs that follow from the first replies of a task on a host."""
        self._replies: dict[bytes, tuple[Reply, ...]] = {}

    @property
    def machine(self) -> Machine:
        """The machine of the cases, detected when the first case asks: collecting needs no driver.

        Raises:
            BadCase: the hardware is not what the options ask for.
        """
        try:
            return self._local_machine.machine
        except HardwareError as error:
            raise BadCase(str(error)) from None

    @property
    def host(self) -> Host:
        """The machine that cases are selected for.

        Raises:
            BadCase: as `machine`.
        """
        return self.machine.host

    def host_of(self, task: Task, inline: bool = False) -> Host:
        """The machine that runs ``task``.

        Raises:
            BadCase: as `machine`.
        """
        return self.host

    def expect(self, task: Task, runs: int, *, soon: bool = False) -> None:
        """Take notice that so many replies will be asked for: a fleet begins with all of them.

        Args:
            soon: before those of other tasks.
        """

    def drop(self, task: Task) -> None:
        """Take notice that no more replies will be asked for, or none soon."""

    def only(self, tasks: Iterable[Task]) -> None:
        """Take notice that replies of other tasks will not be asked for."""

    def close(self) -> None:
        """End what was kept running for the cases to come."""
        if self.fork_server is not None:
            self.fork_server.close()

    def with_steps(self, case: Case) -> Case:
        """Give the case the steps and the warm-up that the options set."""
        steps, warmup = self.settings.steps, self.settings.warmup
        return case.replace(steps=case.steps if steps is None else steps, warmup=case.warmup if warmup is None else warmup)

    def task(
        self, case: Case, module: str, *, growth_bytes: int = 0, inline: bool = False, prefetched: bool = False
    ) -> Task:
        """Make the task of a case, as its test wants it run.

        Args:
            growth_bytes: that the test allows own code to keep more of after every round.
            prefetched: no test has asked for it yet.

        Raises:
            BadCase: as `in_environment`.
        """
        task = Task(
            case=case,
            scale=self.scale(),
            device_type=self.host.device_type,
            processes=self.processes(case.gpus),
            servers=self.processes(case.servers),
            root=str(self.settings.root),
            module=module,
            import_paths=tuple(path for path in sys.path if path),
            growth_bytes=growth_bytes,
        )
        return self.in_environment(task, inline=inline, prefetched=prefetched)

    def in_environment(self, task: Task, *, inline: bool = False, prefetched: bool = False) -> Task:
        """Add to the task what its test has changed in the environment.

        Raises:
            BadCase: a variable is no text, which is how it travels.
        """
        variables = self.environment.changes(task, inline=inline, prefetched=prefetched)
        for name, value in variables.items():
            try:
                f"{name}{value}".encode()
            except UnicodeEncodeError:
                readable_name = name.encode(errors="backslashreplace").decode()
                raise BadCase(
                    f"{task.case} was not measured: its test sets the environment variable {readable_name}, which is not "
                    "UTF-8; set it before pytest starts"
                ) from None
        return msgspec.structs.replace(task, variables=variables)

    def measure(
        self, task: Task, inline: bool, builder: Any, runs: int, before: tuple[Reply, ...] = ()
    ) -> tuple[Reply, ...]:
        """Run fresh processes until there are at least so many replies, fewer only where one gave no figures.

        Args:
            before: replies of the same test that are there already.

        Raises:
            BadCase: no process can be started.
        """
        case, identity = task.case, identity_of(task, inline)
        # An inline function has no address to be known by again.
        earlier = before or (() if builder is not None else self._replies.get(identity, ()))
        earlier = earlier or self.resumed(task, inline, builder).replies
        replies = list(earlier)
        while len(replies) < runs and all(isinstance(reply, Measurement | OutOfMemory) for reply in replies):
            try:
                replies.append(self._launch(task, inline, builder, len(replies) + 1))
            except OSError as error:
                raise BadCase(describe_refusal(case, error)) from None
        if builder is None and len(replies) > len(earlier):
            self._replies[identity] = tuple(replies)
        return tuple(replies)

    def resumed(self, task: Task, inline: bool, builder: Any = None) -> ResumedReplies:
        """The replies that an earlier report has of the case, where one is resumed."""
        if self._resumed_report is None or builder is not None:
            return ResumedReplies()
        return self._resumed_report.of(task, inline=inline, host=self.host, nodes=self.nodes(task.case))

    def with_one_worker(self, task: Task, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], str]:
        """Add to each reply of the case what one worker alone takes in a fresh process, or say why that is not known.

        No reason where the case itself has no figures.
        """
        if not all(isinstance(reply, Measurement) for reply in replies):
            return replies, ""
        case, alone = task.case, self.alone(task)
        known_seconds = self.resumed(task, False).one_worker_seconds
        completed = [
            msgspec.structs.replace(reply, one_worker_seconds=seconds)
            for reply, seconds in zip(replies, known_seconds, strict=False)
        ]
        rest = replies[len(completed) :]
        for reply, single in zip(rest, self.measure(alone, False, None, len(rest)) if rest else (), strict=False):
            if not isinstance(single, Measurement):
                return replies, f"one worker alone {describe_failure(single)}"
            seconds = single.update_seconds(case.gradient_accumulation)
            if seconds is None:
                return replies, f"{len(single.step_seconds)} steps hold no whole update of {case.gradient_accumulation}"
            holders = tuple(dict.fromkeys((*reply.holders, *contention.holders_of(single))))  # type: ignore[union-attr]
            completed.append(msgspec.structs.replace(reply, one_worker_seconds=seconds, holders=holders))
        return tuple(completed), ""

    def alone(self, task: Task) -> Task:
        """One worker of the task, to compare several with."""
        case = one_worker(task.case)
        return msgspec.structs.replace(task, case=case, processes=self.processes(case.gpus))

    def _launch(self, task: Task, inline: bool, builder: Any, run: int) -> Reply:
        def watch(event: Event) -> None:
            self.watch(task.case, event, run)

        return self._local_machine.run(task, nodes=self.nodes(task.case), inline=inline, builder=builder, watch=watch)

    def processes(self, declared: int) -> int:
        """How many processes a case takes: on a CPU a parallelism is exercised, not measured, and fewer show as much."""
        return declared if self.host.gpus else min(declared, self.settings.processes)

    def nodes(self, case: Case) -> int:
        """How many nodes the case takes: as many as have its GPUs, or on a CPU as many as the option allows."""
        if gpus_of_host := self.host.gpus:
            return math.ceil(case.gpus / gpus_of_host)
        return 1 if case.servers else min(self.settings.nodes, self.processes(case.gpus))

    def scale(self) -> Scale:
        """The scale of the models."""
        if self.settings.scale != "auto":
            return self.settings.scale
        return "full" if self.host.gpus else "tiny"
