"""Prepares what the HTML page shows of the cases of reports: counts, failures, a row for each, and their environments."""

from __future__ import annotations

import functools
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pytest_gputrain.gate.count_lines import format_count
from pytest_gputrain.gate.loss_trend import describe_failed_curves
from pytest_gputrain.gate.summary import detail_of, failure_of
from pytest_gputrain.records import (
    BatchSearch,
    Case,
    CountFigure,
    Emulated,
    Environment,
    LossStudy,
    Measured,
    Measurement,
    MetricName,
    Result,
    knob_text,
)
from pytest_gputrain.records.counts import COUNT_FIGURES, DETAILS
from pytest_gputrain.report import expected
from pytest_gputrain.report.results import counts_of, latest, of_kind, verdict_of
from pytest_gputrain.utils.units import (
    format_bytes,
    format_flops,
    format_joules,
    format_nics,
    format_percent,
    format_rate,
    format_seconds,
    format_topology,
)

TONES: Final = {
    "regressed": "bad",
    "failed": "bad",
    "over-limit": "bad",
    "inconclusive": "doubt",
    "not-comparable": "doubt",
    "new": "doubt",
    "improved": "good",
    "recorded": "good",
    "pass": "good",
    "searched": "plain",
    "loss curves": "plain",
    "measured": "plain",
    "emulated": "plain",
}
"""The colours of verdicts, the most urgent first."""
_RANK: Final = {verdict: rank for rank, verdict in enumerate(TONES)}
_MOST_COLUMNS: Final = 10
"""The number of figures that have a column. With more, the table would scroll sideways on a screen of 1,200 pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of a row, with one figure."""

    text: str = ""
    value: float | str = ""
    """The value that rows are sorted by."""
    tone: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The row of a case in the table."""

    result: Result
    verdict: str
    tone: str
    name: str
    sentence: str
    detail: str
    """The end of a traceback; empty if there is none."""
    knobs: str
    cells: tuple[Cell, ...]
    further: str
    """The figures that have no column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cases:
    """All cases of the page, with their counts."""

    columns: tuple[str, ...]
    """Titles of the figures that have a column."""
    rows: tuple[Row, ...]
    """The rows, the most urgent first, and otherwise in the order of the tests."""
    counts: dict[str, int]
    """The number of cases by verdict."""
    suites: dict[str, dict[str, int]]
    """The number of cases by suite and verdict."""

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.tone == "bad"]

    def values(self, name: str) -> list[str]:
        """Return the values that a knob or a field of results has in these cases."""
        owner = "result.case" if name in Case.__struct_fields__ else "result"
        return sorted(set(map(operator.attrgetter(f"{owner}.{name}"), self.rows)))


def gathered(results: Sequence[Result]) -> Cases:
    """Return the cases of results, each once for every device."""
    shown = sorted(_latest(results), key=lambda result: _RANK[_verdict(result)])
    figures = {title: [figure(result) for result in shown] for title, figure in _FIGURES.items()}
    known = [title for title, cells in figures.items() if any(cell.text for cell in cells)]
    # A figure that fails a case has a column, wherever it stands among the figures.
    urgent = sorted(known, key=lambda title: all(cell.tone != "bad" for cell in figures[title]))[:_MOST_COLUMNS]
    columns = tuple(title for title in known if title in urgent)
    rows = tuple(
        _row(
            result,
            tuple(figures[title][index] for title in columns),
            {title: text for title in known if title not in urgent and (text := figures[title][index].text)},
        )
        for index, result in enumerate(shown)
    )
    suites: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        suites[row.result.suite][row.verdict] += 1
    return Cases(
        columns=columns,
        rows=rows,
        counts=dict(sorted(Counter(row.verdict for row in rows).items(), key=lambda item: _RANK[item[0]])),
        suites={suite: dict(counts) for suite, counts in sorted(suites.items())},
    )


def _latest(results: Sequence[Result]) -> Iterator[Result]:
    """Return the latest result of each case. A study has a row of its own, because it says nothing of the case as
    declared."""
    yield from latest(of_kind(results, Measured, Emulated))
    yield from latest(of_kind(results, BatchSearch, LossStudy))


