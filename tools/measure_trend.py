"""Measures the search for changes on simulated histories, beside the claims; exits with 1 if a claim fails.

    python tools/measure_trend.py [--replicates N] [--seed N] [--rule winsorised|plain|greedy]

A history is a series of runs of one case. Runs differ by a normal deviate of 1 %; where the setting says so, two runs in a
hundred are bad (3 to 15 % slower). Offline the whole series is searched, online every beginning of it, as each run would.
Seeds are fresh unless one is given.

- A false alarm offline is a change found in a series that has none; online it is a run at which the number of changes grows.
- A change is found where one is told within five runs of it.
- Its delay is the runs at the new level that it takes until it is told, the median of the series.

A claim holds where its one-sided 99 % bound does, a delay and the time where they are kept. ``--rule`` takes a broken one
instead, to see that claims can fail: residuals that are not cut off, or a tenth of the penalty.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import numpy as np
from claims import ONE_SIDED, Row, parser, report, wilson
from numpy.typing import NDArray

from pytest_gputrain.gate import change_points

Array = NDArray[np.float64]

LENGTH: Final = 500
"""Runs of a series."""
ONLINE_LENGTH: Final = 200
NEW: Final = 30
"""Runs of a history that has just begun."""
ONLINE_STEP: Final = 100
"""Runs before the change whose delay is measured."""
NEAR: Final = 5
BAD: Final = (0.03, 0.15)
SHORT: Final = 20
"""Runs of a slowdown that is mended."""

RULES: Final[dict[str, dict[str, Any]]] = {
    "winsorised": {"WINSOR": change_points.WINSOR},
    "plain": {"WINSOR": math.inf},
    "greedy": {"PENALTY": change_points.PENALTY / 10},
}
"""Constants of the product that a rule changes."""


class Simulation:
    """Histories of simulated cases; figures are logarithms of seconds."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def series(self, count: int, length: int, *, sd: float = 0.01, bad: float = 0.0) -> Array:
        """Draw series, one per row."""
        logs = self.rng.normal(0, sd, (count, length))
        if bad:
            slower = np.log1p(self.rng.uniform(*BAD, logs.shape))
            logs += np.where(self.rng.random(logs.shape) < bad, slower, 0)
        return logs


def detected(logs: Array) -> tuple[int, ...]:
    """Return the changes that the package finds."""
    return change_points.levels(np.exp(logs)).starts[1:]


def near(changes: tuple[int, ...], at: int, within: int = NEAR) -> bool:
    return any(abs(change - at) <= within for change in changes)


def alarms_online(logs: Array) -> int:
    """Return the runs at which the number of changes grows."""
    changes_before, alarms = 0, 0
    for length in range(2 * change_points.LEAST_LENGTH, len(logs) + 1):
        changes = len(detected(logs[:length]))
        alarms += changes > changes_before
        changes_before = changes
    return alarms


def delay(logs: Array, at: int) -> float:
    """Runs from ``at`` on until a change is told there; infinite for never."""
    return next((length - at for length in range(at + 1, len(logs) + 1) if near(detected(logs[:length]), at)), math.inf)


def rate_bound(events: int, points: int) -> float:
    """Return the one-sided 99 % bound of a rate of rare events per thousand points (Poisson; Wilson and Hilferty 1931)."""
    more = events + 1
    return 1000 * more * (1 - 1 / (9 * more) + ONE_SIDED / (3 * math.sqrt(more))) ** 3 / points


def rows(simulation: Simulation, replicates: int) -> Iterator[Row]:
    """The claims one by one, then what is not claimed."""
    for setting, bad in (("sd 1 %", 0.0), ("sd 1 %, 2 % of runs bad", 0.02)):
        series = simulation.series(replicates, LENGTH, bad=bad)
        alarms = sum(len(detected(logs)) for logs in series)
        points = replicates * LENGTH
        yield Row(setting, "offline, alarms per 1000 <= 0.01", 1000 * alarms / points, rate_bound(alarms, points), 0.01)
        yield _caught(simulation, setting, replicates, bad, math.log(1.03), 98.0)
        few = max(5, replicates // 20)
        for length, several, most in ((NEW, 10 * few, 1.5), (ONLINE_LENGTH, 2 * few, 1.0)):
            alarms, points = sum(map(alarms_online, simulation.series(several, length, bad=bad))), several * length
            claim = f"online, first {length} runs, alarms per 1000 <= {most:g}"
            yield Row(setting, claim, 1000 * alarms / points, rate_bound(alarms, points), most)
        for slowdown, late in ((0.03, 4), (0.05, 3)):
            shifted = simulation.series(few, ONLINE_STEP + 2 * SHORT, bad=bad)
            shifted[:, ONLINE_STEP:] += math.log1p(slowdown)
            middle = statistics.median(delay(logs, ONLINE_STEP) for logs in shifted)
            yield Row(setting, f"+{slowdown:.0%}: told after runs <= {late}", middle, middle, late)
        mended = simulation.series(few, LENGTH, bad=bad)
        mended[:, LENGTH // 2 : LENGTH // 2 + SHORT] += math.log(1.03)
        both = [near(changes, LENGTH // 2) and near(changes, LENGTH // 2 + SHORT) for changes in map(detected, mended)]
        share = sum(both) / few
        claim = f"+3% for {SHORT} runs: both ends found >= 90 %"
        yield Row(setting, claim, 100 * share, 100 * wilson(share, few, upper=False), 90.0, True, " %")
    yield _speed(simulation, min(1000, replicates))
    yield _caught(simulation, "sd 1 %", replicates, 0.0, math.log(1.02), None)
    yield _caught(simulation, "sd 3 %", replicates, 0.0, math.log(1.05), None, sd=0.03)
    yield _caught(simulation, "sd 1 %", replicates, 0.0, math.log(1.03), None, within=0)
    yield _caught(simulation, "sd 1 %", replicates, 0.0, math.log(1.05), None, within=0)


def _caught(
    simulation: Simulation,
    setting: str,
    count: int,
    bad: float,
    step: float,
    limit: float | None,
    *,
    sd: float = 0.01,
    within: int = NEAR,
) -> Row:
    """A step somewhere in each series, but for ten runs at either end."""
    series, at = simulation.series(count, LENGTH, sd=sd, bad=bad), simulation.rng.integers(10, LENGTH - 10, count)
    for logs, where in zip(series, at, strict=True):
        logs[where:] += step
    share = sum(near(detected(logs), int(where), within) for logs, where in zip(series, at, strict=True)) / count
    what = "found" if within else "the very run found"
    claim = f"+{math.expm1(step):.0%}: {what}{'' if limit is None else f' >= {limit:g} %'}"
    return Row(setting, claim, 100 * share, 100 * wilson(share, count, upper=False), limit, True, " %")


def _speed(simulation: Simulation, count: int) -> Row:
    series = simulation.series(count, LENGTH, bad=0.02)
    series[:, LENGTH // 2 :] += math.log(1.03)
    begin = time.process_time()
    for logs in series:
        detected(logs)
    seconds = (time.process_time() - begin) * 10_000 / count
    return Row("10,000 series of 500, a change each", "seconds of one core <= 10", seconds, seconds, 10, unit=" s")


def main(arguments: list[str] | None = None) -> int:
    given = parser(__doc__, replicates=4000, rules=RULES, default="winsorised").parse_args(arguments)
    print(f"seed {given.seed}, {given.replicates:,} replicates, rule {given.rule}")
    with mock.patch.multiple(change_points, **RULES[given.rule]):
        return report(rows(Simulation(given.seed), given.replicates), 34, 44)


if __name__ == "__main__":
    sys.exit(main())
