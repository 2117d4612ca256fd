"""Renders text tables for the terminal, as Markdown and as CSV, of measured figures and of published ones beside them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.records import Result
from pytest_gputrain.report import rich_text
from pytest_gputrain.report.published import FRAMEWORKS, METRICS, ComparedFigure, compared_figures
from pytest_gputrain.storage.published import PublishedTable
from pytest_gputrain.utils import markdown
from pytest_gputrain.utils.sanitize import spreadsheet

Format = Literal["terminal", "markdown", "csv"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable:
    """A table of text."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: tuple[tuple[str, ...], ...]
    """Per row what CSV has before it, whose rows must say by themselves what they are: table, platform, case."""
    about: tuple[str, ...] = ()
    """Lines below the title."""
    notes: tuple[str, ...] = ()
    """Lines below the table."""


KEYS: Final = ("table", "platform", "case")


def published_text_table(table: PublishedTable, platform: str, results: Mapping[tuple[str, str], Result]) -> TextTable:
    """The rows of one platform in their published columns, then what was measured with its ratios.

    Args:
        results: the measured cases of this platform by suite and key.
    """
    rows = table.published(platform)
    setup = table.platforms[platform]
    headers = [column.title for column in table.columns]
    cells = [[_plain(row.cells[column.header]) for column in table.columns] for row in rows]
    if len(set(map(tuple, cells))) < len(cells):  # the document prints several cases in one line
        headers.append("Case")
        cells = [[*printed, str(row.case)] for printed, row in zip(cells, rows, strict=True)]
    measured = [results.get((row.suite, str(row.case))) for row in rows]
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
    known_platform = PLATFORMS.get(platform)
    return TextTable(
        title=f"{table.name} on {known_platform.title if known_platform else platform.upper()}: {table.title}",
        headers=tuple(headers),
        rows=tuple(map(tuple, cells)),
        keys=tuple((table.name, platform, str(row.case)) for row in rows),
        about=(f"{table.source.document} of {table.source.repository}, {table.source.url}", str(setup), *setup.conditions),
        notes=(*table.notes, f"Memory: {table.memory}", *setup.topology),
    )


def _key(line: ComparedFigure) -> tuple[str, str]:
    return line.metric, line.framework


def measured_text_table(results: Sequence[Result]) -> TextTable:
    """Return a table of a report's own results, for Markdown and CSV."""
    rows = [
        (
            result.suite,
            result.device,
            result.scale,
            str(result.case),
            *(
                _exact(value) if (value := metric.measured(result)) is not None else ""
                for metric in METRICS
                if metric.field in _MEASURED
            ),
            result.verdict.status if result.verdict else "",
        )
        for result in results
    ]
    return TextTable(
        title="gputrain",
        headers=("suite", "device", "scale", "case", *_MEASURED, "verdict"),
        rows=tuple(rows),
        keys=((),) * len(rows),
    )


def _exact(value: float) -> str:
    """Bytes to the byte, times with more digits than a clock has."""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


_MEASURED: Final = ("step_seconds", "samples_per_second", "peak_allocated_bytes", "peak_reserved_bytes", "model_bytes")


def render(text_tables: Sequence[TextTable], form: Format, *, width: int, colour: bool) -> str:
    """Render the tables one after another.

    Args:
        width: columns to fold a terminal's table to.
    """
    if form == "csv":
        return "\n".join(map(_csv, text_tables))
    if form == "markdown":
        return "\n".join(map(_markdown, text_tables))
    return "\n".join(_terminal(text_table, width=width, colour=colour) for text_table in text_tables)


def _csv(text_table: TextTable) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    width = len(text_table.keys[0]) if text_table.keys else 0
    writer.writerow([*KEYS[:width], *text_table.headers])
    writer.writerows(map(spreadsheet, [*key, *row]) for key, row in zip(text_table.keys, text_table.rows, strict=True))
    return file.getvalue()


def _markdown(text_table: TextTable) -> str:
    about = "\n".join(f"- {markdown.escaped(line)}" for line in text_table.about)
    notes = "\n\n".join(map(markdown.escaped, text_table.notes))
    parts = [
        f"## {markdown.escaped(text_table.title)}",
        about,
        "\n".join(markdown.table(text_table.headers, text_table.rows)),
        notes,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _terminal(text_table: TextTable, *, width: int, colour: bool) -> str:
    console, file = rich_text.console(width, colour)
    console.print(rich_text.text(text_table.title, style="bold"))
    for line in text_table.about:
        console.print(rich_text.text(line, style="dim"))
    if width < _LEAST_COLUMN * len(text_table.headers):
        for row in text_table.rows:
            first, *remaining = [
                (header, cell) for header, cell in zip(text_table.headers, row, strict=True) if cell not in ("", "-")
            ]
            console.print(rich_text.text(f"\n{first[1]}", style="bold"))
            console.print(rich_text.text("  ".join(f"{header}: {cell}" for header, cell in remaining)))
    else:
        table = rich_text.table()
        for header in text_table.headers:
            table.add_column(rich_text.text(header), overflow="fold")
        for row in text_table.rows:
            table.add_row(*map(rich_text.text, row))
        console.print(table)
    for line in text_table.notes:
        console.print(rich_text.text(line, style="dim"))
    return file.getvalue()


_LEAST_COLUMN: Final = 11
"""Characters a column needs on average to be read. Where a terminal is narrower, a row is a few lines of text instead."""


def _plain(cell: str) -> str:
    """Return a cell without the links of its document, which are relative to that document."""
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).split())
