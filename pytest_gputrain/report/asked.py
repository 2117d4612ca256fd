"""Makes the table of the work that each line of a program gives to an emulated GPU, for the terminal and the HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pytest_gputrain.gate.count_lines import by_line, format_count
from pytest_gputrain.gate.messages import count
from pytest_gputrain.records import CountFigure, StepCounts
from pytest_gputrain.records.counts import COUNT_FIGURES, DETAILS
from pytest_gputrain.records.emulation import EmulatedProcess

_MOST_LINES: Final = 12
"""The most lines of the program in the table; the others are added up."""
_LEAST_STEPS: Final = 2
"""The least number of steps for a table of one step; with fewer it is one of the whole run."""

Figures = dict[CountFigure, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A table of the work that each line of a program gives to the GPU in a step of one process."""

    about: str
    """The steps that it shows: ``in a step, from one update to the next (3 of 5 steps ask for the same)``."""
    columns: tuple[CountFigure, ...]
    lines: tuple[tuple[str, Figures], ...]
    """The lines of the program with their counts, those with the largest share of any figure first; then the sum of all
    others."""
    sums: tuple[tuple[str, Figures], ...]
    """The sums over all lines."""
    lines_unknown: str
    """The reason why there are no lines."""

    def cells(self, figures: Figures) -> list[str]:
        """Return the text of each figure; empty for 0."""
        return [format_count(name, figures[name]) if figures.get(name) else "" for name in self.columns]


def asked_by(process: EmulatedProcess) -> Asked | None:
    """Return the table of a process; None if nothing was counted."""
    if process.asked is None:
        return None
    counts, kind = process.asked, 0
    about = "in the whole run"
    whole = _figures_of(process.asked.kinds[0])
    sums = [(about, whole)]
    if process.steps is not None and (steps := len(process.steps.steps)) >= _LEAST_STEPS:
        counts, kind = process.steps, process.steps.usual_kind
        alike = counts.steps.count(kind)
        about = f"in a step, from one update to the next ({alike} of {count(steps, 'step')} ask for the same)"
        sums.insert(0, ("in a step", _figures_of(counts.kinds[kind])))
    details = DETAILS - {"gpu_work"} if process.asked.launches_graphs else DETAILS
    columns = tuple(name for name in COUNT_FIGURES if name not in details and any(figures[name] for _, figures in sums))
    total = sums[0][1]
    lines = sorted(
        () if counts.lines_unknown else by_line(counts, kind, columns).items(),
        key=lambda line: max(number / total[name] for name, number in line[1].items()),
        reverse=True,
    )
    shown, others = lines[:_MOST_LINES], lines[_MOST_LINES:]
    if others:
        rest = {name: sum(figures.get(name, 0) for _, figures in others) for name in columns}
        shown.append((f"{len(others)} other lines", rest))
    return Asked(about=about, columns=columns, lines=tuple(shown), sums=tuple(sums), lines_unknown=counts.lines_unknown)


def _figures_of(step: StepCounts) -> Figures:
    return {name: step.figure(name) for name in COUNT_FIGURES}
