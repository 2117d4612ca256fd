"""Defines the errors that several packages raise, and that pytest's side turns into failures and skips."""

from __future__ import annotations

from pytest_gputrain.utils.sanitize import OneLineError


class BadCase(OneLineError):
    """The case makes no sense, or what it needs is broken; the sentence to fail with.

    Attributes:
        reason: the sentence without the case, where that is known.
    """

    def __init__(self, sentence: str, *, reason: str | None = None) -> None:
        super().__init__(sentence)
        self.reason = sentence if reason is None else reason


class CannotRun(Exception):
    """The case must not run here; the reason to skip."""


class OtherPlatform(CannotRun):
    """The case is for machines of another platform."""


class WrongTorch(ImportError):
    """A worker imported another torch than the one that it is for; the sentence."""


class CannotEmulate(OneLineError):
    """A GPU cannot be emulated here; the sentence says why and what to do."""
