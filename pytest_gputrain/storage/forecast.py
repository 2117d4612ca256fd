"""Looks up recorded emulated runs for a real run: which cases will not fit, and in which order the others take longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.hardware.catalog import PLATFORMS, Platform
from pytest_gputrain.records import Case, EmulatedRun
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.emulated import EmulationStore

Test = TypeVar("Test")


class Forecast:
    """The recorded emulated runs at full size on one platform, under any conditions.

    Args:
        baselines: folder of the baselines.
        platform: catalog marker.
    """

    def __init__(self, baselines: Path, platform: str) -> None:
        self._store = EmulationStore(baselines)
        self._unreadable: set[str] = set()
        self.platform = platform

    def of(self, suite: str, case: Case) -> EmulatedRun | None:
        """Return the latest run of exactly this case; None if there is none."""
        if suite in self._unreadable:
            return None
        try:
            recorded = self._store.get(self.platform, suite, key_of(case, "full"))
        except BaselineError:  # --gpu-emulate reports this error. A real run does not need the figures.
            self._unreadable.add(suite)
            return None
        return recorded.figures[-1] if recorded is not None and recorded.case.identity() == case.identity() else None

    def is_unfit(self, suite: str, case: Case) -> bool:
        run = self.of(suite, case)
        return run is not None and not run.fits

    def seconds(self, suite: str, case: Case) -> float | None:
        """Return the seconds of all steps of the case at the peak rates of the GPU, warm-up included; None if they are
        unknown."""
        run = self.of(suite, case)
        if run is None or not run.operators:
            return None
        return _seconds_at_peaks(run, PLATFORMS[self.platform], case) * (case.steps + case.warmup)

    def order(
        self, tests: list[Test], file_of: Callable[[Test], object], asks: Callable[[Test], tuple[str, list[Case]]]
    ) -> None:
        """Sort ``tests`` in place. In each file the shortest come first, then those without an emulated run, then those that
        will not fit.

        Tests without cases keep their places.

        Args:
            asks: the suite and the cases of a test.
        """
        positions: defaultdict[object, list[int]] = defaultdict(list)
        for position, test in enumerate(tests):
            if asks(test)[1]:
                positions[file_of(test)].append(position)
        for file_positions in positions.values():
            ordered = sorted((tests[position] for position in file_positions), key=lambda test: self._rank(*asks(test)))
            for position, test in zip(file_positions, ordered, strict=True):
                tests[position] = test

    def _rank(self, suite: str, cases: list[Case]) -> tuple[int, float]:
        """Return the sort key of a test: whether it fits, and the time of its steps at the peak rates of the GPU."""
        if any(self.is_unfit(suite, case) for case in cases):
            return 2, 0.0
        seconds = [known for case in cases if (known := self.seconds(suite, case)) is not None]
        return (0, sum(seconds)) if len(seconds) == len(cases) else (1, 0.0)


def _seconds_at_peaks(run: EmulatedRun, platform: Platform, case: Case) -> float:
    """Return the sum over a step's operators of the larger of two times at the peak rates of the GPU: arithmetic, and memory
    traffic.

    This figure only orders cases and is never shown. `expected_time` would be better, but needs the calls, which baselines
    do not keep.
    """
    peaks, tf32 = platform.peak_flops, platform.tf32_flops or 0.0
    flops = peaks.get(case.precision.removesuffix("-amp")) or max(peaks.values())
    if case.tf32 and case.precision == "fp32":
        flops = tf32 or flops
    of_convolutions = flops if case.tf32 is False else max(flops, tf32)
    seconds = sum(
        max(work.flops / (of_convolutions if "convolution" in name else flops), work.bytes / platform.bandwidth)
        for name, work in run.operators.items()
    )
    return seconds / max(1, len(run.allocated_by_rank))  # The work is the sum over all ranks that ran.
