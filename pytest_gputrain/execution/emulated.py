"""Runs tasks on emulated GPUs: the training itself, at full size, in a process that finds stand-ins of CUDA's libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pytest_gputrain.execution.executor import Executor, Watch, not_started
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.hardware.emulation import boards, build, libraries
from pytest_gputrain.hardware.emulation.environment import emulated_environment
from pytest_gputrain.hardware.lease import lease_emulated
from pytest_gputrain.records import Crashed, EmulatedRun, Host, OutOfMemory, Task, TimedOut
from pytest_gputrain.storage.emulations import FOLDER
from pytest_gputrain.utils.errors import BadCase, CannotEmulate

EmulatedReply = EmulatedRun | OutOfMemory | Crashed | TimedOut
"""The memory that runs out is the host's: where the GPU's does, the case does not fit, which is a figure."""

_ANY_NUMBER: Final = 1 << 20
"""GPUs of a machine that is not there: no case is refused for taking many."""

_OF_A_NODE: Final = 8
"""GPUs that a process sees at most."""

_CHECK_BY_NVML: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Else a library that asks at its import whether there is a GPU initialises CUDA, after which a process must not fork."""


class EmulatingExecutor(Executor[EmulatedReply]):
    """Runs tasks on emulated GPUs of one platform. Of this machine it takes memory and a core for each, and no GPU.

    Args:
        platform: catalog marker.
        environ: variables of the session.
        fork_server: where the processes are forked from; fresh interpreters without it.

    Raises:
        CannotEmulate: the catalog has no such NVIDIA GPU, or there is no CUDA build of torch here.
    """

    def __init__(
        self, platform: str, timeout_seconds: float, environ: Mapping[str, str], fork_server: ForkServer | None
    ) -> None:
        self._board = boards.board(platform)
        self._torch = libraries.find_torch()
        self._host = Host(name="", platform=platform, device=f"{FOLDER}/{platform}", gpus=_ANY_NUMBER)
        self._timeout_seconds = timeout_seconds
        self._environ = environ
        self._fork_server = fork_server
        self._environments: dict[int, dict[str, str]] = {}

    @property
    def host(self) -> Host:
        return self._host

    def run(self, task: Task, *, watch: Watch, inline: bool = False, builder: Any = None) -> EmulatedReply:
        try:
            environ = self.environment(min(task.case.gpus, _OF_A_NODE))
            with lease_emulated():
                return launcher.emulate(
                    task,
                    timeout_seconds=self._timeout_seconds,
                    watch=watch,
                    fork_server=self._fork_server,
                    environ=environ,
                )
        except CannotEmulate as error:
            raise BadCase(str(error)) from None
        except OSError as error:
            raise not_started(task.case, error) from None

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    def environment(self, gpus: int) -> dict[str, str]:
        """Return the variables of a process that sees so many emulated GPUs, the same for each.

        Raises:
            CannotEmulate: the stand-ins cannot be built, or torch has no kernels for the platform.
        """
        if gpus not in self._environments:
            stand_ins = build.stand_ins(self._torch)
            kernels = boards.find_kernels(self._board, stand_ins.architectures, self._torch.version)
            description = boards.describe(self._board, kernels=kernels, devices=gpus)
            self._environments[gpus] = {
                **emulated_environment(self._environ, stand_ins, description),
                **_CHECK_BY_NVML,
            }
        return self._environments[gpus]
