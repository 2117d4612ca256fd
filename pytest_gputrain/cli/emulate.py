"""Runs the command ``gputrain emulate``: a program on an emulated GPU, and what it would have taken of a real one."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import operator
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.cli import emulate_install
from pytest_gputrain.gate.emulated_program import judge
from pytest_gputrain.hardware.emulation import boards, build, libraries
from pytest_gputrain.hardware.emulation.environment import RATES, TORCH, emulated_environment, with_startup
from pytest_gputrain.hardware.rates import rates_of
from pytest_gputrain.records.emulation import (
    ASSUMPTION,
    BALANCED,
    ESTIMATED,
    MADE_UP,
    AtLine,
    DeviceUse,
    EmulatedDevice,
    EmulatedProcess,
    Emulation,
    Tensors,
    not_exchanged_sentence,
    unpadded_sentence,
)
from pytest_gputrain.records.expected import slowest
from pytest_gputrain.report import expected
from pytest_gputrain.report.asked import asked_by
from pytest_gputrain.report.html import page
from pytest_gputrain.report.json_report import generator
from pytest_gputrain.utils import console
from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.files import locked, make_own, own_locks, write_atomically
from pytest_gputrain.utils.json_text import encoded
from pytest_gputrain.utils.linux import end_with_parent
from pytest_gputrain.utils.masking import masked, told
from pytest_gputrain.utils.reading import UNREADABLE, read_message
from pytest_gputrain.utils.units import format_bytes

_STATE: Final = struct.Struct(f"={4 * boards.MOST_DEVICES}Q")
"""The state that the stand-ins share of a process: of each device the use, the peak, what was missing for requests beside
torch's allocator, and the peak of managed memory."""

_FOLDERS: Final = "gputrain-emulated-"
"""Begins the name of the folder in which the program's processes leave what they took."""

_IN_USE: Final = "in-use.lock"
"""The file in that folder which the command that made it holds locked."""

_PROCESS: Final = re.compile(r"[0-9]{1,10}")

_NAMED: Final = 3
"""Lines of the program that are named of one kind."""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_SIGNALLED = 128


def add_to(commands: Any) -> None:
    emulate = commands.add_parser(
        "emulate",
        allow_abbrev=False,
        help="run a training script on an emulated GPU, to see whether it fits and what is in memory at the peak",
        description="Run a program on an emulated GPU. This needs no GPU. torch's own allocator and CUDA operators "
        "decide how "
        "much memory is allocated. Kernels compute nothing, so losses and times mean nothing. The program runs with your "
        "rights, as it would without gputrain. The last line says whether the program fits, does not fit, or whether that "
        "is not known (incomplete). The exit status is that of the program, or 2 if the GPU cannot be emulated. "
        "Example: gputrain emulate --gpu h100 -- python train.py",
    )
    emulate.add_argument("--gpu", metavar="MARKER", help="the GPU, as h100 (pytest --markers lists all)")
    emulate.add_argument(
        "--gpus",
        type=_number_of_gpus,
        default=1,
        metavar="N",
        help="the number of GPUs, for torchrun and similar programs (default: 1)",
    )
    emulate.add_argument(
        "--must-fit",
        action="store_true",
        help="exit with 1 if the program ends well, but does not fit, or if that is not known",
    )
    emulate.add_argument(
        "--expect",
        action="store_true",
        help="estimate how long a step takes on the GPU, in place of counting what each line asks of it",
    )
    emulate.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this JSON file")
    emulate.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with a picture of memory; this needs the extra 'report'"
    )
    emulate_install.add_options(emulate)
    emulate.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments")


