"""Defines the records of a case over time: the document of ``gputrain trend --format=json``."""

from __future__ import annotations

import math

from msgspec import Struct

from pytest_gputrain.records.case import FORMAT
from pytest_gputrain.records.whole import Whole


class Moment(Struct, frozen=True, kw_only=True):
    """A pytest run in the history: its date, commit and id."""

    date: str
    """When the run began, in UTC (ISO 8601)."""
    commit: str
    """The commit that it measured."""
    session: str
    """The id of the pytest run."""


class Change(Struct, frozen=True, kw_only=True):
    """The change from one level of a metric to the next."""

    before: float
    """The median of the level before, in the unit of the metric."""
    after: float
    """The median of the level after."""
    share: float | None
    """The change as a share of ``before``, negative if the metric fell. None if ``before`` is 0."""
    worse: bool
    """Whether the change is for the worse."""
    base: Moment
    """The last run at the level before."""
    first: Moment
    """The first run at the level after."""
    runs: Whole
    """Runs at the level after."""
    runs_since: Whole
    """Runs from ``first`` to the end of the history."""
    differences: tuple[str, ...]
    """Other differences between these two runs: versions, machine, fields of the case."""

    @property
    def size(self) -> float:
        """The change as a share without its sign; infinite if ``before`` is 0."""
        return math.inf if self.share is None else abs(self.share)


class Course(Struct, frozen=True, kw_only=True):
    """One metric of one case on one device, from its first run to its latest."""

    suite: str
    """The test file without ``test_`` and ``.py``."""
    key: str
    """The id of the case."""
    device: str
    """The device."""
    metric: str
    """The key of the history."""
    runs: Whole
    """The number of runs."""
    level: float
    """The median of the runs since the last change, in the unit of the metric."""
    since: Moment
    """The first of these runs."""
    noise: float
    """The noise between neighbouring runs, as a share."""
    latest: float
    """The latest value."""
    last: Moment
    """The latest run."""
    changes: tuple[Change, ...]
    """All changes, in order."""


class Trends(Struct, frozen=True, kw_only=True):
    """All courses of a history."""

    format: Whole = FORMAT
    """The version of the format."""
    courses: tuple[Course, ...]
    """One course for each metric of each case on each device."""
