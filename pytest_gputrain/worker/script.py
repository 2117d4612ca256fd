"""Runs a script of the user's as the case of a worker: as a process of its own, and as its command line would."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from pytest_gputrain.records import Counts, Crashed, EmulatedRun, Measurement, OutOfMemory, Reply, Task
from pytest_gputrain.records.emulation import NotExchanged, Unpadded
from pytest_gputrain.utils.linux import end_with_parent
from pytest_gputrain.utils.reading import read_message, tail
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.device import Accelerator
from pytest_gputrain.worker.emulated import conditions, of_counts, of_estimates, read_though_unknown, rests_on
from pytest_gputrain.worker.environment import environment_of
from pytest_gputrain.worker.group import ALONE
from pytest_gputrain.worker.progress import Progress

_STARTUP: Final = Path(__file__).parent / "startup"
"""The folder on the script's PYTHONPATH with the ``sitecustomize`` that records it."""
_LEAST_STEPS: Final = 2
"""The least number of steps: from the second step on the optimizer has its states."""
_NOT_LOOKED_AT: Final = "the losses, precision, FLOPs and memory growth of a script are not checked"


class _DeviceUse(Struct):
    allocated: int
    reserved: int
    used: int


class _Recorded(Struct):
    """The record that a process of the script wrote."""

    process: int
    cuda: str | None
    """Version that its torch was built for, of CUDA or ROCm."""
    devices: list[_DeviceUse]
    """The GPUs that the process used; empty if it used none."""
    steps_of: str
    stamps: list[list[float]]
    """Seconds at the ends of steps, for each training; with a framework's trainer at the begin of the first one, too."""
    out_of_memory: str | None
    unknown: list[str]
    estimated_bytes: int = 0
    not_exchanged: list[NotExchanged] = []
    dealt: list[dict[str, str | int]] = []
    assumed: list[dict[str, str | int]] = []
    unpadded: list[Unpadded] = []
    unknown_reads: list[dict[str, str | int]] = []
    """The reads of unknown values, because an emulated GPU computes none."""
    steps: Counts | None = None
    """The counts of its first steps on an emulated GPU."""


def run_script(task: Task, progress: Progress, folder: Path) -> Reply | EmulatedRun:
    """Run the script to its end, and return a reply with what it took of the GPU.

    Args:
        folder: of this rank, which has what the script prints in ``stderr.txt``.
    """
    state = folder / "script"
    state.mkdir()
    progress.enter("measure")
    status = _run(task, state)
    try:
        recorded = [msgspec.json.decode(read_message(path), type=_Recorded) for path in sorted(state.glob("*.json"))]
        return _reply(task, status, recorded, folder / "stderr.txt")
    except CheckFailed as error:
        return Crashed(sentence=str(error), phase=progress.phase, refused=not status)


def _run(task: Task, state: Path) -> int:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environ["GPUTRAIN_SCRIPT_STATE"] = str(state)
    if task.counts:
        environ["GPUTRAIN_SCRIPT_COUNTS"] = "1"
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STARTUP), environ.get("PYTHONPATH", "")]))
    command = [sys.executable, task.case.code, *msgspec.json.decode(task.case.args or "[]", type=list[str])]
    return subprocess.run(
        command, cwd=task.root, env=environ, stdin=subprocess.DEVNULL, check=False, preexec_fn=end_with_parent
    ).returncode


def _reply(task: Task, status: int, recorded: list[_Recorded], stderr: Path) -> Reply | EmulatedRun:
    name = task.case.code
    users = [process for process in recorded if process.devices]
    full = next((process.out_of_memory for process in users if process.out_of_memory), None) if status else None
    if status and full is None:
        how = f"with exit status {status}" if status > 0 else f"by signal {-status}"
        last = _last_line(stderr)
        raise CheckFailed(f"{name} ended {how}{f': {last}' if last else ''}")
    if not recorded:
        raise CheckFailed(
            f"{name} never imported torch, or ended without Python's own end (os._exit), so its memory is not known"
        )
    if not users:
        build = "" if any(process.cuda for process in recorded) else ", because its torch is built without CUDA"
        raise CheckFailed(
            f"{name} never used the GPU{build}; "
            + ("let it choose its device by torch.cuda.is_available()" if not build else "install torch's CUDA build")
        )
    if len(users) > 1:
        raise CheckFailed(
            f"{name} used the GPU in {len(users)} processes, and their memory together is not known; let it train in one"
        )
    (process,) = users
    device = Accelerator(0, emulated=bool(task.emulated))
    allocated, reserved, used = (max(getattr(use, kind) for use in process.devices) for kind in _DeviceUse.__struct_fields__)
    peaks = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved, "device_used_bytes": used}
    if task.emulated:
        fits = {"fits": False, "refused": full} if full is not None else {"fits": True}
        if full is None:
            _check_steps(name, process, _LEAST_STEPS)
        resting = rests_on(process.dealt, process.assumed, process.not_exchanged, process.unpadded)
        notes = (
            _NOT_LOOKED_AT,
            *of_estimates(process.estimated_bytes),
            *resting,
            *read_though_unknown(process.unknown_reads),
            *of_counts(process.steps, process.unknown_reads),
        )
        return EmulatedRun(
            **conditions(task, device),
            **fits,
            **peaks,
            counts=process.steps if full is None else None,
            not_counted=tuple(process.unknown),
            estimated_bytes=process.estimated_bytes,
            notes=notes,
        )
    environment = environment_of(device, ALONE)
    if full is not None:
        return OutOfMemory(
            where="device", phase="measure", message=full, peak_allocated_bytes=allocated, environment=environment
        )
    warmup = task.case.warmup
    seconds = _check_steps(name, process, warmup + 1)
    return Measurement(
        **peaks,
        step_seconds=tuple(seconds[warmup:]),
        warmup_seconds=tuple(seconds[:warmup]),
        losses=(),
        batch_size=task.case.batch_size,
        sequence_length=task.case.sequence_length,
        updates=len(seconds),
        parameters=None,
        trainable_parameters=None,
        model_bytes=None,
        peak_host_bytes=1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        notes=(_NOT_LOOKED_AT,),
        environment=environment,
    )


def _check_steps(name: str, process: _Recorded, least: int) -> list[float]:
    """Return the seconds of each step of the script.

    Raises:
        CheckFailed: there are too few.
    """
    seconds = [end - start for stamps in process.stamps for start, end in itertools.pairwise(stamps)]
    if len(seconds) < least:
        what = f"micro-batches of {process.steps_of}" if process.steps_of != "optimizer" else "updates by torch.optim"
        raise CheckFailed(
            f"{name} took too few steps to be measured: {len(seconds)} could be timed, counted as {what}, and {least} are "
            "needed, warm-up included; let it train longer"
        )
    return seconds


def _last_line(stderr: Path) -> str:
    return next((line.strip() for line in reversed(tail(stderr).splitlines()) if line.strip()), "")
