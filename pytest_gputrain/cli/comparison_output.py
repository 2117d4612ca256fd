"""Prints the comparisons of ``gputrain ab`` and ``gputrain compare``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

from pytest_gputrain.records import FAILING, Result, Status
from pytest_gputrain.report import explanations, terminal
from pytest_gputrain.utils import console
from pytest_gputrain.utils.sanitize import shown


def print_comparison(results: Sequence[Result], further_notes: Iterable[str]) -> tuple[str, ...]:
    """Print the table, the changes, and a line on what was not compared. Return this line."""
    width, colour = console.standard_output()
    changed = [
        result.verdict.sentence
        for result in results
        if result.verdict is not None and result.verdict.status in (*FAILING, "improved")
    ]
    notes = (*explanations.explain(results, against_base=True), *further_notes)
    console.put("\n".join([terminal.render(results, width=width, colour=colour), *map(shown, changed), *map(shown, notes)]))
    return notes


def verdicts(results: Iterable[Result], missing_cases: Sized) -> set[Status]:
    """Return the verdicts of a comparison. A case that head lacks is not comparable."""
    absent: set[Status] = {"not-comparable"} if missing_cases else set()
    return absent | {result.verdict.status for result in results if result.verdict is not None}
