"""Measures the time gate on simulated benchmarks, beside the claims; exits with 1 if a claim fails.

    python tools/measure_gate.py [--replicates N] [--seed N] [--rule vote|mean|once]

A replicate is a case with its baseline and its runs of today. A run is the median of 20 steps of one process: processes
differ by a normal deviate of 1 %, steps by an autoregressive one of 1 %, one step in a hundred takes half as long again, and
the first steps are still warming up; where the setting says so, two processes in a hundred are bad (3 to 15 % slower) or
days differ. Seeds are fresh unless one is given.

In a case that waits for the host, steps differ by 20 % on either side and machines by 30 %, and the GPU seconds of processes
by a normal deviate. It is judged by both, and each asks for further runs of both. The simulated deviates are assumed: no
GPU has shown them yet.

A comparison of ``gputrain ab`` has five rounds of both sides, which share the mood of the machine. It is judged by all of
them, and by as many as its rule wants. There is one for 200 replicates, because the package itself judges them.

A claim holds where its one-sided 99 % bound does; rows without a claim tell what the rule cannot do. The rule is a copy of
`pytest_gputrain.gate.step_times.decide` for arrays, which is compared with it case by case before anything is counted. So is
that of cases that wait for the host, with the verdicts of `pytest_gputrain.gate.regression.judge`.
``--rule`` takes a broken one instead, to see that claims can fail: the mean of three runs instead of their votes, or one run
against the limit that is meant for several.
"""

from __future__ import annotations

import math
import statistics
import sys
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
from claims import ONE_SIDED, Row, parser, report, wilson
from numpy.typing import NDArray

from pytest_gputrain.gate import regression
from pytest_gputrain.gate import step_times as stats
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.host_bound import GPU_PRIOR_SD, HOST_PRIOR_SD, LEAST_HOST_TOLERANCE
from pytest_gputrain.records import Baseline, BaselineRun, Case, Environment, GpuSteps, Measurement, MetricName, Verdict
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance
from pytest_gputrain.utils.bounds import MOST_RUNS

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
HOST_STEPS: Final = 0.2
"""By how much a step that waits for the host is longer or shorter than the mean, evenly spread."""
MACHINES: Final = 0.3
"""The same of machines."""
BUSY: Final = 0.23
"""The share of such a step in which the GPU works."""
TOLD: Final = 0.5
"""``gpu_host_time_tolerance``."""
OUTLIER: Final = 3.0
"""How many times as long a step takes that its host holds up."""
ROUNDS: Final = 5
"""Of ``gputrain ab``, by default."""
GPU_SDS: Final = (0.005, 0.01, 0.02)
"""Standard deviations of GPU seconds between processes."""

Rule = Callable[..., Flags]
"""``(base, new, tolerance=, prior=, shift=)`` to which cases, a row of both each, are called regressed."""


@dataclass(frozen=True)
class Noise:
    """Standard deviations of logarithms; ``day`` is that of what all runs of one day share."""

    process: float = 0.01
    day: float = 0.0
    bad: float = 0.0
    """Share of processes that are bad."""


class Steps(NamedTuple):
    """What happens to single steps."""

    outliers: float = 0.0
    """Share of steps that take `OUTLIER` times as long, by chance."""
    every: int = STEPS
    slower: float = 1.0
    """How many times as long each so-many-th step takes."""


class Waiting(NamedTuple):
    """Wall and GPU seconds of cases, as logarithms: baselines, and five runs of today."""

    base: Array
    new: Array
    gpu_base: Array
    gpu_new: Array


