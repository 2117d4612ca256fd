"""Defines the records that pytest and a node of a fleet send each other: an order there, a delivery back."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from pytest_gputrain.records.case import FORMAT, Task
from pytest_gputrain.records.reply import Reply
from pytest_gputrain.records.whole import Whole


class Host(Struct, frozen=True, kw_only=True):
    """The machine that cases run on: its name, its platform and the GPUs that cases may use."""

    name: str
    """The name of the machine; empty if it is not known yet."""
    platform: str
    """Catalog marker, or ``unknown``."""
    device: str
    """Slug: the folder of its baselines."""
    gpus: Whole
    """The GPUs that cases may use."""

    @property
    def device_type(self) -> Literal["cpu", "gpu"]:
        return "gpu" if self.gpus else "cpu"


class Conditions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that decide how a case runs, for the machine that runs it."""

    platform: str | None = None
    """Catalog marker that the machine must have; None for any."""
    gpu_ids: tuple[str, ...] | None = None
    timeout_seconds: float
    foreign: Literal["error", "warn", "ignore"]
    shared: str
    """Folder that all nodes of a case see."""
    rendezvous: str = ""
    """The rendezvous, as in `pytest_gputrain.execution.launch.torchrun.Cluster`."""


class Order(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a case, to be done somewhere in the fleet."""

    format: Whole = FORMAT
    task: Task
    conditions: Conditions
    gpus: Whole
    """The GPUs of each node of the task; 0 for a case on CPUs."""
    cpus: Whole
    """The least number of CPU cores of each node."""


class Delivery(Struct, frozen=True, kw_only=True):
    """The answer to an order: a reply, or why the node did not run the case."""

    format: Whole = FORMAT
    host: Host
    reply: Reply | None = None
    refusal: str = ""
    """The sentence that the test would fail with on that machine."""
    unfit: str = ""
    """Why the order cannot be done on this machine."""
