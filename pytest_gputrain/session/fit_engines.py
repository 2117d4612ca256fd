"""Gives the memory that a case takes of a GPU that nobody has here, by an emulated one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.execution.emulated import NO_SERVERS, EmulatingExecutor
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.gate.fit import loads_in_parts
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.hardware.emulation import libraries
from pytest_gputrain.hardware.emulation.environment import DEVICE
from pytest_gputrain.records import Case, Crashed, EmulatedRun, Limit
from pytest_gputrain.records.emulation import OtherKernels
from pytest_gputrain.session.tasks import full_size_task
from pytest_gputrain.storage.result_cache import ResultCache
from pytest_gputrain.utils.errors import BadCase

_UNCOMPUTED: Final = "figures on an emulated GPU"


class EmulatedCells:
    """Runs each case on an emulated GPU, in a process that was forked from one with the imported libraries.

    Args:
        root: folder that files named by cases are relative to.
        timeout_seconds: of a case.
        environ: variables of the processes.
        cache: folder of what was answered before.

    Attributes:
        titles: of the GPUs, with the kernels that run on one that is emulated by those for another.

    Raises:
        CannotEmulate: there is no CUDA build of torch here, or the stand-ins cannot be built.
    """

    def __init__(
        self, gpus: list[str], root: Path, timeout_seconds: float, environ: Mapping[str, str], cache: Path | None
    ) -> None:
        self._root = root
        self._fork_server = ForkServer()
        self._executors: dict[str, EmulatingExecutor] = {}
        self._caches: dict[str, ResultCache] = {}
        self.titles: dict[str, str] = {}
        torch = libraries.find_torch()
        for gpu in gpus:
            self._executors[gpu] = executor = EmulatingExecutor(gpu, timeout_seconds, environ, self._fork_server, torch)
            self._caches[gpu] = ResultCache(cache, executor.stand_ins())
            other = OtherKernels.of_description(executor.environment(1)[DEVICE])
            self.titles[gpu] = other.name if other else PLATFORMS[gpu].title

    def figures(self, case: Case, gpu: str, memory_bytes: int = 0, *, memory_only: bool = False) -> EmulatedRun:
        """Return how much memory the case takes of the GPU. Several threads may call this at once.

        Args:
            memory_bytes: of the GPU, 0 for any amount. What programs load in parts is built whole, without this limit.
            memory_only: whether nothing is asked for but memory.

        Raises:
            BadCase: there are no figures; one sentence.
        """
        if case.servers:
            raise BadCase(f"{case} {NO_SERVERS}")
        task = msgspec.structs.replace(
            # From the second step on, memory has gradients and the optimizer's state.
            full_size_task(case.replace(steps=1, warmup=1), self._root, gpu),
            counts=False,
            limit=Limit(bytes=memory_bytes, of_steps=loads_in_parts(case)),
            memory_only=memory_only,
        )
        kept = self._caches[gpu].get(task)
        reply = kept or self._executors[gpu].run(task, watch=lambda event: None)
        if isinstance(reply, Crashed) and reply.refused:
            raise BadCase(reply.sentence)  # the sentence names the model, and is the same for all of its cases
        if not isinstance(reply, EmulatedRun):
            raise BadCase(f"{case} {describe_failure(reply, _UNCOMPUTED)}")
        if kept is None:
            self._caches[gpu].put(task, reply)
        return reply

    def close(self) -> None:
        """End the processes."""
        self._fork_server.close()