class SimulatedMachine:
    """Processes of a simulated machine; figures are logarithms of seconds."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._medians = self._bank(STEP_SD)
        self._host_medians = self._bank(HOST_STEPS / math.sqrt(3))  # the standard deviation of what is spread evenly

    def _bank(self, sd: float) -> Array:
        """Draw the medians of steps that differ by so much."""
        return np.asarray(np.median(self.steps(BANK, sd), axis=1))

    def steps(self, processes: int, sd: float = STEP_SD, kind: Steps | None = None) -> Array:
        """Draw the steps of processes, a row for each."""
        steps = np.empty((processes, STEPS))
        steps[:, 0] = self.rng.normal(0, sd, processes)
        fresh = self.rng.normal(0, sd * math.sqrt(1 - STEP_CORRELATION**2), (processes, STEPS))
        for index in range(1, STEPS):
            steps[:, index] = STEP_CORRELATION * steps[:, index - 1] + fresh[:, index]
        steps += math.log(1.5) * (self.rng.random((processes, STEPS)) < 0.01)
        steps += WARMING * 2.0 ** -np.arange(STEPS)
        if kind:
            steps += math.log(OUTLIER) * (self.rng.random((processes, STEPS)) < kind.outliers)
            steps[:, kind.every - 1 :: kind.every] += math.log(kind.slower)
        return steps

    def medians_and_means(self, cases: int, runs: int, sd: float, kind: Steps) -> Array:
        """Draw for each run the median step and what the gate takes for the mean one: ``[case, run, figure]``."""
        steps = self.steps(BANK, sd, kind)
        bank = np.stack([np.median(steps, axis=1), np.log(_means(steps))], axis=1)
        return bank[self.rng.integers(0, BANK, (cases, runs))] + self.rng.normal(0, Noise().process, (cases, runs, 1))

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

    def waiting(self, cases: int, baseline_runs: int, gpu_sd: float) -> Waiting:
        """Draw cases whose GPU waits for the host, on one machine."""
        runs = baseline_runs + stats.MOST_RUNS
        wall = self.rng.normal(0, Noise().process, (cases, runs)) + self.rng.choice(self._host_medians, (cases, runs))
        gpu = math.log(BUSY) + self.rng.normal(0, gpu_sd, (cases, runs))
        return Waiting(*np.hsplit(wall, [baseline_runs]), *np.hsplit(gpu, [baseline_runs]))

    def machines(self, cases: int) -> Array:
        """Draw by how much a machine differs from another one of its kind."""
        speeds = np.log(self.rng.uniform(1 - MACHINES, 1 + MACHINES, (cases, 2)))
        return np.asarray(speeds[:, 0] - speeds[:, 1])

    def suite(self, baseline_runs: int, noise: Noise, *, days: bool) -> tuple[Array, Array]:
        """Draw the same of cases that share their days."""
        base = self.runs(CASES, baseline_runs, noise) + self.rng.normal(0, noise.day, baseline_runs if days else 1)
        return base, self.runs(CASES, stats.MOST_RUNS, noise) + self.rng.normal(0, noise.day)


def _means(steps: Array) -> Array:
    """Return the mean seconds of the steps of each process without its slowest step."""
    seconds = np.exp(steps)
    return np.asarray((seconds.sum(axis=-1) - seconds.max(axis=-1)) / (STEPS - 1))


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


class Terms(NamedTuple):
    """What seconds are held to."""

    tolerance: float = 0.03
    prior: Array | float = stats.PRIOR_SD
    shift: Array | float = 0.0
    doubted_from: float = 0.5


ON_THE_HOST: Final = Terms(LEAST_HOST_TOLERANCE, HOST_PRIOR_SD, doubted_from=1.0)
ON_THE_GPU: Final = Terms(prior=GPU_PRIOR_SD)
OF_THE_MEAN: Final = Terms(stats.MEAN_TOLERANCE, stats.MEAN_PRIOR_SD, doubted_from=1.0)


def _look(base: Array, new: Array, terms: Terms) -> tuple[Flags, Flags]:
    """Tell which cases have regressed by the runs so far, and which need no more."""
    prior = np.broadcast_to(np.asarray(terms.prior, float), len(base))
    shift = np.broadcast_to(np.asarray(terms.shift, float), len(base))
    counted = np.where(abs(shift) > stats.LEAST_SHIFT, shift, 0)[:, None]
    ratios = new - _centre(base)[:, None]
    slower, faster = np.minimum(ratios, ratios - counted), np.maximum(ratios, ratios - counted)
    limit = _limit(base, new, terms.tolerance, prior, stats.LIMIT_SDS)[:, None]
    above, below = (slower > limit).sum(axis=1), (faster < -limit).sum(axis=1)
    quiet = ((slower <= limit * terms.doubted_from) & (faster >= -limit)).all(axis=1)
    agree = np.maximum(np.maximum(above, below), new.shape[1] - above - below) >= stats.AGREEING
    return above >= stats.AGREEING, quiet | agree


def vote(
    base: Array, new: Array, *, tolerance: float, prior: Array | float = stats.PRIOR_SD, shift: Array | float = 0.0
) -> Flags:
    """The rule: further runs on suspicion, until three agree."""
    prior, shift = (np.broadcast_to(np.asarray(value, float), len(base)) for value in (prior, shift))
    regressed = np.zeros(len(base), bool)
    left = np.arange(len(base))
    for runs in range(1, new.shape[1] + 1):
        regressed[left], settled = _look(base[left], new[left, :runs], Terms(tolerance, prior[left], shift[left]))
        left = left[~settled]
    return regressed


def vote_on_waiting(cases: Waiting) -> tuple[Flags, Flags, float]:
    """The rule for cases whose GPU waits for the host, on the machine of their baselines.

    Returns:
        Which have regressed by wall seconds, which by GPU seconds, and the mean number of runs.
    """
    by_wall, by_gpu = np.zeros(len(cases.base), bool), np.zeros(len(cases.base), bool)
    left, processes = np.arange(len(cases.base)), 0
    for runs in range(1, cases.new.shape[1] + 1):
        processes += len(left)
        by_wall[left], settled = _look(cases.base[left], cases.new[left, :runs], ON_THE_HOST)
        by_gpu[left], gpu_settled = _look(cases.gpu_base[left], cases.gpu_new[left, :runs], ON_THE_GPU)
        left = left[~(settled & gpu_settled)]
    return by_wall, by_gpu, processes / len(cases.base)


def vote_on_means(base: Array, new: Array, terms: Terms) -> tuple[Flags, Flags]:
    """The rule for medians and means as of `SimulatedMachine.medians_and_means`.

    Returns:
        Which have regressed by the median, and which by the mean alone.
    """
    by_median, by_mean = np.zeros(len(base), bool), np.zeros(len(base), bool)
    left = np.arange(len(base))
    for runs in range(1, new.shape[1] + 1):
        by_median[left], settled = _look(base[left, :, 0], new[left, :runs, 0], terms)
        by_mean[left], mean_settled = _look(base[left, :, 1], new[left, :runs, 1], OF_THE_MEAN)
        left = left[~(settled & (mean_settled | by_median[left]))]
    return by_median, by_mean & ~by_median


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


_HERE: Final = Environment(
    device_name="a GPU",
    device_type="cuda",
    device_count=1,
    device_memory_bytes=1,
    host="here",
    cpu_model="a CPU",
    os="an OS",
    python="3",
    packages={},
    gpu_digests=("a",),
)


def waiting_differs_from_the_gate(machine: SimulatedMachine, cases: int = 300) -> str:
    """Return where `vote_on_waiting` differs from `pytest_gputrain.gate.regression.judge`; empty if nowhere."""
    for baseline_runs in (1, 5):
        drawn = machine.waiting(cases, baseline_runs, 0.015)
        slower, gpu_slower = (machine.rng.uniform(-0.1, most, (cases, 1)) for most in (0.3, 0.1))
        drawn = drawn._replace(new=drawn.new + slower, gpu_new=drawn.gpu_new + gpu_slower)
        by_wall, by_gpu, mean = vote_on_waiting(drawn)
        with mock.patch.object(regression, "WHY_GPU_SECONDS_ARE_HELD_COARSELY", ""):
            judged = [_judged(Waiting(*(array[row : row + 1] for array in drawn))) for row in range(cases)]
        for row, (wall, gpu, _) in enumerate(judged):
            if (wall, gpu) != (by_wall[row], by_gpu[row]):
                return f"{[array[row].tolist() for array in drawn]}"
        if abs(statistics.fmean(runs for _, _, runs in judged) - mean) > 1e-9:
            return "the numbers of runs"
    return ""


def means_differ_from_the_gate(machine: SimulatedMachine, cases: int = 300) -> str:
    """Return where `vote_on_means` differs from `pytest_gputrain.gate.regression.judge`; empty if nowhere."""
    processes = 5 + stats.MOST_RUNS
    # Every second case has a periodic slowdown from near the tolerance on.
    steps = machine.steps(cases * processes, kind=Steps(outliers=0.03)).reshape(cases, processes, STEPS)
    steps[::2, 5:, 2::3] += machine.rng.uniform(0, 1.5, (len(steps[::2]), 1, 1))
    figures = np.stack([np.median(steps, axis=2), np.log(_means(steps))], axis=2)
    flags = vote_on_means(figures[:, :5], figures[:, 5:], Terms())
    for row in range(cases):
        runs = [_figures(*process) for process in steps[row].tolist()]
        verdict, _ = _gate_says(runs[:5], runs[5:])
        judged = tuple(_has_regressed(verdict, name) for name in ("step_seconds", "mean_step_seconds"))
        if judged != tuple(bool(flag[row]) for flag in flags):
            return f"{steps[row].tolist()}: {verdict.sentence}"
    return ""


def _figures(*wall: float, gpu: float | None = None) -> dict[str, Any]:
    gpu_steps = None if gpu is None else GpuSteps(seconds=(math.exp(gpu),), collective_seconds=(0.0,))
    seconds = tuple(map(math.exp, wall))
    return {"step_seconds": seconds, "gpu_steps": gpu_steps, "environment": _HERE, "peak_allocated_bytes": 1}


def _has_regressed(verdict: Verdict, name: MetricName) -> bool:
    metric = verdict.metric(name)
    return metric is not None and metric.status == "regressed"


def _judged(case: Waiting) -> tuple[bool, bool, int]:
    """Return the package's verdicts on wall and GPU seconds, given one run after the other, and the number of runs."""
    base, new = (
        [_figures(wall, gpu=gpu) for wall, gpu in zip(walls[0], gpus[0], strict=True)]
        for walls, gpus in ((case.base, case.gpu_base), (case.new, case.gpu_new))
    )
    verdict, runs = _gate_says(base, new)
    return _has_regressed(verdict, "step_seconds"), _has_regressed(verdict, "gpu_seconds"), runs


