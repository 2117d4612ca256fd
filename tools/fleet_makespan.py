"""Simulates how long a suite takes on a fleet, beside the claims; exits with 1 if a claim fails.

    python tools/fleet_makespan.py [--replicates N] [--seed N] [--rule longest|shortest|random] [--history FILE]

A replicate is a suite. Each of its cases is drawn from those that have a run in ``baselines/emulated/h100``. It
takes as long to start as `START_SECONDS` and `START_SECONDS_OF_A_BILLION` say, which are assumed, and then its steps: as
many times the time of that run at peak rates as a case took that is drawn from those that were also published (2.6 to 4.5
times). With ``--history`` the steps take what the latest lines of that file say. The fleet knows the times at peak rates,
nothing else.

pytest submits one job after the other, so that as many wait as run, up to the window, and asks every few seconds which of
them run and have ended. The scheduler starts them in the order of their arrival; one that does not fit yet holds up all
that follow. Of several runs of a case each counts as long as those that are left. Where a setting says so, a share of the
cases is in doubt after the first run and has further ones. These go before the first runs of others as soon as the fleet has
seen the delivery, or behind them, or each waits until its test asks for it.

A makespan is told as its excess over the least that any order can reach: all work spread over the nodes, or the longest
case. A claim holds where it does for 99 suites in 100. ``--rule`` takes another order than the product's, to see that claims
can fail.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from claims import Row, parser, report

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.execution.fleet.job_queue import ASK_SECONDS, LEAST_WAITING
from pytest_gputrain.storage.emulated import EmulationStore
from pytest_gputrain.storage.forecast import Forecast
from pytest_gputrain.storage.history import read
from pytest_gputrain.storage.published import PublishedStore

BASELINES: Final = Path(__file__).parents[1] / "baselines"
PLATFORM: Final = "h100"

START_SECONDS: Final = 30.0
"""Assumed: the scheduler's start of a job, imports, the device's context, kernels' first calls."""
START_SECONDS_OF_A_BILLION: Final = 2.0
"""Assumed: to make the weights of so many parameters."""
SUBMIT_SECONDS: Final = 0.05
"""The time to submit one job: a command of the scheduler."""
WINDOW: Final = 256
"""Jobs in the queue at most: the default of gpu_fleet_jobs."""
IN_DOUBT: Final = 0.11
"""Share of the cases, with baselines of five runs and processes that differ by 1 %: counted with `gate.step_times`."""
RUNS_OF_DOUBT: Final = 2

NODES: Final = 64
WIDTHS: Final = {1: 0.76, 2: 0.11, 4: 0.05, 8: 0.08}
"""Nodes of a case and shares of such cases, where cases take several: what GPUs are to the suites of this project."""


class Job(NamedTuple):
    """A run of a case."""

    seconds: float
    nodes: int
    forecast: float
    """Seconds of its steps, as far as the fleet knows."""
    in_doubt: bool


class KnownCase(NamedTuple):
    """A case of this project's suites."""

    start_seconds: float
    forecast: float
    steps_seconds: float | None
    """The seconds of the steps from a history; None if they are drawn."""


class _Line(msgspec.Struct):
    suite: str
    key: str
    platform: str
    median_step_seconds: float | None


