"""Has cases whose fit was predicted run on emulated GPUs, too, where torch's own allocator and CUDA operators decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pytest_gputrain.execution.emulated import EmulatingExecutor
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.gate.fit import fit_of_emulated, loads_in_parts
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.hardware.targets import target_of
from pytest_gputrain.records import EmulatedRun
from pytest_gputrain.records.fit import FitCell
from pytest_gputrain.session.tasks import full_size_task
from pytest_gputrain.utils.errors import BadCase


class EmulatedFitting:
    """Answers for the cells of a report, one after the other.

    Args:
        root: folder that files named by cases are relative to.
        timeout_seconds: of a case.
        environ: variables of the processes.

    Raises:
        CannotEmulate: one of the GPUs cannot be emulated, or there is no CUDA build of torch here.
    """

    def __init__(self, gpus: Sequence[str], root: Path, timeout_seconds: float, environ: Mapping[str, str]) -> None:
        self._root = root
        self._executors = {gpu: EmulatingExecutor(gpu, timeout_seconds, environ, ForkServer()) for gpu in gpus}

    def environment_of_predictions(self) -> dict[str, str]:
        """Return the variables of processes that see no GPU, and can import torch without NVIDIA's libraries.

        Raises:
            CannotEmulate: the stand-ins cannot be built.
        """
        return {**next(iter(self._executors.values())).environment(1), "CUDA_VISIBLE_DEVICES": ""}

    def cells(self, cells: Sequence[FitCell], note: Callable[[str, int, int], None]) -> Iterator[FitCell]:
        """Yield each cell with what its case took of an emulated GPU, and whether it fits by both."""
        for number, cell in enumerate(cells, start=1):
            yield self._with_run(cell)
            note("emulated GPUs", number, len(cells))

    def close(self) -> None:
        """End the processes."""
        for executor in self._executors.values():
            executor.close()

    def _with_run(self, cell: FitCell) -> FitCell:
        # The second step has all that later ones have: gradients of its own, and the optimizer's state.
        case = cell.case.replace(steps=1, warmup=1)
        try:
            task = full_size_task(case, self._root, emulated=cell.gpu)
            reply = self._executors[cell.gpu].run(task, watch=lambda event: None)
        except BadCase as error:
            return msgspec.structs.replace(cell, failure=str(error))
        if not isinstance(reply, EmulatedRun):
            failure = f"{cell.case} {describe_failure(reply, 'figures on an emulated GPU')}"
            return msgspec.structs.replace(cell, failure=failure)
        if not reply.fits and loads_in_parts(cell.case):
            failure = (
                f"{cell.case} ran out of memory on an emulated GPU, where all of it is built; its figures are predicted"
            )
            return msgspec.structs.replace(cell, emulated=reply, failure=failure)
        target = target_of(cell.gpu)
        needed = reply.peak_reserved_bytes + target.context_bytes if reply.fits else cell.needed_bytes
        fit = fit_of_emulated(reply, target, cell.fit)
        return msgspec.structs.replace(cell, emulated=reply, needed_bytes=needed, fit=fit, failure="")
