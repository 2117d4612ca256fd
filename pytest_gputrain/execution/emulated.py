"""Runs tasks on emulated GPUs: the training itself, at full size, in a process that finds stand-ins of CUDA's libraries."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import msgspec

from pytest_gputrain.execution.executor import Watch, not_started
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.execution.unmeasured import ANY_NUMBER, UnmeasuredExecutor
from pytest_gputrain.hardware.emulation import boards, build, libraries
from pytest_gputrain.hardware.emulation.environment import emulated_environment
from pytest_gputrain.hardware.lease import lease_emulated
from pytest_gputrain.records import Crashed, EmulatedRun, Host, OutOfMemory, Task, TimedOut
from pytest_gputrain.records.case import MOST_EMULATED
from pytest_gputrain.storage.recorded import EMULATED
from pytest_gputrain.utils.errors import BadCase, CannotEmulate

EmulatedReply = EmulatedRun | OutOfMemory | Crashed | TimedOut
"""The memory that runs out is the host's: where the GPU's does, the case does not fit, which is a figure."""

_OF_A_NODE: Final = 8
"""GPUs that a process sees at most."""

_CHECK_BY_NVML: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Else a library that asks at its import whether there is a GPU initialises CUDA, after which a process must not fork."""


_EQUAL: Final = "the first process stands for all, because each has the whole model and a batch of the same size"
_PARTITIONED: Final = "the first process stands for all, because DeepSpeed pads their parts to one size"
_STANDS_FOR_ALL: Final = {
    "ddp": _EQUAL,
    "fsdp": "the first process stands for all, because FSDP2 rounds its shards up, and no process has larger ones",
    "zero0": _EQUAL,
    "zero1": _PARTITIONED,
    "zero2": _PARTITIONED,
    "zero3": _PARTITIONED,
}
"""Why no process of an engine needs more memory than the first, which alone runs."""


class EmulatingExecutor(UnmeasuredExecutor[EmulatedReply]):
    """Runs tasks on emulated GPUs of one platform.

    Args:
        platform: catalog marker.

    Raises:
        CannotEmulate: the catalog has no such NVIDIA GPU, or there is no CUDA build of torch here.
    """

    def __init__(
        self, platform: str, timeout_seconds: float, environ: Mapping[str, str], fork_server: ForkServer | None
    ) -> None:
        self._board = boards.board(platform)
        self._torch = libraries.find_torch()
        host = Host(name="", platform=platform, device=f"{EMULATED}/{platform}", gpus=ANY_NUMBER)
        super().__init__(host, timeout_seconds, environ, fork_server)
        self._environments: dict[int, dict[str, str]] = {}

    def _reply(self, task: Task, watch: Watch) -> EmulatedReply:
        try:
            environ = self.environment(min(task.case.gpus, _OF_A_NODE))
            with lease_emulated(1 if task.simulated else task.processes):
                reply = launcher.emulate(
                    task,
                    timeout_seconds=self._timeout_seconds,
                    watch=watch,
                    fork_server=self._fork_server,
                    environ=environ,
                )
            if not isinstance(reply, EmulatedRun) or task.processes == 1 or not task.simulated:
                return reply
            return msgspec.structs.replace(reply, notes=(*reply.notes, _first_for_all(task)))
        except CannotEmulate as error:
            raise BadCase(str(error)) from None
        except OSError as error:
            raise not_started(task.case, error) from None

    def stand_ins(self) -> str:
        """Name the stand-ins, by all that they were built from.

        Raises:
            CannotEmulate: they cannot be built, or torch has no kernels for the platform.
        """
        self.environment(1)
        return self._stand_ins.folder.name

    @functools.cached_property
    def _stand_ins(self) -> build.StandIns:
        return build.stand_ins(self._torch)

    def _identity(self, task: Task) -> bytes:
        return msgspec.json.encode((super()._identity(task), task.limit, task.memory_only))

    def environment(self, gpus: int) -> dict[str, str]:
        """Return the variables of a process that sees so many emulated GPUs, the same for each.

        Raises:
            CannotEmulate: the stand-ins cannot be built, or torch has no kernels for the platform.
        """
        if gpus not in self._environments:
            kernels = boards.find_kernels(self._board, self._stand_ins.architectures, self._torch.version)
            description = boards.describe(self._board, kernels=kernels, devices=gpus)
            self._environments[gpus] = {
                **emulated_environment(self._environ, self._stand_ins, description),
                **_CHECK_BY_NVML,
            }
        return self._environments[gpus]


def _first_for_all(task: Task) -> str:
    """Say that the first process alone ran, and why that is enough, or that it is not."""
    if not task.case.code:
        return _STANDS_FOR_ALL[task.case.parallel]
    return (
        f"only the first of {task.processes} processes ran, because at most {MOST_EMULATED} are emulated: if another one "
        "needs more memory, that is not seen"
    )
