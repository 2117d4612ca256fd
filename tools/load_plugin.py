"""The pytest plugin of ``tools/load_here.py``: no case trains, and every pytest process tells what it took.

Only the worker processes are stand-ins. Where one would be started, its reply is put into its folder, as a worker does it,
and its process has ended. All else is the product's: collecting, leases, reading replies, judging, reports and baselines.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.processes import Process
from pytest_gputrain.records import Environment, Measurement, Task
from pytest_gputrain.records.node_protocol import write_record

HERE = Environment(
    device_name="cpu",
    device_type="cpu",
    device_count=1,
    device_memory_bytes=None,
    host="load",
    cpu_model="stand-in",
    os="Linux",
    python="3",
    packages={"torch": "2"},
)


class Ended(Process):
    """A worker that has replied."""

    def poll(self) -> int:
        return 0

    def killed_for_memory(self, kills_before: int) -> bool:
        return False

    def ask_for_stacks(self) -> None:
        raise AssertionError("an ended worker has no stacks")

    def end(self) -> None:
        """Do nothing, because the process has ended."""


def start(folder: Path, rank: int, environment: Mapping[str, str]) -> Ended:
    """Write the reply of a worker: figures of every step with all the digits that a clock gives."""
    task = msgspec.json.decode((folder / "case.json").read_bytes(), type=Task)
    noise = random.Random(str(task.case))
    reply = Measurement(
        step_seconds=tuple(noise.gauss(0.1, 0.001) for _ in range(task.case.steps)),
        warmup_seconds=tuple(noise.gauss(0.2, 0.002) for _ in range(task.case.warmup)),
        losses=tuple(noise.gauss(3.0, 0.1) for _ in range(task.case.steps)),
        batch_size=task.case.batch_size,
        sequence_length=task.case.sequence_length,
        updates=task.case.steps + task.case.warmup,
        parameters=1_000_000,
        trainable_parameters=1_000_000,
        model_bytes=4_000_000,
        peak_allocated_bytes=20_000_000 + 1000 * task.case.batch_size,
        peak_host_bytes=400_000_000,
        flops_per_step=10**9,
        environment=HERE,
    )
    write_record(folder / f"rank{rank}" / "reply.json", reply)
    return Ended()


class Stopwatch:
    """Writes ``load-{process}.json`` into the current folder when its pytest process ends."""

    def __init__(self, process: str) -> None:
        self._file = Path(f"load-{process}.json").absolute()
        self._told: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        return (yield from self._timed("run"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        return (yield from self._timed("finish"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self) -> Generator[None, object, object]:
        return (yield from self._timed("table"))

    def pytest_unconfigure(self) -> None:
        self._file.write_text(json.dumps(self._told))

    def _timed(self, what: str) -> Generator[None, object, object]:
        began, computed = time.monotonic(), time.process_time()
        ended = yield
        self._told[f"{what}_seconds"] = time.monotonic() - began
        self._told[f"{what}_cpu_seconds"] = time.process_time() - computed
        self._told[f"{what}_peak_bytes"] = peak_bytes()
        return ended


def peak_bytes() -> int:
    """Return the highest resident set of this program. ``getrusage`` may return that of the program which started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def pytest_configure(config: Any) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(launcher, "start", start)
    config.add_cleanup(patch.undo)
    config.pluginmanager.register(Stopwatch(os.environ.get("PYTEST_XDIST_WORKER", "parent")))