def _verdict(result: Result) -> str:
    match result:
        case LossStudy():
            return "failed" if describe_failed_curves(result.case, result.loss_curves) else "loss curves"
        case BatchSearch():
            return "failed" if result.search.fastest is None else "searched"
        case _:
            return verdict_of(result)


def _row(result: Result, cells: tuple[Cell, ...], further: Mapping[str, str]) -> Row:
    verdict = _verdict(result)
    return Row(
        result=result,
        verdict=verdict,
        tone=TONES[verdict],
        name=result.key,
        sentence=(result.verdict.sentence if result.verdict else failure_of(result)) or "",
        detail=detail_of(result),
        knobs=", ".join(_knobs(result)),
        cells=cells,
        further=", ".join(f"{title} {text}" for title, text in further.items()),
    )


def _knobs(result: Result) -> Iterator[str]:
    """Yield the knobs of a case that differ from their defaults, its scale and its processes."""
    case, plain = result.case, type(result.case)()
    for name, value in case.identity().items():
        if value != getattr(plain, name) and name not in ("model", "method", "precision", "parallel"):
            yield f"{name.replace('_', ' ')} {knob_text(value)}"
    yield f"{result.scale} scale"
    if count := len(result.replies):
        yield f"{count} process{'es' if count > 1 else ''} of {case.steps} steps"


def _cell(value: float | None, show: Callable[[float], str], tone: str = "") -> Cell:
    return Cell() if value is None else Cell(text=show(value), value=value, tone=tone)


def _of_summary(name: str, show: Callable[[float], str]) -> Callable[[Result], Cell]:
    return lambda result: _cell(getattr(result.summary, name) if result.summary else None, show)


def _measured(name: str, show: Callable[[float], str]) -> Callable[[Result], Cell]:
    def cell(result: Result) -> Cell:
        runs = [reply for reply in result.replies if isinstance(reply, Measurement)]
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        if isinstance(result, Emulated):
            values = [value for value in [getattr(result.figures, name, None)] if value is not None]
        return _cell(statistics.median_high(values) if values else None, show)

    return cell


def _change(*names: MetricName) -> Callable[[Result], Cell]:
    """Return a function that makes a cell of the first of these metrics that was compared."""

    def cell(result: Result) -> Cell:
        metrics = (result.verdict.metric(name) for name in names) if result.verdict else ()
        metric = next((candidate for candidate in metrics if candidate is not None and candidate.change is not None), None)
        if metric is None:
            return Cell()
        tone = {"regressed": "bad", "improved": "good"}.get(metric.status, "")
        return _cell(metric.change, format_percent, tone)

    return cell


def _peak(result: Result) -> Cell:
    peak = result.figures if isinstance(result, Emulated) else result.summary
    return _cell(peak.peak_allocated_bytes if peak else None, format_bytes)


def _expected(result: Result) -> Cell:
    run = result.figures if isinstance(result, Emulated) else None
    one = run.expected if run else None
    return Cell(text=expected.describe(one), value=one.seconds) if one and one.seconds else Cell()


def _asked(figure: CountFigure) -> Callable[[Result], Cell]:
    """Return a function that makes a cell of a count; empty for 0."""

    def cell(result: Result) -> Cell:
        metric = result.verdict.metric(figure) if result.verdict else None
        tone = {"regressed": "bad", "improved": "good"}.get(metric.status, "") if metric else ""
        return _cell(counts_of(result).get(figure) or None, functools.partial(format_count, figure), tone)

    return cell


def _share(value: float) -> str:
    return format_percent(value, signed=False)


def _fits(result: Result) -> Cell:
    fits = result.figures.fits if isinstance(result, Emulated) and result.figures else None
    return Cell() if fits is None else Cell(text="yes" if fits else "no", value=int(fits), tone="" if fits else "bad")


