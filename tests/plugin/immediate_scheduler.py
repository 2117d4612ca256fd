"""Provides a scheduler with one node that runs every job when it is submitted, in this process."""

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from plugin_project import gpu_uuid

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

    def __init__(self):
        self.orders = []
        self.during = []
        """Names of the tests that ran when each was submitted; empty where none did any more."""
        self.cancelled = []
        """What was done already, and nobody wants any more."""
        self.refused = set()
        """Ids of cases."""
        self.nodes = None
        """Names and counts of the GPUs of the nodes that take the jobs in turn; None for a node like this machine."""
        self.late = {}
        """How often the fleet has to ask for jobs, by number from 1, before they are done."""
        self._to_deliver = {}

    @property
    def submitted(self):
        return [str(order.task.case) for order in self.orders]

    def forget(self):
        """Forget what was submitted, not what is late."""
        self.orders.clear()
        self.during.clear()

    def submit(self, order, folder):
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

    def _deliver(self, number):
        folder = self._to_deliver.pop(number)
        with pytest.MonkeyPatch.context() as node:
            if self.nodes is not None:
                name, count = self.nodes[(number - 1) % len(self.nodes)]
                gpus = tuple(
                    Gpu(index=at, uuid=gpu_uuid(at), name=name, memory_bytes=85_029_158_912, driver="570.86.10")
                    for at in range(count)
                )
                node.setattr(drivers, "gpus", lambda: gpus)
            deliver(folder)

    def jobs(self, ids):
        for number in self._to_deliver.keys() & set(map(int, ids)):
            self.late[number] -= 1
            if not self.late[number]:
                self._deliver(number)
        return {job: Job("running" if int(job) in self._to_deliver else "ended") for job in ids}

    def cancel(self, ids):
        self.cancelled += ids

    def close(self):
        """There is nothing to leave."""


def stand_in(monkeypatch):
    """The scheduler of every run from now on."""
    scheduler = ImmediateScheduler()
    monkeypatch.setattr(executor, "scheduler_of", lambda settings, platform: scheduler)
    return scheduler
