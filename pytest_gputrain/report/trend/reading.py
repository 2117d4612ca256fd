"""Reads histories into memory: only the date, the offset in the file and the requested figures of each line."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from pytest_gputrain.records import FORMAT, Case, HistoryLine
from pytest_gputrain.records.history import COUNT_KEYS
from pytest_gputrain.storage.history import HistoryError, read
from pytest_gputrain.utils.reading import UNREADABLE, opened

TRUNKS: Final = ("main", "master")
"""Branches whose history is read by default, if it has one of them."""


class Subject(NamedTuple):
    """The case and the device whose figures a series has."""

    suite: str
    key: str
    device: str


class Filter(NamedTuple):
    """A filter of lines by one of several texts in their key or device. Without texts all lines pass."""

    cases: Sequence[str] = ()
    devices: Sequence[str] = ()
    branch: str | None = None
    """``*`` for all; None for the trunk of the history."""

    def wants(self, key: str, device: str) -> bool:
        return (not self.cases or any(text in key for text in self.cases)) and (
            not self.devices or any(text in device for text in self.devices)
        )


@dataclass(frozen=True, slots=True)
class Series:
    """The runs of one subject, in a few bytes each. They are in order of time once `sorted` was called."""

    dates: array[float]
    """Seconds since 1970."""
    offsets: array[int]
    """The offset in bytes of each line, counted over all files one after the other."""
    figures: dict[str, array[float]]
    """The figures by metric, of those that some line has; not a number if a line has none."""

    @classmethod
    def empty(cls) -> Series:
        return cls(array("d"), array("Q"), {})

    def append(self, date: float, offset: int, figures: Iterable[tuple[str, float | None]]) -> None:
        """Add a line."""
        for metric, figure in figures:
            if figure is not None and metric not in self.figures:
                self.figures[metric] = array("d", [math.nan]) * len(self.dates)
            if metric in self.figures:
                self.figures[metric].append(math.nan if figure is None else figure)
        self.dates.append(date)
        self.offsets.append(offset)

    def extend(self, other: Series) -> None:
        for metric in self.figures.keys() | other.figures.keys():
            own = self.figures.setdefault(metric, array("d", [math.nan]) * len(self.dates))
            own.extend(other.figures.get(metric, array("d", [math.nan]) * len(other.dates)))
        self.dates.extend(other.dates)
        self.offsets.extend(other.offsets)

    def sorted(self) -> Series:
        """Sort the series by time. Lines of a file are in the order in which runs ended, and files follow each other."""
        if all(map(operator.le, self.dates, itertools.islice(self.dates, 1, None))):
            return self
        indices = sorted(range(len(self.dates)), key=self.dates.__getitem__)
        return Series(
            array("d", [self.dates[index] for index in indices]),
            array("Q", [self.offsets[index] for index in indices]),
            {metric: array("d", [figures[index] for index in indices]) for metric, figures in self.figures.items()},
        )

    def figures_of(self, metric: str) -> tuple[array[float], array[int]]:
        """Return the figures that are present, and the offsets of their lines."""
        figures = self.figures.get(metric, array("d"))
        least = 0.0 if metric in COUNT_KEYS else math.ulp(0.0)
        is_present = bytes(least <= figure < math.inf for figure in figures)
        return array("d", itertools.compress(figures, is_present)), array("Q", itertools.compress(self.offsets, is_present))


class History:
    """Files of ``--gpu-history``. They are read once from end to end, and later a line at a time."""

    def __init__(self, paths: Sequence[Path], metrics: Sequence[str], wanted: Filter, warn: Callable[[str], None]) -> None:
        """
        Args:
            metrics: keys of numbers.
            warn: called with a sentence for what was left out.

        Raises:
            HistoryError: a file is none, or none of its lines is wanted.
        """
        self._paths = list({os.path.realpath(path): path for path in paths}.values())
        self._begins: list[int] = []
        fields = [("date", Annotated[datetime, msgspec.Meta(tz=True)]), *((name, str) for name in _NAMES)]
        point: Any = msgspec.defstruct(
            "Point",
            [("format", int), *fields, *((metric, float | None, None) for metric in metrics)],
        )
        series_by_branch: dict[tuple[str, Subject], Series | None] = {}
        lines = end = 0
        for path in self._paths:
            if not path.is_file():
                raise HistoryError(f"{path} is not a file; give what --gpu-history wrote")
            self._begins.append(end)
            begin = end
            for offset, line in read(path, point, warn):
                lines += 1
                if line.format != FORMAT:
                    newer = "; update pytest-gputrain" if line.format > FORMAT else ""
                    raise HistoryError(
                        f"{path} has lines of format {line.format}, this version reads format {FORMAT}{newer}"
                    )
                branch_subject = (line.branch, Subject(line.suite, line.key, line.device))
                if branch_subject not in series_by_branch:
                    series_by_branch[branch_subject] = Series.empty() if wanted.wants(line.key, line.device) else None
                series = series_by_branch[branch_subject]
                if series is not None:
                    figures = ((metric, getattr(line, metric)) for metric in metrics)
                    series.append(line.date.timestamp(), begin + offset, figures)
            end += path.stat().st_size
        if not lines:
            raise HistoryError("the history holds no runs; --gpu-history appends them")
        branches: dict[str, dict[Subject, Series]] = {}
        for (branch, subject), series in series_by_branch.items():
            if series is not None:
                branches.setdefault(branch, {})[subject] = series
        if not branches:
            texts = " or ".join(map(repr, (*wanted.cases, *wanted.devices)))
            raise HistoryError(f"none of the {lines:,} lines is of a case or device with {texts}")
        self.series = _of_branch(branches, wanted.branch, warn)

    def line(self, offset: int) -> dict[str, Any]:
        """Return all fields of the line at an offset.

        Raises:
            HistoryError: the file is not as it was.
        """
        file = bisect.bisect_right(self._begins, offset) - 1
        try:
            with opened(self._paths[file]) as open_:
                open_.seek(offset - self._begins[file])
                fields: dict[str, Any] = msgspec.json.decode(open_.readline(), type=dict)
        except (OSError, *UNREADABLE) as error:
            raise HistoryError(f"{self._paths[file]} changed while it was read: {error}; try again") from None
        return fields


_NAMES: Final = ("suite", "key", "device", "branch")


def _of_branch(
    branches: dict[str, dict[Subject, Series]], asked: str | None, warn: Callable[[str], None]
) -> dict[Subject, Series]:
    """Return a function that keeps only the lines of one branch."""
    branch = asked or next((trunk for trunk in TRUNKS if trunk in branches), "*")
    if branch == "*":
        chosen = list(branches.values())
    elif branch in branches:
        chosen = [branches[branch]]
    else:
        branch_names = ", ".join(sorted(name or "none" for name in branches))
        raise HistoryError(f"no line is of branch {branch!r}; there are {branch_names}")
    merged: dict[Subject, Series] = {}
    for subjects in chosen:
        for subject, series in subjects.items():
            if subject in merged:
                merged[subject].extend(series)
            else:
                merged[subject] = series
    other_runs = sum(
        len(series.dates) for name, subjects in branches.items() if name != branch for series in subjects.values()
    )
    if asked is None and branch != "*" and other_runs:
        warn(f"of branch {branch} only; {other_runs:,} runs of others are left out (--branch='*' takes all)")
    return {subject: merged[subject].sorted() for subject in sorted(merged)}


_ENDINGS: Final = (
    "_seconds",
    "_bytes",
    "_per_second",
    "_per_step",
    "_per_sample",
    "parameters",
    "_efficiency",
    "_utilization",
    "_watts",
    "_mhz",
)

METRICS: Final = tuple(
    name
    for name in HistoryLine.__struct_fields__
    if name.endswith(_ENDINGS)
    and name not in Case.__struct_fields__
    and not name.startswith(("baseline_", "limit_", "device_memory_", "host_memory_"))
)
"""Keys of figures that may have a trend."""
