"""Escapes text for Markdown, and formats tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from pytest_gputrain.utils.sanitize import shown

_REFERENCE: Final = re.compile(r"(?<![A-Za-z0-9])@(?=\w)|[#!&$%](?=\d)|(?<=\b[Gg][Hh])-(?=\d)|&(?=#|commat;|num;|excl;)")
"""Text that GitHub or GitLab takes for a mention of somebody, of a team, an issue or a merge request, and what may begin an
entity that stands for such a character; not an address, nor ``gemma-7b@tiny``."""


def unlinked(text: str) -> str:
    """Return ``text`` in which hosts see no mention of a person or an issue. They look for these once markup is removed."""
    return _REFERENCE.sub("\\g<0>\N{ZERO WIDTH SPACE}", text)


def escaped(text: str) -> str:
    """Return ``text`` as one line in which nothing is markup or a mention."""
    line = re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", unlinked(" ".join(shown(text).split())))
    # Markdown would read these characters as a list item or as a horizontal rule.
    return re.sub(r"^(\d*)([-+.)])(?=\s|-|$)", r"\1\\\2", line)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    rule = "| " + " | ".join("---" for _ in headers) + " |"
    return [_row(headers), rule, *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"
