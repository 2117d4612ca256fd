"""Makes rich's consoles, texts and tables with the settings of this package, so that every table looks alike."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from pytest_gputrain.utils.sanitize import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def console(width: int, colour: bool) -> tuple[Console, io.StringIO]:
    """A console of ``width`` columns and the text that it has written."""
    from rich.console import Console

    file = io.StringIO()
    rich_console = Console(
        file=file, width=width, force_terminal=colour, no_color=not colour, highlight=False, legacy_windows=False
    )
    return rich_console, file


def text(data: str, style: str = "") -> Text:
    """Return the text that a table or a line shows; of a plain string, rich would take the brackets for markup."""
    from rich.text import Text

    return Text(shown(data), style=style)


def table(*, gap: int = 1) -> Table:
    """An empty table without a frame, its columns ``gap`` characters apart."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