class Suites:
    """
    Args:
        history: of real runs; None for times at peak rates alone.
    """

    def __init__(self, seed: int, history: Path | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        lines = read(history, _Line, lambda warning: None) if history else ()
        measured = {(line.suite, line.key): line.median_step_seconds for _, line in lines if line.platform == PLATFORM}
        emulations, published = EmulationStore(BASELINES), PublishedStore.beside(BASELINES)
        forecast = Forecast(BASELINES, PLATFORM)
        self.recorded, self.ratios = [], []
        for path in sorted((emulations.folder / PLATFORM).glob("*.json")):
            for key, recorded in emulations.suite(PLATFORM, path.stem).items():
                case = recorded.case
                forecast_seconds = forecast.seconds(path.stem, case)
                if forecast_seconds is None or not recorded.figures[-1].fits:
                    continue
                count = case.steps + case.warmup
                seconds = measured.get((path.stem, key_of(case, "full")))
                start = START_SECONDS + START_SECONDS_OF_A_BILLION * (recorded.figures[-1].parameters or 0) / 1e9
                self.recorded.append(KnownCase(start, forecast_seconds, None if seconds is None else seconds * count))
                row = published.get(PLATFORM, path.stem, key)
                if row is not None and row.figures and (figure := row.figures["pytorch"].step_seconds) is not None:
                    self.ratios.append(figure.middle * count / forecast_seconds)

    def draw(
        self, cases: int, *, widths: dict[int, float] | None = None, forecast: float = 1.0, longest: float = math.inf
    ) -> list[Job]:
        """Draw a suite.

        Args:
            widths: nodes that its cases take, and shares of them.
            forecast: share of the cases that have one.
            longest: seconds that no case exceeds.
        """
        widths_of_cases = self.rng.choice(list(widths), cases, p=list(widths.values())) if widths else np.ones(cases, int)
        which, ratios = self.rng.integers(len(self.recorded), size=cases), self.rng.choice(self.ratios, cases)
        have_forecast, doubtful = self.rng.random(cases) < forecast, self.rng.random(cases) < IN_DOUBT
        suite = []
        for recorded, ratio, nodes, has_forecast, doubt in zip(
            map(self.recorded.__getitem__, which),
            ratios.tolist(),
            widths_of_cases.tolist(),
            have_forecast,
            doubtful.tolist(),
            strict=True,
        ):
            steps = recorded.forecast * ratio if recorded.steps_seconds is None else recorded.steps_seconds
            seconds = min(longest, recorded.start_seconds + steps)
            guess = recorded.forecast if recorded.steps_seconds is None else recorded.steps_seconds
            suite.append(Job(seconds, nodes, guess if has_forecast else 0.0, doubt))
        return suite

    def shuffled(self, jobs: Sequence[Job], runs: int) -> list[int]:
        return [int(at) for at in self.rng.permutation(np.repeat(np.arange(len(jobs)), runs))]


Rule = Callable[[Suites, Sequence[Job], int], list[int]]
"""The order in which the runs of each case of a suite are submitted."""


def _by(seconds: Callable[[float], float]) -> Rule:
    def rule(suites: Suites, jobs: Sequence[Job], runs: int) -> list[int]:
        turns = [(left, at) for left in range(runs, 0, -1) for at in range(len(jobs))]
        return [at for left, at in sorted(turns, key=lambda turn: seconds(turn[0] * jobs[turn[1]].forecast))]

    return rule


RULES: Final[dict[str, Rule]] = {
    "longest": _by(lambda seconds: -seconds),
    "shortest": _by(lambda seconds: seconds),
    "random": lambda suites, jobs, runs: suites.shuffled(jobs, runs),
}


Doubt = Literal["none", "asked for", "at once", "behind"]
"""The time at which further runs of a case in doubt are submitted: when its test asks for one of them after the other, or
with its first delivery, before those that wait or behind them."""


def least(jobs: Sequence[Job], nodes: int, *, doubts: bool = False, runs: int = 1) -> float:
    """Return the seconds that no order can go below.

    Args:
        doubts: count the further runs of cases in doubt, which begin after the first and all at once.
        runs: of every case, which may all begin at once.
    """
    work = runs * sum(job.seconds * job.nodes * (1 + RUNS_OF_DOUBT * (doubts and job.in_doubt)) for job in jobs)
    return max(work / nodes, *(job.seconds * (1 + (doubts and job.in_doubt)) for job in jobs))


@dataclass
class Fleet:
    """One pytest process and a scheduler."""

    nodes: int = NODES
    window: int = WINDOW
    submit_seconds: float = SUBMIT_SECONDS
    ask_seconds: float = ASK_SECONDS
    least_waiting: int = LEAST_WAITING
    doubt: Doubt = "none"

    def makespan(self, jobs: Sequence[Job], order: Sequence[int]) -> float:
        """Return the seconds until the last test of the suite has its replies."""
        to_submit, queued = deque(order), deque[int]()
        events: list[tuple[float, int, str, int]] = [(0.0, 0, "asks", 0)]
        numbers = itertools.count(1)
        free, running, submitted, ended = self.nodes, 0, 0, 0
        seen_running = seen_ended = 0
        clock = last = idle_at = 0.0
        test, further, delivered = 0, [0] * len(jobs), [0] * len(jobs)
        foreseen: list[int] = []

        def at(time: float, what: str, job: int = 0) -> None:
            heapq.heappush(events, (time, next(numbers), what, job))

        while events:
            clock, _, what, job = heapq.heappop(events)
            if what == "arrives":
                queued.append(job)
            elif what == "asks":
                seen_running, seen_ended = running, ended
                (to_submit.extendleft if self.doubt == "at once" else to_submit.extend)(foreseen)
                foreseen.clear()
                if to_submit or ended < submitted:
                    at(clock + self.ask_seconds, "asks")
            else:
                last = clock
                free, running, ended = free + jobs[job].nodes, running - 1, ended + 1
                delivered[job] += 1
                if self.doubt in ("at once", "behind") and jobs[job].in_doubt and delivered[job] == 1:
                    foreseen += [job] * RUNS_OF_DOUBT
            while self.doubt == "asked for" and test < len(jobs) and delivered[test] > further[test]:
                if jobs[test].in_doubt and further[test] < RUNS_OF_DOUBT:
                    further[test] += 1
                    to_submit.appendleft(test)
                else:
                    test += 1
            limit = min(self.window, seen_running + max(seen_running, self.least_waiting))
            while to_submit and submitted - seen_ended < limit:
                submitted, idle_at = submitted + 1, max(clock, idle_at) + self.submit_seconds
                at(idle_at, "arrives", to_submit.popleft())
            while queued and jobs[queued[0]].nodes <= free:
                started = queued.popleft()
                free, running = free - jobs[started].nodes, running + 1
                at(clock + jobs[started].seconds, "ends", started)
        return last


_FLEET: Final = Fleet()


def rows(suites: Suites, rule: Rule, replicates: int) -> Iterator[Row]:
    """The claims one by one, then what is not claimed."""

    def row(
        setting: str,
        cases: int,
        limit: float | None,
        *,
        fleet: Fleet = _FLEET,
        rule_of_row: Rule = rule,
        runs: int = 1,
        **draw_options: Any,
    ) -> Row:
        excesses = []
        for _ in range(max(2, replicates * 500 // cases)):
            jobs = suites.draw(cases, **draw_options)
            shortest = least(jobs, fleet.nodes, doubts=fleet.doubt != "none", runs=runs)
            excesses.append(100 * (fleet.makespan(jobs, rule_of_row(suites, jobs, runs)) / shortest - 1))
        claim = f"over the least{'' if limit is None else f' <= {limit:g} %'}"
        middle, most = float(np.median(excesses)), float(np.quantile(excesses, 0.99))
        return Row(setting, claim, middle, most, limit, unit=" %", digits=1)

    yield row("500 cases", 500, 10)
    yield row("500 cases of 10 minutes at most", 500, 10, longest=600)
    yield row("500 cases of 1 to 8 nodes", 500, 10, widths=WIDTHS)
    yield row("10,000 cases", 10_000, 10)
    yield row("10,000 cases of 1 to 8 nodes", 10_000, 10, widths=WIDTHS)
    yield row("500 cases, 11 % in doubt", 500, 20, fleet=Fleet(doubt="at once"))
    yield row("10,000 cases, 11 % in doubt", 10_000, 10, fleet=Fleet(doubt="at once"))
    yield row("500 cases, five runs of each", 500, 10, runs=5)
    yield row("500 cases, a fifth of them unknown", 500, None, forecast=0.8)
    yield row("500 cases, a window of 64", 500, None, fleet=Fleet(window=64))
    yield row("10,000 cases, a window of 64", 10_000, None, fleet=Fleet(window=64))
    yield row("500 cases, submitted in 0.5 s each", 500, None, fleet=Fleet(submit_seconds=0.5))
    yield row("500 cases, in no order", 500, None, rule_of_row=RULES["random"])
    yield row("500 cases of 10 minutes at most, in no order", 500, None, rule_of_row=RULES["random"], longest=600)
    yield row("500 cases, the shortest first", 500, None, rule_of_row=RULES["shortest"])
    yield row("10,000 cases, in no order", 10_000, None, rule_of_row=RULES["random"])
    yield row("of 10 minutes at most, 11 % in doubt", 500, None, fleet=Fleet(doubt="at once"), longest=600)
    yield row("of 10 minutes at most, in doubt, behind", 500, None, fleet=Fleet(doubt="behind"), longest=600)
    yield row("500 cases, 11 % in doubt, tests ask", 500, None, fleet=Fleet(doubt="asked for"))
    yield row("10,000 cases, 11 % in doubt, tests ask", 10_000, None, fleet=Fleet(doubt="asked for"))


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, replicates=200, rules=RULES, default="longest")
    options.add_argument("--history", type=Path, help="file of --gpu-history whose times count before those at peak rates")
    given = options.parse_args(arguments)
    suites = Suites(given.seed, given.history)
    jobs = suites.draw(100_000)
    seconds, ratios = [job.seconds for job in jobs], suites.ratios
    print(f"seed {given.seed}, {given.replicates} suites, {given.rule} first, {NODES} nodes")
    print(
        f"{len(suites.recorded)} cases; {len(ratios)} published ones took {min(ratios):.1f} to {max(ratios):.1f} "
        f"times the least, {np.median(ratios):.1f} in the middle; a case takes {np.mean(seconds):.0f} s, half of them "
        f"{np.median(seconds):.0f} s or less, the longest {max(seconds) / 60:.0f} min"
    )
    return report(rows(suites, RULES[given.rule], given.replicates), 44, 22)


if __name__ == "__main__":
    sys.exit(main())
