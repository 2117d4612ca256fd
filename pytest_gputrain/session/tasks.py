"""Makes the tasks of cases: how large, in how many processes, and with what a test has changed in the environment."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from pytest_gputrain.cases.deepspeed_config import with_config
from pytest_gputrain.cases.model_config import config_of
from pytest_gputrain.execution.launch.environment import SessionEnvironment
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.gate.scaling import one_worker
from pytest_gputrain.hardware.rates import rates_of
from pytest_gputrain.records import Case, Host, Scale, Task
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.sanitize import utf8


def full_size_task(case: Case, root: Path, emulated: str) -> Task:
    """Return the task of a case at full size, outside of any test.

    Args:
        root: folder that files named by the case are relative to.
        emulated: marker of the emulated GPU that it runs on.

    Raises:
        BadCase: its file of options for DeepSpeed is not what it should be.
    """
    case, further = with_config(case, root) if case.deepspeed_config else (case, {})
    return Task(
        case=case,
        scale="full",
        device_type="gpu",
        processes=case.gpus,
        servers=case.servers,
        root=str(root),
        deepspeed=further,
        model_config=config_of(case),
        emulated=emulated,
        rates=rates_of(emulated),
    )


class TaskMaker:
    """Makes the tasks of one pytest process.

    Args:
        host: returns the machine that they are for; asked when the first is made, since collecting needs no driver.
        environment: variables of the session.
        emulated: marker of the GPU that they run on where it is emulated.
    """

    def __init__(
        self,
        settings: Settings,
        host: Callable[[], Host],
        environment: SessionEnvironment,
        emulated: str = "",
    ) -> None:
        self._settings = settings
        self._host = host
        self._environment = environment
        self._emulated = emulated

    def scale(self) -> Scale:
        """Return the scale of the models."""
        if self._settings.scale != "auto":
            return self._settings.scale
        return "full" if self._host().gpus else "tiny"

    def with_steps(self, case: Case) -> Case:
        """Return the case with the steps and the warm-up that the options set."""
        steps, warmup = self._settings.steps, self._settings.warmup
        return case.replace(steps=case.steps if steps is None else steps, warmup=case.warmup if warmup is None else warmup)

    def processes(self, declared: int) -> int:
        """Return how many processes a case has. On a CPU a parallelism is only tried out, so fewer processes are enough."""
        return declared if self._host().gpus else min(declared, self._settings.processes)

    def make(
        self, case: Case, module: str = "", *, growth_bytes: int = 0, inline: bool = False, prefetched: bool = False
    ) -> Task:
        """Return the task of a case, as its test wants it run.

        Args:
            module: name under which this process imported the file of the case's code.
            growth_bytes: the memory that the test allows own code to keep after every round of gradient accumulation.
            prefetched: no test has asked for it yet.

        Raises:
            BadCase: a variable that the test has changed is no text, which is how it travels, or the case's file of options
                for DeepSpeed is not what it should be.
        """
        case, further = with_config(case, self._settings.root) if case.deepspeed_config else (case, {})
        task = Task(
            case=case,
            scale=self.scale(),
            device_type=self._host().device_type,
            processes=self.processes(case.gpus),
            servers=self.processes(case.servers),
            nodes=1 if self._emulated else self._nodes(case),
            root=str(self._settings.root),
            module=module,
            import_paths=tuple(path for path in sys.path if path),
            deepspeed=further,
            model_config=config_of(case),
            growth_bytes=growth_bytes,
            emulated=self._emulated,
            rates=rates_of(self._emulated) if self._emulated else None,
            counts=self._settings.counts != "off",
        )
        variables = self._environment.changes(task, inline=inline, prefetched=prefetched)
        for name, value in variables.items():
            try:
                f"{name}{value}".encode()
            except UnicodeEncodeError:
                raise BadCase(
                    f"{task.case} was not measured: its test sets the environment variable {utf8(name)}, which is not "
                    "UTF-8; set it before pytest starts"
                ) from None
        return msgspec.structs.replace(task, variables=variables)

    def alone(self, task: Task) -> Task:
        """Return the task of one worker that several workers are compared with."""
        case = one_worker(task.case)
        processes = self.processes(case.gpus)
        return msgspec.structs.replace(task, case=case, processes=processes, nodes=self._nodes(case))

    def _nodes(self, case: Case) -> int:
        """Return the number of nodes of a case: as many as have its GPUs, or on a CPU as many as the option allows."""
        if gpus_of_host := self._host().gpus:
            return math.ceil(case.gpus / gpus_of_host)
        return 1 if case.servers else min(self._settings.nodes, self.processes(case.gpus))
