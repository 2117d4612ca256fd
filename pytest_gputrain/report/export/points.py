"""Selects the cases of a report that have figures to export, and says why the others have none."""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.records import Emulated, Measurement, Reply, Result, Study
from pytest_gputrain.report.results import latest

_LONGEST_STEM: Final = 200
"""Bytes of a file's name, of the 255 that common file systems take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A case with figures to export."""

    result: Result
    runs: tuple[Measurement, ...]
    """One for each fresh process; none of an emulated GPU, which has only memory to hand on."""
    peak_allocated_bytes: int
    """Also of what was not measured."""

    @property
    def name(self) -> str:
        """The name of the case, ``llm_finetuning/llama-3.1-8b-lora-bf16@tiny``. It is the same in every run, but another one
        for another scale."""
        return f"{self.result.suite}/{self.result.key}"

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """The times of the steps of all processes, one after the other."""
        return tuple(seconds for run in self.runs for seconds in run.step_seconds)

    @property
    def median_step_seconds(self) -> float:
        """The median step, as `pytest_gputrain.records.Summary` has it."""
        return statistics.median(run.median_step_seconds for run in self.runs)


def points(results: Sequence[Result], *, timed: bool = False) -> list[Point]:
    """Return the point of each case that has reliable figures.

    Args:
        timed: leave out what has no time, too.
    """
    return [point for result in latest(results) if isinstance(point := _point(result, timed), Point)]


def left_out(results: Sequence[Result], *, timed: bool = False) -> list[str]:
    """Return a sentence for each case that `points` leaves out, with the reason."""
    return [point for result in latest(results) if isinstance(point := _point(result, timed), str)]


def _point(result: Result, timed: bool) -> Point | str:
    """Return the point of a result, or a sentence that says why it has none."""
    if isinstance(result, Study):
        return f"{result.key} is left out: its figures are of a search or of loss curves, not of the case as declared"
    if isinstance(result, Emulated) and result.figures is not None:
        if timed:
            return f"{result.key} is left out: an emulated GPU has no time"
        if not result.figures.fits:
            return f"{result.key} is left out: it does not fit"
        return Point(result=result, runs=(), peak_allocated_bytes=result.figures.peak_allocated_bytes)
    runs = tuple(reply for reply in result.replies if isinstance(reply, Measurement))
    if result.summary is None or not runs or len(runs) < len(result.replies):
        return f"{result.key} is left out: {_why_not(result.replies)}"
    return Point(result=result, runs=runs, peak_allocated_bytes=result.summary.peak_allocated_bytes)


def file_names(names: Iterable[str], suffix: str) -> Iterator[str]:
    """Return a file name for each of ``names``. All differ even if capitals do not count. A long one ends with a hash."""
    taken: set[str] = set()
    for name in names:
        stem = re.sub(r"[^\w.@=+-]+", "_", name.replace("/", "."))
        if len(stem.encode()) > _LONGEST_STEM:
            begin = stem.encode()[:_LONGEST_STEM].decode(errors="ignore")
            stem = f"{begin}_{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        number = 1
        while (file := f"{stem}{f'_{number}' if number > 1 else ''}.{suffix}").casefold() in taken:
            number += 1
        taken.add(file.casefold())
        yield file


def _why_not(replies: Sequence[Reply]) -> str:
    failed = next((reply for reply in replies if not isinstance(reply, Measurement)), None)
    return f"it {describe_failure(failed)}" if failed else "it was not run"
