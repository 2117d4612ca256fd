"""Defines the records of tolerances: how much worse passes, and the terms that a test sets for its own cases."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pytest_gputrain.records import CountFigure, MetricName
from pytest_gputrain.records.counts import COUNT_FIGURES
from pytest_gputrain.utils.bounds import LEAST_RUNS_ON_A_CPU
from pytest_gputrain.utils.suggest import did_you_mean
from pytest_gputrain.utils.units import (
    format_bytes,
    format_percent,
    parse_bytes,
    parse_ratio,
    read_bytes,
    read_number,
    read_ratio,
)

_LONGEST_COUNT: Final = 19
"""Digits of a count at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTolerance:
    """The tolerance of memory: a share of the baseline, bytes, or a share and bytes on top."""

    ratio: float = 0.0
    bytes: int = 0

    def __str__(self) -> str:
        share, more = format_percent(self.ratio, signed=False), format_bytes(self.bytes)
        return f"{share} + {more}" if self.ratio and self.bytes else more if self.bytes else share


def parse_memory_tolerance(text: str) -> MemoryTolerance:
    """Return the tolerance in ``"2%"``, ``"512MiB"`` or ``"2% + 512MiB"``.

    Raises:
        ValueError: none of these.
    """
    share, plus, more = text.partition("+")
    with contextlib.suppress(ValueError):
        return MemoryTolerance(ratio=parse_ratio(share), bytes=parse_bytes(more) if plus else 0)
    with contextlib.suppress(ValueError):
        return MemoryTolerance(bytes=parse_bytes(text))
    raise ValueError(f"{text!r} is not a tolerance; write it as 2%, 0.02, 512MiB or 2%+512MiB")


def read_memory_tolerance(value: object) -> MemoryTolerance:
    """Return the tolerance that a marker sets: bytes as an int, a ratio as a float, or a text for `parse_memory_tolerance`.

    Raises:
        ValueError: none of these.
    """
    if isinstance(value, str):
        return parse_memory_tolerance(value)
    with contextlib.suppress(ValueError):
        return (
            MemoryTolerance(ratio=read_ratio(value))
            if isinstance(value, float)
            else MemoryTolerance(bytes=read_bytes(value))
        )
    raise ValueError(
        f"{value!r} is not a tolerance; write it as 0.03 (a float is a ratio below 1), 512 * MiB (an int is bytes) or "
        "'3 % + 512 MiB'"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CountTolerance:
    """The growth of a count that passes: a share of the baseline, a number, or a share and a number on top."""

    ratio: float = 0.0
    more: int = 0
    """The number on top, in the unit of the figure: times, bytes or FLOPs."""


def read_count(figure: CountFigure, value: object) -> int:
    """Return the highest value of a figure that a marker sets: a whole number, or a text if the figure is in bytes.

    Raises:
        ValueError: neither.
    """
    if figure.endswith("_bytes"):
        return read_bytes(value)
    number = read_number(value)
    if number is None or number % 1:
        raise ValueError(f"{value!r} is not a count; write it as 0 or 2000")
    return int(number)


def read_count_tolerance(figure: CountFigure, value: object) -> CountTolerance:
    """Return the tolerance of a figure that a marker sets: a number as an int, a ratio as a float, or a text for
    `parse_count_tolerance`.

    Raises:
        ValueError: none of these.
    """
    if isinstance(value, str):
        return parse_count_tolerance(figure, value)
    with contextlib.suppress(ValueError):
        return (
            CountTolerance(ratio=read_ratio(value))
            if isinstance(value, float)
            else CountTolerance(more=read_count(figure, value))
        )
    raise ValueError(f"{value!r} is not a tolerance; write it as 2 (an int is a number), '5 %' or '5 % + 2'")


def parse_count_tolerance(figure: CountFigure, text: str) -> CountTolerance:
    """Return the tolerance in ``"5 %"``, ``"2"`` or ``"5 % + 2"``. For a figure in bytes the number may have a unit.

    Raises:
        ValueError: none of these.
    """
    share, plus, more = text.partition("+")
    with contextlib.suppress(ValueError):
        return CountTolerance(ratio=parse_ratio(share), more=_parse_count(figure, more) if plus else 0)
    with contextlib.suppress(ValueError):
        return CountTolerance(more=_parse_count(figure, text))
    raise ValueError(f"{text!r} is not a tolerance; write it as 5 %, 2 or 5 % + 2")


def parse_count_tolerances(text: str) -> dict[CountFigure, CountTolerance]:
    """Return the tolerances in ``"launches=5 %, waits=1"``.

    Raises:
        ValueError: one is not of a figure, or is none, or two are of the same figure.
    """
    tolerances: dict[CountFigure, CountTolerance] = {}
    for part in filter(None, map(str.strip, re.split("[,\n]", text))):
        name, equals, value = part.partition("=")
        figure = next((figure for figure in COUNT_FIGURES if figure == name.strip()), None)
        if not equals or figure is None:
            hint = did_you_mean(name.strip(), COUNT_FIGURES) if figure is None else ""
            raise ValueError(f"{part!r} is not a count with its tolerance{hint}; write it as launches=5 %, waits=1")
        if figure in tolerances:
            raise ValueError(f"{figure} has two tolerances; give one")
        try:
            tolerances[figure] = parse_count_tolerance(figure, value.strip())
        except ValueError as error:
            raise ValueError(f"{figure}: {error}") from None
    return tolerances


def _parse_count(figure: CountFigure, text: str) -> int:
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and len(digits) < _LONGEST_COUNT:
        return int(digits)
    if figure.endswith("_bytes"):
        return parse_bytes(text)
    raise ValueError(f"{text!r} is not a count; write it as 0 or 2000")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountTerms:
    """How counts are judged."""

    mode: Literal["judge", "tell", "off"] = "judge"
    """Whether growth of counts fails a test, is only mentioned, or is not looked at."""
    tolerances: Mapping[CountFigure, CountTolerance] = field(default_factory=dict)
    """Figures that are judged by these instead of by their own rules. A part of the work (``launches``, ``library_calls``,
    ``d2d``) that has one is judged alone, and the work without it. The share of the FLOPs of a slower class is one of the
    FLOPs of all library calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """The tolerances of a case."""

    time: float
    memory: MemoryTolerance
    cpu_time: bool = False
    """Whether time on a CPU is judged, too; this needs a baseline with several runs on the same host."""
    cpu_runs: int = LEAST_RUNS_ON_A_CPU
    """The least number of such runs."""
    host_time: float = 0.5
    """The tolerance of the time of a step in which the GPU waits for the host, on another machine than that of the
    baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """The highest value that one figure of a case may have."""

    metric: MetricName
    """``peak_allocated_bytes``, ``step_seconds``, or a count of a step."""
    most: float
    stated: str
    """The place of the limit: ``gpu_limit on test_tuning``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The limits and tolerances that a test sets for its own cases."""

    caps: tuple[Cap, ...] = ()
    time_tolerance: float | None = None
    """The tolerance that replaces that of the run; None to keep the run's."""
    memory_tolerance: MemoryTolerance | None = None
    count_tolerances: Mapping[CountFigure, CountTolerance] = field(default_factory=dict)
    """Tolerances of counts, which precede those of the run."""
    growth_bytes: int = 0
    """The memory that own code may keep after every round of gradient accumulation."""


NO_TERMS: Final = Terms()
