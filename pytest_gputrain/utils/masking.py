"""Masks what looks like a secret in a command line that a report keeps, which everybody who gets the report can read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

MASK: Final = "***"

_NAME: Final = (
    r"(?:token|passwd|password|passphrase|secret|credentials?|auth|apikey|pat"
    r"|(?:api|access|secret|private|auth|encryption|signing)[-_]?key)"
)
_LONGER: Final = rf"(?:[A-Za-z0-9]+[-_.])*{_NAME}"
"""Only to match from the beginning of an argument: a search for it would take quadratic time."""
_OPTION: Final = re.compile(rf"-+{_LONGER}", re.IGNORECASE)
_OPTION_WITH_VALUE: Final = re.compile(rf"(-*{_LONGER}\s*=).+", re.IGNORECASE | re.DOTALL)
_VALUE: Final = r"(?:\"(?:[^\"\\]|\\.)*+\"?|'[^']*'?|\\+(?P<quote>[\"']).*?(?:\\(?P=quote)|\Z)|[^\s\"'\\]\S*|\\\S*)"
"""A value in quotes, which a backslash may escape, or up to the next blank. A secret may hold any other sign, also ``&`` and
``,``, which separate values elsewhere."""
_QUOTE: Final = r"(?:\\*[\"'])?"
_ASSIGNED: Final = re.compile(rf"((?<![A-Za-z0-9]){_NAME}{_QUOTE}\]?\s*(?:=|:(?!:))\s*){_VALUE}", re.IGNORECASE | re.DOTALL)
"""``--token=x``, ``HF_TOKEN=x``, ``X-API-Key: x`` and ``{"api_key": "x"}``, also in the middle of an argument."""
_FOLLOWING: Final = re.compile(rf"((?<![^\s=\"'])-+{_LONGER}\s+)(?:-+{_LONGER}\s+)*{_VALUE}", re.IGNORECASE | re.DOTALL)
"""``--token x`` in one argument, as in ``addopts=-q --token x``."""
_IN_ADDRESS: Final = re.compile(r"(\w://)[^/\s]+@")
_HEADER: Final = r"\b(?:Authorization|Cookie)"
_SCHEME: Final = r"(?:[A-Za-z]+\s+)?"
_IN_HEADER: Final = re.compile(
    rf"(\bBearer\s+)[^\"'\r\n]+"
    rf"|({_HEADER}[\"']\s*[:=]\s*(?P<quote>[\"']){_SCHEME})(?:\\.|(?!(?P=quote))[^\\\r\n])+"
    rf"|({_HEADER}{_QUOTE}\s*[:=]\s*(?:\\+[\"'])?{_SCHEME})\S[^\r\n]*",
    re.IGNORECASE,
)
"""The rest of the line, or of the quoted text: a header holds blanks and quotes."""
_KNOWN: Final = re.compile(r"\b(hf_|gh[opsur]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA)[A-Za-z0-9_-]{12,}")
"""The beginnings of tokens of Hugging Face, GitHub, GitLab, OpenAI and others, Slack and AWS."""


def masked(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the arguments of a command line with ``***`` in place of each secret, which is known by the name of its option.

    The argument after such an option is its value, even if it looks like another option.
    """
    shown, follows = [], False
    for argument in arguments:
        if follows:
            shown.append(MASK)
        elif whole := _OPTION_WITH_VALUE.fullmatch(argument):
            shown.append(whole[1] + MASK)
        else:
            shown.append(_masked(argument))
        follows = _OPTION.fullmatch(argument) is not None
    return tuple(shown)


def told(arguments: Sequence[str]) -> str:
    """Return a note if these arguments contain a masked value; else empty."""
    changed = masked(arguments) != tuple(arguments)
    return f"what looks like a secret in the command line is {MASK} in the report" if changed else ""


def masked_settings(value: Any) -> Any:
    """Return JSON values with masked secrets. A list of texts in them may be arguments."""
    if isinstance(value, dict):
        return {name: MASK if _is_secret(name, item) else masked_settings(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return list(masked(value)) if all(isinstance(item, str) for item in value) else list(map(masked_settings, value))
    return _masked(value) if isinstance(value, str) else value


def _is_secret(name: object, value: Any) -> bool:
    return isinstance(value, str) and isinstance(name, str) and re.fullmatch(_LONGER, name, re.IGNORECASE) is not None


def _masked(text: str) -> str:
    text = _ASSIGNED.sub(rf"\g<1>{MASK}", text)
    text = _IN_ADDRESS.sub(rf"\g<1>{MASK}@", text)
    text = _IN_HEADER.sub(rf"\g<1>\g<2>\g<4>{MASK}", text)
    text = _KNOWN.sub(rf"\g<1>{MASK}", text)
    return _FOLLOWING.sub(rf"\g<1>{MASK}", text)
