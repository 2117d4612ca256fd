"""Estimates from all cases of a run how noisy the machine is, and whether all of them are slower today."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from pytest_gputrain.gate.host_bound import WHY_GPU_SECONDS_ARE_HELD_COARSELY, Pace, pace
from pytest_gputrain.gate.step_times import LEAST_SHIFT, MANY_CASES, suite_prior, suite_shift
from pytest_gputrain.records import Baseline, Measurement, Result
from pytest_gputrain.utils.units import format_percent


class SuiteNoise:
    """The noise of a suite's cases, and how much slower all of them are today. Both are updated with each case of a pytest
    process."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], float] = {}
        self._shift: float | None = None
        """The shift of the first runs that are known; None until it is requested."""

    @property
    def lacking(self) -> int:
        """The number of further cases that are needed to estimate the shift."""
        return max(0, MANY_CASES - len(self._first))

    @property
    def shift(self) -> float:
        """The logarithm of how much slower all cases are today; 0 as long as too few cases were measured."""
        if self._shift is None:
            self._shift = suite_shift(list(self._first.values())) or 0.0
        return self._shift

    def add(self, suite: str, key: str, first: float | None) -> None:
        """Add the first run of a case, if it can be compared with a baseline."""
        if first is not None and not self.knows(suite, key):
            self._first[suite, key] = first
            self._shift = None

    def knows(self, suite: str, key: str) -> bool:
        return (suite, key) in self._first


def prior_of(baselines: Iterable[Baseline]) -> float:
    """Return the standard deviation between processes that a case of a suite is expected to have.

    Args:
        baselines: of the suite on a device. Baselines whose GPU waits for the host are left out.
    """
    return suite_prior(
        [
            [statistics.median(run.step_seconds) for run in baseline.runs]
            for baseline in baselines
            if all(run.step_seconds for run in baseline.runs) and not pace(baseline.runs).is_host_bound
        ]
    )


def whole_suite(results: Iterable[Result], tolerance: float) -> tuple[bool, str]:
    """Tell whether the judged cases regressed all together, with a sentence about it."""
    noise = SuiteNoise()
    for result in results:
        first = next((reply for reply in result.replies if isinstance(reply, Measurement)), None)
        if first is None or result.verdict is None:
            continue
        metric, seconds = result.verdict.metric("step_seconds"), first.median_step_seconds
        if metric and Pace(metric.gpu_busy_share).is_host_bound:
            if WHY_GPU_SECONDS_ARE_HELD_COARSELY:
                continue
            metric, seconds = result.verdict.metric("gpu_seconds"), first.gpu_seconds or 0.0
        if metric and metric.baseline and metric.baseline_runs and seconds:
            noise.add(result.suite, result.key, math.log(seconds / metric.baseline))
    if abs(noise.shift) <= LEAST_SHIFT:
        return False, ""
    shift = format_percent(math.expm1(noise.shift))
    if noise.shift > math.log1p(tolerance):
        return (
            True,
            f"all cases together regressed, the median one by {shift}; look for a change that all share",
        )
    return False, f"the time of the median case changed by {shift}, which points to the machine and not to a case"
