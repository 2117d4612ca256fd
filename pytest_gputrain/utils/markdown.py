"""Escapes text and formats tables as Markdown that shows text as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pytest_gputrain.utils.sanitize import shown


def escaped(text: str) -> str:
    """``text`` in one line, none of it markup."""
    line = re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", " ".join(shown(text).split()))
    # What would begin a list or be a rule.
    return re.sub(r"^(\d*)([-+.)])(?=\s|-|$)", r"\1\\\2", line)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    rule = "| " + " | ".join("---" for _ in headers) + " |"
    return [_row(headers), rule, *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"
