"""Selects which results of a run are shown to readers, and says in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from pytest_gputrain.gate.count_lines import format_count
from pytest_gputrain.records import CountFigure, Counts, Emulated, Measured, Result, Verdict
from pytest_gputrain.records.counts import MAIN

FAILURES: Final[dict[str, str]] = {
    "out_of_memory": "OOM",
    "timed_out": "timed out",
    "crashed": "crashed",
    "lost": "lost",
    "refused": "refused",
}
"""The cells of tables for a run without figures."""
_Kind = TypeVar("_Kind", bound=Result)


def of_kind(results: Sequence[Result], *kinds: type[_Kind]) -> list[_Kind]:
    """Return the results of these kinds, in their order."""
    return [result for result in results if isinstance(result, kinds)]


def latest(results: Sequence[_Kind]) -> list[_Kind]:
    """Return each case of each device once: the last result that was judged, else the last that was measured.

    Those whose test had changed something in the environment come after all others.
    """
    chosen: dict[tuple[str, str, str], tuple[bool, bool, int]] = {}
    for index, result in enumerate(results):
        identity = (result.device, result.suite, result.key)
        rank = (not result.variables, result.verdict is not None, index)
        chosen[identity] = max(chosen.get(identity, rank), rank)
    return [results[index] for _, _, index in chosen.values()]


BY_ATTENTION: Final = (
    "regressed",
    "failed",
    "over-limit",
    "inconclusive",
    "not-comparable",
    "new",
    "improved",
    "recorded",
    "pass",
    "measured",
    "emulated",
)
"""The results of `verdict_of`, the most urgent first."""


def verdict_of(result: Result) -> str:
    """Return the verdict for a table, or ``measured``, ``emulated`` or ``failed`` if nobody judged."""
    verdict: Verdict | None = result.verdict
    if verdict:
        return verdict.status
    if result.figures is None:
        return "failed"
    return "emulated" if isinstance(result, Emulated) else "measured"


def counts_of(result: Result) -> dict[CountFigure, float]:
    """Return the counts of a step on a GPU or a CPU, each as the mean over the steps; empty if nothing was counted."""
    runs = [result.figures] if isinstance(result, Emulated) else result.replies if isinstance(result, Measured) else ()
    counted = (getattr(run, "counts", None) for run in runs)
    counts: Counts | None = next((counts for counts in counted if counts is not None and counts.steps), None)
    if counts is None:
        return {}
    absent = {"gpu_work": not counts.launches_graphs, "python_calls": not counts.per_step("python_calls")}
    return {name: counts.per_step(name) for name in counts.figures if not absent.get(name)}


def count_columns(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return columns of counts for a narrow table by their titles, with a cell for each result."""
    counts = [counts_of(result) for result in results]
    figures = (figure for figure in MAIN if any(figure in asked for asked in counts))
    return {
        figure.capitalize(): [format_count(figure, asked[figure]) if figure in asked else "" for asked in counts]
        for figure in figures
    }
