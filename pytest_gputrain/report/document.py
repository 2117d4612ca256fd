"""The JSON report and its schema."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from pytest_gputrain.files import write_atomically
from pytest_gputrain.records import Report


def write(report: Report, path: Path) -> None:
    """Write ``report`` as indented JSON, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


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
