"""Estimates how long a run of a case trains, from its history or else, as a lower bound, from its emulated run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from msgspec import Struct

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.records import Task
from pytest_gputrain.storage.forecast import Forecast
from pytest_gputrain.storage.history import HistoryError, read


class _Line(Struct):
    suite: str
    key: str
    platform: str
    median_step_seconds: float | None = None


class Durations:
    """Estimates the seconds that all steps of a task take, warm-up included. The time before the first step is not
    estimated.

    Args:
        platform: catalog marker that the cases run on.
        history: the file to which earlier runs appended; None without one.
        forecast: recorded runs on emulated GPUs of the platform; None for none.
    """

    def __init__(self, platform: str, history: Path | None, forecast: Forecast | None) -> None:
        self._forecast = forecast
        self._steps: dict[tuple[str, str], float] = {}
        # Other readers report a history that cannot be read. Without a history cases can still be ordered.
        with contextlib.suppress(HistoryError):
            for _, line in read(history, _Line, lambda warning: None) if history is not None and history.exists() else ():
                if line.platform == platform and line.median_step_seconds is not None:
                    self._steps[line.suite, line.key] = line.median_step_seconds

    def of(self, suite: str, task: Task) -> float:
        """Return the seconds of the steps in the latest run; without one, a lower bound from an emulated run, or 0."""
        case = task.case
        seconds = self._steps.get((suite, key_of(case, task.scale)))
        if seconds is not None:
            return seconds * (case.steps + case.warmup)
        if self._forecast is None or task.scale != "full":
            return 0.0
        return self._forecast.seconds(suite, case) or 0.0
