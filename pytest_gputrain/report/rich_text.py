"""Makes rich's consoles, texts and tables with the settings of this package, so that every table looks alike."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pytest_gputrain.utils.sanitize import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def console(width: int, colour: bool) -> tuple[Console, io.StringIO]:
    """Return a console of ``width`` columns, and the file to which it writes its text."""
    from rich.console import Console

    file = io.StringIO()
    rich_console = Console(
        file=file, width=width, force_terminal=colour, no_color=not colour, highlight=False, legacy_windows=False
    )
    return rich_console, file


def text(data: str, style: str = "", *, width: int | None = None) -> Text:
    """Return text for a table or a line. rich would take brackets in a plain string for markup.

    Args:
        width: of the lines that it is broken into, between its words where it can be.
    """
    from rich.text import Text

    return Text(shown(data) if width is None else _broken(shown(data), width), style=style)


def _broken(data: str, width: int) -> str:
    """Return the line in pieces that fit. It is broken after blanks, hyphens and commas, and if a piece is too long also
    after other signs."""
    lines = [""]
    for piece in _pieces(data, width, (r"(?<=[-\s,])", r"(?<=[_=/.:])")):
        if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
    return "\n".join(map(str.rstrip, lines))


def _pieces(data: str, width: int, places: tuple[str, ...]) -> Iterator[str]:
    for piece in re.split(places[0], data):
        if len(piece) > width and places[1:]:
            yield from _pieces(piece, width, places[1:])
        else:
            yield piece


_LEAST_CASE: Final = 12
"""Characters of a case's name in a line of a table, on however narrow a terminal."""


def case_table(cases: Sequence[str], figures: Mapping[str, Sequence[str]], verdicts: Sequence[Text], width: int) -> Table:
    """Return a table with a row for each case. Names take as many lines as the columns of figures leave room for.

    Args:
        cases: their names.
        figures: the cells of each further column, by its header.
    """
    longest, gap = max(map(len, cases)), 1
    taken = max(len("Verdict"), *map(len, verdicts)) + 1
    taken += sum(1 + max(map(len, (header, *cells))) for header, cells in figures.items())
    if taken + len(figures) + 1 + longest > width:
        gap = 0
    case_width = max(_LEAST_CASE, width - taken - gap * (len(figures) + 1) - 1)
    result = table(gap=gap)
    result.add_column("Case", width=min(longest, case_width) if longest >= len("Case") else None, overflow="fold")
    for header in figures:
        result.add_column(header, justify="right", no_wrap=True)
    result.add_column("Verdict", no_wrap=True)
    for number, (case, verdict) in enumerate(zip(cases, verdicts, strict=True)):
        cells = [text(column[number]) for column in figures.values()]
        result.add_row(text(case, width=case_width), *cells, verdict)
    return result


def natural_width(renderable: Table) -> int:
    """Return the number of columns that a table takes without a limit."""
    from rich.measure import Measurement

    wide, _ = console(10_000, colour=False)
    return Measurement.get(wide, wide.options, renderable).maximum


def table(*, gap: int = 1) -> Table:
    """Return an empty table without a frame, whose columns are ``gap`` characters apart."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
