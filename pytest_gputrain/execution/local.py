"""Runs one task on this machine: leases its GPUs, watches who else uses them, and completes the reply with that."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.execution.executor import Executor, Watch, not_started
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.execution.launch.torchrun import Cluster, on_nodes
from pytest_gputrain.gate import contention
from pytest_gputrain.hardware import drivers
from pytest_gputrain.hardware.devices import Gpu, HardwareError, Occupancy
from pytest_gputrain.hardware.lease import lease, lease_cores
from pytest_gputrain.hardware.machine import Machine, detect
from pytest_gputrain.hardware.watch import Watch as GpuWatch
from pytest_gputrain.hardware.watch import watching
from pytest_gputrain.records import Case, Conditions, Crashed, Event, Host, Measurement, OutOfMemory, Reply, Task, TimedOut
from pytest_gputrain.utils.errors import BadCase

_SETTLING_SECONDS: Final = 0.5
_SETTLING_LOOKS: Final = 4
"""The number of looks at the processes on the GPUs before they count."""


class LocalExecutor(Executor[Reply]):
    """Runs tasks on this machine, under the conditions that the options set.

    Args:
        fork_server: where a case's processes are forked from; fresh interpreters without it.
        environ: variables of a case's processes, with those that its task changes; by default those of this one.
    """

    def __init__(
        self,
        conditions: Conditions,
        fork_server: ForkServer | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._conditions = conditions
        self._fork_server = fork_server
        self._environ = environ
        self._machine: Machine | None = None

    @property
    def machine(self) -> Machine:
        """The machine. It is detected when the first case asks, because collecting tests needs no driver.

        Raises:
            HardwareError: the hardware is not what the options ask for.
        """
        if self._machine is None:
            self._machine = detect(platform=self._conditions.platform, gpu_ids=self._conditions.gpu_ids)
        return self._machine

    @property
    def unseen(self) -> str:
        """Why this machine counts as a CPU although it has GPUs, with the remedy; empty if it counts as it should."""
        if not drivers.may_be_unseen():
            return ""
        try:
            return self.machine.unseen
        except HardwareError:  # This error is reported by every case that needs a GPU.
            return ""

    @property
    def host(self) -> Host:
        try:
            return self.machine.host
        except HardwareError as error:
            raise BadCase(str(error)) from None

    def run(self, task: Task, *, watch: Watch, inline: bool = False, builder: Any = None) -> Reply:
        try:
            return self._run(task, watch, inline, builder)
        except OSError as error:
            raise not_started(task.case, error) from None

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    def _run(self, task: Task, watch: Watch, inline: bool, builder: Any) -> Reply:
        """Run a case on the devices that were reserved for it. Of a case on several nodes this is the first node."""

        def noted(event: Event) -> None:
            watched.note(event)
            watch(event)

        visible, nodes = self.machine.gpus, task.nodes
        count = min(task.case.gpus, len(visible)) if visible else task.cores
        with _lease(visible[:1] if inline else visible, count) as gpus:
            if len(gpus) > 1 and any(gpu.uuid.startswith("MIG-") for gpu in gpus):
                raise BadCase(f"{task.case} takes several GPUs, and parts of one GPU cannot exchange data")
            between, before = drivers.paths(gpus), self._before(task.case, gpus, inline)
            # An inline case trains in this process, so the watching thread would slow it down. GPUs of other nodes cannot be
            # watched from here.
            with watching(() if inline or nodes > 1 else gpus, _process_tree) as watched:
                timeout_seconds = self._conditions.timeout_seconds
                if inline:
                    reply = launcher.inline(task, builder)
                elif nodes > 1:
                    shared, rendezvous = Path(self._conditions.shared), self._conditions.rendezvous
                    cluster = Cluster(nodes=nodes, shared=shared, rendezvous=rendezvous)
                    reply = on_nodes(
                        task,
                        gpus=gpus,
                        timeout_seconds=timeout_seconds,
                        cluster=cluster,
                        watch=noted,
                        environ=self._environ,
                    )
                else:
                    reply = launcher.in_process(
                        task,
                        gpus=gpus,
                        timeout_seconds=timeout_seconds,
                        watch=noted,
                        fork_server=self._fork_server,
                        environ=self._environ,
                    )
            return self._with_hardware(reply, gpus[0], between, before, watched) if gpus else reply

    def _before(self, case: Case, gpus: tuple[Gpu, ...], inline: bool) -> Occupancy:
        """Return the free memory and the other processes of the GPUs before a case starts."""
        if not gpus:
            return Occupancy(None, None)
        before = drivers.occupancy(gpus, _process_tree())
        # This process may be one of those that use the GPU. In a container it does not know its own number there.
        if inline:
            return Occupancy(before.free_bytes, None)
        for _ in range(_SETTLING_LOOKS):
            if not before.holders or self._conditions.foreign == "ignore":
                break
            time.sleep(_SETTLING_SECONDS)  # the driver lists a process for a moment after its end
            before = drivers.occupancy(gpus, _process_tree())
        if before.holders is None and self._conditions.foreign == "error":
            raise BadCase(
                f"{case} was not measured: the driver does not report who uses its GPUs; "
                "-o gpu_foreign=warn measures it anyway"
            )
        if before.holders and self._conditions.foreign == "error":
            raise BadCase(
                f"{case} was not measured: its GPUs are in use by {contention.describe_holders(before.holders)}; end that, "
                "choose other GPUs with --gpu-ids, or measure beside it with -o gpu_foreign=warn"
            )
        return before

    def _with_hardware(
        self, reply: Reply, gpu: Gpu, between: tuple[tuple[str, ...], ...], before: Occupancy, watched: GpuWatch
    ) -> Reply:
        """Add to the reply what only this process knows: power, clocks and other programs on the GPUs."""
        if isinstance(reply, Crashed | TimedOut) and isinstance(reply.measured, Measurement):
            measured = self._with_hardware(reply.measured, gpu, between, before, watched)
            return msgspec.structs.replace(reply, measured=measured)
        if not isinstance(reply, Measurement | OutOfMemory) or reply.environment is None:
            return reply
        environment = msgspec.structs.replace(
            reply.environment,
            driver=gpu.driver,
            power_limit_watts=gpu.power_limit_watts,
            topology=between,
            gpu_digests=tuple(sorted(hashlib.sha256(each.uuid.encode()).hexdigest()[:8] for each in self.machine.gpus)),
        )
        reply = msgspec.structs.replace(reply, environment=environment, free_bytes=before.free_bytes)
        counts = self._conditions.foreign != "ignore"
        if counts and before.holders is not None:
            # Programs that started while the case ran may have taken the memory.
            holders = before.holders if isinstance(reply, Measurement) else (*before.holders, *watched.others)
            pids = {holder.pid for holder in holders} - {None}
            reply = msgspec.structs.replace(reply, other_processes=len(pids), holders=holders)
        if not isinstance(reply, Measurement) or (telemetry := watched.telemetry()) is None:
            return reply
        others = watched.others if counts else ()
        return msgspec.structs.replace(reply, telemetry=msgspec.structs.replace(telemetry, others=others))


@contextlib.contextmanager
def _lease(gpus: tuple[Gpu, ...], count: int) -> Iterator[tuple[Gpu, ...]]:
    """Provide a context that reserves this many of the GPUs, or as many cores of a machine without GPUs."""
    if not gpus:
        with lease_cores(count):
            yield ()
        return
    try:
        with lease(gpus, count) as lent:
            yield lent
    except HardwareError as error:
        raise BadCase(str(error)) from None


def _process_tree() -> set[int]:
    """Return this process and its descendants. Under xdist these are the processes of all its workers, because any worker
    may train an inline case."""
    import psutil

    own = psutil.Process()
    root = (own.parent() or own) if "PYTEST_XDIST_WORKER" in os.environ else own
    return {own.pid, root.pid, *(child.pid for child in root.children(recursive=True))}
