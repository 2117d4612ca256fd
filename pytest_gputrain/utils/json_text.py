"""Formats JSON that people read and compare, in parts: the last field of a document holds most of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from pytest_gputrain.utils.sanitize import utf8

_PARTS = rb'"(?:[^"\\]|\\.)*"|[^{}"]'
_ROW: Final = re.compile(rb'\{\n\s+("(?:bytes|what)": (?:' + _PARTS + rb"|\{(?:" + _PARTS + rb")*\})+?)\n\s*\}")
"""A record on several lines, which holds records that hold no others."""


def encoded(record: Any) -> bytes:
    """Return the JSON of a record. Characters that UTF-8 cannot encode, such as half a surrogate pair, are escaped."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escaped(msgspec.to_builtins(record)))


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {_escaped(name): _escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_escaped, value))
    return utf8(value) if isinstance(value, str) else value


def repeated_names(data: bytes) -> list[str]:
    """Return the names that occur twice in one object. Readers of JSON silently take the last one.

    Raises:
        ValueError: it is not JSON in UTF-8; a byte-order mark is passed over.
        RecursionError: it is nested too deep.
    """
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            repeated.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)

    json.loads(data.decode("utf-8-sig"), object_pairs_hook=note, parse_int=str)
    return repeated


def document(frame: msgspec.Struct | dict[str, Any], items: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the JSON of ``frame`` in parts, with ``items`` in its last field.

    Args:
        frame: a record, or its fields. The last field is an empty list or object.
        items: the items of that field, each from `item`.
    """
    text = msgspec.json.format(encoded(frame), indent=1)
    assert text.endswith((b"[]\n}", b"{}\n}")), "the last field is an empty list or object"
    head, empty = text[:-4], text[-4:-2]
    begin = head + empty[:1]
    for part in items:
        yield begin + b"\n" + part
        begin = b","
    yield (head + empty if begin != b"," else b"\n " + empty[1:]) + b"\n}\n"


def item(value: Any, key: str | None = None) -> bytes:
    """Return an element of the last field of a document: of a list, or of an object, in which it has a key."""
    text = msgspec.json.format(encoded(value), indent=1).replace(b"\n", b"\n  ")
    return b"  " + (b"" if key is None else encoded(key) + b": ") + text


def whole(record: msgspec.Struct) -> bytes:
    """Return the indented JSON of a small record, with each list of numbers on one line."""
    return short_lists(msgspec.json.format(encoded(record), indent=1)) + b"\n"


def short_lists(text: bytes) -> bytes:
    """Return JSON with each list of numbers on one line, so that a case recorded again changes few lines, and not fifty."""
    return re.sub(rb"\[\n\s+([-0-9.e+,\s]+?)\n\s*\]", lambda m: b"[" + re.sub(rb"\s+", b" ", m[1]) + b"]", text)


def short_rows(text: bytes) -> bytes:
    """Return JSON in which each record that begins with its bytes, such as `LiveTensor`, or with its count is one line."""

    def on_one_line(row: re.Match[bytes]) -> bytes:
        inner = re.sub(rb"(?<=\{)\n\s+|\n\s+(?=\})", b"", row[1])
        return b"{" + re.sub(rb"\n\s+", b" ", inner) + b"}"

    return _ROW.sub(on_one_line, text)
