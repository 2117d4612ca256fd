"""The fresh processes of cases, on this machine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.launch.fork_server import Preloaded
from pytest_gputrain.execution.local import Here, refused
from pytest_gputrain.execution.resume import Resumption, Taken
from pytest_gputrain.gate import contention
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.gate.scaling import one_worker
from pytest_gputrain.hardware.devices import HardwareError
from pytest_gputrain.hardware.machine import Machine
from pytest_gputrain.records import Case, Conditions, Event, Host, Measurement, OutOfMemory, Reply, Scale, Task
from pytest_gputrain.records.settings import Settings
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.spill import Cabinet

Watch = Callable[[Case, Event, int], None]
"""Called with what a case does, and in which of its fresh processes, from 1."""


class Foreseen(NamedTuple):
    """Runs that tests will ask for."""

    suite: str
    task: Task
    runs: int
    """In all, those that there are included."""
    soon: bool = False
    """Whether they go before the runs of other cases."""


def conditions_of(settings: Settings) -> Conditions:
    """What the options say of how a case runs, wherever it does."""
    return Conditions(
        platform=settings.platform,
        gpu_ids=settings.gpu_ids,
        timeout_seconds=settings.timeout_seconds,
        foreign=settings.foreign,
        shared=str(settings.shared),
        rendezvous=settings.rendezvous,
    )


class Bench:
    """Measures cases for one pytest process; a case is measured once however many tests ask for it."""

    def __init__(self, settings: Settings, resumption: Resumption | None = None) -> None:
        self.settings = settings
        self._resumption = resumption
        self.watch: Watch = lambda case, event, run: None
        self.preloaded = Preloaded() if settings.isolation == "auto" else None
        self.environment = SessionEnvironment()
        self._here = Here(conditions_of(settings), self.preloaded, self.environment.began)
        self.ahead: Callable[[], Iterable[Foreseen]] = tuple
        """What tests will ask for, for a fleet, which begins with all of it."""
        self.foresee: Callable[[Task, Sequence[Reply], Host], Iterable[Foreseen]] = lambda task, replies, host: ()
        """And what the first replies of a task, which the host gave, add to that."""
        self._replies: Cabinet[bytes, tuple[Reply, ...]] = Cabinet(tuple[Reply, ...])

    @property
    def machine(self) -> Machine:
        """Found out when the first case asks: collecting needs no driver.

        Raises:
            BadCase: the hardware is not what the options ask for.
        """
        try:
            return self._here.machine
        except HardwareError as error:
            raise BadCase(str(error)) from None

    @property
    def host(self) -> Host:
        """What cases are selected for.

        Raises:
            BadCase: as `machine`.
        """
        return self.machine.host

    def place(self, task: Task, inline: bool = False) -> Host:
        """The machine that the figures of ``task`` are of.

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
        if self.preloaded is not None:
            self.preloaded.close()

    def with_steps(self, case: Case) -> Case:
        steps, warmup = self.settings.steps, self.settings.warmup
        return case.replace(steps=case.steps if steps is None else steps, warmup=case.warmup if warmup is None else warmup)

    def task(self, case: Case, module: str, *, growth_bytes: int = 0, inline: bool = False, foreseen: bool = False) -> Task:
        """
        Args:
            growth_bytes: that the test allows own code to keep more of after every round.
            foreseen: no test has asked for it yet.

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
        return self.in_environment(task, inline=inline, foreseen=foreseen)

    def in_environment(self, task: Task, *, inline: bool = False, foreseen: bool = False) -> Task:
        """The task with what its test has changed in the environment.

        Raises:
            BadCase: a variable is no text, which is how it travels.
        """
        variables = self.environment.changes(task, inline=inline, foreseen=foreseen)
        for name, value in variables.items():
            try:
                f"{name}{value}".encode()
            except UnicodeEncodeError:
                told = name.encode(errors="backslashreplace").decode()
                raise BadCase(
                    f"{task.case} was not measured: its test sets the environment variable {told}, which is not UTF-8; set "
                    "it before pytest starts"
                ) from None
        return msgspec.structs.replace(task, variables=variables)

    def measure(
        self, task: Task, inline: bool, builder: Any, runs: int, before: tuple[Reply, ...] = ()
    ) -> tuple[Reply, ...]:
        """Replies of at least so many fresh processes, fewer only where one gave no figures.

        Args:
            before: replies of the same test that are there already.

        Raises:
            BadCase: no process can be started.
        """
        case, identity = task.case, identity_of(task, inline)
        # An inline function has no address to be known by again.
        known = before or (() if builder is not None else self._replies.get(identity, ()))
        known = known or self.taken(task, inline, builder).replies
        replies = list(known)
        while len(replies) < runs and all(isinstance(reply, Measurement | OutOfMemory) for reply in replies):
            try:
                replies.append(self._launch(task, inline, builder, len(replies) + 1))
            except OSError as error:
                raise BadCase(refused(case, error)) from None
        if builder is None and len(replies) > len(known):
            self._replies[identity] = tuple(replies)
        return tuple(replies)

    def taken(self, task: Task, inline: bool, builder: Any = None) -> Taken:
        """What an earlier report has of the case, where one is resumed."""
        if self._resumption is None or builder is not None:
            return Taken()
        return self._resumption.of(task, inline=inline, host=self.host, nodes=self.nodes(task.case))

    def beside_one_worker(self, task: Task, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], str]:
        """The case's replies, each with what one worker alone takes in a fresh process, or why that is not known.

        No reason where the case itself has no figures.
        """
        if not all(isinstance(reply, Measurement) for reply in replies):
            return replies, ""
        case, alone = task.case, self.alone(task)
        known = self.taken(task, False).one_worker_seconds
        beside = [
            msgspec.structs.replace(reply, one_worker_seconds=seconds)
            for reply, seconds in zip(replies, known, strict=False)
        ]
        rest = replies[len(beside) :]
        for reply, one in zip(rest, self.measure(alone, False, None, len(rest)) if rest else (), strict=False):
            if not isinstance(one, Measurement):
                return replies, f"one worker alone {describe_failure(one)}"
            seconds = one.update_seconds(case.gradient_accumulation)
            if seconds is None:
                return replies, f"{len(one.step_seconds)} steps hold no whole update of {case.gradient_accumulation}"
            holders = tuple(dict.fromkeys((*reply.holders, *contention.holders_of(one))))  # type: ignore[union-attr]
            beside.append(msgspec.structs.replace(reply, one_worker_seconds=seconds, holders=holders))
        return tuple(beside), ""

    def alone(self, task: Task) -> Task:
        """One worker of the task, to compare several with."""
        case = one_worker(task.case)
        return msgspec.structs.replace(task, case=case, processes=self.processes(case.gpus))

    def _launch(self, task: Task, inline: bool, builder: Any, run: int) -> Reply:
        def watch(event: Event) -> None:
            self.watch(task.case, event, run)

        return self._here.run(task, nodes=self.nodes(task.case), inline=inline, builder=builder, watch=watch)

    def processes(self, declared: int) -> int:
        """On a CPU a parallelism is exercised rather than measured: fewer processes show as much."""
        return declared if self.host.gpus else min(declared, self.settings.processes)

    def nodes(self, case: Case) -> int:
        """That the case takes: as many as have its GPUs, or on a CPU as many as the option allows."""
        if here := self.host.gpus:
            return math.ceil(case.gpus / here)
        return 1 if case.servers else min(self.settings.nodes, self.processes(case.gpus))

    def scale(self) -> Scale:
        if self.settings.scale != "auto":
            return self.settings.scale
        return "full" if self.host.gpus else "tiny"
