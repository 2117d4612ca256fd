"""Writes failures as annotations of GitHub: workflow commands in the log, which it shows on the lines of the tests.

Form: https://docs.github.com/actions/reference/workflow-commands-for-github-actions. Escaping: `escapeData` and
`escapeProperty` of ``packages/core/src/command.ts`` in actions/toolkit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pytest_gputrain.utils.sanitize import shown

MOST: Final = 10
"""Errors that GitHub shows of one step; it drops the rest without a word."""


class Failure(NamedTuple):
    """A failed test, with its place and its message."""

    path: Path | None
    """The file of the test; None if the failure is not that of a single test."""
    line: int | None
    """Counted from 1."""
    title: str
    sentence: str


def wanted() -> bool:
    """Tell whether this process runs in a job of GitHub Actions, which reads such lines."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def commands(failures: Sequence[Failure]) -> Iterator[str]:
    """Return a line for each failure, up to the number that GitHub shows. The last line then names the others."""
    shown = failures if len(failures) <= MOST else failures[: MOST - 1]
    yield from map(_command, shown)
    if len(shown) < len(failures):
        rest = f"{len(failures) - len(shown)} more tests failed; the summary of the step and the log have all"
        yield _command(Failure(None, None, "gputrain", rest))


def _command(failure: Failure) -> str:
    properties = {"file": _in_repository(failure.path), "line": failure.line or "", "title": failure.title}
    if not properties["file"]:
        del properties["line"]
    given = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items() if value)
    return f"::error {given}::{_data(failure.sentence)}"


def _in_repository(path: Path | None) -> str:
    """Return the path relative to the folder of GitHub's checkout."""
    if path is None:
        return ""
    workspace = os.environ.get("GITHUB_WORKSPACE", "")
    inside = workspace and path.is_relative_to(workspace)
    return path.relative_to(workspace).as_posix() if inside else path.as_posix()


def _data(text: str) -> str:
    return shown(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
