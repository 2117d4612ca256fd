"""Provides a scheduler with one node that runs every job when it is submitted, in this process."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_gputrain.execution.fleet import executor
from pytest_gputrain.execution.fleet.job import deliver
from pytest_gputrain.execution.fleet.scheduler import ORDER, Job, JobRefused
from pytest_gputrain.hardware import drivers
from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.records import Order


class ImmediateScheduler:
    """Stands in for every scheduler of ``--gpu-executor``."""

    name = "Slurm"
    ask_seconds = 4.0
    remedies: Mapping[Any, str] = {"held": "wait", "refused": "ask otherwise", "unreachable": "call"}

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.during: list[str] = []
        """Names of the tests that ran when each was submitted; empty where none did any more."""
        self.cancelled: list[str] = []
        """What was done already, and nobody wants any more."""
        self.refused: set[str] = set()
        """Ids of cases."""
        self.nodes: list[tuple[str, int]] | None = None
        """Names and counts of the GPUs of the nodes that take the jobs in turn; None for a node like this machine."""
        self.late: dict[int, int] = {}
        """How often the fleet has to ask for jobs, by number from 1, before they are done."""
        self._to_deliver: dict[int, Path] = {}

    @property
    def submitted(self) -> list[str]:
        return [str(order.task.case) for order in self.orders]

    def forget(self) -> None:
        """Forget what was submitted, not what is late."""
        self.orders.clear()
        self.during.clear()

    def submit(self, order: Order, folder: Path) -> str:
        if str(order.task.case) in self.refused:
            raise JobRefused("no such partition")
        assert order == msgspec.json.decode((folder / ORDER).read_bytes(), type=Order)
        self.orders.append(order)
        self.during.append(os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[2].partition(" ")[0])
        number = len(self.orders)
        self._to_deliver[number] = folder
        if number not in self.late:
            self._deliver(number)
        return str(number)

    def _deliver(self, number: int) -> None:
        folder = self._to_deliver.pop(number)
        with pytest.MonkeyPatch.context() as node:
            if self.nodes is not None:
                name, count = self.nodes[(number - 1) % len(self.nodes)]
                gpus = tuple(
                    Gpu(index=at, uuid=f"GPU-{at}", name=name, memory_bytes=85_029_158_912, driver="570.86.10")
                    for at in range(count)
                )
                node.setattr(drivers, "gpus", lambda: gpus)
            deliver(folder)

    def jobs(self, ids: Sequence[str]) -> dict[str, Job]:
        for number in self._to_deliver.keys() & set(map(int, ids)):
            self.late[number] -= 1
            if not self.late[number]:
                self._deliver(number)
        return {job: Job("running" if int(job) in self._to_deliver else "ended") for job in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        self.cancelled += ids

    def close(self) -> None:
        """There is nothing to leave."""


def stand_in(monkeypatch: pytest.MonkeyPatch) -> ImmediateScheduler:
    """The scheduler of every run from now on."""
    scheduler = ImmediateScheduler()
    monkeypatch.setattr(executor, "scheduler_of", lambda settings, platform: scheduler)
    return scheduler
