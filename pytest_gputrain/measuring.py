"""The machine, and the fresh processes that are started on it for cases."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from pytest_gputrain import company, launch
from pytest_gputrain.hardware import drivers
from pytest_gputrain.hardware.devices import Gpu, HardwareError, Occupancy
from pytest_gputrain.hardware.lease import lease, lease_cores
from pytest_gputrain.hardware.machine import Machine, detect
from pytest_gputrain.hardware.watch import Watch as GpuWatch
from pytest_gputrain.hardware.watch import watching
from pytest_gputrain.records import Case, Event, Measurement, OutOfMemory, Reply, Scale, Task
from pytest_gputrain.resuming import Resumption, Taken
from pytest_gputrain.scaling import one_worker
from pytest_gputrain.sentences import describe_failure
from pytest_gputrain.settings import Settings

Watch = Callable[[Case, Event, int], None]
"""Called with what a case does, and in which of its fresh processes, from 1."""

_SETTLING_SECONDS: Final = 0.5
_SETTLING_LOOKS: Final = 4
"""At who is on the GPUs, before whoever is there counts."""


class BadCase(Exception):
    """The case makes no sense, or what it needs is broken; the sentence to fail with."""


class Bench:
    """Measures cases for one pytest process; a case is measured once however many tests ask for it."""

    def __init__(self, settings: Settings, resumption: Resumption | None = None) -> None:
        self.settings = settings
        self._resumption = resumption
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
        known = () if builder is not None else self._replies.get(identity, ())
        replies = list(before or known or self.taken(task, inline, builder).replies)
        while len(replies) < runs and all(isinstance(reply, Measurement | OutOfMemory) for reply in replies):
            replies.append(self._launch(task, inline, builder, len(replies) + 1))
        self._replies[identity] = tuple(replies)
        return self._replies[identity]

    def taken(self, task: Task, inline: bool, builder: Any = None) -> Taken:
        """What an earlier report has of the case, where one is resumed."""
        if self._resumption is None or builder is not None:
            return Taken()
        return self._resumption.of(task, inline=inline, device=self.machine.slug, nodes=self.nodes(task.case))

    def beside_one_worker(self, task: Task, replies: tuple[Reply, ...]) -> tuple[tuple[Reply, ...], str]:
        """The case's replies, each with what one worker alone takes in a fresh process, or why that is not known.

        No reason where the case itself has no figures.
        """
        if not all(isinstance(reply, Measurement) for reply in replies):
            return replies, ""
        case = one_worker(task.case)
        alone = msgspec.structs.replace(task, case=case, processes=self.processes(case.gpus))
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
            holders = tuple(dict.fromkeys((*reply.holders, *company.of(one))))  # type: ignore[union-attr]
            beside.append(msgspec.structs.replace(reply, one_worker_seconds=seconds, holders=holders))
        return tuple(beside), ""

    def _launch(self, task: Task, inline: bool, builder: Any, run: int) -> Reply:
        def watch(event: Event) -> None:
            watched.note(event)
            self.watch(task.case, event, run)

        visible = self.machine.gpus
        nodes = self.nodes(task.case)
        count = min(task.case.gpus, len(visible)) if visible else task.processes + task.servers
        with _lent(visible[:1] if inline else visible, count) as gpus:
            if len(gpus) > 1 and any(gpu.uuid.startswith("MIG-") for gpu in gpus):
                raise BadCase(f"{task.case} takes several GPUs, and the parts of a partitioned one do not reach each other")
            between, before = drivers.paths(gpus), self._before(task.case, gpus, inline)
            # An inline case has no events, and trains in this process, where the thread that watches would take its time; of
            # several nodes the others cannot be seen from here.
            with watching(() if inline or nodes > 1 else gpus, _family) as watched:
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
            return self._with_hardware(reply, gpus[0], between, before, watched) if gpus else reply

    def _before(self, case: Case, gpus: tuple[Gpu, ...], inline: bool) -> Occupancy:
        """What is on the GPUs before a case starts.

        Raises:
            BadCase: somebody, and that is not allowed.
        """
        if not gpus:
            return Occupancy(None, None)
        before = drivers.occupancy(gpus, _family())
        if inline:  # on a GPU that this process may have used before, under a number that it does not know
            return Occupancy(before.free_bytes, None)
        for _ in range(_SETTLING_LOOKS):
            if not before.holders or self.settings.foreign == "ignore":
                break
            time.sleep(_SETTLING_SECONDS)  # a process that has just ended is listed for a moment
            before = drivers.occupancy(gpus, _family())
        if before.holders is None and self.settings.foreign == "error":
            raise BadCase(
                f"{case} was not measured: the driver does not tell who is on its GPUs; leave --gpu-foreign=error out"
            )
        if before.holders and self.settings.foreign == "error":
            raise BadCase(
                f"{case} was not measured: {company.named(before.holders)} is there already; end that, choose other GPUs "
                "with --gpu-ids, or measure beside it with --gpu-foreign=warn"
            )
        return before

    def _with_hardware(
        self, reply: Reply, gpu: Gpu, between: tuple[tuple[str, ...], ...], before: Occupancy, watched: GpuWatch
    ) -> Reply:
        """The reply with what only the parent knows of the machine."""
        if not isinstance(reply, Measurement | OutOfMemory) or reply.environment is None:
            return reply
        environment = msgspec.structs.replace(
            reply.environment, driver=gpu.driver, power_limit_watts=gpu.power_limit_watts, topology=between
        )
        reply = msgspec.structs.replace(reply, environment=environment, free_bytes=before.free_bytes)
        counts = self.settings.foreign != "ignore"
        if counts and before.holders is not None:
            # Who came later may have taken the memory that ran out.
            there = before.holders if isinstance(reply, Measurement) else (*before.holders, *watched.others)
            seen = {holder.pid for holder in there} - {None}
            reply = msgspec.structs.replace(reply, other_processes=len(seen), holders=there)
        if not isinstance(reply, Measurement) or (telemetry := watched.telemetry()) is None:
            return reply
        others = watched.others if counts else ()
        return msgspec.structs.replace(reply, telemetry=msgspec.structs.replace(telemetry, others=others))

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


def _family() -> set[int]:
    """This process and those below it; under xdist those of all its workers, which measure inline cases at times."""
    import psutil

    me = psutil.Process()
    root = (me.parent() or me) if "PYTEST_XDIST_WORKER" in os.environ else me
    return {me.pid, root.pid, *(child.pid for child in root.children(recursive=True))}
