"""Renders tables for the terminal and as Markdown, and writes CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pytest_gputrain.report import rich_text
from pytest_gputrain.utils import console, markdown
from pytest_gputrain.utils.sanitize import spreadsheet

Form = Literal["terminal", "markdown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable:
    """A table of text."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    about: tuple[str, ...] = ()
    """Lines below the title."""
    notes: tuple[str, ...] = ()
    """Lines below the table."""


def render(text_tables: Sequence[TextTable], form: Form) -> str:
    """Return the tables as text, one after another. For a terminal they are as wide as standard output, and in its
    colours."""
    if form == "markdown":
        return "\n".join(map(_markdown, text_tables))
    width, colour = console.standard_output()
    return "\n".join(_terminal(text_table, width=width, colour=colour) for text_table in text_tables)


def csv_text(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return CSV text that no spreadsheet takes for formulas. None is an empty cell."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(map(spreadsheet, row) for row in rows)
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
    screen, file = rich_text.console(width, colour)
    screen.print(rich_text.text(text_table.title, style="bold"))
    for line in text_table.about:
        screen.print(rich_text.text(line, style="dim"))
    if width < _LEAST_COLUMN * len(text_table.headers):
        for row in text_table.rows:
            first, *remaining = [
                (header, cell) for header, cell in zip(text_table.headers, row, strict=True) if cell not in ("", "-")
            ]
            screen.print(rich_text.text(f"\n{first[1]}", style="bold"))
            screen.print(rich_text.text("  ".join(f"{header}: {cell}" for header, cell in remaining)))
    else:
        table = rich_text.table()
        for header in text_table.headers:
            table.add_column(rich_text.text(header), overflow="fold")
        for row in text_table.rows:
            table.add_row(*map(rich_text.text, row))
        screen.print(table)
    for line in text_table.notes:
        screen.print(rich_text.text(line, style="dim"))
    return file.getvalue()


_LEAST_COLUMN: Final = 11
"""Characters a column needs on average to be read. Where a terminal is narrower, a row is a few lines of text instead."""
