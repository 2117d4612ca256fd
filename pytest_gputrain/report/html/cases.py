"""The cases of reports as a page tells of them: counts, failures, a row for each, and where they ran."""

from __future__ import annotations

import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pytest_gputrain.gate.loss_trend import describe_failed_curves
from pytest_gputrain.gate.summary import detail_of, failure_of
from pytest_gputrain.records import Case, Environment, Measurement, MetricName, Report, Result, knob_text
from pytest_gputrain.report.results import latest, verdict_of
from pytest_gputrain.utils.units import (
    format_bytes,
    format_flops,
    format_joules,
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
    "predicted": "plain",
}
"""How a verdict looks, those first that want attention first."""
_RANK: Final = {verdict: rank for rank, verdict in enumerate(TONES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A figure of a row."""

    text: str = ""
    value: float | str = ""
    """What rows are sorted by."""
    tone: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A case."""

    result: Result
    verdict: str
    tone: str
    name: str
    sentence: str
    detail: str
    """End of a traceback."""
    knobs: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cases:
    """All of them."""

    columns: tuple[str, ...]
    """Of figures; only those that a row has."""
    rows: tuple[Row, ...]
    """As tests ran, those first that want attention first."""
    counts: dict[str, int]
    """By verdict."""
    suites: dict[str, dict[str, int]]
    """The same by suite."""

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.tone == "bad"]

    def values(self, name: str) -> list[str]:
        """What a knob or a field of results is in these cases."""
        owner = "result.case" if name in Case.__struct_fields__ else "result"
        return sorted(set(map(operator.attrgetter(f"{owner}.{name}"), self.rows)))


def gathered(results: Sequence[Result]) -> Cases:
    """The cases of results, each once for a device."""
    shown = sorted(_latest(results), key=lambda result: _RANK[_verdict(result)])
    figures = {title: [figure(result) for result in shown] for title, figure in _FIGURES.items()}
    columns = tuple(title for title, cells in figures.items() if any(cell.text for cell in cells))
    rows = tuple(_row(result, tuple(figures[title][place] for title in columns)) for place, result in enumerate(shown))
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
    """A study is a row of its own: it says nothing of the case as declared."""
    for is_study in (False, True):
        yield from latest([result for result in results if bool(result.search or result.loss_curves) is is_study])


def _verdict(result: Result) -> str:
    if result.loss_curves:
        return "failed" if describe_failed_curves(result.case, result.loss_curves) else "loss curves"
    if result.search is not None:
        return "failed" if result.search.fastest is None else "searched"
    return verdict_of(result)


def _row(result: Result, cells: tuple[Cell, ...]) -> Row:
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
    )


def _knobs(result: Result) -> Iterator[str]:
    """What of a case is not the default."""
    case, plain = result.case, type(result.case)()
    for name, value in case.identity().items():
        if value != getattr(plain, name) and name not in ("model", "method", "precision", "parallel"):
            yield f"{name.replace('_', ' ')} {knob_text(value)}"
    yield f"{result.scale} scale"
    if count := len(result.replies):
        yield f"{count} process{'es' if count > 1 else ''} of {case.steps} steps"


def _cell(value: float | None, show: Callable[[float], str], tone: str = "") -> Cell:
    return Cell() if value is None else Cell(text=show(value), value=value, tone=tone)


def _summary(name: str, show: Callable[[float], str]) -> Callable[[Result], Cell]:
    return lambda result: _cell(getattr(result.summary, name) if result.summary else None, show)


def _predicted(name: str, show: Callable[[float], str]) -> Callable[[Result], Cell]:
    return lambda result: _cell(getattr(result.prediction, name) if result.prediction else None, show)


def _measured(name: str, show: Callable[[float], str]) -> Callable[[Result], Cell]:
    def cell(result: Result) -> Cell:
        runs = [reply for reply in result.replies if isinstance(reply, Measurement)]
        known = [value for run in runs if (value := getattr(run, name)) is not None]
        if result.prediction is not None:
            known = [value for value in [getattr(result.prediction, name, None)] if value is not None]
        return _cell(statistics.median_high(known) if known else None, show)

    return cell


def _change(*names: MetricName) -> Callable[[Result], Cell]:
    """Of the first of the metrics that was compared."""

    def cell(result: Result) -> Cell:
        found = (result.verdict.metric(name) for name in names) if result.verdict else ()
        metric = next((one for one in found if one is not None and one.change is not None), None)
        if metric is None:
            return Cell()
        tone = {"regressed": "bad", "improved": "good"}.get(metric.status, "")
        return _cell(metric.change, format_percent, tone)

    return cell


