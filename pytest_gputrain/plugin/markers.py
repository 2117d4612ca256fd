"""Reads the markers by which a test states limits and tolerances for its own cases."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pytest

from pytest_gputrain.gate.messages import listed
from pytest_gputrain.plugin.marker_help import KINDS, LIMIT, ONLY_ON, TOLERANCE
from pytest_gputrain.records import CountFigure, MetricName
from pytest_gputrain.records.counts import COUNT_FIGURES
from pytest_gputrain.records.tolerance import Cap, Terms, read_count, read_count_tolerance, read_memory_tolerance
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.suggest import did_you_mean
from pytest_gputrain.utils.units import read_bytes, read_ratio, read_seconds


def _of_each_count(read: Callable[[CountFigure, object], Any]) -> dict[str, Callable[[object], Any]]:
    return {figure: functools.partial(read, figure) for figure in COUNT_FIGURES}


_KEYWORDS: Final[dict[str, dict[str, Callable[[object], Any]]]] = {
    LIMIT: {"memory": read_bytes, "time": read_seconds, **_of_each_count(read_count)},
    TOLERANCE: {
        "time": read_ratio,
        "memory": read_memory_tolerance,
        "growth": read_bytes,
        **_of_each_count(read_count_tolerance),
    },
}
_METRICS: Final[dict[str, MetricName]] = {
    "memory": "peak_allocated_bytes",
    "time": "step_seconds",
    **{figure: figure for figure in COUNT_FIGURES},
}
_EXAMPLES: Final = {
    LIMIT: '@pytest.mark.gpu_limit(memory="24 GiB", time="0.5 s", waits=0)',
    TOLERANCE: '@pytest.mark.gpu_tolerance(time="5 %", memory="3 % + 1 GiB", launches="5 %")',
    ONLY_ON: '@pytest.mark.gpu_only_on("cpu", "gpu", reason="it reads losses")',
}


def terms_of(item: pytest.Item) -> Terms:
    """Return the limits and tolerances that the markers of a test set.

    Of each keyword the nearest marker counts: that of the parameters, of the test, of its class, of its file.

    Raises:
        BadCase: a marker that makes no sense, or one that is nearly spelt like these.
    """
    _refuse_misspelt(item)
    why_left_out(item, KINDS[0])
    limit, tolerance = _nearest(item, LIMIT), _nearest(item, TOLERANCE)
    caps = [Cap(metric=_METRICS[keyword], most=most, stated=stated) for keyword, (most, stated) in limit.items()]
    return Terms(
        caps=tuple(caps),
        time_tolerance=tolerance.get("time", (None,))[0],
        memory_tolerance=tolerance.get("memory", (None,))[0],
        count_tolerances={figure: tolerance[figure][0] for figure in COUNT_FIGURES if figure in tolerance},
        growth_bytes=tolerance.get("growth", (0,))[0],
    )


def why_left_out(item: pytest.Item, kind: str) -> str:
    """Return the reason why a marker leaves a test out of runs of a kind; empty if none does.

    Raises:
        BadCase: a marker that makes no sense.
    """
    stated, mark = next(_marks(item, ONLY_ON), ("", None))
    if mark is None:
        return ""
    for unknown in [name for name in mark.args if name not in KINDS]:
        hint = did_you_mean(unknown, KINDS) if isinstance(unknown, str) else ""
        raise BadCase(f"{stated} knows no kind of run {unknown!r}{hint}; known: {', '.join(KINDS)}")
    reason = mark.kwargs.get("reason")
    if not mark.args or not isinstance(reason, str) or not reason or len(mark.kwargs) > 1:
        raise BadCase(f"{stated} takes kinds of runs ({', '.join(KINDS)}) and a reason, as {_EXAMPLES[ONLY_ON]}")
    return "" if kind in mark.args else f"{stated} leaves it out of runs of the kind {kind}: {reason}"


def _nearest(item: pytest.Item, name: str) -> dict[str, tuple[Any, str]]:
    """Return the value of each keyword of these markers, with the place where it is set. The nearest marker wins."""
    nearest: dict[str, tuple[Any, str]] = {}
    for stated, mark in _marks(item, name):
        for keyword, value in _read(mark, stated).items():
            nearest.setdefault(keyword, (value, stated))
    return nearest


def _marks(item: pytest.Item, name: str) -> Iterator[tuple[str, pytest.Mark]]:
    """Yield the markers of this name, the nearest first, each with its place: ``gpu_limit on test_it``."""
    for location, marks in _levels(item):
        mine = [mark for mark in marks if mark.name == name]
        if len(mine) > 1:
            raise BadCase(f"{len(mine)} markers {name} are {location}; give one with all values")
        yield from ((f"{name} {location}", mark) for mark in mine)


def _levels(item: pytest.Item) -> Iterator[tuple[str, list[pytest.Mark]]]:
    """Yield the markers of the parameters, of the test, and of its classes and modules, in this order, each list with its
    place. pytest itself mixes the markers of parameters with those of the test."""
    callspec = getattr(item, "callspec", None)
    parameter_marks = list(callspec.marks) if callspec else []
    if callspec:
        yield f"of the parameters [{callspec.id}]", parameter_marks
    test = getattr(item, "originalname", None) or item.name
    yield (
        f"on {test}",
        [mark for mark in item.own_markers if not any(mark is parameter_mark for parameter_mark in parameter_marks)],
    )
    for node in item.listchain()[-2::-1]:
        if not isinstance(node, pytest.Class):
            yield f"in {node.name}", node.own_markers
            continue
        # In `own_markers` of a class pytest also has the markers of base classes. They are read from each class, so that a
        # message can name the class on which a marker stands.
        for kind in node.obj.__mro__:
            marks = vars(kind).get("pytestmark", [])
            yield f"on the class {kind.__name__}", marks if isinstance(marks, list) else [marks]


def _read(mark: pytest.Mark, stated: str) -> dict[str, Any]:
    keywords, example = _KEYWORDS[mark.name], _EXAMPLES[mark.name]
    if mark.args or not mark.kwargs:
        raise BadCase(f"{stated} takes {_listed(keywords, '=')}, as {example}")
    values = {}
    for keyword, value in mark.kwargs.items():
        if keyword not in keywords:
            hint = did_you_mean(keyword, keywords)
            raise BadCase(f"{stated} knows no {keyword!r}{hint}; it takes {_listed(keywords)}, as {example}")
        try:
            values[keyword] = keywords[keyword](value)
        except ValueError as error:
            raise BadCase(f"{stated}: {keyword}: {error}") from None
        if mark.name == LIMIT and keyword not in COUNT_FIGURES and not values[keyword]:
            raise BadCase(f"{stated}: {keyword}={value!r} lets nothing pass; state more than zero, as {example}")
    return values


def _listed(keywords: Iterable[str], end: str = "") -> str:
    """Return a list of keywords as text, with only two of the counts."""
    named = [f"{keyword}{end}" for keyword in keywords if keyword not in COUNT_FIGURES]
    return listed([*named, f"counts such as waits{end} or launches{end}"])


def _refuse_misspelt(item: pytest.Item) -> None:
    """Raise an error for misspelt markers. A limit that nobody reads would seem to hold, and pytest only warns of unknown
    markers."""
    registered = {line.partition(":")[0].partition("(")[0].strip() for line in item.config.getini("markers")}
    for mark in item.iter_markers():
        hint = did_you_mean(mark.name, (LIMIT, TOLERANCE, ONLY_ON)) if mark.name.startswith("gpu") else ""
        if hint and mark.name not in registered:
            raise BadCase(f"there is no marker {mark.name!r}{hint}")
