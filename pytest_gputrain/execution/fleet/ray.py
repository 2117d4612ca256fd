"""Submits runs of cases to an existing Ray cluster, each as a task that asks for its GPUs and its platform."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from pytest_gputrain.execution.fleet import ray_task
from pytest_gputrain.execution.fleet.scheduler import DELIVERY, OUTPUT, SPARE_SECONDS, Doing, Job, Unreachable
from pytest_gputrain.records import Order
from pytest_gputrain.utils.units import format_seconds

_ADDRESS: Final = "--address="
_NODE_SECONDS: Final = 30.0
"""The time from a task's end for no reason of its own until its node counts as alive: Ray takes some time to miss one."""
_CONNECT_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 25.0
"""The time in which cancelled tasks have to end their processes."""


@dataclass(eq=False, kw_only=True)
class _Run:
    """The task of an order, with the tasks that take part on further nodes."""

    answers: Any
    """Generator of what the first task yields."""
    folder: Path
    asked: Mapping[str, float]
    """Resources of each node."""
    nodes: int
    most_seconds: float
    """The most seconds that it may run."""
    began_at: float = 0.0
    group: Any = None
    other_nodes: Sequence[Any] = ()
    node: str = ""
    host: str = ""
    got: list[str | bytes] = field(default_factory=list)
    over: tuple[Doing, str] | None = None
    ended_at: float = 0.0


