"""Searches for the micro-batches that fit, and for the fastest of them. Pure: what a try costs is the caller's business.

The largest that fits is found by doubling from 1 until one does not fit, then by bisection between the last that did and
the first that did not; that takes memory to grow with the batch, as it does. Throughput has no such shape to rely on: it
mostly saturates, and may fall again. The fastest is the best of what was tried, after its two gaps to the neighbours that
fit were halved once: the doublings alone leave gaps as wide as the batch itself, and a second halving would change a curve
this flat by less than two fresh processes differ.
"""

from __future__ import annotations

from collections.abc import Callable

from pytest_gputrain.records.study import Search, Try


def find_batch(try_batch: Callable[[int], Try], most: int) -> Search:
    """Search batches from 1 to ``most``. Makes at most ``2 * floor(log2(most)) + 4`` tries.

    Args:
        try_batch: trains on that many samples. It is asked for each batch once.

    A try that crashed, or was lost by the fleet, ends the search: nothing is known of larger batches then, so there is no
    largest or fastest.
    """
    tries: dict[int, Try] = {}

    def fits(batch: int) -> bool:
        tries[batch] = try_batch(batch)
        if tries[batch].outcome in ("crashed", "lost"):
            raise _Crash
        return tries[batch].outcome == "fits"

    try:
        largest = _largest(fits, most)
        for batch in _beside_fastest(tries) if largest else ():
            fits(batch)
    except _Crash:
        return Search(tries=tuple(tries.values()), most=most)
    return Search(tries=tuple(tries.values()), most=most, largest=largest or None, fastest=_fastest(tries))


class _Crash(Exception):
    """The outcome of a try that crashed, which says nothing about memory."""


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest batch that fits, 0 for none."""
    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, min(2 * bad, most)
        if good == most:
            return good
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _fastest(tries: dict[int, Try]) -> int | None:
    """Choose the fastest batch, the smallest of equally fast ones."""
    speeds = {batch: tries[batch].samples_per_second for batch in sorted(tries) if tries[batch].outcome == "fits"}
    return max(speeds, key=lambda batch: speeds[batch] or 0.0, default=None)


def _beside_fastest(tries: dict[int, Try]) -> list[int]:
    """Return the middles between the fastest batch and its neighbours that fit."""
    batches = sorted(batch for batch in tries if tries[batch].outcome == "fits")
    fastest = _fastest(tries)
    assert fastest is not None
    index = batches.index(fastest)
    middles = {(fastest + neighbour) // 2 for neighbour in batches[max(0, index - 1) : index + 2]}
    return sorted(middles - set(batches))
