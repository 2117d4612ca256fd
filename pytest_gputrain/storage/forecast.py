"""Looks up recorded emulated runs for a real run: which cases will not fit, and how long the others take at least."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.hardware.rates import peaks_of
from pytest_gputrain.records import Case, EmulatedRun, Peaks
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.emulated import EmulationStore

Test = TypeVar("Test")


class Forecast:
    """Recorded runs at full size on one platform, under whatever conditions they were recorded.

    Args:
        baselines: folder of the baselines.
        platform: catalog marker.
    """

    def __init__(self, baselines: Path, platform: str) -> None:
        self._store = EmulationStore(baselines)
        self._unreadable: set[str] = set()
        self.platform = platform

    def of(self, suite: str, case: Case) -> EmulatedRun | None:
        """Return the latest run of the case; None where there is none, or none of this very case."""
        if suite in self._unreadable:
            return None
        try:
            recorded = self._store.get(self.platform, suite, key_of(case, "full"))
        except BaselineError:  # --gpu-emulate tells of it; a real run can do without
            self._unreadable.add(suite)
            return None
        return recorded.figures[-1] if recorded is not None and recorded.case.identity() == case.identity() else None

    def is_unfit(self, suite: str, case: Case) -> bool:
        run = self.of(suite, case)
        return run is not None and not run.fits

    def seconds(self, suite: str, case: Case) -> float | None:
        """Return the least seconds of all steps of the case, warm-up included; None where they are not known."""
        run = self.of(suite, case)
        if run is None or not run.operators:
            return None
        return _least_seconds(run, peaks_of(self.platform, case.tf32), case.precision) * (case.steps + case.warmup)

    def order(
        self, tests: list[Test], file_of: Callable[[Test], object], asks: Callable[[Test], tuple[str, list[Case]]]
    ) -> None:
        """Sort ``tests`` in place: in each file the shortest first, then what was never emulated, then what will not fit.

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
        """Return the sort key of a test: whether it fits, and the least time its steps take."""
        if any(self.is_unfit(suite, case) for case in cases):
            return 2, 0.0
        seconds = [known for case in cases if (known := self.seconds(suite, case)) is not None]
        return (0, sum(seconds)) if len(seconds) == len(cases) else (1, 0.0)


def _least_seconds(run: EmulatedRun, rates: Peaks, precision: str) -> float:
    """Return the least time of a step: the sum, over its operators, of the larger of arithmetic and memory traffic.

    It is a lower bound of ``roofline_seconds``, which baselines do not keep: all calls of an operator count as one.
    """
    flops = rates.flops.get(precision.removesuffix("-amp")) or max(rates.flops.values())
    of_convolutions = max(flops, rates.flops.get("tf32", 0.0))
    seconds = sum(
        max(work.flops / (of_convolutions if "convolution" in name else flops), work.bytes / rates.bandwidth)
        for name, work in run.operators.items()
    )
    return seconds / max(1, len(run.allocated_by_rank))  # the work is that of all ranks that ran
