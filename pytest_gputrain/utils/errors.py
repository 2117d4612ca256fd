"""Defines the errors that several packages raise, and that pytest's side turns into failures and skips."""

from __future__ import annotations

from pytest_gputrain.utils.sanitize import OneLineError


class BadCase(OneLineError):
    """The case is invalid, or something that it needs is broken. The message is the sentence of the failure.

    Attributes:
        reason: the sentence without the case, where that is known.
    """

    def __init__(self, sentence: str, *, reason: str | None = None) -> None:
        super().__init__(sentence)
        self.reason = sentence if reason is None else reason


class CannotRun(Exception):
    """The case must not run here. The message is the reason of the skip."""


class OtherPlatform(CannotRun):
    """The case is for machines of another platform."""


class WrongTorch(ImportError):
    """A worker imported another torch than the one that it is for. The message is a sentence."""


class CannotEmulate(OneLineError):
    """A GPU cannot be emulated here. The message says why, with the remedy."""
