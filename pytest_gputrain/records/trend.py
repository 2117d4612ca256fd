"""Defines the records of a case over time: the document of ``gputrain trend --format=json``."""

from __future__ import annotations

from msgspec import Struct

from pytest_gputrain.records.case import FORMAT
from pytest_gputrain.records.whole import Whole


class Moment(Struct, frozen=True, kw_only=True):
    """A run of the history."""

    date: str
    """UTC, ISO 8601."""
    commit: str
    session: str


class Change(Struct, frozen=True, kw_only=True):
    """From one level to the next."""

    before: float
    """Median of the level before, in the unit of the metric."""
    after: float
    share: float
    """Of ``before`` that ``after`` is more; negative for less."""
    worse: bool
    base: Moment
    """The last run at the level before."""
    first: Moment
    """The first run at the level after."""
    runs: Whole
    """Of the level after."""
    runs_since: Whole
    """From ``first`` to the end of the history."""
    differences: tuple[str, ...]
    """What else is not the same in these two runs: versions, machine, knobs."""


class Course(Struct, frozen=True, kw_only=True):
    """One metric of one case on one device, from its first run to its latest."""

    suite: str
    key: str
    device: str
    metric: str
    """Key of the history."""
    runs: Whole
    level: float
    """Median of the runs since the last change, in the unit of the metric."""
    since: Moment
    """The first of them."""
    noise: float
    """Between neighbouring runs, as a share."""
    latest: float
    last: Moment
    changes: tuple[Change, ...]


class Trends(Struct, frozen=True, kw_only=True):
    """All courses of a history."""

    format: Whole = FORMAT
    courses: tuple[Course, ...]
