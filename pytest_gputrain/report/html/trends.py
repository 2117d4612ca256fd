"""Prepares what the HTML page shows of a history: the trend of each case's time and memory, and its changes."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pytest_gputrain.records import Change, Course
from pytest_gputrain.report.html.charts import Chart, Charts, LevelChange
from pytest_gputrain.report.trend.reading import History, Subject
from pytest_gputrain.report.trend.series import format_share, shown
from pytest_gputrain.utils.units import format_percent

MOST_CARDS: Final = 60
"""The number of cases whose trends are drawn: a page with more opens slowly, and nobody scrolls through it."""
MOST_RUNS: Final = 400
"""The number of runs that are drawn of each case, the latest ones."""
LEAST_RUNS: Final = 3

_TITLES: Final = {"median_step_seconds": "Time of a step", "peak_allocated_bytes": "Peak memory"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """The trend of one metric of a case."""

    title: str
    now: str
    chart: Chart
    changes: tuple[ChangeText, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeText:
    """A change of level, as text."""

    share: str
    tone: str
    levels: str
    date: str
    commits: str
    differences: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The trends of a case on a device."""

    suite: str
    key: str
    device: str
    trends: tuple[Trend, ...]

    @property
    def changed(self) -> bool:
        return any(trend.changes for trend in self.trends)


def cards(
    history: History, courses: Sequence[Course], first: Collection[Subject], charts: Charts, warn: Callable[[str], None]
) -> list[Card]:
    """Return the cards of cases, at most `MOST_CARDS`. Cases with a change come first, the largest change first, and then
    those of ``first``.

    Args:
        courses: how each metric of each case moved.
        warn: called with a sentence for what is left out.

    Raises:
        HistoryError: a file changed meanwhile.
    """
    by_subject: defaultdict[Subject, list[Course]] = defaultdict(list)
    short = 0
    for course in courses:
        if course.runs < LEAST_RUNS:
            short += 1
        else:
            by_subject[Subject(course.suite, course.key, course.device)].append(course)
    if short:
        warn(f"{short} series of fewer than {LEAST_RUNS} runs left out of the trends")
    subjects = sorted(by_subject, key=lambda subject: (-_largest(by_subject[subject]), subject not in first, subject))
    if len(subjects) > MOST_CARDS:
        warn(f"trends are drawn of {MOST_CARDS} of {len(subjects)} cases, those with the largest changes first")
    return [
        Card(
            suite=subject.suite,
            key=subject.key,
            device=subject.device,
            trends=tuple(_trend(course, history, charts) for course in by_subject[subject]),
        )
        for subject in subjects[:MOST_CARDS]
    ]


def _largest(courses: Sequence[Course]) -> float:
    return max((change.size for course in courses for change in course.changes), default=0.0)


def _trend(course: Course, history: History, charts: Charts) -> Trend:
    series = history.series[Subject(course.suite, course.key, course.device)]
    figures, offsets = series.figures_of(course.metric)
    hidden = max(0, len(figures) - MOST_RUNS)
    drawn = list(figures[hidden:])
    lines = [history.line(offset) for offset in offsets[hidden:]]
    starts = [course.runs - change.runs_since for change in course.changes]
    levels = [
        (max(0, start - hidden), statistics.median(figures[start:end]))
        for start, end in itertools.pairwise([0, *starts, len(figures)])
        if end > hidden
    ]
    show = functools.partial(shown, course.metric)
    level_changes = [
        LevelChange(index=start - hidden, text=format_share(change) or show(change.after), worse=change.worse)
        for start, change in zip(starts, course.changes, strict=True)
        if start >= hidden
    ]
    changes = tuple(_change_text(change, show) for change in reversed(course.changes))
    # If all figures of a level are equal, there is no noise to show, and `course.noise` is only an assumption.
    noise = [format_percent(course.noise, signed=False)] if len(set(drawn)) > len(levels) else []
    title = f"{_TITLES.get(course.metric, course.metric)} of {course.key} on {course.device}"
    description = f"{course.runs} runs to {course.last.date[:10]}, now at {show(course.level)}"
    described = [f"{change.share} on {change.date}, {change.levels}" for change in changes]
    return Trend(
        title=_TITLES.get(course.metric, course.metric),
        now=" ± ".join([show(course.level), *noise]),
        chart=charts.trend(
            [datetime.fromisoformat(line["date"]) for line in lines],
            drawn,
            levels,
            level_changes,
            [_point(line, show(figure)) for line, figure in zip(lines, drawn, strict=True)],
            kind=course.metric.rpartition("_")[2],
            title=title,
            description="; ".join([description, *described]),
        ),
        changes=changes,
    )


def _point(line: dict[str, Any], figure: str) -> str:
    return " ".join(filter(None, [str(line["date"])[:10], str(line.get("commit", ""))[:12], figure]))


def _change_text(change: Change, show: Callable[[float], str]) -> ChangeText:
    base, first = change.base, change.first
    if base.commit == first.commit:
        commits = f"{first.commit}, the same before and after" if first.commit else ""
    else:
        commits = f"{base.commit or '?'}..{first.commit or '?'}"
    return ChangeText(
        share=format_share(change) or ("more" if change.worse else "less"),
        tone="bad" if change.worse else "good",
        levels=f"{show(change.before)} to {show(change.after)}",
        date=first.date[:10],
        commits=commits,
        differences=", ".join(change.differences),
    )
