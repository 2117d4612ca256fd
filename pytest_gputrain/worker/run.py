"""Runs one case, from its task to its reply: builds it, counts, warms up, times and checks its steps."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import sys
import traceback
from typing import Final, Literal

import msgspec
import torch

from pytest_gputrain.records import Case, Crashed, EmulatedRun, Measurement, OutOfMemory, Reply, Served, Task
from pytest_gputrain.utils.sanitize import utf8
from pytest_gputrain.worker.case_run import CaseRun, Keep
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.compiling import compile_time
from pytest_gputrain.worker.device import Accelerator, Cpu, Device, peak_host_bytes
from pytest_gputrain.worker.emulated import (
    EmulatedFigures,
    emulated_reply,
    emulated_run,
    training_on_emulated_gpu,
    with_made_up_values,
)
from pytest_gputrain.worker.environment import environment_of
from pytest_gputrain.worker.group import ALONE, Group
from pytest_gputrain.worker.measuring import Measuring
from pytest_gputrain.worker.optimizers import OPTIMIZERS
from pytest_gputrain.worker.own_code import OwnCode
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.parallel import NEEDS_GROUP
from pytest_gputrain.worker.parallel.table_server import TableServer
from pytest_gputrain.worker.precision import tf32_allowed
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.seeds import SEED
from pytest_gputrain.worker.training import StepBuilder

_OF_ANY_CONFIG: Final = ("model", "batch_size", "sequence_length", "resolution", "frames", "loss")
"""Fields of a case that any model of a config.json takes."""

_LIBRARY_OUT_OF_MEMORY: Final = re.compile("(CUBLAS|CUDNN|HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED", re.I)
"""The messages of libraries whose workspace did not fit, which happens a few MiB before torch's allocator finds no
memory."""

_LONGEST_LINE: Final = 2_000
_LONGEST_TEXT: Final = 100_000
"""The most characters of an exception's message in a sentence, and of its traceback: a reply has a limit of its size."""
_MIXED_TYPES: Final = re.compile("to have the same dtype|expected scalar type")
"""The messages of torch for a product of tensors whose types differ."""


def run(
    task: Task,
    progress: Progress,
    builder: StepBuilder | None = None,
    group: Group = ALONE,
    keep: Keep = lambda figures: None,
) -> Reply | Served | EmulatedRun:
    """Train, measure and check a case, and return its reply. Every error becomes a reply, except signals and a broken
    interpreter.

    Leaves torch's seed, its number of threads on a CPU, and a frozen heap behind: a worker ends here, others mend that.

    Args:
        builder: the user's function itself, for a run inside the pytest process.
        group: this process among those of the case.
        keep: called with the figures before they are checked.
    """
    device: Device | None = None
    emulated: EmulatedFigures | None = None
    own: OwnCode | None = None
    lines, is_own_code = OwnLines.of_case(task, builder), bool(task.case.code or builder)
    try:
        on_cpu = task.device_type == "cpu" or group.serves
        device = Cpu() if on_cpu else Accelerator(group.local_rank, emulated=bool(task.emulated))
        if isinstance(device, Accelerator) and not device.computes:
            emulated = EmulatedFigures(device, lines if is_own_code else None, task)
            keep = functools.partial(_keep_emulated, keep, task, device, emulated)
        torch.manual_seed(SEED)
        even_alone = task.case.parallel in NEEDS_GROUP
        if is_own_code:
            own = OwnCode(task, group, counts_memory=device.type == "cpu", inline=builder is not None)
        with (
            group.joined(device.torch_device, even_alone=even_alone),
            device.keeping_peaks(),
            tf32_allowed(task.case.tf32 if device.type != "cpu" else None),
            own.running() if own else contextlib.nullcontext(),
            training_on_emulated_gpu(task.case, emulated) if emulated else contextlib.nullcontext(),
        ):
            if group.serves:
                return _serve(task, progress, device, group, keep)
            case_run = CaseRun(task, progress, device, group, keep, lines, own, emulated)
            reply: Reply = Measuring(case_run).run(builder)
    except CheckFailed as error:
        return Crashed(sentence=f"{error}{compile_time()}", phase=progress.phase, step=progress.step, refused=True)
    except SystemExit as error:
        if said := _said_by_argparse(error):
            return Crashed(sentence=said, phase=progress.phase, step=progress.step)
        at = _at(lines, error)
        return Crashed(
            sentence=f"sys.exit() was called{at}, which ends the process that trains; move "
            'the code that only the script should run below `if __name__ == "__main__":`',
            phase=progress.phase,
            step=progress.step,
        )
    except Exception as error:
        if own is None and (mixed := _mixed_types(error, task.case)):
            return Crashed(sentence=mixed, phase=progress.phase, step=progress.step, refused=True)
        where = _out_of_memory(error)
        # The case has fitted into memory before these phases begin. So running out of memory here is a crash.
        if where is None or device is None or progress.phase in ("check", "profile"):
            crashed = crash(error, progress, lines if own else None, on_cpu=task.device_type == "cpu")
            return of_config(with_made_up_values(crashed) if emulated else crashed, task, error)
        peaks = device.peaks()
        reply = OutOfMemory(
            where=where,
            phase=progress.phase,
            message=f"{_first_line(error)}{_at(lines if own else None, error)}",
            step=progress.step,
            peak_allocated_bytes=peaks.allocated,
            environment=environment_of(device, group),
        )
    # Whether the figures are emulated follows from the libraries that were loaded, and not from what the task asked for.
    return reply if emulated is None else emulated_reply(reply, task, device, emulated)