def _peak(result: Result) -> Cell:
    peak = result.prediction or result.summary
    return _cell(peak.peak_allocated_bytes if peak else None, format_bytes)


def _share(value: float) -> str:
    return format_percent(value, signed=False)


def _fits(result: Result) -> Cell:
    fits = result.prediction.fits if result.prediction else None
    return Cell() if fits is None else Cell(text="yes" if fits else "no", value=int(fits), tone="" if fits else "bad")


_FIGURES: Final[dict[str, Callable[[Result], Cell]]] = {
    "Sec/step": _summary("median_step_seconds", format_seconds),
    "Δ time": _change("step_seconds"),
    "Peak memory": _peak,
    "Δ memory": _change("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"),
    "Fits": _fits,
    "Roofline": _predicted("roofline_seconds", format_seconds),
    "Samples": _summary("samples_per_second", format_rate),
    "Tokens": _summary("tokens_per_second", format_rate),
    "Scaling": _summary("scaling_efficiency", _share),
    "MFU": _summary("model_flops_utilization", _share),
    "Energy": _summary("joules_per_sample", format_joules),
    "Reserved": _measured("peak_reserved_bytes", format_bytes),
    "Model": _measured("model_bytes", format_bytes),
    "Compute": _measured("flops_per_step", format_flops),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where cases ran."""

    title: str
    facts: dict[str, str]
    cases: int


def places(results: Sequence[Result]) -> list[Place]:
    """Each environment once, whatever number of its devices a case takes."""
    found: defaultdict[bytes, list[Result]] = defaultdict(list)
    for result in _latest(results):
        environments = _environments([result])
        if result.prediction is not None:
            found[_key(result.prediction.target)].append(result)
        elif environments:
            found[_key(msgspec.structs.replace(environments[0], device_count=0, topology=(), hosts=(), threads=0))].append(
                result
            )
    return [_predicted_place(members) if members[0].prediction else _place(members) for members in found.values()]


def _key(*records: object) -> bytes:
    """Records hold dictionaries, which are no keys."""
    return msgspec.json.encode(records, order="deterministic")


def _environments(results: Sequence[Result]) -> list[Environment]:
    found = [getattr(reply, "environment", None) for result in results for reply in result.replies]
    return [environment for environment in found if environment is not None]


def _place(results: Sequence[Result]) -> Place:
    known = _environments(results)
    first = known[0]
    memory = first.device_memory_bytes
    facts = {
        "Device": first.device_name,
        "Memory of one": format_bytes(memory) if memory else "",
        "Processes of a case": _several(one.device_count for one in known),
        "Links": "; ".join(dict.fromkeys(format_topology(one.topology) for one in known if one.topology)),
        "Driver": first.driver or "",
        "Runtime": first.runtime or "",
        "Host": ", ".join(dict.fromkeys(host for one in known for host in (one.hosts or (one.host,)))),
        "CPU": first.cpu_model,
        "Threads": _several(one.threads for one in known),
        "System": first.os,
        "Python": first.python,
        **dict(sorted(first.packages.items())),
    }
    return Place(title=results[0].device, facts={name: fact for name, fact in facts.items() if fact}, cases=len(results))


def _several(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))


def _predicted_place(results: Sequence[Result]) -> Place:
    known = [result.prediction for result in results if result.prediction is not None]
    target = known[0].target
    memory = target.memory_bytes
    facts = {
        "Predicted for": target.marker,
        "Memory of one": format_bytes(memory) if memory else "",
        "Attention": target.attention,
        **dict(sorted({name: version for one in known for name, version in one.packages.items()}.items())),
    }
    return Place(title=results[0].device, facts={name: fact for name, fact in facts.items() if fact}, cases=len(results))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A report."""

    created: str
    commit: str
    branch: str
    generator: str
    arguments: str
    exit_status: int
    notes: tuple[str, ...]


def runs(reports: Sequence[Report]) -> list[Run]:
    return [
        Run(
            created=report.created,
            commit=report.commit,
            branch=report.branch,
            generator=report.generator,
            arguments=" ".join(report.arguments),
            exit_status=report.exit_status,
            notes=report.notes,
        )
        for report in reports
    ]
