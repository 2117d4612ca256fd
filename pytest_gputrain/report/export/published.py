"""Exports published tables, with what reports measured of their rows beside the published figures."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_gputrain.gate.messages import count
from pytest_gputrain.hardware.catalog import title_of
from pytest_gputrain.records import Emulated, Published, Result
from pytest_gputrain.records.published import Figure, Figures
from pytest_gputrain.report.published import (
    FRAMEWORKS,
    METRICS,
    ComparedFigure,
    compared_figures,
    epoch_seconds,
    outcome,
    update_seconds,
)
from pytest_gputrain.report.tables import Form, TextTable, csv_text, render
from pytest_gputrain.storage.published import GATED, Epoch, PublishedTable

_ByRow = Mapping[tuple[str, str, str, str], Result]
"""Results by what a row is found by, see `_row`."""


def _row(of: Published | Result) -> tuple[str, str, str, str]:
    """Return platform, suite, key and knobs. The key includes the tiny scale, and the knobs those that the command line has
    changed."""
    return of.platform, of.suite, of.key if isinstance(of, Result) else str(of.case), repr(of.case.identity())


def _by_row(results: Sequence[Result]) -> _ByRow:
    """Return the measured results by row. If a case was measured several times, the last result counts."""
    return {_row(result): result for result in results if not isinstance(result, Emulated)}


def left_out(source: Path, results: Sequence[Result], tables: Sequence[PublishedTable]) -> list[str]:
    """Return sentences for results of ``source``, a report, that no table shows."""
    rows = {_row(row) for table in tables for row in table.published()}
    platforms = {platform for table in tables for platform in table.platforms}
    counts_by_reason: Counter[str] = Counter()
    for result in results:
        if isinstance(result, Emulated):
            counts_by_reason["emulated, and the tables compare what was measured"] += 1
        elif result.scale == "tiny":
            counts_by_reason["measured at tiny scale, which has nothing to do with published figures"] += 1
        elif result.platform not in platforms:
            counts_by_reason[f"measured on {result.platform}, for which the tables have nothing"] += 1
        elif _row(result) not in rows:
            counts_by_reason[f"of {result.platform} without a row in the tables"] += 1
    return [f"{count(number, 'result')} of {source} {reason}" for reason, number in counts_by_reason.items()]


def _text(tables: Sequence[PublishedTable], results: Sequence[Result], *, form: Form) -> str:
    by_row = _by_row(results)
    return render([_text_table(table, platform, by_row) for table in tables for platform in table.platforms], form)


def _text_table(table: PublishedTable, platform: str, results: _ByRow) -> TextTable:
    """Return the rows of one platform in their published columns, with what was measured and its ratios below."""
    rows = table.published(platform)
    setup = table.platforms[platform]
    headers = [column.title for column in table.columns]
    cells = [[_plain(row.cells[column.header]) for column in table.columns] for row in rows]
    if len(set(map(tuple, cells))) < len(cells):  # The document prints several cases in one line.
        headers.append("Case")
        cells = [[*printed, str(row.case)] for printed, row in zip(cells, rows, strict=True)]
    measured = [results.get(_row(row)) for row in rows]
    if any(measured):
        compared = [
            {_key(line): line for line in compared_figures(row, result)} for row, result in zip(rows, measured, strict=True)
        ]
        for metric in METRICS:
            of_metric = [key for key in FRAMEWORKS if any((metric.title, key) in row_lines for row_lines in compared)]
            if not of_metric:
                continue
            headers.append(f"Measured {metric.title}")
            for framework in of_metric:
                headers.append(f"Ratio {metric.title}{f' ({FRAMEWORKS[framework]})' if len(of_metric) > 1 else ''}")
            for printed, row_lines in zip(cells, compared, strict=True):
                own = [row_lines.get((metric.title, framework)) for framework in of_metric]
                either = next((line for line in own if line), row_lines.get((metric.title, "")))
                printed += [either.measured if either else "", *(line.ratio if line else "" for line in own)]
    if table.epoch is not None:
        at = [column.header for column in table.columns].index(table.epoch.column) + 1
        derived = [_epoch_cells(row, result, table.epoch.samples) for row, result in zip(rows, measured, strict=True)]
        shown = len(_EPOCH_HEADERS) if any(measured) else 1
        headers[at:at] = _EPOCH_HEADERS[:shown]
        for printed, epoch_cells in zip(cells, derived, strict=True):
            printed[at:at] = epoch_cells[:shown]
    return TextTable(
        title=f"{table.name} on {title_of(platform, platform.upper())}: {table.title}",
        headers=tuple(headers),
        rows=tuple(map(tuple, cells)),
        about=(f"{table.source.document} of {table.source.repository}, {table.source.url}", str(setup), *setup.conditions),
        notes=(*table.notes, f"Memory: {table.memory}", *setup.topology),
    )


_EPOCH_HEADERS: Final = ("Derived from its sec/update", "Derived from measured sec/update", "Ratio time/epoch")


def _epoch_cells(row: Published, result: Result | None, samples: int) -> list[str]:
    """Return the time of an epoch from the published and from the measured time of an update, and the published ratio."""
    figures = row.figures.get(GATED, Figures())
    printed, update, epoch = "", figures.update_seconds, figures.epoch_seconds
    if update is not None:
        printed = _epoch_text(*(epoch_seconds(row.case, samples, end) for end in (update.low, update.high)))
    seconds = update_seconds(result) if result else None
    if seconds is None:
        return [printed, "", ""]
    here = epoch_seconds(row.case, samples, seconds)
    return [printed, _epoch_text(here, here), f"{here / epoch.middle:.2f}" if epoch else ""]


def _epoch_text(low: float, high: float) -> str:
    """Return an epoch's time as documents print it: ``47min``, ``3.1-3.8h``."""
    size, unit = (3600, "h") if high >= 3600 else (60, "min")
    return f"{'-'.join(dict.fromkeys(f'{end / size:.1f}' for end in (low, high)))}{unit}"


