"""Markdown that shows text as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def escaped(text: str) -> str:
    """``text`` in one line, none of it markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    rule = "| " + " | ".join("---" for _ in headers) + " |"
    return [_row(headers), rule, *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"
