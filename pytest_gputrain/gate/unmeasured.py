"""Decides what figures without times mean where nothing is recorded under the same conditions: predictions, and runs on
emulated GPUs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def nearest(
    case: Case,
    figures: FiguresT,
    recorded: Recorded[FiguresT] | None,
    sentences: Sentences,
    *,
    does_not_fit: Callable[[], str],
) -> tuple[FiguresT, str] | Verdict:
    """Return what is recorded under the most similar conditions, or the verdict where nothing is recorded of the case.

    Args:
        does_not_fit: says what does not fit.

    Returns:
        The recorded figures, and how their conditions differ: ``torch 2.12.0 -> 2.13.0``, empty for the same.
    """
    if recorded is not None and recorded.case.identity() == case.identity():
        before = recorded.like(figures) or recorded.nearest(figures)
        return before, ", ".join(_changed_conditions(before, figures))
    if figures.fits is False:
        sentence = f"{case} {does_not_fit()}; if that is expected, {sentences.record}"
        return Verdict(status="failed", sentence=sentence)
    if recorded is None:
        return Verdict(status="new", sentence=f"{case} {sentences.never_recorded}; {sentences.record}-new-only")
    change = differences(recorded.case, case)
    return Verdict(status="not-comparable", sentence=f"{case} {sentences.other_case} ({change}); {sentences.record}")


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
