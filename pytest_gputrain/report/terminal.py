"""Makes the tables that pytest prints at the end of a run."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.gate.memory import PHASES, is_memory_metric, most_changed
from pytest_gputrain.hardware.catalog import CPU, title_of
from pytest_gputrain.records import (
    BatchSearch,
    Emulated,
    LossStudy,
    Measured,
    Measurement,
    MetricName,
    OutOfMemory,
    Result,
)
from pytest_gputrain.report import emulations, published, rich_text, studies
from pytest_gputrain.report.results import BY_ATTENTION, of_kind, verdict_of
from pytest_gputrain.utils.units import format_bytes, format_percent, format_seconds, format_topology

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_STYLES: Final = {
    "pass": "green",
    "improved": "bold green",
    "recorded": "cyan",
    "inconclusive": "yellow",
    "new": "yellow",
    "not-comparable": "yellow",
    "measured": "",
    "emulated": "",
}
_METHODS: Final = {"full": "Full", "lora": "LoRA", "qlora": "QLoRA", "custom": "", "script": ""}


def render(results: Sequence[Result], *, width: int, colour: bool, most: int | None = None) -> str:
    """Return a table for each suite, device and scale, as text.

    Args:
        most: rows; of more those that want attention are shown, and how many others there are.
    """
    groups: defaultdict[tuple[str, str, str], list[Result]] = defaultdict(list)
    rows = _rows(results)
    shown = rows if most is None or len(rows) <= most else sorted(rows, key=rows.__getitem__)[:most]
    for index in sorted(shown):
        result = results[index]
        groups[result.suite, _device(result), result.scale].append(result)
    console, file = rich_text.console(width, colour)
    for (suite, device, scale), members in groups.items():
        own = all(result.case.code for result in members)
        size = "" if own else ", tiny scale (tiny stand-ins for the models named)" if scale == "tiny" else ", full scale"
        console.print(rich_text.text(f"{suite} on {device}{size}", style="bold"))
        for line in _links(members):
            console.print(rich_text.text(line, style="dim"))
        if emulated := of_kind(members, Emulated):
            console.print(emulations.table(emulated, _names, _verdict, published.outcome, width))
        if measured := of_kind(members, Measured):
            compared = any(result.published for result in measured)
            console.print(published.table(measured, _verdict) if compared else _table(measured, width))
        if searched := of_kind(members, BatchSearch):
            console.print(studies.search_table(searched, _names))
        if curved := of_kind(members, LossStudy):
            console.print(studies.loss_table(curved, _names))
    if len(shown) < len(rows):
        console.print(rich_text.text(f"(and {len(rows) - len(shown):,} more cases; the JSON report has all)"))
    return file.getvalue().rstrip("\n")


def _rows(results: Sequence[Result]) -> dict[int, int]:
    """Return the indices of the results that the tables show, each with its rank. Rank 0 needs attention most and comes
    first."""
    judged_keys = {(result.suite, result.key, result.variables_digest) for result in results if result.verdict}
    return {
        index: BY_ATTENTION.index(verdict_of(result))
        for index, result in enumerate(results)
        # If one test checked a case and another only measured it, the tables show the checked result alone.
        if result.verdict or (result.suite, result.key, result.variables_digest) not in judged_keys
    }


_CHANGES: Final[dict[MetricName, str]] = {
    "peak_allocated_bytes": "Δ mem.",
    "step_seconds": "Δ time",
    "scaling_efficiency": "Δ scal.",
}
"""The headers of metrics that are judged against a stored baseline."""
_WIDTH_OF_ALL_COLUMNS: Final = 92
_SHOWN_DIGITS: Final = 4
"""The digits of a change as a share: a table shows what a reader compares, and sentences the rest."""


def _table(results: Sequence[Measured], width: int) -> Table:
    figures: dict[str, Callable[[Result], str]] = {
        "Peak mem.": _peak,
        "(Model)": _model,
        "Sec/step": _seconds,
        "GPU busy": _busy,
    }
    changes = {header: functools.partial(change, name) for name, header in _CHANGES.items()}
    compared = {header: change for header, change in changes.items() if any(map(change, results))}
    if any(_scaling(result) for result in results):
        figures["Scaling"] = _scaling
    shown = {header: [show(result) for result in results] for header, show in (figures | compared).items()}
    shown = {header: cells for header, cells in shown.items() if any(cells)}
    verdicts = [_verdict(result) for result in results]
    # Cells are Text, because rich would take brackets in a user's name for markup.
    table = rich_text.table()
    names = dict(zip(("Model", "Method", "Setting"), zip(*map(_names, results), strict=True), strict=True))
    names = {header: cells for header, cells in names.items() if any(cells)}
    for header in (*names, *shown, "Verdict"):
        table.add_column(header, justify="right" if header in shown else "left", no_wrap=True)
    for *cells, verdict in zip(*names.values(), *shown.values(), verdicts, strict=True):
        table.add_row(*map(rich_text.text, cells), verdict)
    if rich_text.natural_width(table) <= width:
        return table
    if compared and width < _WIDTH_OF_ALL_COLUMNS:
        # The changes that are left out here are in the sentence of a regression and in the JSON report.
        shown = {
            header: cells for header, cells in shown.items() if header not in ("(Model)", _CHANGES["scaling_efficiency"])
        }
    return rich_text.case_table([" ".join(filter(None, _names(result))) for result in results], shown, verdicts, width)


def _verdict(result: Result) -> Text:
    status = verdict_of(result)
    before = " (measured before)" if result.measured_for else ""
    return rich_text.text(f"{status}{before}", style=_STYLES.get(status, "red"))


def _names(result: Result) -> tuple[str, str, str]:
    case = result.case
    architecture = architectures().get(case.model)
    skip = len(case.model) + 1 + (0 if case.method in ("custom", "script") else len(case.method) + 1)
    return architecture.title if architecture else case.model, _METHODS.get(case.method, case.method), str(case)[skip:]


def _peak(result: Result) -> str:
    return format_bytes(result.summary.peak_allocated_bytes) if result.summary else published.outcome(result)


def _model(result: Result) -> str:
    model_bytes = [reply.model_bytes for reply in result.replies if isinstance(reply, Measurement) and reply.model_bytes]
    return f"({format_bytes(model_bytes[0])})" if model_bytes else ""


def _seconds(result: Result) -> str:
    return format_seconds(result.summary.median_step_seconds) if result.summary else published.outcome(result)


def _busy(result: Result) -> str:
    share = result.summary.gpu_busy_share if result.summary else None
    return "" if share is None else f"{100 * share:.0f} %"


def _scaling(result: Result) -> str:
    efficiency = result.summary.scaling_efficiency if result.summary else None
    return "" if efficiency is None else format_percent(efficiency, signed=False)


def change(name: MetricName, result: Result) -> str:
    """Return ``+0.4 %`` for a metric that was compared, or ``+18.3 % backward`` if only the peak of a phase has grown."""
    metric, where = result.verdict.metric(name) if result.verdict else None, ""
    if name == "peak_allocated_bytes" and result.verdict and (metric is None or metric.status != "regressed"):
        # If only a phase has grown, the row shows that phase.
        worse = [other for other in result.verdict.metrics if is_memory_metric(other) and other.status == "regressed"]
        if worse:
            peaks = result.figures.phase_peak_bytes if result.figures else {}
            phase = most_changed([other for other in worse if other.metric in PHASES], peaks)
            metric = phase or max(worse, key=lambda other: other.change or 0.0)
            where = f" {PHASES[metric.metric]}" if metric.metric in PHASES else ""
            where = " of a step" if metric.metric == "step_peak_bytes" else where
    if metric is None or metric.change is None:
        return ""
    return f"{format_percent(round(metric.change, _SHOWN_DIGITS) + 0.0)}{where}"


def _links(results: Sequence[Result]) -> list[str]:
    """Return a sentence for each different way in which the GPUs of the cases are linked."""
    topologies = [
        reply.environment.topology
        for result in results
        for reply in result.replies
        if isinstance(reply, Measurement | OutOfMemory) and reply.environment is not None
    ]
    return [f"GPUs linked by {format_topology(rows)}" for rows in dict.fromkeys(topologies) if rows]


def _device(result: Result) -> str:
    kind = " (emulated)" if isinstance(result, Emulated) else ""
    if result.platform == CPU:
        return f"CPU{kind}"
    return f"{title_of(result.platform, result.device)} x{result.case.gpus}{kind}"
