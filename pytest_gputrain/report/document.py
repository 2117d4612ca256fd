"""The JSON report and its schema."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from pytest_gputrain.files import write_atomically
from pytest_gputrain.records import Report, Result


def write(report: Report, path: Path, more: Iterable[Result] = ()) -> None:
    """Write ``report`` as indented JSON, whole or not at all.

    Args:
        more: results after those of the report; they need not be in memory all at once.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(path, _text(report, itertools.chain(report.results, more)))


def _text(report: Report, results: Iterable[Result]) -> Iterator[bytes]:
    """The document with one result in memory at a time."""
    frame = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(report, results=())), indent=1)
    head, between, tail = frame.rpartition(b"[]")
    assert tail == b"\n}", "the results are the last field of a report"
    opening = b"[\n  "
    for result in results:
        text = msgspec.json.format(msgspec.json.encode(result), indent=1).replace(b"\n", b"\n  ")
        yield head + opening + text
        head, opening, between = b"", b",\n  ", b"\n ]"
    yield head + between + tail + b"\n"


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the report, generated from the records."""
    document = msgspec.json.schema(Report)
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["title"] = "pytest-gputrain report"
    return document


def schema_text() -> str:
    """The schema as published in docs/report.schema.json."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="deterministic"), indent=1).decode() + "\n"


def generator() -> str:
    """Name and version of this package."""
    return f"pytest-gputrain {metadata.version('pytest-gputrain')}"