def _keep_emulated(
    keep: Keep, task: Task, device: Device, emulated: EmulatedFigures, figures: Measurement | Served | EmulatedRun
) -> None:
    """Keep the figures of a measurement as those of an emulated GPU, which have no times."""
    assert isinstance(figures, Measurement), "the first worker of a case measures, and it alone runs there"
    keep(emulated_run(figures, task, device, emulated))


_NO_GPU: Final = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")
"""The errors of torch where a program asks for a GPU and there is none."""


def _said_by_argparse(error: SystemExit) -> str:
    """Return a sentence on a command line that argparse has refused; empty if something else has ended the process."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_qualname == "ArgumentParser.error":
            return (
                f"argparse found {frame.f_locals['message']!r}, because the process that trains has no command line: give "
                "its options defaults, or have the function take args={...} in place of them"
            )
    return ""


def crash(error: BaseException, progress: Progress, lines: OwnLines | None, *, on_cpu: bool = False) -> Crashed:
    """Return the reply for an exception, with its traceback.

    Args:
        lines: tells which lines are the user's own, of which the sentence has the last; None for a model of the zoo.
        on_cpu: whether the case trains on a CPU.
    """
    remedy = f"; install it for {sys.executable}" if isinstance(error, ModuleNotFoundError) else ""
    if lines and on_cpu and any(said in _message(error) for said in _NO_GPU):
        remedy = "; this run trains on the CPU: take setup.device in place of a GPU's name"
    return Crashed(
        sentence=f"{type(error).__name__}: {_first_line(error)}{_at(lines, error)}{remedy}{compile_time()}",
        phase=progress.phase,
        step=progress.step,
        detail=_cut(utf8("".join(traceback.format_exception(error))), _LONGEST_TEXT),
    )


def _at(lines: OwnLines | None, error: BaseException) -> str:
    """Return the last line of the user in an exception's traceback, as the end of a sentence; empty without one."""
    line = lines.of_traceback(error.__traceback__) if lines else ""
    return f" (at {line})" if line else ""


def _serve(task: Task, progress: Progress, device: Device, group: Group, keep: Keep) -> Served:
    """Serve as a parameter server, from the first worker's tables until the last worker leaves."""
    case = task.case
    progress.enter("build")
    optimizer = OPTIMIZERS[case.optimizer]
    with device.counting(OwnLines.of_case(task).current) as counter:
        server = TableServer(group, case.asynchronous, lambda rows: optimizer(rows, case.learning_rate))
        progress.enter("count")
        # The workers count two steps: the first makes the optimizer's state, and the second uses it.
        server.serve(updates=2 * (group.size if case.asynchronous else 1))
    gc.collect()
    gc.freeze()
    progress.enter("measure")
    server.serve()
    assert counter is not None, "a server has its tables on the host"
    figures = Served(
        updates=server.updates,
        rows=server.rows,
        model_bytes=server.bytes,
        peak_allocated_bytes=counter.peak_bytes,
        peak_host_bytes=peak_host_bytes(),
    )
    keep(figures)
    progress.enter("check")
    if not task.curve:
        server.check()
    return figures


def _out_of_memory(error: Exception) -> Literal["device", "host"] | None:
    """Return which memory ran out; None for any other error. torch has no exception of its own for memory of the CPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    message = _message(error)
    if isinstance(error, RuntimeError) and "out of memory" in message and ("CUDA" in message or "HIP" in message):
        return "device"  # A library has allocated this memory without torch's allocator.
    if isinstance(error, RuntimeError) and _LIBRARY_OUT_OF_MEMORY.search(message):
        return "device"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in message):
        return "host"
    return None


def _mixed_types(error: Exception, case: Case) -> str:
    """Return the sentence for a model of transformers whose code needs autocast; empty for any other error."""
    if case.precision != "bf16" or not _MIXED_TYPES.search(_message(error)):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    name = next(
        (name for name in reversed(names) if name.partition(".")[0] not in ("torch", __name__.partition(".")[0])), ""
    )
    if not name.startswith("transformers.models."):
        return ""
    return (
        f"{case.model} does not train in precision='bf16', because {name} multiplies tensors of two types "
        f"({_first_line(error)}); choose precision='bf16-amp'"
    )


def of_config(crashed: Crashed, task: Task, error: BaseException) -> Crashed:
    """Return the reply, with a sentence that names the model if the model's config.json is the cause.

    That is proven where a library fails in plain full fine-tuning. Adapters, engines and knobs have faults of their own.
    """
    plain = {name: value for name, value in task.case.identity().items() if name not in _OF_ANY_CONFIG}
    if not task.model_config or not crashed.detail or plain != {name: Case().identity()[name] for name in plain}:
        return crashed
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        return crashed
    sentence = f"{task.case.model} does not train as its config.json describes it: {crashed.sentence}"
    return msgspec.structs.replace(crashed, sentence=sentence)


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in _message(error).splitlines())
    return _cut(utf8(next(filter(None, lines), "no message")), _LONGEST_LINE)


def _message(error: BaseException) -> str:
    """Return the message of an exception, whose class may be the user's."""
    try:
        return str(error)
    except Exception as failed:
        return f"its message cannot be made, because __str__ fails with {type(failed).__name__}"


def _cut(text: str, most: int) -> str:
    """Return the text without its middle if it is longer than this. A traceback begins with the place."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}... ({len(text) - most:,} characters left out) ...{text[-half:]}"
