"""Looks up recorded predictions for a real run: which cases will not fit, and how long the others take at least."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.records import Case, Prediction
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.recorded import PredictionStore

Test = TypeVar("Test")


class Forecast:
    """Predictions at full size for one platform, under whatever conditions they were recorded.

    Args:
        baselines: folder of the baselines.
        platform: catalog marker.
    """

    def __init__(self, baselines: Path, platform: str) -> None:
        self._store = PredictionStore(baselines)
        self._unreadable: set[str] = set()
        self.platform = platform

    def of(self, suite: str, case: Case) -> Prediction | None:
        """Return the latest prediction of the case; None where there is none, or none of this very case."""
        if suite in self._unreadable:
            return None
        try:
            recorded = self._store.get(self.platform, suite, key_of(case, "full"))
        except BaselineError:  # --gpu-predict tells of it; a real run can do without
            self._unreadable.add(suite)
            return None
        same = recorded is not None and recorded.figures and recorded.case.identity() == case.identity()
        return recorded.figures[-1] if recorded is not None and same else None

    def is_unfit(self, suite: str, case: Case) -> bool:
        prediction = self.of(suite, case)
        return prediction is not None and prediction.fits is False

    def order(
        self, tests: list[Test], file_of: Callable[[Test], object], asks: Callable[[Test], tuple[str, list[Case]]]
    ) -> None:
        """Sort ``tests`` in place: in each file the shortest first, then what nobody predicted, then what will not fit.

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
        predictions = [self.of(suite, case) for case in cases]
        if any(prediction is not None and prediction.fits is False for prediction in predictions):
            return 2, 0.0
        seconds = [
            prediction.roofline_seconds * (case.steps + case.warmup)
            for prediction, case in zip(predictions, cases, strict=True)
            if prediction is not None and prediction.roofline_seconds is not None
        ]
        return (0, sum(seconds)) if len(seconds) == len(cases) else (1, 0.0)
