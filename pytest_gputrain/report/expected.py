"""Describes how long a step is expected to take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_gputrain.records import ExpectedTime
from pytest_gputrain.utils.units import format_interval, format_seconds


def interval(expected: ExpectedTime) -> str:
    """Return ``2.20 s (1.87 to 2.75)``, with ``rough`` at its end if only published rates of the board are known; empty
    without an estimate."""
    if expected.seconds is None or expected.low is None or expected.high is None:
        return ""
    rough = ", rough" if expected.rough else ""
    return f"{format_interval(expected.seconds, expected.low, expected.high)}{rough}"


def most_of_it(expected: ExpectedTime) -> str:
    """Return the part that takes longest: ``71 % matrix products``, or ``host-bound: GPU 55.0 ms, host 120 ms``."""
    if expected.host_bound:
        return f"host-bound: GPU {format_seconds(expected.gpu_seconds)}, host {format_seconds(expected.host_seconds)}"
    part, share = expected.dominant or ("", 0.0)
    return f"{share:.0%}".replace("%", f" % {part}") if part else ""


def describe(expected: ExpectedTime) -> str:
    """Return the interval and the part that takes longest, or why there is no estimate."""
    if expected.seconds is None:
        return f"not known: {expected.unknown}"
    return ", ".join(filter(None, [interval(expected), most_of_it(expected)]))


def notes(estimates: Iterable[tuple[str, ExpectedTime]]) -> Iterator[str]:
    """Yield sentences on what the estimates of a table mean, and on what they lack.

    Args:
        estimates: each with the name of its GPU.
    """
    rows = list(estimates)
    if any(one.seconds is not None for _, one in rows):
        yield "expected times are estimates, and nothing was measured"
    if any(one.seconds is not None and not one.rough for _, one in rows):
        yield "17 of 19 steps of an H200 are within such intervals, and 14 of 19 where their family of models was left out"
    if rough := ", ".join(dict.fromkeys(gpu for gpu, one in rows if one.seconds is not None and one.rough)):
        yield (
            f"rough: of {rough} only published rates are known, or a step exchanges data with other GPUs; "
            "86 of 98 published steps are within such intervals"
        )
    for gpu, one in dict.fromkeys((gpu, one.unknown) for gpu, one in rows if one.seconds is None):
        yield f"{gpu} has no expected time: {one}"
    for gpu in dict.fromkeys(gpu for gpu, one in rows if one.not_modelled):
        operators = dict.fromkeys(name for its, one in rows if its == gpu for name in one.not_modelled)
        yield f"the expected time of {gpu} leaves out what is not known, the time of {', '.join(operators)}"