class Ray:
    """Runs orders as tasks of a Ray cluster.

    Args:
        arguments: resources of each node, as ``h100=8``, in place of the default of that name, or of the platform's;
            ``{gpus}``, ``{cpus}`` and ``{nodes}`` stand for what a case takes. Or ``--address=HOST:PORT`` of the cluster.

    Raises:
        ValueError: Ray or its cluster is not there, or the arguments make no sense.
    """

    name = "Ray"
    ask_seconds = 0.25
    remedies: Mapping[Literal["held", "refused", "unreachable", "undelivered"], str] = {
        "held": "see `ray status`, and check the request in gpu_fleet_args",
        "refused": "check the request in gpu_fleet_args",
        "unreachable": "see `ray status`",
        "undelivered": "see the log of its node",
    }

    def __init__(self, arguments: Sequence[str]) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError(
                "--gpu-executor=ray needs Ray, which is not installed here; "
                "pip install 'pytest-gputrain[ray]', as on its nodes"
            ) from None
        self._ray: Any = ray
        self._arguments = [argument for argument in arguments if not argument.startswith(_ADDRESS)]
        _amounts(self._arguments, gpus=1, cpus=1, nodes=1)
        addresses = [argument.removeprefix(_ADDRESS) for argument in arguments if argument.startswith(_ADDRESS)]
        self._connect(addresses[-1] if addresses else os.environ.get("RAY_ADDRESS", "auto"))
        self._runs: dict[str, _Run] = {}
        self._numbers = itertools.count(1)

    def submit(self, order: Order, folder: Path) -> str:
        asked = self._requested(order)
        group, other_nodes = None, []
        shared = str(folder) if order.task.nodes > 1 else ""
        with self._answering():
            options = {**_options(asked), "max_retries": 0}
            if order.task.nodes > 1:
                from ray.util.placement_group import placement_group
                from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

                group = placement_group([dict(asked)] * order.task.nodes, strategy="STRICT_SPREAD")
                places = [PlacementGroupSchedulingStrategy(group, at) for at in range(order.task.nodes)]
                serve_node = self._ray.remote(ray_task.serve_node)
                other_nodes = [
                    serve_node.options(**options, scheduling_strategy=place).remote(sys.executable, shared)
                    for place in places[1:]
                ]
                options["scheduling_strategy"] = places[0]
            do = self._ray.remote(ray_task.do).options(**options, num_returns="streaming")
            answers = do.remote(sys.executable, msgspec.json.encode(order), shared)
        number = str(next(self._numbers))
        self._runs[number] = _Run(
            answers=answers,
            folder=folder,
            asked=asked,
            nodes=order.task.nodes,
            most_seconds=order.conditions.timeout_seconds + SPARE_SECONDS,
            group=group,
            other_nodes=other_nodes,
        )
        return number

    def jobs(self, ids: Sequence[str]) -> Mapping[str, Job]:
        with self._answering():
            nodes = self._ray.nodes()
        alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
        for run in self._runs.values():
            # `_is_over` also gives back the nodes of a run that is over, so runs are looked at even if nobody asks for them
            # any more.
            self._is_over(run)
        return {number: self._job(self._runs[number], alive) for number in ids if number in self._runs}

    def cancel(self, ids: Sequence[str]) -> None:
        for run in (self._runs[number] for number in ids if number in self._runs):
            self._cancel(run)

    def close(self) -> None:
        deadline = time.monotonic() + _CLOSE_SECONDS
        while time.monotonic() < deadline and not all(map(self._is_over, self._runs.values())):
            time.sleep(self.ask_seconds)
        self._runs.clear()
        self._ray.shutdown()

    def _connect(self, address: str) -> None:
        """Connect to the cluster."""
        if address.startswith("ray://"):
            raise ValueError(
                f"--gpu-executor=ray: {address} is for Ray's client; start pytest on a node of the cluster, "
                "without RAY_ADDRESS"
            )
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():
            try:  # Without this check Ray would try to connect for minutes.
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
            except OSError as error:
                raise ValueError(f"--gpu-executor=ray finds no cluster at {address}: {error.strerror or error}") from None
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self._ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
        except Exception as error:
            why = " ".join(str(error).split())
            raise ValueError(f"--gpu-executor=ray finds no cluster at {address}: {why}") from None
        finally:
            if in_main_thread:  # Ray's own handler would end pytest without a report.
                signal.signal(signal.SIGTERM, handler)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Provide a context that turns an error of Ray into `Unreachable`."""
        try:
            yield
        except self._ray.exceptions.RayError as error:
            raise Unreachable(_first_line(error)) from None

    def _requested(self, order: Order) -> Mapping[str, float]:
        """Return the resources to request of each node: the defaults, replaced by those that the site names."""
        site = _amounts(self._arguments, gpus=order.gpus, cpus=order.cpus, nodes=order.task.nodes)
        asked: dict[str, float] = {"CPU": order.cpus, "GPU": order.gpus}
        if order.conditions.platform and not site.keys() - asked.keys() - {"memory"}:
            asked[order.conditions.platform] = order.gpus
        return {name: amount for name, amount in (asked | site).items() if amount}

    def _cancel(self, run: _Run, **how: bool) -> None:
        for task in (run.answers, *run.other_nodes):
            with contextlib.suppress(Exception):  # The task may have ended, or Ray itself.
                self._ray.cancel(task, **how)

    def _job(self, run: _Run, alive: Mapping[str, Mapping[str, float]]) -> Job:
        if run.over is None:
            self._listen(run)
        if run.over is not None:
            doing, why = run.over
            lost_for = time.monotonic() - run.ended_at
            if doing == "ended" and not run.folder.joinpath(DELIVERY).exists() and run.node and run.node not in alive:
                doing = "node_died"
            return Job(doing, why, run.host, final=len(run.got) > 1 or lost_for >= _NODE_SECONDS)
        if run.host:
            return Job("running", "", run.host)
        fitting = sum(
            all(resources.get(name, 0) >= amount for name, amount in run.asked.items()) for resources in alive.values()
        )
        if fitting < run.nodes:
            asked = ", ".join(f"{name} {amount:g}" for name, amount in run.asked.items())
            has = "no node has" if run.nodes == 1 else f"{fitting} nodes have, of {run.nodes} that it takes,"
            return Job("held", f"{has} {asked}")
        return Job("waiting", "its nodes are busy")

    def _listen(self, run: _Run) -> None:
        """Read what the task of a run has yielded since the last call."""
        errors = self._ray.exceptions
        try:
            while run.over is None and self._ray.wait([run.answers], timeout=0)[0]:
                self._take(run, self._ray.get(next(run.answers)))
        except StopIteration:
            run.over = ("ended", "Ray reports nothing about it")
        except errors.TaskCancelledError:
            run.over = ("cancelled", "")
        except errors.NodeDiedError as error:
            run.over = ("node_died", _first_line(error))
        except errors.RayError as error:
            run.over = ("ended", _first_line(error))
        if run.over is None and run.host and time.monotonic() - run.began_at > run.most_seconds:
            self._cancel(run, force=True)  # a process that hangs ends only by force
            run.over = (
                "cancelled",
                f"it ran for more than {format_seconds(run.most_seconds)}, which is --gpu-timeout and ten minutes",
            )
        if run.over is not None:
            run.ended_at = time.monotonic()
            self._leave(run)

    def _take(self, run: _Run, answer: str | bytes) -> None:
        run.got.append(answer)
        match run.got:
            case [str(begun)]:
                run.node, _, run.host = begun.partition(" ")
                run.began_at = time.monotonic()
            case [_, bytes(delivery), str(how), bytes(output)]:
                with contextlib.suppress(OSError):  # The folder is gone if nobody waits any more.
                    (run.folder / OUTPUT).write_bytes(output)
                    if delivery:
                        part = run.folder / f"{DELIVERY}.part"
                        part.write_bytes(delivery)
                        part.rename(run.folder / DELIVERY)
                run.over = ("ended", how)

    def _leave(self, run: _Run) -> None:
        if run.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(run.group)

    def _is_over(self, run: _Run) -> bool:
        if run.over is None:
            self._listen(run)
        return run.over is not None


def _amounts(arguments: Sequence[str], **values: int) -> dict[str, float]:
    """Return the resources by name."""
    amounts = {}
    for argument in arguments:
        name, _, amount = argument.partition("=")
        try:
            amounts[name] = float(amount.format(**values))
        except (KeyError, IndexError, ValueError):
            raise ValueError(
                f"gpu_fleet_args: {argument!r} is neither a resource of Ray's with an amount, as h100={{gpus}}, nor "
                f"{_ADDRESS}HOST:PORT"
            ) from None
    return amounts


def _options(asked: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of a Ray task that takes these resources."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {option: asked.get(name, 0) for name, option in named.items() if name != "memory" or name in asked}
    return {**own, "resources": {name: amount for name, amount in asked.items() if name not in named}}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
