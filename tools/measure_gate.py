"""Measures the time gate on simulated benchmarks, beside the claims; exits with 1 if a claim fails.

    python tools/measure_gate.py [--replicates N] [--seed N] [--rule vote|mean|once]

A replicate is a case with its baseline and its runs of today. A run is the median of 20 steps of one process: processes
differ by a normal deviate of 1 %, steps by an autoregressive one of 1 %, one step in a hundred takes half as long again, and
the first steps are still warming up; where the setting says so, two processes in a hundred are bad (3 to 15 % slower) or
days differ. Seeds are fresh unless one is given.

A claim holds where its one-sided 99 % bound does; rows without a claim tell what the rule cannot do. The rule is a copy of
`pytest_gputrain.gate.step_times.decide` for arrays, which is compared with it case by case before anything is counted.
``--rule`` takes a broken one instead, to see that claims can fail: the mean of three runs instead of their votes, or one run
against the limit that is meant for several.
"""

from __future__ import annotations

import math
import statistics
import sys
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from claims import ONE_SIDED, Row, parser, report, wilson
from numpy.typing import NDArray

from pytest_gputrain.gate import step_times as stats

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

STEPS: Final = 20
STEP_SD: Final = 0.01
STEP_CORRELATION: Final = 0.5
WARMING: Final = 0.02
"""The slowdown of the first timed step; it halves with about each step."""
BANK: Final = 100_000
"""Simulated processes whose medians of steps the replicates draw from; simulating steps for each would take minutes."""
BAD: Final = (0.03, 0.15)
"""The slowdown of a bad process."""
CASES: Final = 300
"""The number of cases of the suite."""

Rule = Callable[..., Flags]
"""``(base, new, tolerance=, prior=, shift=)`` to which cases, a row of both each, are called regressed."""


@dataclass(frozen=True)
class Noise:
    """Standard deviations of logarithms; ``day`` is that of what all runs of one day share."""

    process: float = 0.01
    day: float = 0.0
    bad: float = 0.0
    """Share of processes that are bad."""


