"""Escapes text and formats tables as Markdown that shows text as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from pytest_gputrain.utils.sanitize import shown

_MENTION: Final = re.compile(r"(?<![A-Za-z0-9_])@(?=[A-Za-z0-9])")
"""Text that GitHub takes for a mention of somebody, or of a team; not an address, nor ``gemma-7b@tiny``."""


def escaped(text: str) -> str:
    """Escape ``text`` in one line, none of it markup, and nobody in it mentioned: GitHub looks for names when markup is
    gone."""
    line = _MENTION.sub("@\N{ZERO WIDTH SPACE}", " ".join(shown(text).split()))
    line = re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", line)
    # What would begin a list or be a rule.
    return re.sub(r"^(\d*)([-+.)])(?=\s|-|$)", r"\1\\\2", line)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    rule = "| " + " | ".join("---" for _ in headers) + " |"
    return [_row(headers), rule, *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"
