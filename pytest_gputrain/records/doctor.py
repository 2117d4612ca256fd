"""Defines what ``gputrain doctor`` finds out of a host."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from pytest_gputrain.records.case import FORMAT

CheckStatus = Literal["ok", "warning", "problem"]


class Check(Struct, frozen=True):
    """The result of one check."""

    name: str
    """The part of the host that was checked."""
    status: CheckStatus
    found: str
    """What was found."""
    remedy: str = ""
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.status:<8} {self.name:<12} {self.found}{f'; {self.remedy}' if self.remedy else ''}"


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The document of ``gputrain doctor --json``."""

    format: int = FORMAT
    """The version of the format."""
    generator: str
    """The name and the version of the package that wrote it."""
    sound: bool
    """Whether no check found a problem."""
    checks: tuple[Check, ...]
    """All checks."""
