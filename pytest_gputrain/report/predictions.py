"""Table and sentences of ``--gpu-dry-run``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from pytest_gputrain.gate.memory import in_phase, tensor
from pytest_gputrain.records import Prediction, Result
from pytest_gputrain.report import rich_text
from pytest_gputrain.utils.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_WIDE: Final = 110
"""Columns of a terminal that has room for all figures."""
_SHOWN_PEAKS: Final = 4
"""Results up to whose number the tensors at the peaks are shown; the JSON report has them all."""
_SHOWN_TENSORS: Final = 3


def table(
    results: Sequence[Result], names: Callable[[Result], Sequence[str]], verdict: Callable[[Result], Text], width: int
) -> Table:
    """A row for each case: memory as the driver shows it, allocated, FLOPs and the least time of a step, whether it fits."""
    figures: dict[str, Callable[[Prediction], str]] = {
        "Memory": _memory,
        "Allocated": lambda one: format_bytes(one.peak_allocated_bytes),
        "(Model)": lambda one: "" if one.model_bytes is None else f"({format_bytes(one.model_bytes)})",
        "Peak in": lambda one: one.peak_phase,
        "Compute": lambda one: format_flops(one.flops_per_step + one.recomputed_flops_per_step),
        "Roofline": lambda one: "" if one.roofline_seconds is None else format_seconds(one.roofline_seconds),
        "Fits": lambda one: "" if one.fits is None else "yes" if one.fits else "no",
    }
    if width < _WIDE:
        del figures["(Model)"], figures["Compute"], figures["Peak in"]
    made = rich_text.table(gap=1 if width >= _WIDE else 0)
    made.add_column("Case", overflow="fold", width=None if width >= _WIDE else 28)
    for header in figures:
        made.add_column(header, justify="right", no_wrap=True)
    made.add_column("Verdict", no_wrap=True)
    for result in results:
        cells = [show(result.prediction) if result.prediction else "" for show in figures.values()]
        made.add_row(*map(rich_text.text, [" ".join(filter(None, names(result))), *cells]), verdict(result))
    return made


def explain(results: Sequence[Result]) -> list[str]:
    """What the table means, what does not fit, and what is largest at the peaks where there is room to tell."""
    known = [(result, result.prediction) for result in results if result.prediction is not None]
    if not known:
        return []
    first = known[0][1]
    packages = ", ".join(
        f"{name} {version}" for name, version in sorted({k: v for _, p in known for k, v in p.packages.items()}.items())
    )
    limit = "" if first.target.memory_bytes is None else f" with {format_bytes(first.target.memory_bytes)}"
    how = "the operators of a CPU" if first.fidelity == "cpu" else "CUDA's rules on a CPU's operators"
    lines = [f"predicted for {first.target.marker}{limit}, by {how} ({packages}); nothing was trained"]
    if first.peak_reserved_bytes is not None:
        lines.append(
            "memory is what the allocator and the driver hold; roofline is the least time of a step at the hardware's peaks"
        )
    unfit = [str(result.case) for result, one in known if one.fits is False]
    if unfit:
        lines.append(f"does not fit: {', '.join(unfit)}")
    if len(known) <= _SHOWN_PEAKS:
        for result, one in known:
            largest = one.largest.get(one.peak_phase, ())[:_SHOWN_TENSORS]
            lines.append(f"{result.case} at its peak, {in_phase(one.peak_phase)}: {', '.join(map(tensor, largest))}")
    return lines


def _memory(prediction: Prediction) -> str:
    held = prediction.peak_reserved_bytes
    return "" if held is None else format_bytes(held + prediction.target.context_bytes)