class SimulatedMachine:
    """Processes of a simulated machine; figures are logarithms of seconds."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        steps = np.empty((BANK, STEPS))
        steps[:, 0] = self.rng.normal(0, STEP_SD, BANK)
        fresh = self.rng.normal(0, STEP_SD * math.sqrt(1 - STEP_CORRELATION**2), (BANK, STEPS))
        for index in range(1, STEPS):
            steps[:, index] = STEP_CORRELATION * steps[:, index - 1] + fresh[:, index]
        steps += math.log(1.5) * (self.rng.random((BANK, STEPS)) < 0.01)
        steps += WARMING * 2.0 ** -np.arange(STEPS)
        self._medians = np.median(steps, axis=1)

    def runs(self, cases: int, runs: int, noise: Noise) -> Array:
        """Draw the runs: a row for each case, without the effect of the day."""
        logs = self.rng.normal(0, noise.process, (cases, runs)) + self.rng.choice(self._medians, (cases, runs))
        if noise.bad:
            slower = np.log1p(self.rng.uniform(*BAD, (cases, runs)))
            logs += np.where(self.rng.random((cases, runs)) < noise.bad, slower, 0)
        return logs

    def case(self, cases: int, baseline_runs: int, noise: Noise, *, days: bool = True) -> tuple[Array, Array]:
        """Draw baselines, and five runs of today.

        Args:
            days: every run of a baseline is of another day, not all of one.
        """
        base = self.runs(cases, baseline_runs, noise) + self.rng.normal(0, noise.day, (cases, baseline_runs if days else 1))
        return base, self.runs(cases, stats.MOST_RUNS, noise) + self.rng.normal(0, noise.day, (cases, 1))

    def suite(self, baseline_runs: int, noise: Noise, *, days: bool) -> tuple[Array, Array]:
        """Draw the same of cases that share their days."""
        base = self.runs(CASES, baseline_runs, noise) + self.rng.normal(0, noise.day, baseline_runs if days else 1)
        return base, self.runs(CASES, stats.MOST_RUNS, noise) + self.rng.normal(0, noise.day)


def _centre(base: Array) -> Array:
    ordered = np.sort(base, axis=1)
    return ordered[:, 1:-1].mean(axis=1) if base.shape[1] >= 5 else np.median(base, axis=1)


def _limit(base: Array, new: Array, tolerance: float, prior: Array, sds: float) -> Array:
    """Return the limit of every case, by its baseline and the runs so far."""
    baseline_runs, new_runs = base.shape[1], new.shape[1]
    parts = [abs(base - _centre(base)[:, None])] if baseline_runs > 1 else []
    parts += [abs(new - np.median(new, axis=1)[:, None])] if new_runs > 1 else []
    weighted = stats.PRIOR_WEIGHT * prior**2
    squares = weighted
    if parts:
        dev = np.concatenate(parts, axis=1)
        spread = (stats.NORMAL_MAD * np.median(dev, axis=1)) ** 2
        first = np.sqrt((weighted + dev.shape[1] * spread) / (stats.PRIOR_WEIGHT + dev.shape[1]))
        squares = weighted + (np.minimum(dev, stats.WINSOR * first[:, None]) ** 2).sum(axis=1)
    sd = np.sqrt(squares / (stats.PRIOR_WEIGHT + baseline_runs - 1 + new_runs - 1))
    bound = sds * sd * math.sqrt(0.65 + 1.15 / baseline_runs)
    return np.asarray(np.maximum(math.log1p(tolerance), bound))


def vote(
    base: Array, new: Array, *, tolerance: float, prior: Array | float = stats.PRIOR_SD, shift: Array | float = 0.0
) -> Flags:
    """The rule: further runs on suspicion, until three agree."""
    prior = np.broadcast_to(np.asarray(prior, float), len(base))
    shift = np.broadcast_to(np.asarray(shift, float), len(base))
    counted = np.where(abs(shift) > stats.LEAST_SHIFT, shift, 0)[:, None]
    ratios = new - _centre(base)[:, None]
    slower, faster = np.minimum(ratios, ratios - counted), np.maximum(ratios, ratios - counted)
    regressed = np.zeros(len(base), bool)
    left = np.arange(len(base))
    for runs in range(1, new.shape[1] + 1):
        limit = _limit(base[left], new[left, :runs], tolerance, prior[left], stats.LIMIT_SDS)[:, None]
        up, down = slower[left, :runs], faster[left, :runs]
        above, below = (up > limit).sum(axis=1), (down < -limit).sum(axis=1)
        regressed[left[above >= stats.AGREEING]] = True
        quiet = ((up <= limit / 2) & (down >= -limit)).all(axis=1)
        agree = np.maximum(np.maximum(above, below), runs - above - below) >= stats.AGREEING
        left = left[~(quiet | agree)]
    return regressed


def mean_of_three(base: Array, new: Array, *, tolerance: float, prior: float = stats.PRIOR_SD, shift: float = 0.0) -> Flags:
    """Decide by a broken rule: one bad process of three moves the mean."""
    limit = _limit(base, new[:, :3], tolerance, np.full(len(base), prior), stats.LIMIT_SDS)
    return np.asarray(new[:, :3].mean(axis=1) - _centre(base) > limit)


def once(base: Array, new: Array, *, tolerance: float, prior: float = stats.PRIOR_SD, shift: float = 0.0) -> Flags:
    """Decide by a broken rule: no second look, at the limit that is meant for one."""
    limit = _limit(base, new[:, :1], tolerance, np.full(len(base), prior), stats.LIMIT_SDS)
    return np.asarray(new[:, 0] - _centre(base) > limit)


RULES: Final[dict[str, Rule]] = {"vote": vote, "mean": mean_of_three, "once": once}


def differs_from_the_rule(machine: SimulatedMachine, cases: int = 1000) -> str:
    """Return where the vectorised rule differs from `pytest_gputrain.gate.step_times.decide`; empty if nowhere."""
    for baseline_runs in (1, 2, 4, 5, 20):
        noise = Noise(process=0.015, bad=0.05)
        base, new = machine.case(cases, baseline_runs, noise)
        new += machine.rng.uniform(-0.02, 0.08, (cases, 1))
        shift = np.where(machine.rng.random(cases) < 0.5, machine.rng.normal(0, 0.03, cases), 0)
        regressed = vote(base, new, tolerance=0.03, shift=shift)
        for row in range(cases):
            if _decided(base[row], new[row], float(shift[row])) != regressed[row]:
                return f"baseline {base[row].tolist()}, runs {new[row].tolist()}, shift {shift[row]}"
    return ""


def _decided(base: Array, new: Array, shift: float) -> bool:
    """Return the decision of the package, given one run after the other."""
    baseline_seconds, seconds = np.exp(base).tolist(), np.exp(new).tolist()
    for runs in range(1, len(seconds) + 1):
        decision = stats.decide(baseline_seconds, seconds[:runs], tolerance=0.03, shift=shift)
        if decision.settled:
            return decision.outcome == "regressed"
    raise AssertionError("the rule does not end")


def rows(machine: SimulatedMachine, rule: Rule, replicates: int) -> Iterator[Row]:
    """The claims one by one, then what is not claimed."""
    quiet, mixed = Noise(), Noise(process=0.01 / math.sqrt(2), day=0.01 / math.sqrt(2))

    def rows_of(
        setting: str,
        baseline_runs: int,
        noise: Noise,
        claims: dict[float, float | None],
        tolerance: float = 0.03,
        days: bool = True,
    ) -> Iterator[Row]:
        """A row for each slowdown and what is claimed of it, in percent; that of no slowdown is of false alarms."""
        base, new = machine.case(replicates, baseline_runs, noise, days=days)
        for slowdown, limit in claims.items():
            share = float(rule(base, new + math.log1p(slowdown), tolerance=tolerance).mean())
            bound = wilson(share, replicates, upper=not slowdown)
            what = f"power at +{slowdown:.0%}" if slowdown else "false alarms"
            claim = "" if limit is None else f" {'>=' if slowdown else '<='} {limit:g} %"
            yield Row(setting, what + claim, 100 * share, 100 * bound, limit, slowdown > 0, " %", 2 if slowdown else 3)

    yield from rows_of("5 runs, sd 1 %", 5, quiet, {0.0: 0.05, 0.05: 98.0, 0.06: 99.8})
    yield from rows_of("5 runs, sd 1 %, tolerance 2.5 %", 5, quiet, {0.0: 0.1, 0.05: 99.0}, tolerance=0.025)
    yield from rows_of("20 runs, sd 1 %", 20, quiet, {0.05: 99.5})
    yield from rows_of("1 run, sd 1 %", 1, quiet, {0.0: 0.5, 0.08: 99.0})
    yield from rows_of("5 runs, 2 % of processes bad", 5, Noise(bad=0.02), {0.0: 0.05, 0.05: 96.0})
    yield from rows_of("5 runs of 5 days, half the variance per day", 5, mixed, {0.0: 0.2, 0.05: 96.5})
    yield _suite(machine, rule, max(20, replicates // 400), days=True, limit=0.1)
    yield from rows_of("5 runs of 1 day, half the variance per day", 5, mixed, {0.0: None}, days=False)
    yield from rows_of("5 runs, sd 3 %", 5, Noise(process=0.03), {0.0: None, 0.05: None})
    yield _suite(machine, rule, max(20, replicates // 400), days=False, limit=None)


def _suite(machine: SimulatedMachine, rule: Rule, suites: int, *, days: bool, limit: float | None) -> Row:
    """Count false alarms in a suite whose days differ by 1.5 %; that the whole suite is slower counts as one.

    The cases come one after the other: a case knows the first runs of those before it, and of ten at least.
    """
    alarms = np.empty(suites)
    for index in range(suites):
        base, new = machine.suite(5, Noise(day=0.015), days=days)
        first = new[:, 0] - _centre(base)
        prior = float(np.median(base.std(axis=1, ddof=1) / (1 - 1 / (4 * base.shape[1]))))
        earlier_shifts = sorted(first[: stats.MANY_CASES].tolist())
        shifts = [statistics.median(earlier_shifts)] * stats.MANY_CASES
        for value in first[stats.MANY_CASES :].tolist():
            insort(earlier_shifts, value)
            shifts.append(statistics.median(earlier_shifts))
        regressed = rule(base, new, tolerance=0.03, prior=prior, shift=np.array(shifts))
        alarms[index] = regressed.sum() + (shifts[-1] > math.log1p(0.03))
    mean = float(alarms.mean())
    bound = mean + ONE_SIDED * float(alarms.std()) / math.sqrt(suites)
    claim = f"false alarms per suite{'' if limit is None else f' <= {limit:g}'}"
    setting = f"a suite of {CASES}, 5 runs of {5 if days else 1} day{'s' if days else ''} of sd 1.5 %"
    return Row(setting, claim, mean, bound, limit, digits=3)


def main(arguments: list[str] | None = None) -> int:
    given = parser(__doc__, replicates=400_000, rules=RULES, default="vote").parse_args(arguments)
    machine = SimulatedMachine(given.seed)
    print(f"seed {given.seed}, {given.replicates:,} replicates, rule {given.rule}")
    different = differs_from_the_rule(machine)
    if different:
        print(f"FAIL this simulation's rule is not that of pytest_gputrain.gate.step_times: {different}")
        return 1
    return report(rows(machine, RULES[given.rule], given.replicates), 48, 30)


if __name__ == "__main__":
    sys.exit(main())
