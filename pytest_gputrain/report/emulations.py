"""Makes the table and the sentences that ``--gpu-emulate`` prints on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pytest_gputrain.gate.memory import in_phase, tensor
from pytest_gputrain.gate.messages import count
from pytest_gputrain.records import Emulated, EmulatedRun, Result
from pytest_gputrain.report import expected, rich_text
from pytest_gputrain.report.results import count_columns, latest, of_kind
from pytest_gputrain.utils.units import format_bytes, format_flops

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_WIDE: Final = 110
"""Columns of a terminal that is wide enough for all figures."""
_SHOWN_PEAKS: Final = 4
"""Results up to whose number the tensors at the peaks and the expected times are shown; the JSON report has them all."""
_SHOWN_TENSORS: Final = 3


def table(
    results: Sequence[Emulated],
    names: Callable[[Result], Sequence[str]],
    verdict: Callable[[Result], Text],
    outcome: Callable[[Result], str],
    width: int,
) -> Table:
    """Return a table with a row for each case: its memory, model, FLOPs and expected time, and whether it fits."""
    figures: dict[str, Callable[[EmulatedRun], str]] = {
        "Allocated": lambda run: format_bytes(run.peak_allocated_bytes) if run.fits else "OOM",
        "Reserved": lambda run: format_bytes(run.peak_reserved_bytes) if run.fits else "",
        "(Model)": lambda run: f"({format_bytes(run.model_bytes)})" if run.model_bytes else "",
        "Compute": _compute,
        "Expected": lambda run: expected.interval(run.expected) if run.expected else "",
        "Fits": lambda run: "yes" if run.fits else "no",
    }
    wide = width >= _WIDE
    if not wide:
        del figures["(Model)"], figures["Compute"], figures["Expected"]
    cells: dict[str, list[str]] = {header: [] for header in figures}
    if wide:
        cells |= count_columns(results)
    for result in results:
        for number, (header, show) in enumerate(figures.items()):
            failed = "" if number else outcome(result)
            cells[header].append(failed if result.figures is None else show(result.figures))
    cells = {header: column for header, column in cells.items() if any(column)}
    cases = [" ".join(filter(None, names(result))) for result in results]
    return rich_text.case_table(cases, cells, [verdict(result) for result in results], width)


def explain(results: Sequence[Result]) -> list[str]:
    """Return sentences on where the figures come from, what was not counted or checked, and what does not fit."""
    runs = [(result, run) for result in latest(of_kind(results, Emulated)) if (run := result.figures) is not None]
    if not runs:
        return []
    first = runs[0][1]
    lines = [
        f"emulated {first.device_name} with {format_bytes(first.device_memory_bytes)}, CUDA {first.runtime}: torch's own "
        "operators and allocator decided what was allocated; kernels computed nothing, and no time was measured"
    ]
    lines += _largest_tensors(runs)
    estimates = [(result, run.expected) for result, run in runs if run.expected]
    if len(estimates) <= _SHOWN_PEAKS:
        lines += [f"{result.case} is expected to take {expected.describe(one)}" for result, one in estimates if one.seconds]
    lines += expected.notes((first.device_name, one) for _, one in estimates)
    unfit = [str(result.case) for result, run in runs if not run.fits]
    if unfit:
        lines.append(f"does not fit: {', '.join(unfit)}")
    for note in dict.fromkeys(note for _, run in runs for note in run.notes):
        lines.append(f"{count(sum(note in run.notes for _, run in runs), 'case')}: {note}")
    for what in dict.fromkeys(what for _, run in runs for what in run.not_counted):
        cases = count(sum(what in run.not_counted for _, run in runs), "case")
        lines.append(f"{cases}: at least this memory is needed; {what} are not known, and not counted")
    several = [run for _, run in runs if run.processes > 1]
    if whole := sum(bool(run.allocated_by_rank) for run in several):
        lines.append(
            f"{count(whole, 'case')} of several GPUs: all processes ran, and memory is that of the one that needs most"
        )
    if first_alone := sum(run.fits and not run.allocated_by_rank for run in several):
        lines.append(
            f"{count(first_alone, 'case')} of several GPUs: the first process of each ran, beside torch's fake process group"
        )
    return lines


def _compute(run: EmulatedRun) -> str:
    flops = (run.flops_per_step or 0) + (run.recomputed_flops_per_step or 0)
    return format_flops(flops) if flops else ""


def _largest_tensors(runs: Sequence[tuple[Result, EmulatedRun]]) -> Iterator[str]:
    """Describe the largest tensors at the peak of each case, if there are only a few cases."""
    for result, run in runs if len(runs) <= _SHOWN_PEAKS else ():
        if (phase := run.peak_phase) and (largest := run.largest.get(phase, ())[:_SHOWN_TENSORS]):
            yield f"{result.case} at its peak, {in_phase(phase)}: {', '.join(map(tensor, largest))}"
