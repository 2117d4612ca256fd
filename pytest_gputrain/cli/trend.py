"""Runs the command ``gputrain trend``, which prints where the figures of a history changed, and between which commits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.cli import failing
from pytest_gputrain.gate.messages import count
from pytest_gputrain.records import Change, Course, Moment, Trends
from pytest_gputrain.report import tables
from pytest_gputrain.report.html import page
from pytest_gputrain.report.trend.reading import METRICS, Filter, History
from pytest_gputrain.report.trend.series import DEFAULT_METRICS, HIGHER_IS_BETTER, analyse, format_share, is_told, shown
from pytest_gputrain.storage.history import HistoryError
from pytest_gputrain.utils import console
from pytest_gputrain.utils.units import format_percent, parse_ratio


def add_to(commands: Any) -> None:
    trend = commands.add_parser(
        "trend",
        help="find the commits at which a case became slower or bigger",
        description="Find the commits at which the figures of a case changed, in files that --gpu-history wrote. A "
        "change for "
        "the worse counts as regressed, and a change for the better as improved.",
    )
    trend.add_argument(
        "history", nargs="+", type=Path, metavar="HISTORY", help="a file of --gpu-history; several files are read as one"
    )
    trend.add_argument(
        "--metric",
        action="append",
        choices=METRICS,
        metavar="KEY",
        help="a key of the history; may be repeated (default: median_step_seconds, peak_allocated_bytes, and the counts "
        "that have changed)",
    )
    trend.add_argument(
        "--case", action="append", default=[], metavar="TEXT", help="only cases whose id contains this; may be repeated"
    )
    trend.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="TEXT",
        help="only devices whose name contains this; may be repeated",
    )
    trend.add_argument(
        "--branch", metavar="NAME", help="the branch, or '*' for all (default: main or master, if the history has it)"
    )
    trend.add_argument("--least", type=_ratio, default=0.0, metavar="RATIO", help="leave out smaller changes (default: 0)")
    trend.add_argument("--newest", type=_whole, metavar="N", help="only changes among the last N runs of a case")
    trend.add_argument(
        "--format",
        choices=("terminal", "markdown", "json"),
        default="terminal",
        help="the format of the output (default: terminal)",
    )
    trend.add_argument("--html", type=Path, metavar="FILE", help="also draw the trends in this HTML file")
    failing.add_option(trend)


def _ratio(text: str) -> float:
    try:
        return parse_ratio(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def main(options: argparse.Namespace) -> int:
    """Print the trends. Return 0, 1 if a change is one of ``--fail-on``, or 2 for bad input."""
    if options.html is not None and (lacking := page.missing()):
        console.say(f"--html: {lacking}")
        return 2
    metrics = tuple(dict.fromkeys(options.metric or DEFAULT_METRICS))
    wanted = Filter(cases=options.case, devices=options.device, branch=options.branch)
    try:
        history = History(options.history, metrics, wanted, console.say)
        analysed = (_with_wanted_changes(course, options) for course in analyse(history, metrics))
        courses = tuple(course for course in analysed if options.metric or is_told(course))
    except HistoryError as error:
        console.say(error)
        return 2
    if options.format == "json":
        console.put(msgspec.json.format(msgspec.json.encode(Trends(courses=courses)), indent=1).decode())
    else:
        console.put(tables.render(_text_tables(courses), options.format))
    if options.html is not None:
        try:
            page.write(options.html, [], page.HistoryTrends(history, courses), baseline_dir=Path("baselines"))
        except (HistoryError, OSError) as error:
            console.say(f"{options.html} cannot be written: {error}")
            return 2
    changes = [change for course in courses for change in course.changes]
    return failing.exit_status(options, ("regressed" if change.worse else "improved" for change in changes))


def _with_wanted_changes(course: Course, options: argparse.Namespace) -> Course:
    """Return the course with the changes that the options ask for."""
    wanted = [
        change
        for change in course.changes
        if change.size >= options.least and (options.newest is None or change.runs_since <= options.newest)
    ]
    return msgspec.structs.replace(course, changes=tuple(wanted))


_TITLES: Final = {"median_step_seconds": "step time", "peak_allocated_bytes": "peak memory"}


def _text_tables(courses: Sequence[Course]) -> list[tables.TextTable]:
    """Return a table of the current figures, and below it one of the changes, so that it is next to the prompt."""
    now = [
        (
            *_names(course),
            str(course.runs),
            shown(course.metric, course.level),
            format_percent(course.noise, signed=False),
            shown(course.metric, course.latest),
            f"{course.since.date[:10]} {course.since.commit}".rstrip(),
        )
        for course in courses
    ]
    changed = [
        (
            *_names(course),
            " ".join(filter(None, [format_share(change), _word(course.metric, change)])),
            f"{shown(course.metric, change.before)} -> {shown(course.metric, change.after)}",
            _commits(change.base, change.first),
            " .. ".join(dict.fromkeys((change.base.date[:10], change.first.date[:10]))),
            ", ".join(change.differences),
        )
        for course in courses
        for change in course.changes
    ]
    changed_courses = sum(bool(course.changes) for course in courses)
    summary = f"{count(len(changed), 'change')} in {changed_courses} of {len(courses)} series"
    if not changed:
        summary = f"no change in {len(courses)} series"
    return [
        tables.TextTable(title="Now", headers=(*_NAMES, "Runs", "Level", "Noise", "Latest", "Since"), rows=tuple(now)),
        tables.TextTable(
            title="Changes",
            headers=(*_NAMES, "Change", "From", "Commits", "Between", "Changed with it"),
            rows=tuple(changed),
            notes=(summary,),
        ),
    ]


_NAMES: Final = ("Case", "Device", "Metric")


def _names(course: Course) -> tuple[str, str, str]:
    return f"{course.suite} {course.key}", course.device, _TITLES.get(course.metric, course.metric)


def _word(metric: str, change: Change) -> str:
    if metric.endswith("_seconds"):
        return "slower" if change.worse else "faster"
    if metric in HIGHER_IS_BETTER:
        return "worse" if change.worse else "better"
    return "more" if change.worse else "less"


def _commits(base: Moment, first: Moment) -> str:
    """Return the commits of a change in the form of git: ``git log base..first``."""
    if base.commit == first.commit:
        return f"{first.commit} (the same)" if first.commit else ""
    return f"{base.commit or '?'}..{first.commit or '?'}"
