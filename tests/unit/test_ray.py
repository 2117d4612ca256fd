"""What Ray is asked for, by a stand-in for its module; ``tests/plugin/test_fleet_on_nodes.py`` has a real one."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from unit_examples import CASE

from pytest_gputrain.execution.fleet.ray import Ray
from pytest_gputrain.execution.fleet.scheduler import SPARE_SECONDS, Job
from pytest_gputrain.records import Conditions, Order, Task


class _Remote:
    """A function of the driver's, with the options that it is started with."""

    def __init__(self, asked: list[dict[str, Any]]) -> None:
        self._asked = asked

    def options(self, **options: Any) -> _Remote:
        self._asked.append(options)
        return self

    def remote(self, *arguments: Any) -> list[Any]:
        self._asked[-1]["arguments"] = arguments
        return []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Options of every task, and the connection first."""
    resources: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        resources.append(options)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))

    errors = SimpleNamespace(RayError=RuntimeError)
    module = SimpleNamespace(init=init, remote=lambda function: _Remote(resources), exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield resources
    assert signal.getsignal(signal.SIGTERM) is before, "Ray's own would end pytest without a report"


def order(gpus: int, cpus: int, platform: str) -> Order:
    task = Task(case=CASE, scale="full", device_type="gpu", root="/")
    conditions = Conditions(platform=platform, timeout_seconds=60, foreign="warn", shared="/")
    return Order(task=task, conditions=conditions, gpus=gpus, cpus=cpus)


@pytest.mark.parametrize(
    ("arguments", "resources"),
    [
        ([], {"num_cpus": 8, "num_gpus": 2, "resources": {"h100": 2}}),
        (["accelerator_type:H100=0.001"], {"num_cpus": 8, "num_gpus": 2, "resources": {"accelerator_type:H100": 0.001}}),
        (["CPU=24"], {"num_cpus": 24, "num_gpus": 2, "resources": {"h100": 2}}),
        (["rack={gpus}", "memory=1e9"], {"num_cpus": 8, "num_gpus": 2, "memory": 1e9, "resources": {"rack": 2}}),
        (["GPU=0", "CPU={cpus}"], {"num_cpus": 8, "num_gpus": 0, "resources": {"h100": 2}}),
    ],
)
def test_a_case_asks_for_its_gpus_and_its_platform(
    asked: list[dict[str, Any]], arguments: list[str], resources: dict[str, Any]
) -> None:
    Ray(arguments).submit(order(2, 8, "h100"), Path("/nowhere"))
    connection, task = asked
    assert connection["address"] == "auto"
    payload = task.pop("arguments")
    assert task == {**resources, "max_retries": 0, "num_returns": "streaming"}
    assert payload == (sys.executable, msgspec.json.encode(order(2, 8, "h100")), "")


def test_a_case_on_cpus_asks_for_nothing_else(asked: list[dict[str, Any]]) -> None:
    Ray([]).submit(order(0, 2, "cpu"), Path("/nowhere"))
    assert (asked[1]["num_cpus"], asked[1]["num_gpus"], asked[1]["resources"]) == (2, 0, {})


class _Stream:
    """Of what a task has yielded so far."""

    def __init__(self, *answers: str | bytes) -> None:
        self.answers = list(answers)

    def __next__(self) -> str | bytes:
        return self.answers.pop(0)


def test_a_task_that_hangs_on_its_node_is_ended_some_time_after_the_case_should_have_been(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ended, stream = [1000.0], [], _Stream("node7 host7")
    module = sys.modules["ray"]
    module.nodes = lambda: [{"NodeID": "node7", "Alive": True, "Resources": {"CPU": 8, "GPU": 8, "h100": 8}}]
    module.wait = lambda streams, timeout: ([stream for stream in streams if stream.answers], [])
    module.get = lambda answer: answer
    module.cancel = lambda task, force=False: ended.append((task, force))
    errors = ("TaskCancelledError", "NodeDiedError")
    module.exceptions = SimpleNamespace(RayError=RuntimeError, **{name: type(name, (RuntimeError,), {}) for name in errors})
    monkeypatch.setattr(_Remote, "remote", lambda self, *arguments: stream)
    monkeypatch.setattr("pytest_gputrain.execution.fleet.ray.time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = Ray([])
    job = engine.submit(order(2, 8, "h100"), Path("/nowhere"))
    now[0] += 10_000  # in the queue, which is the fleet's business
    assert engine.jobs([job]) == {job: Job("running", "", "host7")}
    now[0] += 60 + SPARE_SECONDS
    assert engine.jobs([job])[job].doing == "running"
    now[0] += 1
    why = "it ran for more than 660 s, which --gpu-timeout is part of"
    assert engine.jobs([job]) == {job: Job("cancelled", why, "host7")}
    assert ended == [(stream, True)]
    engine.cancel([])


def test_the_address_is_that_of_the_arguments_or_of_ray(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "one")
    Ray([])
    Ray(["--address=other"])
    assert [connection["address"] for connection in asked] == ["one", "other"]


def test_a_machine_without_ray_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"^--gpu-executor=ray needs Ray, .*pytest-gputrain\[ray\]"):
        Ray([])
