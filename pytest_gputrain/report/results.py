"""Selects which results of a run are shown to readers, and says in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pytest_gputrain.records import Result, Verdict


def latest(results: Sequence[Result]) -> list[Result]:
    """Each case of each device once: the last that was judged, else the last that was measured.

    Those whose test had changed something in the environment come after all others.
    """
    chosen: dict[tuple[str, str, str], tuple[bool, bool, int]] = {}
    for index, result in enumerate(results):
        identity = (result.device, result.suite, result.key)
        rank = (not result.variables, result.verdict is not None, index)
        chosen[identity] = max(chosen.get(identity, rank), rank)
    return [results[index] for _, _, index in chosen.values()]


BY_ATTENTION: Final = (
    "regressed",
    "failed",
    "over-limit",
    "inconclusive",
    "not-comparable",
    "new",
    "improved",
    "recorded",
    "pass",
    "measured",
    "predicted",
)
"""What `verdict_of` gives, with what wants attention first."""


def verdict_of(result: Result) -> str:
    """The verdict, or ``measured``, ``predicted``, ``failed`` where nobody judged, as tables show it."""
    verdict: Verdict | None = result.verdict
    if verdict:
        return verdict.status
    return "measured" if result.summary else "predicted" if result.prediction else "failed"
