"""Whether a test that was selected may run on this machine. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Final

from pytest_gputrain.hardware.catalog import CPU, MARKERS

_ALL: Final = frozenset(MARKERS)


def platforms_of(declared: object) -> tuple[str, ...]:
    """The markers that a case with these ``platforms`` carries.

    Its own and ``cpu``. A case without any is declared for all. So is, in effect, one with a misspelt platform (or with no
    tuple of them): no ``-m`` then passes it over, and it fails there with a sentence instead of silently never running.
    """
    if not declared or not isinstance(declared, tuple) or any(platform not in MARKERS for platform in declared):
        return MARKERS
    return tuple(dict.fromkeys((*declared, CPU)))


def platforms_named(expression: str) -> list[str]:
    """Platforms that a ``-m`` expression asks for by name."""
    words = set(re.findall(r"\w+", expression))
    others = words - _ALL  # which a test may have or not
    return [m for m in MARKERS if m in words and (_holds(expression, {m}) or _holds(expression, {m} | others))]


def why_skipped(markers: Collection[str], expression: str, platform: str, gpus: int) -> str | None:
    """Why a test must not run on a machine of ``platform``, None where it may.

    ``-m h100`` selects tests by what they are declared for. A machine that is no H100 satisfies the expression only if it
    still holds when the machine's own platform is the only one the test carries.

    Args:
        markers: names of all markers of the test.
        expression: of ``-m``; empty for none.
        gpus: devices the test's case needs.
    """
    declared = [marker for marker in MARKERS if marker in markers]
    if not declared:
        return None
    everywhere = len(declared) == len(MARKERS)
    here = platform in declared or (everywhere and platform not in _ALL)
    if here and (not expression or _holds(expression, (set(markers) - _ALL) | {platform})):
        return None
    wanted = [marker for marker in declared if expression and _holds(expression, (set(markers) - _ALL) | {marker})]
    gpu_markers = [marker for marker in (wanted or declared) if marker != CPU]
    needs = " or ".join(f"{marker} x{gpus}" for marker in gpu_markers) or CPU
    return f"needs {needs}, found {platform}"


def _holds(expression: str, names: Collection[str]) -> bool:
    """A ``-m`` expression over plain marker names. pytest has refused malformed ones before; those with names that are no
    Python identifiers, or with arguments, count as satisfied: they are about something else than platforms."""
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # the latter for a null character, before Python 3.12
        return True
    return _value(tree, names) is not False


def _value(node: ast.expr, names: Collection[str]) -> bool | None:
    """Kleene's three values: None for what cannot be known, which negation leaves unknown."""
    match node:
        case ast.BoolOp():
            values = [_value(value, names) for value in node.values]
            decisive = isinstance(node.op, ast.Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        case ast.UnaryOp(op=ast.Not()):
            value = _value(node.operand, names)
            return None if value is None else not value
        case ast.Name():
            return node.id in names
        case _:
            return None
