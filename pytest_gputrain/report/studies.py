"""Makes the tables and the sentences that ``--gpu-find-batch`` and ``--gpu-loss`` print on the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from pytest_gputrain.records import BatchSearch, Case, LossStudy, Result
from pytest_gputrain.records.study import LossCurve, Search, Try
from pytest_gputrain.report import rich_text
from pytest_gputrain.report.results import FAILURES, of_kind
from pytest_gputrain.utils.units import format_percent, format_rate

if TYPE_CHECKING:
    from rich.table import Table

Names = Callable[[Result], Sequence[str]]
"""Model, method and setting of a result, as every table begins."""

_STYLES: Final = {"converging": "green", "flat": "yellow", "searched": "green"}
_OUTCOMES: Final = {**FAILURES, "left_out": "left out", "capped": "capped"}


def search_table(results: Sequence[BatchSearch], names: Names) -> Table:
    """Return a table of throughput at batch size 1 and at the best one, as published tables have it, with the largest batch
    that fits."""
    table = _table("Batch 1", "Fastest (batch)", "Largest", "Tries", last="Outcome")
    for result in results:
        search = result.search
        tries = {attempt.batch_size: attempt for attempt in search.tries}
        fastest = tries.get(search.fastest or 0)
        _add_row(
            table,
            *names(
                _as(result, result.case.replace(named=tuple(name for name in result.case.named if name != "batch_size")))
            ),
            _speed(tries.get(1)),
            f"{_speed(fastest)} ({fastest.batch_size})" if fastest else "",
            "" if search.largest is None else f"{'>= ' if search.largest == search.most else ''}{search.largest}",
            str(len(search.tries)),
            "searched" if fastest else "failed",
        )
    return table


def loss_table(results: Sequence[LossStudy], names: Names) -> Table:
    """Return a table of the loss curves, with a row for each precision."""
    table = _table("First loss", "Last loss", "From fp32", last="Trend")
    for result in results:
        for curve in result.loss_curves:
            _add_row(
                table,
                *names(_as(result, result.case.replace(precision=curve.precision))),
                *_ends(curve),
                "" if curve.gap is None else format_percent(curve.gap),
                _trend(curve),
            )
    return table


def _table(*figures: str, last: str) -> Table:
    table = rich_text.table()
    for header in ("Model", "Method", "Setting"):
        table.add_column(header, overflow="fold")
    for header in figures:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column(last, no_wrap=True)
    return table


def _add_row(table: Table, *cells: str) -> None:
    # Cells are Text, because rich would take brackets in a user's name for markup.
    *leading, last = cells
    table.add_row(*map(rich_text.text, leading), rich_text.text(last, style=_STYLES.get(last, "red")))


def _as(result: Result, case: Case) -> Result:
    return msgspec.structs.replace(result, case=case)


def _speed(attempt: Try | None) -> str:
    if attempt is None:
        return ""
    return (
        _OUTCOMES.get(attempt.outcome, "") if attempt.samples_per_second is None else format_rate(attempt.samples_per_second)
    )


def _ends(curve: LossCurve) -> tuple[str, str]:
    """Return the first and the last loss as text."""
    first, last = (f"{curve.losses[index]:.4g}" if curve.losses else "" for index in (0, -1))
    return first, "not finite" if curve.non_finite_step is not None else last


def _trend(curve: LossCurve) -> str:
    from_step = f" from step {curve.non_finite_step}" if curve.non_finite_step is not None else ""
    return f"{curve.trend}{from_step}" if curve.trend else _OUTCOMES.get(curve.outcome, "")


def explain(results: Sequence[Result]) -> list[str]:
    """Yield sentences on what the tables cannot show."""
    lines = _counted({result.key: _end_of(result.search) for result in of_kind(results, BatchSearch)})
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for result in of_kind(results, LossStudy):
        for curve in result.loss_curves:
            if curve.outcome == "left_out":
                reasons[curve.reason].append(curve.precision)
        if any(curve.precision == "fp32" and curve.trend == "diverging" for curve in result.loss_curves):
            lines.append(f"{result.case} diverges in fp32, too, so the cause is the recipe and not the precision")
        trends = {curve.trend for curve in result.loss_curves if curve.trend}
        if trends == {"flat"}:
            lines.append(f"{result.case} is flat in every precision: its loss does not fall")
    for reason, precisions in reasons.items():
        lines.append(f"{' and '.join(dict.fromkeys(precisions))} left out: {reason}")
    return lines


def _end_of(search: Search) -> str:
    """Return a sentence on what limits the largest batch; empty if it is memory."""
    if search.largest == search.most:
        return f"the largest batch tried, {search.most}, fits; a higher gpu_find_batch_max allows more"
    beyond = [
        attempt
        for attempt in search.tries
        if attempt.outcome in ("timed_out", "capped") and attempt.batch_size > (search.largest or 0)
    ]
    smallest = min(beyond, key=lambda attempt: attempt.batch_size, default=None)
    return f"batch {smallest.batch_size} {smallest.reason}" if smallest and search.largest else ""


def _counted(sentences: dict[str, str]) -> list[str]:
    """Yield each sentence once, with the first case that it is about."""
    about: defaultdict[str, list[str]] = defaultdict(list)
    for key, sentence in sentences.items():
        about[sentence].append(key)
    return [
        f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}: {sentence}"
        for sentence, keys in about.items()
        if sentence
    ]
