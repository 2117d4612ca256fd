"""Makes text that comes from data harmless for the terminal, the log of CI or the spreadsheet that shows it."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_COMMANDS: Final = (
    "add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|notice|remove-matcher|save-state|set-env|set-output|"
    "stop-commands|warning"
)
"""Commands of GitHub's workflows: https://docs.github.com/actions/reference/workflow-commands-for-github-actions."""

_COMMAND: Final = re.compile(rf":(?=:(?:{_COMMANDS})\b)|##(?=\[)", re.I)
"""A workflow command: in the log of a job the runner obeys a line that begins with ``::error``, and text after ``##[``
anywhere."""

_UNUSUAL: Final = re.compile(r"[^ -~\n\t]")
_FIGURE: Final = re.compile(r"[-+]?[\d.,]*\s?%?")


def shown(text: str) -> str:
    """Return ``text`` for a terminal or a log. Nothing in it can move the cursor, set a title, reverse the text or be a
    command.

    Line ends and tabs stay.
    """
    text = _UNUSUAL.sub(lambda letter: _shown(letter[0]), text)
    return _COMMAND.sub(lambda command: f"{command[0]} ", text)


def utf8(text: str) -> str:
    """Return the text with escapes for what UTF-8 cannot encode: a file's name may be any bytes, and a message may hold half
    a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()


def _shown(letter: str) -> str:
    fine = letter.isprintable() or letter in "\n\t" or unicodedata.category(letter) == "Zs"
    return letter if fine else "\N{REPLACEMENT CHARACTER}"


class OneLineError(Exception):
    """An error whose message is one line, even if it quotes several."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())


def spreadsheet(cell: object) -> object:
    """Return a cell of CSV that no spreadsheet takes for a formula. A quotation mark at its begin marks it as text."""
    if not isinstance(cell, str):
        return cell
    text = shown(cell)
    formula = (text[:1] in ("\t", "\r") or text.lstrip()[:1] in ("=", "+", "-", "@")) and not _FIGURE.fullmatch(text)
    return f"'{text}" if formula else text
