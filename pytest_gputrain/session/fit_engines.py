"""Gives the memory that a case takes of a GPU that nobody has here: by an emulated GPU, or else by a prediction by rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from pytest_gputrain.execution.emulated import EmulatingExecutor
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.execution.predicted import predict
from pytest_gputrain.gate.fit import Figures, loads_in_parts, needed_bytes
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.hardware.emulation import boards
from pytest_gputrain.hardware.emulation.environment import DEVICE
from pytest_gputrain.hardware.targets import target_of, with_tf32
from pytest_gputrain.records import Case, Crashed, EmulatedRun, Limit, Prediction, Task
from pytest_gputrain.records.emulation import OtherKernels
from pytest_gputrain.session.tasks import full_size_task
from pytest_gputrain.storage.result_cache import ResultCache
from pytest_gputrain.utils.errors import BadCase, CannotEmulate

_UNCOMPUTED: Final = "figures on an emulated GPU"


class FitEngine(Protocol):
    """Gives the figures of cases, to several threads at once."""

    def figures(self, case: Case, gpu: str, memory_bytes: int = 0, *, memory_only: bool = False) -> Figures:
        """Return what the case takes of the GPU.

        Args:
            memory_bytes: of the GPU, 0 for any amount. What programs load in parts is built whole, without this limit.
            memory_only: whether nothing is asked for but memory.

        Raises:
            BadCase: there are no figures; one sentence.
        """

    def close(self) -> None:
        """End the processes."""


class EmulatedCells:
    """Runs each case on an emulated GPU, in a process that was forked from one with the imported libraries.

    Args:
        root: folder that files named by cases are relative to.
        timeout_seconds: of a case.
        environ: variables of the processes.
        cache: folder of what was answered before.

    Attributes:
        titles: of those that can be emulated.
        refusals: the sentence for each of the others.
    """

    def __init__(
        self, gpus: list[str], root: Path, timeout_seconds: float, environ: Mapping[str, str], cache: Path | None
    ) -> None:
        self._root, self._cache_folder = root, cache
        self._fork_server = ForkServer()
        self._executors: dict[str, EmulatingExecutor] = {}
        self._caches: dict[str, ResultCache[EmulatedRun]] = {}
        self.titles: dict[str, str] = {}
        self.refusals: dict[str, str] = {}
        for gpu in gpus:
            try:
                executor = EmulatingExecutor(gpu, timeout_seconds, environ, self._fork_server)
                self._caches[gpu] = ResultCache(cache, EmulatedRun, executor.stand_ins())
            except CannotEmulate as error:
                self.refusals[gpu] = str(error)
            else:
                self._executors[gpu] = executor
                other = OtherKernels.of_description(executor.environment(1)[DEVICE])
                self.titles[gpu] = other.name if other else PLATFORMS[gpu].title

    def figures(self, case: Case, gpu: str, memory_bytes: int = 0, *, memory_only: bool = False) -> EmulatedRun:
        if case.servers:
            raise BadCase(
                f"{case} takes parameter servers, which have to answer, and an emulated GPU runs the first worker alone"
            )
        task = msgspec.structs.replace(
            # The second step has all that later ones have: gradients of its own, and the optimizer's state.
            full_size_task(case.replace(steps=1, warmup=1), self._root, emulated=gpu),
            counts=False,
            limit=Limit(bytes=memory_bytes, of_steps=loads_in_parts(case)),
            memory_only=memory_only,
            rates=with_tf32(target_of(gpu), case.tf32),
        )
        kept = self._caches[gpu].get(task)
        reply = kept or self._executors[gpu].run(task, watch=lambda event: None)
        if isinstance(reply, Crashed) and reply.refused:
            raise BadCase(reply.sentence)  # which names the model, and is the same for all of its cases
        if not isinstance(reply, EmulatedRun):
            raise BadCase(f"{case} {describe_failure(reply, _UNCOMPUTED)}")
        if kept is None:
            self._caches[gpu].put(task, reply)
        return reply

    def close(self) -> None:
        self._fork_server.close()


class PredictedCells:
    """Predicts each case by rules, on fake tensors, where a GPU cannot be emulated.

    Args:
        root, timeout_seconds, environ, cache: as of `EmulatedCells`.
    """

    def __init__(self, root: Path, timeout_seconds: float, environ: Mapping[str, str], cache: Path | None) -> None:
        self._root, self._timeout_seconds, self._environ = root, timeout_seconds, environ
        self._cache = ResultCache(cache, Prediction)
        self._fork_server = ForkServer()

    def figures(self, case: Case, gpu: str, memory_bytes: int = 0, *, memory_only: bool = False) -> Prediction:
        target = with_tf32(target_of(gpu), case.tf32)

        def at(memory: int | None) -> Prediction:
            return self._predicted(
                case, full_size_task(case, self._root, target=msgspec.structs.replace(target, memory_bytes=memory))
            )

        prediction = at(memory_bytes or None)
        if loads_in_parts(case) and prediction.refused is not None and prediction.refused.phase == "build":
            unlimited = at(None)
            return msgspec.structs.replace(unlimited, fits=needed_bytes(unlimited, case) <= memory_bytes)
        return prediction

    def _predicted(self, case: Case, task: Task) -> Prediction:
        reply = predict(
            task,
            self._cache,
            timeout_seconds=self._timeout_seconds,
            environ=self._environ,
            fork_server=self._fork_server,
        )
        if isinstance(reply, Crashed) and reply.refused:
            raise BadCase(reply.sentence)
        if not isinstance(reply, Prediction):
            raise BadCase(f"{case} {describe_failure(reply, 'prediction')}")
        return reply

    def close(self) -> None:
        self._fork_server.close()


class FitEngines:
    """The engine of each GPU: an emulated one where that can be, and rules elsewhere.

    Args:
        gpus, root, timeout_seconds, environ, cache: as of `EmulatedCells`.

    Attributes:
        titles: of the GPUs, with the kernels that run on one that is emulated by those for another.
        about: sentences about the GPUs that are not emulated, and those whose capacity is computed.
    """

    def __init__(
        self, gpus: list[str], root: Path, timeout_seconds: float, environ: Mapping[str, str], cache: Path | None
    ) -> None:
        emulated = EmulatedCells(gpus, root, timeout_seconds, environ, cache)
        predicted = PredictedCells(root, timeout_seconds, environ, cache)
        self._engines: dict[str, FitEngine] = {gpu: emulated if gpu in emulated.titles else predicted for gpu in gpus}
        self.titles = {gpu: emulated.titles.get(gpu, PLATFORMS[gpu].title) for gpu in gpus}
        sentences: dict[str, list[str]] = {}
        for gpu, refusal in emulated.refusals.items():
            sentences.setdefault(refusal, []).append(PLATFORMS[gpu].title)
        self.about = (
            *(
                f"memory of {', '.join(titles)} is predicted by rules, which is less sure: {refusal}"
                for refusal, titles in sentences.items()
            ),
            *filter(None, (boards.computed_capacity(boards.board(gpu)) for gpu in gpus)),
        )

    def figures(self, case: Case, gpu: str, memory_bytes: int = 0, *, memory_only: bool = False) -> Figures:
        return self._engines[gpu].figures(case, gpu, memory_bytes, memory_only=memory_only)

    def close(self) -> None:
        for engine in set(self._engines.values()):
            engine.close()