def _key(line: ComparedFigure) -> tuple[str, str]:
    return line.metric, line.framework


def _plain(cell: str) -> str:
    """Return a cell without its links, which are relative to the document."""
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).split())


CSV_HEADERS: Final = (
    *("table", "platform", "suite", "case", "framework", "published", "measured"),
    *(f"{side}_{metric.field}" for metric in METRICS for side in ("published", "measured", "ratio")),
    *("published_epoch_seconds", "epoch_seconds_from_published_update", "epoch_seconds_from_measured_update"),
)


def _csv(tables: Sequence[PublishedTable], results: Sequence[Result]) -> str:
    """Return a CSV row for each case and framework, in seconds, bytes and samples per second. A range is given by its
    middle."""
    by_row = _by_row(results)
    rows = [(row, table.epoch) for table in tables for row in table.published()]
    return csv_text(CSV_HEADERS, [cells for row, epoch in rows for cells in _csv_rows(row, by_row.get(_row(row)), epoch)])


def _csv_rows(row: Published, result: Result | None, epoch: Epoch | None) -> Iterator[list[object]]:
    measured = "" if result is None else "measured" if result.summary else outcome(result)
    for framework, figures in (row.figures or {"": Figures()}).items():
        cells: list[object] = [row.table, row.platform, row.suite, str(row.case), framework, row.outcome, measured]
        for metric in METRICS:
            figure: Figure | None = getattr(figures, metric.field)
            printed, value = figure and figure.middle, metric.measured(result) if result else None
            cells += [printed, value, value / printed if printed and value is not None else None]
        cells.append(figures.epoch_seconds and figures.epoch_seconds.middle)
        updates = (figures.update_seconds and figures.update_seconds.middle, update_seconds(result) if result else None)
        cells += [epoch_seconds(row.case, epoch.samples, update) if epoch and update else None for update in updates]
        yield cells


def _html(tables: Sequence[PublishedTable], results: Sequence[Result]) -> str:
    """Return a page with bars for every figure of the tables."""
    from pytest_gputrain.report.html import page

    if missing := page.missing():
        raise ValueError(missing)
    by_row = _by_row(results)
    return page.page_of_tables(tables, lambda row: by_row.get(_row(row)))


FORMATS: Final[dict[str, Callable[[Sequence[PublishedTable], Sequence[Result]], str]]] = {
    "terminal": functools.partial(_text, form="terminal"),
    "markdown": functools.partial(_text, form="markdown"),
    "csv": _csv,
    "html": _html,
}
