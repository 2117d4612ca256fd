"""Makes the table and the sentences that ``--gpu-predict`` prints on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pytest_gputrain.gate.memory import in_phase, tensor
from pytest_gputrain.records import EmulatedRun, Predicted, Prediction, Result
from pytest_gputrain.report import rich_text
from pytest_gputrain.report.results import latest, of_kind
from pytest_gputrain.utils.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_WIDE: Final = 110
"""Columns of a terminal that is wide enough for all figures."""
_SHOWN_PEAKS: Final = 4
"""Results up to whose number the tensors at the peaks are shown; the JSON report has them all."""
_SHOWN_TENSORS: Final = 3


def table(
    results: Sequence[Predicted], names: Callable[[Result], Sequence[str]], verdict: Callable[[Result], Text], width: int
) -> Table:
    """Render a row for each case: memory as the driver shows it, allocated, FLOPs and the least time of a step, whether it
    fits."""
    figures: dict[str, Callable[[Prediction], str]] = {
        "Memory": _memory,
        "Allocated": lambda prediction: format_bytes(prediction.peak_allocated_bytes),
        "(Model)": lambda prediction: "" if prediction.model_bytes is None else f"({format_bytes(prediction.model_bytes)})",
        "Peak in": lambda prediction: prediction.peak_phase,
        "Compute": lambda prediction: format_flops(prediction.flops_per_step + prediction.recomputed_flops_per_step),
        "Roofline": lambda prediction: (
            "" if prediction.roofline_seconds is None else format_seconds(prediction.roofline_seconds)
        ),
        "Fits": lambda prediction: "" if prediction.fits is None else "yes" if prediction.fits else "no",
    }
    if width < _WIDE:
        del figures["(Model)"], figures["Compute"], figures["Peak in"]
    cells = {
        header: [show(result.figures) if result.figures else "" for result in results] for header, show in figures.items()
    }
    cases = [" ".join(filter(None, names(result))) for result in results]
    return rich_text.case_table(cases, cells, [verdict(result) for result in results], width)


def explain(results: Sequence[Result]) -> list[str]:
    """Return sentences: what the table means, which cases do not fit and, of few cases, the largest tensors at the peaks."""
    predicted = [
        (result, figures) for result in latest(of_kind(results, Predicted)) if (figures := result.figures) is not None
    ]
    if not predicted:
        return []
    first = predicted[0][1]
    packages = ", ".join(
        f"{name} {version}" for name, version in sorted({k: v for _, p in predicted for k, v in p.packages.items()}.items())
    )
    limit = "" if first.target.memory_bytes is None else f" with {format_bytes(first.target.memory_bytes)}"
    how = "the operators of a CPU" if first.fidelity == "cpu" else "CUDA's rules on a CPU's operators"
    lines = [f"predicted for {first.target.marker}{limit}, by {how} ({packages}); nothing was trained"]
    if first.peak_reserved_bytes is not None:
        lines.append(
            "memory is that of the allocator and of the driver; roofline is the least time of a step at the hardware's peaks"
        )
    unfit = [str(result.case) for result, prediction in predicted if prediction.fits is False]
    if unfit:
        lines.append(f"does not fit: {', '.join(unfit)}")
    return [*lines, *largest_tensors(predicted)]


def largest_tensors(cases: Sequence[tuple[Result, Prediction | EmulatedRun]]) -> Iterator[str]:
    """Name the largest tensors at the peak of each case, where there are few cases."""
    for result, figures in cases if len(cases) <= _SHOWN_PEAKS else ():
        if (phase := figures.peak_phase) and (largest := figures.largest.get(phase, ())[:_SHOWN_TENSORS]):
            yield f"{result.case} at its peak, {in_phase(phase)}: {', '.join(map(tensor, largest))}"


def _memory(prediction: Prediction) -> str:
    held = prediction.peak_reserved_bytes
    return "" if held is None else format_bytes(held + prediction.target.context_bytes)
