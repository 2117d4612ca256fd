"""Runs tasks on emulated GPUs: the training itself, at full size, in a process that finds stand-ins of CUDA's libraries."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.execution.executor import Executor, Watch, not_started
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.hardware.emulation import boards, build, libraries
from pytest_gputrain.hardware.emulation.environment import emulated_environment
from pytest_gputrain.hardware.lease import lease_emulated
from pytest_gputrain.records import Crashed, EmulatedRun, Host, OutOfMemory, Task, TimedOut
from pytest_gputrain.records.case import MOST_EMULATED
from pytest_gputrain.storage.emulated import EMULATED
from pytest_gputrain.utils.errors import BadCase, CannotEmulate

EmulatedReply = EmulatedRun | OutOfMemory | Crashed | TimedOut
"""The memory that runs out is the host's: where the GPU's does, the case does not fit, which is a figure."""

_ANY_NUMBER: Final = 1 << 20
"""GPUs of a machine that is not there: no case is refused for taking many."""

NO_SERVERS: Final = "takes parameter servers, which have to answer, and an emulated GPU runs the first worker alone"
"""Why a case with parameter servers has no figures, as the rest of a sentence."""

_OF_A_NODE: Final = 8
"""GPUs that a process sees at most."""

_CHECK_BY_NVML: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""The variable that makes torch look for GPUs without CUDA. Otherwise a library that looks for a GPU at its import would
initialise CUDA, after which a process must not fork."""


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
"""The reason, by engine, why the first process needs most memory. It alone runs."""


class EmulatingExecutor(Executor[EmulatedReply]):
    """Runs each task once on emulated GPUs of one platform. This takes memory and one core of this machine, and no GPU.

    Args:
        platform: catalog marker.
        environ: variables of the session.
        fork_server: where the processes are forked from; fresh interpreters without it.
        torch: the build of torch for the emulated GPUs; by default the one that is found.

    Raises:
        CannotEmulate: the catalog has no such NVIDIA GPU, or there is no CUDA build of torch here.
    """

    def __init__(
        self,
        platform: str,
        timeout_seconds: float,
        environ: Mapping[str, str],
        fork_server: ForkServer | None,
        torch: libraries.Torch | None = None,
    ) -> None:
        self._board = boards.board(platform)
        self._torch = torch or libraries.find_torch()
        self._host = Host(name="", platform=platform, device=f"{EMULATED}/{platform}", gpus=_ANY_NUMBER)
        self._timeout_seconds = timeout_seconds
        self._environ = environ
        self._fork_server = fork_server
        self._replies: dict[tuple[bytes, int], EmulatedReply] = {}
        self._environments: dict[int, dict[str, str]] = {}

    @property
    def host(self) -> Host:
        return self._host

    def run(self, task: Task, *, watch: Watch, inline: bool = False, builder: Any = None) -> EmulatedReply:
        return self._once(task, 1, watch)

    def run_again(self, task: Task, *, watch: Watch) -> EmulatedReply:
        """Return the reply of a second fresh process for the task. This process runs at most once for each task."""
        return self._once(task, 2, watch)

    def _once(self, task: Task, process: int, watch: Watch) -> EmulatedReply:
        key = msgspec.json.encode((identity_of(task), task.limit, task.memory_only)), process
        if key not in self._replies:
            self._replies[key] = self._reply(task, watch)
        return self._replies[key]

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

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
            if not isinstance(reply, EmulatedRun):
                return reply
            alone = _first_for_all(task) if task.simulated and task.processes > 1 else ""
            notes = filter(None, [alone, boards.computed_capacity(self._board)])
            return msgspec.structs.replace(reply, notes=(*reply.notes, *notes))
        except CannotEmulate as error:
            raise BadCase(str(error)) from None
        except OSError as error:
            raise not_started(task.case, error) from None

    def stand_ins(self) -> str:
        """Return a name of the stand-ins, which is another one for other source code, compilers or versions of CUDA.

        Raises:
            CannotEmulate: they cannot be built, or torch has no kernels for the platform.
        """
        self.environment(1)
        return self._stand_ins.folder.name

    @functools.cached_property
    def _stand_ins(self) -> build.StandIns:
        return build.stand_ins(self._torch)

    def environment(self, gpus: int) -> dict[str, str]:
        """Return the environment variables for a process that sees this many emulated GPUs.

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
    """Return the note that only the first process ran, and whether its figures stand for all processes."""
    if not task.case.code:
        return _STANDS_FOR_ALL[task.case.parallel]
    return (
        f"only the first of {task.processes} processes ran, because at most {MOST_EMULATED} are emulated: if another one "
        "needs more memory, that is not seen"
    )
