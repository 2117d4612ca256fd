"""Suggests the word that was meant by a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`` (did you mean 'lora'?)``, or nothing where no known word is close."""
    close = difflib.get_close_matches(str(word), list(candidates), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