def _number_of_gpus(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= boards.MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs from 1 to {boards.MOST_DEVICES}")
    return int(text)


def main(options: argparse.Namespace) -> int:
    """Run the program, and return its exit status. Return 1 if it ended well and ``--must-fit`` is not met, or 2 for bad
    input."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if emulate_install.is_asked(options):
        return emulate_install.main(options, program)
    if options.gpu is None:
        console.say("name the GPU to emulate: gputrain emulate --gpu h100 -- python train.py")
        return 2
    if not program:
        console.say("name the program to run: gputrain emulate --gpu h100 -- python train.py")
        return 2
    if options.html is not None and (lacking := page.missing()):
        console.say(lacking)
        return 2
    try:
        board = boards.board(options.gpu)
        torch = libraries.find_torch()
        stand_ins = build.stand_ins(torch)
        kernels = boards.find_kernels(board, stand_ins.architectures, torch.version)
        with _folder_of_program() as state:
            description = boards.describe(board, kernels=kernels, devices=options.gpus)
            environ = emulated_environment(os.environ, stand_ins, description, state=state)
            environ[TORCH] = str(torch.folder)
            environ["PYTHONPATH"] = with_startup(environ)
            if options.expect:
                environ[RATES] = msgspec.json.encode(rates_of(board.marker)).decode()
            status = _run(program, environ)
            processes, use = tuple(_processes(state)), tuple(_use(state))
            other = boards.other_kernels(board, kernels)
            hidden = told(program) if options.json or options.html else ""
            report = Emulation(
                generator=generator(),
                device_name=other.name if other else board.name,
                platform=board.marker,
                device_count=options.gpus,
                device_memory_bytes=board.memory_bytes,
                torch=torch.version,
                torch_build=torch.origin,
                command=masked(program),
                exit_status=status,
                processes=processes,
                use=use,
                fit=judge(program, status, board.memory_bytes, processes, use),
                notes=tuple(filter(None, [other.sentence if other else "", boards.computed_capacity(board), hidden])),
            )
    except CannotEmulate as error:
        console.say(error)
        return 2
    for line in _report_lines(report):
        console.say(line)
    if options.must_fit and not status:
        status = int(report.fit.verdict != "fits")
    if options.json is not None and not _written(options.json, msgspec.json.format(encoded(report)) + b"\n"):
        return status or 2
    if options.html is not None and not _written(options.html, page.page_of_emulation(report).encode()):
        return status or 2
    return status


def _written(path: Path, data: bytes) -> bool:
    try:
        write_atomically(path, data)
    except OSError as error:
        console.say(f"{path} cannot be written: {error.strerror}")
        return False
    return True


@contextlib.contextmanager
def _folder_of_program() -> Iterator[Path]:
    """Provide a folder for the program until the context ends. Folders of killed commands are removed, too."""
    from filelock import FileLock

    temporary = Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        try:
            make_own(own_locks())  # No other user can hold locks in this user's own folder.
            with locked(own_locks() / _FOLDERS):
                for left in temporary.glob(f"{_FOLDERS}*"):
                    with contextlib.suppress(OSError), FileLock(left / _IN_USE, timeout=0):
                        shutil.rmtree(left)
                made = tempfile.TemporaryDirectory(prefix=_FOLDERS, ignore_cleanup_errors=True)
                folder = Path(stack.enter_context(made))
                stack.enter_context(FileLock(folder / _IN_USE))
        except OSError as error:
            raise CannotEmulate(f"no folder can be made in {temporary}: {error.strerror or error}; set TMPDIR") from None
        yield folder


def _run(program: list[str], environ: dict[str, str]) -> int:
    """Run the program to its end with this process's input and output. If this process dies, the program ends."""
    try:
        asks = functools.partial(end_with_parent, signal.SIGTERM)
        process = subprocess.Popen(program, env=environ, preexec_fn=asks)  # noqa: PLW1509 - there is one thread
    except FileNotFoundError:
        console.say(f"{program[0]} is not found; name a program of this environment, such as python")
        return _NOT_FOUND
    except OSError as error:
        console.say(f"{program[0]} cannot be run: {error.strerror}")
        return _NOT_EXECUTABLE

    def pass_on(number: int, _: object) -> None:
        process.send_signal(number)

    # The terminal sends Ctrl-C to the program as well. Other signals reach only this process, and are meant for both.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before |= {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else _SIGNALLED - status


def _processes(state: Path) -> Iterator[EmulatedProcess]:
    for path in sorted(state.glob("*.json")):
        try:
            yield msgspec.json.decode(read_message(path), type=EmulatedProcess)
        except (*UNREADABLE, OSError) as error:
            console.say(f"what process {path.stem} recorded cannot be read: {error}")


def _use(state: Path) -> Iterator[DeviceUse]:
    for path in sorted(state.iterdir()):
        # The program may also leave files and folders of its own here.
        status = path.lstat()
        if _PROCESS.fullmatch(path.name) and stat.S_ISREG(status.st_mode) and status.st_size == _STATE.size:
            figures = _STATE.unpack(read_message(path))
            _, peaks, missing, managed = (
                figures[first : first + boards.MOST_DEVICES] for first in range(0, len(figures), boards.MOST_DEVICES)
            )
            for gpu, peak in enumerate(peaks):
                if peak:
                    yield DeviceUse(
                        process=int(path.name),
                        gpu=gpu,
                        peak_bytes=peak,
                        managed_bytes=managed[gpu],
                        missing_beside_torch=missing[gpu],
                    )


def _report_lines(report: Emulation) -> Iterator[str]:
    """Return the report as lines, with the verdict last."""
    if report.use:
        yield from _lines_of_figures(report)
    yield f"{report.fit.verdict}: {report.fit.sentence}"


def _lines_of_figures(report: Emulation) -> Iterator[str]:
    many = f"{report.device_count} x " if report.device_count > 1 else ""
    yield (
        f"emulated {many}{report.device_name} ({format_bytes(report.device_memory_bytes)}), {report.versions}; its kernels "
        "computed nothing, so losses, scores and times above mean nothing"
    )
    yield from report.notes
    by_process = {process.process: process for process in report.processes}
    for use in report.use:
        yield from _lines_of_use(use, by_process.get(use.process), report, whole=use is max(report.use, key=_peak))
    for gpu, shared in itertools.groupby(sorted(report.use, key=_gpu), key=_gpu):
        uses = list(shared)
        if len(uses) > 1:
            together = sum(map(_peak, uses))
            fits = "" if together <= report.device_memory_bytes else ", which is more than it has"
            yield f"{len(uses)} processes used GPU {gpu}: at most {format_bytes(together)} together{fits}"


_gpu: Final = operator.attrgetter("gpu")
_peak: Final = operator.attrgetter("peak_bytes")


def _lines_of_use(use: DeviceUse, process: EmulatedProcess | None, report: Emulation, *, whole: bool) -> Iterator[str]:
    """Return lines on the memory of a process on a GPU. Only the process that took most is listed with its tensors at the
    peak."""
    if len(report.use) > 1:
        rank = f", rank {process.rank}" if process is not None and process.rank else ""
        yield f"process {use.process}{rank} on GPU {use.gpu}"
    device = next((device for device in process.devices if device.gpu == use.gpu), None) if process is not None else None
    if process is None or device is None:
        yield (
            f"  peak device use {format_bytes(use.peak_bytes)}; the memory that torch allocated is not known, because the "
            "process ended without Python's own end, or ran without PYTHONPATH"
            if process is None
            else f"  peak device use {format_bytes(use.peak_bytes)}, and torch allocated nothing"
        )
        return
    at_least, torch_at_least = ("at least " if what else "" for what in (process.unknown, process.unknown_in_torch))
    yield f"  peak allocated  {torch_at_least}{format_bytes(device.peak_allocated_bytes)}"
    yield f"  peak reserved   {torch_at_least}{format_bytes(device.peak_reserved_bytes)}"
    yield (
        f"  peak device use {at_least}{format_bytes(use.peak_bytes)} of {format_bytes(report.device_memory_bytes)}, of "
        f"which {format_bytes(boards.CONTEXT_BYTES)} are assumed for CUDA's context"
    )
    if use.managed_bytes:
        yield (
            f"  up to {format_bytes(use.managed_bytes)} were managed memory (cudaMallocManaged), "
            "which is assumed to be on the GPU as far as it fits"
        )
    yield from _lines_of_refusals(device)
    if whole:
        if process.unknown:
            yield f"  not known, and not counted: {', '.join(process.unknown)}"
        if process.estimated_bytes:
            yield f"  {ESTIMATED} ({format_bytes(process.estimated_bytes)})"
        yield from _lines_of_peak(device)
        yield from _lines_of_counts(process) if process.expected is None else _lines_of_expected(report)
        if graphs := process.graphs:
            pools = format_bytes(graphs.most_in_pools)
            yield (
                f"  CUDA graphs: {graphs.captured:,} captured, launched {graphs.launched:,} times; at most "
                f"{graphs.most:,} at a time with {graphs.most_kernels:,} kernels; up to {pools} in private pools"
            )
        yield from _lines_of_values(process)


def _lines_of_values(process: EmulatedProcess) -> Iterator[str]:
    """Yield lines on what was assumed where values of tensors are unknown, and on what took long to follow."""
    sentences = (
        _by_lines(BALANCED, process.dealt),
        not_exchanged_sentence(process.not_exchanged) if process.not_exchanged else "",
        _by_lines(ASSUMPTION, process.assumed),
        unpadded_sentence(process.unpadded) if process.unpadded else "",
        _by_lines(MADE_UP, process.unknown_reads),
        process.slow_following,
    )
    yield from (f"  {sentence}" for sentence in sentences if sentence)


def _by_lines(said: str, happened: Sequence[AtLine]) -> str:
    """Return a sentence with the lines at which it happened, the most frequent first; empty if there are none."""
    if not happened:
        return ""
    named = [
        f"{one.what} at {one.where}" + (f" ({one.count:,} times)" if one.count > 1 else "") for one in happened[:_NAMED]
    ]
    rest = len(happened) - len(named)
    others = f" and at {rest} other {'lines' if rest > 1 else 'line'}" if rest else ""
    return f"{said}, by {', '.join(named)}{others}"


def _lines_of_refusals(device: EmulatedDevice) -> Iterator[str]:
    for refused in device.refused:
        yield (
            f"  out of memory: {format_bytes(refused.bytes)} were asked for and {format_bytes(refused.free)} were free, at "
            f"{refused.where or 'a place without a Python line'}"
        )


def _lines_of_peak(device: EmulatedDevice) -> Iterator[str]:
    peak = device.peak
    if peak is None:
        yield (
            "  the tensors at the peak are not known: too many allocations came after it, or the program recorded its "
            "memory itself; run fewer steps"
        )
        return
    yield (
        f"  the peak came {peak.seconds:.1f} s after the first allocation, with allocation {peak.event:,} of {peak.events:,}"
    )
    yield f"  in use then: {', '.join(f'{part.name} {format_bytes(part.bytes)}' for part in peak.parts)}"
    yield "  the largest tensors at the peak:"
    yield from _rows(peak.tensors)
    rest = peak.bytes - sum(tensors.bytes * tensors.count for tensors in peak.tensors)
    if rest:
        yield f"  {format_bytes(rest):>12}  all others"


def _lines_of_expected(report: Emulation) -> Iterator[str]:
    """Return the expected time of a step, in the process that takes longest. All others wait for that process."""
    one = slowest(process.expected for process in report.processes)
    if one is not None:
        yield f"  expected time of a step, from one update to the next: {expected.describe(one)}"
    if one is not None and one.seconds is not None:
        yield from (f"  {note}" for note in expected.notes([(report.device_name, one)]))


def _lines_of_counts(process: EmulatedProcess) -> Iterator[str]:
    """Return a table of the work that each line of the program gives to the GPU, as lines of text."""
    asked = asked_by(process)
    if asked is None:
        yield "  what each line asks of the GPU is not known: pytest-gputrain is not in the program's environment"
        return
    if asked.lines_unknown:
        yield f"  what asks it has no lines: {asked.lines_unknown}"
    yield f"  what each line asks of the GPU {asked.about}:"
    rows: list[tuple[str, list[str]]] = [("", list(asked.columns))]
    rows += ((place, asked.cells(figures)) for place, figures in (*asked.lines, *asked.sums))
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    for place, cells in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"    {'  '.join(padded)}  {place}".rstrip()


def _rows(groups: Iterable[Tensors]) -> Iterator[str]:
    for group in groups:
        together = format_bytes(group.bytes * group.count)
        parts = f" ({group.count} x {format_bytes(group.bytes)})" if group.count > 1 else ""
        yield f"  {together:>12}  {group.where}{parts}"