def _gate_says(base: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> tuple[Verdict, int]:
    """Return the package's verdict, given one run after the other, and the number of runs."""
    baseline = Baseline(
        device="gpu",
        case=Case(model="a"),
        scale="full",
        runs=tuple(BaselineRun(outcome="measured", date="", session="", **figures) for figures in base),
    )
    unknown: dict[str, Any] = dict.fromkeys(("parameters", "trainable_parameters", "model_bytes"))
    counted = dict.fromkeys(("batch_size", "sequence_length", "updates", "peak_host_bytes"), 1)
    replies = [Measurement(warmup_seconds=(), losses=(), **counted, **unknown, **figures) for figures in new]
    tolerance = Tolerance(time=0.03, memory=MemoryTolerance())
    criteria = Criteria(case=baseline.case, scale="full", tolerance=tolerance, baseline=baseline, most=MOST_RUNS)
    for runs in range(1, len(replies) + 1):
        verdict, settled = regression.judge(criteria, replies[:runs])
        if settled:
            return verdict, runs
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
    for sd in GPU_SDS:
        yield from _waiting(machine, sd, replicates)
    yield from _means_of(machine, replicates)
    yield from _rounds_of(machine, max(100, replicates // 200))
    setting, machines = "waits for the host, another machine", machine.machines(replicates)
    told = 100 * float((machines > math.log1p(TOLD)).mean())
    yield Row(setting, f"told, slower than {TOLD:.0%}", told, told, None, unit=" %")


def _waiting(machine: SimulatedMachine, sd: float, replicates: int) -> Iterator[Row]:
    """Judge cases that wait for the host, unchanged and with a GPU that takes 5 % longer."""
    setting = f"waits for the host, GPU sd {100 * sd:g} %"
    cases = machine.waiting(replicates, 5, sd)
    by_wall, by_gpu, processes = vote_on_waiting(cases)
    longer = math.log1p(0.05)
    wall_too = np.log1p(BUSY * 0.05)
    caught = vote_on_waiting(cases._replace(gpu_new=cases.gpu_new + longer, new=cases.new + wall_too))[1]
    share, power = float((by_wall | by_gpu).mean()), float(caught.mean())
    bound, power_bound = wilson(share, replicates, upper=True), wilson(power, replicates, upper=False)
    yield Row(setting, "false alarms <= 0.05 %", 100 * share, 100 * bound, 0.05, unit=" %", digits=3)
    claimed = 98.0 if sd == GPU_SDS[0] else None
    claim = f"GPU +5% caught{'' if claimed is None else f' >= {claimed:g} %'}"
    yield Row(setting, claim, 100 * power, 100 * power_bound, claimed, at_least=True, unit=" %")
    yield Row(setting, "processes, unchanged", processes, processes, None)


def _means_of(machine: SimulatedMachine, replicates: int) -> Iterator[Row]:
    """Judge cases by medians and means: unchanged ones on hosts that hold up steps, and some of whose steps are slow."""
    waits = HOST_STEPS / math.sqrt(3)
    plain, waiting = Terms(), ON_THE_HOST
    for what, before, now, sd, terms in (
        ("1 % of steps 3x", 0.01, 0.01, STEP_SD, plain),
        ("5 % of steps 3x", 0.05, 0.05, STEP_SD, plain),
        ("5 % of steps 3x, today only", 0.0, 0.05, STEP_SD, plain),
        ("5 % of steps 3x, waits for the host", 0.05, 0.05, waits, waiting),
    ):
        base = machine.medians_and_means(replicates, 5, sd, Steps(before))
        new = machine.medians_and_means(replicates, stats.MOST_RUNS, sd, Steps(now))
        by_median, by_mean = vote_on_means(base, new, terms)
        for name, flags in (("false alarms", by_median | by_mean), ("of these, by the mean alone", by_mean)):
            share = float(flags.mean())
            limit = 0.05 if name == "false alarms" else None
            claim = f"{name} <= {limit} %" if limit else name
            yield Row(what, claim, 100 * share, 100 * wilson(share, replicates, upper=True), limit, unit=" %", digits=3)
    for every, word in ((3, "third"), (10, "tenth")):
        for slower in (2.0, 3.0, 5.0, 10.0):
            base = machine.medians_and_means(replicates, 5, STEP_SD, Steps(0.01))
            new = machine.medians_and_means(replicates, stats.MOST_RUNS, STEP_SD, Steps(0.01, every, slower))
            caught = float(np.logical_or(*vote_on_means(base, new, plain)).mean())
            claimed = 98.0 if slower == 10 or (every, slower) in ((3, 3.0), (3, 5.0)) else None
            claim = f"each {word} step {slower:g}x: caught{f' >= {claimed:g} %' if claimed else ''}"
            bound = 100 * wilson(caught, replicates, upper=False)
            yield Row("1 % of steps 3x", claim, 100 * caught, bound, claimed, at_least=True, unit=" %")


def _rounds_of(machine: SimulatedMachine, comparisons: int) -> Iterator[Row]:
    """Judge A/B comparisons by all rounds, and by as many as they want."""
    for setting, noise, mood, goals in (
        ("sd 1 %", Noise(), 0.0, (0.0, 0.1)),
        ("sd 1 %, and 3 % between rounds", Noise(), 0.03, (0.0, 0.1)),
        ("2 % of processes bad", Noise(bad=0.02), 0.0, (0.0, 0.1)),
        ("sd 3 %", Noise(process=0.03), 0.0, ()),
    ):
        moods = machine.rng.normal(0, mood, (comparisons, ROUNDS))
        base, head = (np.exp(machine.runs(comparisons, ROUNDS, noise) + moods) for _ in range(2))
        for slowdown in (0.0, 0.05, 0.06, 0.1):
            slower = (head * (1 + slowdown)).tolist()
            pairs = [*zip(base.tolist(), slower, strict=True)]
            what = f"power at +{slowdown:.0%}" if slowdown else "false alarms"
            for when, first in (("all rounds", ROUNDS), ("early end", 2)):
                ends = [_end_of_rounds(*pair, first) for pair in pairs]
                share = statistics.fmean(outcome == "regressed" for outcome, _ in ends)
                bound = wilson(share, comparisons, upper=not slowdown)
                yield Row(f"A/B, {setting}", f"{what}, {when}", 100 * share, 100 * bound, None, unit=" %")
            rounds = float(statistics.median(ended for _, ended in ends))
            limit = ROUNDS / 2 if slowdown in goals else None
            claim = f"median at +{slowdown:.0%}{f' <= {limit:g}' if limit else ''}"
            yield Row(f"A/B, {setting}", claim, rounds, rounds, limit, unit=" rounds", digits=0)


def _end_of_rounds(base: Sequence[float], head: Sequence[float], first: int) -> tuple[str, int]:
    """Return the package's outcome of an A/B comparison, and after how many rounds it ends.

    Args:
        base: seconds, one a round, as ``head``.
        first: the round after which it is judged for the first time.
    """
    for rounds in range(first, ROUNDS + 1):
        sides = stats.levelled(base[:rounds], head[:rounds])
        decision = stats.decide(*sides, tolerance=0.03, most=ROUNDS, paired=True)
        if decision.settled:
            return decision.outcome, rounds
    raise AssertionError("the rule does not end")


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
    if different := waiting_differs_from_the_gate(machine):
        print(f"FAIL this simulation's rule is not that of pytest_gputrain.gate.regression: {different}")
        return 1
    if different := means_differ_from_the_gate(machine):
        print(f"FAIL this simulation's rule is not that of pytest_gputrain.gate.regression: {different}")
        return 1
    return report(rows(machine, RULES[given.rule], given.replicates), 48, 30)


if __name__ == "__main__":
    sys.exit(main())
