"""The machine, and the fresh processes that are started on it for cases."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pytest_gputrain import launch
from pytest_gputrain.hardware import nvidia, topology
from pytest_gputrain.hardware.devices import Gpu, HardwareError
from pytest_gputrain.hardware.lease import lease, lease_cores
from pytest_gputrain.hardware.machine import Machine, detect
from pytest_gputrain.records import Case, Event, Measurement, OutOfMemory, Reply, Scale, Task
from pytest_gputrain.scaling import one_worker
from pytest_gputrain.sentences import describe_failure
from pytest_gputrain.settings import Settings

Watch = Callable[[Case, Event, int], None]
"""Called with what a case does, and in which of its fresh processes, from 1."""


class BadCase(Exception):
    """The case makes no sense, or what it needs is broken; the sentence to fail with."""


class Bench:
    """Measures cases for one pytest process; a case is measured once however many tests ask for it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.watch: Watch = lambda case, event, run: None
        self._machine: Machine | None = None
        self.preloaded = launch.Preloaded() if settings.isolation == "auto" else None
        self._replies: dict[bytes, tuple[Reply, ...]] = {}

    @property
    def machine(self) -> Machine:
        """Found out when the first case asks: collecting needs no driver.

        Raises:
            BadCase: the hardware is not what the options ask for.
        """
        if self._machine is None:
            try:
                self._machine = detect(platform=self.settings.platform, gpu_ids=self.settings.gpu_ids)
            except HardwareError as error:
                raise BadCase(str(error)) from None
        return self._machine

    def close(self) -> None:
        """End what was kept running for the cases to come."""
        if self.preloaded is not None:
            self.preloaded.close()

    def with_steps(self, case: Case) -> Case:
        steps, warmup = self.settings.steps, self.settings.warmup
        return case.replace(steps=case.steps if steps is None else steps, warmup=case.warmup if warmup is None else warmup)

    def task(self, case: Case, module: str) -> Task:
        return Task(
            case=case,
            scale=self.scale(),
            device_type=self.machine.device_type,
            processes=self.processes(case.gpus),
            servers=self.processes(case.servers),
            root=str(self.settings.root),
            module=module,
            import_paths=tuple(path for path in sys.path if path),
        )

    def measure(
        self, task: Task, inline: bool, builder: Any, runs: int, before: tuple[Reply, ...] = ()
    ) -> tuple[Reply, ...]:
        """Replies of at least so many fresh processes, fewer only where one gave no figures.

        Args:
            before: replies of the same test that are there already.
        """
        case = task.case
        identity = msgspec.json.encode((case.identity(), case.steps, case.warmup, task.scale, task.curve, inline))
        # An inline function has no address to be known by again.
        replies = list(before or (() if builder is not None else self._replies.get(identity, ())))
        while len(replies) < runs and all(isinstance(reply, Measurement | OutOfMemory) for reply in replies):
            replies.append(self._launch(task, inline, builder, len(replies) + 1))
        self._replies[identity] = tuple(replies)
        return self._replies[identity]

    def beside_one_worker(self, task: Task, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], str]:
        """The case's replies, each with what one worker alone takes in a fresh process, or why that is not known.

        No reason where the case itself has no figures.
        """
        if not all(isinstance(reply, Measurement) for reply in replies):
            return replies, ""
        case = one_worker(task.case)
        alone = msgspec.structs.replace(task, case=case, processes=self.processes(case.gpus))
        beside = []
        for reply, one in zip(replies, self.measure(alone, False, None, len(replies)), strict=False):
            if not isinstance(one, Measurement):
                return replies, f"one worker alone {describe_failure(one)}"
            seconds = one.update_seconds(case.gradient_accumulation)
            if seconds is None:
                return replies, f"{len(one.step_seconds)} steps hold no whole update of {case.gradient_accumulation}"
            beside.append(msgspec.structs.replace(reply, one_worker_seconds=seconds))
        return tuple(beside), ""

    def _launch(self, task: Task, inline: bool, builder: Any, run: int) -> Reply:
        def watch(event: Event) -> None:
            self.watch(task.case, event, run)

        visible = self.machine.gpus
        nodes = self.nodes(task.case)
        count = min(task.case.gpus, len(visible)) if visible else task.processes + task.servers
        with _lent(visible[:1] if inline else visible, count) as gpus:
            between, before = topology.paths(gpus), nvidia.occupancy(gpus)
            if inline:
                reply = launch.inline(task, builder)
            elif nodes > 1:
                cluster = launch.Cluster(nodes=nodes, shared=self.settings.shared, rendezvous=self.settings.rendezvous)
                reply = launch.on_nodes(
                    task, gpus=gpus, timeout_seconds=self.settings.timeout_seconds, cluster=cluster, watch=watch
                )
            else:
                reply = launch.in_process(
                    task,
                    gpus=gpus,
                    timeout_seconds=self.settings.timeout_seconds,
                    watch=watch,
                    preloaded=self.preloaded,
                )
            return _with_hardware(reply, gpus[0].driver, between, before) if gpus else reply

    def processes(self, declared: int) -> int:
        """On a CPU a parallelism is exercised rather than measured: fewer processes show as much."""
        return declared if self.machine.gpus else min(declared, self.settings.processes)

    def nodes(self, case: Case) -> int:
        """That the case takes: as many as have its GPUs, or on a CPU as many as the option allows."""
        if self.machine.gpus:
            return math.ceil(case.gpus / len(self.machine.gpus))
        return 1 if case.servers else min(self.settings.nodes, self.processes(case.gpus))

    def scale(self) -> Scale:
        if self.settings.scale != "auto":
            return self.settings.scale
        return "full" if self.machine.gpus else "tiny"


@contextlib.contextmanager
def _lent(gpus: tuple[Gpu, ...], count: int) -> Iterator[tuple[Gpu, ...]]:
    """So many of the GPUs, or turns on as many cores of a machine that has none."""
    if not gpus:
        with lease_cores(count):
            yield ()
        return
    try:
        with lease(gpus, count) as lent:
            yield lent
    except HardwareError as error:
        raise BadCase(str(error)) from None


def _with_hardware(reply: Reply, driver: str, between: tuple[tuple[str, ...], ...], before: nvidia.Occupancy) -> Reply:
    """The reply with what only the parent knows of the machine."""
    if isinstance(reply, Measurement | OutOfMemory) and reply.environment is not None:
        environment = msgspec.structs.replace(reply.environment, driver=driver, topology=between)
        return msgspec.structs.replace(
            reply, environment=environment, free_bytes=before.free_bytes, other_processes=before.processes
        )
    return reply
