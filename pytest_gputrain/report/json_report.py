"""Writes the JSON report of ``--gpu-json``; storage reads such reports."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import msgspec

from pytest_gputrain.records import Report, Result
from pytest_gputrain.utils import json_text
from pytest_gputrain.utils.files import write_atomically


def write(report: Report, path: Path, more_results: Iterable[Result] = ()) -> None:
    """Write ``report`` as indented JSON completely, or leave the file as it is.

    Args:
        more_results: results after those of the report; they need not be in memory all at once.

    Raises:
        OSError: it cannot be written.
    """
    results = itertools.chain(report.results, more_results)
    write_atomically(path, json_text.document(msgspec.structs.replace(report, results=()), map(json_text.item, results)))


def generator() -> str:
    """Return the name and version of this package."""
    return f"pytest-gputrain {metadata.version('pytest-gputrain')}"
