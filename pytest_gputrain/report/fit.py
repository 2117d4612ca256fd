"""Makes the tables and sentences of ``gputrain predict``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pytest_gputrain.gate.expected_times import tells_apart
from pytest_gputrain.gate.fit import loads_in_parts
from pytest_gputrain.gate.memory import in_phase, tensor
from pytest_gputrain.records import Case, EmulatedRun, ExpectedTime, TrainingPhase, knob_text
from pytest_gputrain.records.case import ADAPTING
from pytest_gputrain.records.emulated import NOT_MADE
from pytest_gputrain.records.fit import Fit, FitCell, FitGpu, FitReport, LargestBatch
from pytest_gputrain.report import expected
from pytest_gputrain.report.tables import Form, TextTable, render
from pytest_gputrain.utils.units import format_bytes, format_percent

WORDS: Final[dict[Fit, str]] = {
    "fits": "fits",
    "incomplete": "or more, incomplete",
    "within-error": "within the error",
    "does-not-fit": "does not fit",
}
_SHOWN_PEAKS: Final = 4
"""Cases up to whose number the largest tensors at the peak are shown; JSON and HTML have them all."""
_SHOWN_TENSORS: Final = 3


def tables(report: FitReport) -> list[TextTable]:
    """Return the tables: memory of each cell, the largest batches, and the expected time of a step."""
    common = ", ".join(f"{name} {knob_text(value)}" for name, value in _common(report).items())
    cells = {(_row(report, cell.case), cell.gpu): cell for cell in report.cells}
    made = [
        _table(
            report,
            f"Memory of {report.model}",
            {key: _cell(cell) for key, cell in cells.items()},
            about=(common,) if common else (),
        )
    ]
    if report.largest:
        batches = {(_row(report, found.case)[:-1], found.gpu): _largest(found) for found in report.largest}
        made.append(_table(report, "Largest batch that fits", batches, knobs=report.knobs[:-1]))
    if timed := _timed(report):
        made.append(_times(report, timed))
    return made


def text(report: FitReport, form: Form) -> str:
    """Return the tables and the sentences below them as text."""
    *others, last = tables(report)
    return render([*others, dataclasses.replace(last, notes=tuple(notes(report)))], form)


def _table(
    report: FitReport,
    title: str,
    cells: dict[tuple[tuple[str, ...], str], str],
    *,
    knobs: tuple[str, ...] | None = None,
    about: tuple[str, ...] = (),
) -> TextTable:
    """Return a table with a row for each combination of knobs and a column for each GPU."""
    rows = dict.fromkeys(row for row, _ in cells)
    return TextTable(
        title=title,
        about=about,
        headers=(*(report.knobs if knobs is None else knobs), *map(_header, report.gpus)),
        rows=tuple((*row, *(cells.get((row, gpu.marker), "-") for gpu in report.gpus)) for row in rows),
    )


def _header(gpu: FitGpu) -> str:
    return f"{gpu.title} ({format_bytes(gpu.memory_bytes)})"


def _row(report: FitReport, case: Case) -> tuple[str, ...]:
    return tuple(knob_text(getattr(case, knob)) for knob in report.knobs)


def _common(report: FitReport) -> dict[str, object]:
    """Return the knobs that are equal in all cells and differ from their defaults."""
    if not report.cells:
        return {}
    case, default = report.cells[0].case, Case()
    names = [name for name in case.identity() if name not in (*report.knobs, "model", "named")]
    always = ("method", "precision", "optimizer")
    return {name: getattr(case, name) for name in names if name in always or getattr(case, name) != getattr(default, name)}


def _cell(cell: FitCell) -> str:
    if cell.fit is None:
        return "no figures"
    if cell.needed_bytes is None:
        return WORDS[cell.fit]
    return f"{format_bytes(cell.needed_bytes)} {WORDS[cell.fit]}"


def _largest(found: LargestBatch) -> str:
    if found.failure:
        return "not known"
    if found.needed_bytes is None:
        return "none" if not found.perhaps else f"none, {found.perhaps} within the error"
    more = " or more" if found.is_bound else ""
    return f"{found.batch_size}{more} ({format_bytes(found.needed_bytes)})"


class _Timed(NamedTuple):
    """A cell that may fit, with its expected time and the amount that a step trains on."""

    cell: FitCell
    expected: ExpectedTime
    work: int
    """Tokens of a step, or samples where the case has no sequence length."""

    @property
    def speed(self) -> float:
        """The tokens or samples in each second."""
        return self.work / (self.expected.seconds or math.inf)


def _timed(report: FitReport) -> list[_Timed]:
    """Return the cells that may fit and have an expected time, the fastest first if that was asked for."""
    rows = []
    for cell, one in _expected(report):
        if one.seconds is not None and cell.fit not in (None, "does-not-fit"):
            rows.append(_Timed(cell, one, cell.case.batch_size * cell.case.gpus * (cell.case.sequence_length or 1)))
    return sorted(rows, key=lambda row: -row.speed) if report.sort == "speed" else rows


def _expected(report: FitReport) -> Iterator[tuple[FitCell, ExpectedTime]]:
    return ((cell, cell.figures.expected) for cell in report.cells if cell.figures and cell.figures.expected)


def _times(report: FitReport, rows: Sequence[_Timed]) -> TextTable:
    """Return a table of the expected time of each cell. If sorted by speed, it also says whether a cell is surely slower
    than the fastest."""
    titles = {gpu.marker: gpu.title for gpu in report.gpus}
    work = "tokens" if any(row.cell.case.sequence_length for row in rows) else "samples"
    fastest, told = rows[0], [""]
    for row in rows[1:]:
        on_one_gpu = fastest.cell.gpu == row.cell.gpu
        is_slower = tells_apart(fastest.expected, row.expected, fastest.work / row.work, on_one_gpu=on_one_gpu)
        told.append("slower" if is_slower else "cannot tell")
    is_sorted = report.sort == "speed"
    return TextTable(
        title="Expected time of a step",
        headers=(*report.knobs, "GPU", "time", "most of it", f"{work}/s", *(["than the fastest"] if is_sorted else [])),
        rows=tuple(
            (
                *_row(report, row.cell.case),
                titles[row.cell.gpu],
                expected.interval(row.expected),
                expected.most_of_it(row.expected),
                f"{row.speed:,.{0 if row.speed >= 10 else 2}f}",
                *([than] if is_sorted else []),
            )
            for row, than in zip(rows, told, strict=True)
        ),
    )


def notes(report: FitReport, *, with_peaks: bool = True) -> Iterator[str]:
    """Yield sentences on what would make other cells fit, on the memory at the peak, and on what the figures mean."""
    titles = {gpu.marker: gpu.title for gpu in report.gpus}
    failures = [*(cell.failure for cell in report.cells), *(found.failure for found in report.largest)]
    yield from dict.fromkeys(filter(None, failures))
    for cell in report.cells:
        if cell.remedy:
            verb = "does" if cell.fit == "does-not-fit" else "may"
            yield f"{cell.case} {verb} not fit {titles[cell.gpu]}: {cell.remedy}"
    at_peak = peaks(report)
    if with_peaks and len(at_peak) <= _SHOWN_PEAKS:
        for name, what in at_peak.items():
            yield f"{name} at its peak, {what}"
    yield from _trained(report)
    yield from _unquantized(report)
    ran = [cell.figures for cell in report.cells if cell.figures is not None]
    yield from dict.fromkeys(note for run in ran for note in run.notes if note != NOT_MADE)
    for what in dict.fromkeys(what for run in ran for what in run.not_counted):
        gpus = dict.fromkeys(titles[cell.gpu] for cell in report.cells if _counts_not(cell, what))
        yield (
            f"{', '.join(gpus)}: {what} are not known, and not counted, so at least this memory is needed; what fits "
            "without them is called incomplete, the largest batches are upper bounds, and what makes a case fit may not be "
            "enough"
        )
    yield from report.left_out
    yield from report.about
    share = format_percent(report.error, signed=False)
    yield (
        "memory is what nvidia-smi would show of the process; 'within the error' means that an error of "
        f"{share} in it would change the answer"
    )
    yield from expected.notes((titles[cell.gpu], one) for cell, one in _expected(report))
    if any(cell.case.gpus > 1 for cell in report.cells):
        yield "memory is that of one of the GPUs, without the memory of NCCL, which is not known"
    if any(loads_in_parts(cell.case) for cell in report.cells):
        yield (
            "memory under fsdp and of qlora is that of training, for programs that load one part of the model at a time; a "
            "case of pytest-gputrain builds the whole model on the GPU first"
        )
    versions = ", ".join(f"{name} {version}" for name, version in sorted(report.packages.items()))
    compiled = "" if any(cell.case.compile != "off" for cell in report.cells) else ", not compiled"
    runtimes = ", ".join(dict.fromkeys(str(run.runtime) for run in ran))
    yield f"run on emulated GPUs (CUDA {runtimes}) with {versions}{compiled}; nothing was computed"


def _counts_not(cell: FitCell, what: str) -> bool:
    return cell.figures is not None and what in cell.figures.not_counted


def _trained(report: FitReport) -> Iterator[str]:
    """Yield how many parameters each adapting method trains, which follows from the layers that get adapters."""
    counts = {
        case.method: f"{case.method} trains {figures.trainable_parameters:,} parameters"
        for case, figures in ((cell.case, cell.figures) for cell in report.cells)
        if case.method in ADAPTING and figures is not None and figures.trainable_parameters
    }
    if counts:
        yield f"{', '.join(counts.values())}; --set lora_rank=... and --set lora_targets=... change that"


def _unquantized(report: FitReport) -> Iterator[str]:
    """Yield the type in which qlora keeps what it does not pack, and whether peft has converted it."""
    cases = [cell.case for cell in report.cells if cell.case.method == "qlora"]
    for precision, called in dict.fromkeys((case.precision, case.unquantized_fp32) for case in cases):
        knob = "" if called is None else f" and unquantized_fp32={knob_text(called)}"
        in_fp32 = called or (called is None and precision != "bf16")
        yield (
            f"qlora with precision={precision}{knob} keeps embeddings, head and norms in {'fp32' if in_fp32 else '16 bits'}"
            + _OF_PREPARED[called, in_fp32]
        )


_OF_PREPARED: Final = {
    (True, True): ", because peft's prepare_model_for_kbit_training is called",
    (False, False): ", because peft's prepare_model_for_kbit_training is not called",
    (None, True): ", as after peft's prepare_model_for_kbit_training",
    (None, False): ", as without peft's prepare_model_for_kbit_training; --set unquantized_fp32=true calls it",
}
"""How the type came about, by the knob ``unquantized_fp32`` and by whether it is fp32."""

_ORIGINS: Final[dict[TrainingPhase, str]] = {
    "build": "weights",
    "forward": "activations",
    "backward": "gradients and recomputed activations",
    "between": "clipping",
    "optimizer": "optimizer",
}
"""The kind of tensors that each phase makes, for the most part."""
_SHOWN_SHARE: Final = 0.01


def origins(figures: EmulatedRun) -> list[tuple[str, int]]:
    """Describe the origins of the bytes at the peak, without origins of less than a hundredth."""
    sizes = figures.peak_bytes_by_origin
    least = _SHOWN_SHARE * sum(sizes.values())
    return [(_ORIGINS[phase], size) for phase, size in sizes.items() if size >= least]


def peaks(report: FitReport) -> dict[str, str]:
    """Describe what is at the peak of each case, on the first GPU: ``in backward: 15.0 GiB weights, ...; largest 7.00 GiB
    (...)``."""
    found = {}
    for cell in report.cells:
        if cell.figures is not None and (phase := cell.figures.peak_phase) and str(cell.case) not in found:
            made = ", ".join(f"{format_bytes(size)} {word}" for word, size in origins(cell.figures))
            largest = cell.figures.largest.get(phase, ())[:_SHOWN_TENSORS]
            found[str(cell.case)] = f"{in_phase(phase)}: {made}; largest {', '.join(map(tensor, largest))}"
    return found
