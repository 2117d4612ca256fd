"""Decides what figures without times mean where nothing is recorded under the same conditions: predictions, and runs on
emulated GPUs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from pytest_gputrain.cases.identity import differences
from pytest_gputrain.records import Case, EmulatedRun, Prediction, Verdict
from pytest_gputrain.records.recorded import FiguresT, Recorded


class Sentences(NamedTuple):
    """The parts of verdicts for one kind of figures. Each part follows the case in a sentence."""

    record: str
    """The command that records figures: ``record it with --gpu-predict --gpu-baseline-update``."""
    never_recorded: str
    other_case: str
    unchanged: str
    """The sentence for figures that equal those under other conditions."""


def comparable(
    case: Case,
    figures: FiguresT,
    recorded: Recorded[FiguresT] | None,
    title: str,
    sentences: Sentences,
    *,
    does_not_fit: Callable[[bool], str],
    changes: Callable[[FiguresT], Sequence[str]],
) -> FiguresT | Verdict:
    """Return what is recorded under the same conditions, or the verdict where there is nothing.

    Args:
        title: of the platform, as sentences name it.
        does_not_fit: says what does not fit, given whether the case did under other conditions.
        changes: describes how the figures differ from those of other conditions.
    """
    nearest = None
    if recorded is not None and recorded.case.identity() == case.identity():
        if (before := recorded.like(figures)) is not None:
            return before
        nearest = recorded.nearest(figures)
    record = sentences.record
    if figures.fits is False and (nearest is None or nearest.fits is not False):
        sentence = f"{case} {does_not_fit(nearest is not None)}; if that is expected, {record}"
        return Verdict(status="failed", sentence=sentence)
    if recorded is None:
        return Verdict(status="new", sentence=f"{case} {sentences.never_recorded}; {record}-new-only")
    if nearest is None:
        change = differences(recorded.case, case)
        return Verdict(status="not-comparable", sentence=f"{case} {sentences.other_case} ({change}); {record}")
    changed = ", ".join(_changed_conditions(nearest, figures))
    fits = [f"it fits {title} now"] if figures.fits and nearest.fits is False else []
    moved = "; ".join([*fits, *changes(nearest)]) or sentences.unchanged
    sentence = f"{case} was recorded under other conditions ({changed}); {moved}; {record}"
    return Verdict(status="not-comparable", sentence=sentence)


def _changed_conditions(before: Prediction | EmulatedRun, now: Prediction | EmulatedRun) -> Iterator[str]:
    for name in sorted({*before.packages, *now.packages}):
        if before.packages.get(name) != now.packages.get(name):
            yield f"{name} {before.packages.get(name, 'absent')} -> {now.packages.get(name, 'absent')}"
    old, new = _facts(before), _facts(now)
    for name, value in old.items():
        if value != new[name]:
            yield f"{name.replace('_', ' ')} {value} -> {new[name]}"


def _facts(figures: Prediction | EmulatedRun) -> dict[str, object]:
    """Return the conditions beside the libraries by name."""
    if isinstance(figures, Prediction):
        return {"processes": figures.processes or "all", **msgspec.structs.asdict(figures.target)}
    return {name: value for name, value in msgspec.structs.asdict(figures.conditions).items() if name != "packages"}