_FIGURES: Final[dict[str, Callable[[Result], Cell]]] = {
    "Sec/step": _of_summary("median_step_seconds", format_seconds),
    "Δ time": _change("step_seconds"),
    "GPU sec/step": _of_summary("gpu_seconds", format_seconds),
    "GPU busy": _of_summary("gpu_busy_share", _share),
    "Peak memory": _peak,
    "Δ memory": _change("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"),
    "Fits": _fits,
    "Expected time": _expected,
    "Samples": _of_summary("samples_per_second", format_rate),
    "Tokens": _of_summary("tokens_per_second", format_rate),
    "Scaling": _of_summary("scaling_efficiency", _share),
    "MFU": _of_summary("model_flops_utilization", _share),
    "Energy": _of_summary("joules_per_sample", format_joules),
    "Reserved": _measured("peak_reserved_bytes", format_bytes),
    "Model": _measured("model_bytes", format_bytes),
    "Compute": _measured("flops_per_step", format_flops),
    **{figure.capitalize().replace("_", " "): _asked(figure) for figure in COUNT_FIGURES if figure not in DETAILS},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSummary:
    """An environment in which cases ran, or the platform that was emulated."""

    title: str
    facts: dict[str, str]
    cases: int


def environment_summaries(results: Sequence[Result]) -> list[EnvironmentSummary]:
    """Return each environment once, whatever number of its devices the cases use."""
    by_environment: defaultdict[bytes, list[Result]] = defaultdict(list)
    for result in _latest(results):
        environments = _environments([result])
        if isinstance(result, Emulated) and result.figures is not None:
            by_environment[_key(result.figures.conditions)].append(result)
        elif environments:
            by_environment[
                _key(msgspec.structs.replace(environments[0], device_count=0, topology=(), hosts=(), threads=0))
            ].append(result)
    return [_summary_of(members) for members in by_environment.values()]


def _summary_of(members: Sequence[Result]) -> EnvironmentSummary:
    emulated = of_kind(members, Emulated)
    facts = _emulated_facts(emulated) if emulated else _measured_facts(members)
    known = {name: fact for name, fact in facts.items() if fact}
    return EnvironmentSummary(title=members[0].device, facts=known, cases=len(members))


def _key(*records: object) -> bytes:
    """Return a hashable key of records that hold dictionaries."""
    return msgspec.json.encode(records, order="deterministic")


def _environments(results: Sequence[Result]) -> list[Environment]:
    candidates = [getattr(reply, "environment", None) for result in results for reply in result.replies]
    return [environment for environment in candidates if environment is not None]


def _measured_facts(results: Sequence[Result]) -> dict[str, str]:
    environments = _environments(results)
    first = environments[0]
    memory = first.device_memory_bytes
    return {
        "Device": first.device_name,
        "Memory of one": format_bytes(memory) if memory else "",
        "Processes of a case": _several(environment.device_count for environment in environments),
        "Links": "; ".join(
            dict.fromkeys(format_topology(environment.topology) for environment in environments if environment.topology)
        ),
        "Driver": first.driver or "",
        "Runtime": first.runtime or "",
        "MIOpen" if first.device_type == "rocm" else "cuDNN": first.cudnn or "",
        "RCCL" if first.device_type == "rocm" else "NCCL": first.nccl or "",
        "Host": ", ".join(
            dict.fromkeys(host for environment in environments for host in (environment.hosts or (environment.host,)))
        ),
        "CPU": first.cpu_model,
        "Cores": str(first.cores or ""),
        "Host memory": format_bytes(first.host_memory_bytes) if first.host_memory_bytes else "",
        "Network": "" if first.nics is msgspec.UNSET else format_nics(first.nics),
        "Threads": _several(environment.threads for environment in environments),
        "System": first.os,
        "Python": first.python,
        **dict(sorted(first.packages.items())),
    }


def _several(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))


def _emulated_facts(results: Sequence[Emulated]) -> dict[str, str]:
    first = next(run for result in results if (run := result.figures) is not None)
    return {
        "Emulated": first.device_name,
        "Memory of one": format_bytes(first.device_memory_bytes),
        "Runtime": first.runtime or "",
        **dict(sorted(first.packages.items())),
    }
