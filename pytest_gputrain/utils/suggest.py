"""Suggests the word that was meant by a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return `` (did you mean 'lora'?)``; empty if no known word is close."""
    known = list(candidates)
    longer = [name for name in known if word and name.startswith(str(word))]
    same = [name for name in known if name.lower() == str(word).lower()]
    close = same or difflib.get_close_matches(str(word), longer or known, n=1) or longer
    return f" (did you mean {close[0]!r}?)" if close else ""
