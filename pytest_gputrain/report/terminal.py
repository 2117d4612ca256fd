"""Makes the tables that pytest prints at the end of a run, and the sentences for what a table cannot show."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.gate.contention import describe_throttling
from pytest_gputrain.gate.count_lines import describe_most, most_of_a_step
from pytest_gputrain.gate.memory import PHASES, is_memory_metric
from pytest_gputrain.gate.messages import count
from pytest_gputrain.hardware.catalog import CPU, title_of
from pytest_gputrain.records import (
    BatchSearch,
    Emulated,
    LossStudy,
    Measured,
    Measurement,
    MetricName,
    MetricVerdict,
    OutOfMemory,
    Result,
)
from pytest_gputrain.records.counts import COUNT_FIGURES
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
    """Render a table per suite, device and scale.

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
    """Return the indices of the results that the tables show, each with its rank by attention; rank 0 comes first."""
    judged_keys = {(result.suite, result.key, result.variables_digest) for result in results if result.verdict}
    return {
        index: BY_ATTENTION.index(verdict_of(result))
        for index, result in enumerate(results)
        # A case is not listed twice if another test only measured it.
        if result.verdict or (result.suite, result.key, result.variables_digest) not in judged_keys
    }


def explain(results: Sequence[Result], *, against_base: bool = False) -> list[str]:
    """Yield sentences for what passed or was skipped over without a full comparison; regressions have their failures.

    Args:
        against_base: the results are compared with those of another version, and not with baselines.
    """
    doubts: defaultdict[str, list[str]] = defaultdict(list)
    reasons: defaultdict[str, int] = defaultdict(int)
    changed: list[str] = []
    spreads: list[str] = []
    slowed: list[str] = []
    uncompiled: dict[str, None] = {}
    uncounted: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for result in results:
        if any(reply.uncompiled for reply in _measured(result)):
            uncompiled[str(result.case)] = None
        if result.verdict:
            held_to = result.verdict.held_to if result.verdict.status == "new" else None
            accepted = result.verdict.before == "regressed"  # other failures need no baseline
            other = "other-conditions" if result.verdict.status == "pass" and result.verdict.other_conditions else ""
            doubts["accepted" if accepted else held_to or other or result.verdict.status].append(result.verdict.sentence)
        for metric in result.verdict.metrics if result.verdict else ():
            if metric.status == "not-comparable" and result.verdict and result.verdict.status != "not-comparable":
                reasons[f"{METRIC_NAMES[metric.metric]} not compared: {metric.note}"] += 1
        for limit in result.verdict.limits if result.verdict else ():
            if limit.status == "not-judged":
                reasons[f"the limit of {METRIC_NAMES[limit.metric]} not judged: {limit.note}"] += 1
        if result.verdict and result.verdict.status == "pass":
            notes = (metric for metric in result.verdict.metrics if metric.status == "pass" and metric.note)
            changed += [f"{result.case}: {_note(metric)}" for metric in notes]
        changed += _repeated_updates(result)
        spreads += [f"{result.case}: {how}" for how in _rank_spread(result)]
        slowed += [f"{result.case}: {why}"] if (why := describe_throttling(_measured(result))) else []
        for note in next((reply.notes for reply in _measured(result)), ()):
            uncounted[note][str(result.case)] = None
    lines = [
        _doubt(description, sentences)
        for status, description in (_DOUBTS_OF_BASE if against_base else _DOUBTS).items()
        if (sentences := doubts[status])
    ]
    lines += _environments(results)
    if uncompiled:
        use = f"{next(iter(uncompiled))}{_and_more(list(uncompiled))} use{'s' if len(uncompiled) == 1 else ''}"
        lines.append(
            f"{count(len(uncompiled), 'case')} not compiled: {use} torch.compile, which has no effect on memory and time on "
            "a CPU, because tensors are counted one by one; its effect shows on a GPU"
        )
    lines += emulations.explain(results)
    lines += _accepted(results)
    lines += [f"{count(number, 'case')} with {reason}" for reason, number in reasons.items()]
    lines += [
        f"{count(len(names), 'case')}: {note}: {next(iter(names))}{_and_more(names)}" for note, names in uncounted.items()
    ]
    lines += _reused(results)
    noted = [*changed, *spreads, *slowed]
    lines += noted[:_SHOWN_NOTES]
    if len(noted) > _SHOWN_NOTES:
        lines.append(f"(and {len(noted) - _SHOWN_NOTES} more; the JSON report has all)")
    return lines


def advice(results: Sequence[Result]) -> str:
    """Return the line of `explain` that says what to do after a first run, in which no case has a baseline; else nothing."""
    sentences = [result.verdict.sentence for result in results if result.verdict and result.verdict.status == "new"]
    held = any(result.verdict and (result.verdict.status != "new" or result.verdict.held_to) for result in results)
    return "" if held or not sentences else _doubt(_DOUBTS["new"], sentences)


def _repeated_updates(result: Result) -> Iterator[str]:
    """Say that an optimizer of a case without a baseline updates more than once a step, which is meant or forgotten."""
    counts = result.figures.counts if result.figures else None
    if not counts or not counts.steps or not result.verdict or result.verdict.status not in ("new", "recorded"):
        return
    if most_of_a_step("repeated_updates", counts):
        said, line = describe_most("repeated_updates", counts)
        yield f"{result.case} {said}{f' ({line})' if line else ''}; yield after each update if each is a step"


def _reused(results: Sequence[Result]) -> Iterator[str]:
    """Say which cases were not measured for the test that judged them."""
    reused = [
        f"{result.case} in {result.nodeid} has the figures of {result.measured_for}"
        for result in results
        if result.verdict and result.measured_for
    ]
    if reused:
        number = count(len(reused), "case")
        yield f"{number} not measured again, even if what the code reads has changed: {reused[0]}{_and_more(reused)}"


def _accepted(results: Sequence[Result]) -> Iterator[str]:
    """List the counts that an update has changed, before and after."""
    accepted: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for result in results:
        if result.verdict and result.verdict.accepted:
            accepted[result.verdict.accepted].append(str(result.case))
    for changes, cases in accepted.items():
        yield f"{count(len(cases), 'case')} recorded with {', '.join(changes)}: {', '.join(cases)}"


def _doubt(description: str, sentences: Sequence[str]) -> str:
    return f"{count(len(sentences), 'case')} {description}: {sentences[0]}{_and_more(sentences)}"


def _environments(results: Sequence[Result]) -> Iterator[str]:
    """List which cases ran in environments that differ, and what their tests change there."""
    environments_by_case: defaultdict[tuple[str, str, str], dict[str, tuple[str, ...]]] = defaultdict(dict)
    cases: dict[tuple[str, str, str], str] = {}
    for result in results:
        identity = (result.device, result.suite, result.key)
        cases[identity] = str(result.case)
        environments_by_case[identity].setdefault(result.variables_digest, (result.nodeid, *result.variables))
    for identity, environments in environments_by_case.items():
        if len(environments) > 1:
            changing = [
                f"{nodeid} changes {', '.join(names)}" for digest, (nodeid, *names) in environments.items() if digest
            ]
            yield f"{cases[identity]} was run in {len(environments)} environments: {'; '.join(changing)}"


_DOUBTS: Final = {
    "accepted": "recorded although worse than the baseline before",
    "inconclusive": "in doubt",
    "emulated": "without a baseline, compared with an emulated run",
    "published": "without a baseline or an emulated run, compared with its published memory",
    "new": "without a baseline",
    "not-comparable": "not comparable with the baseline",
    "other-conditions": "compared with a baseline of other versions",
    "improved": "better than the baseline",
}
_DOUBTS_OF_BASE: Final = {
    "inconclusive": "in doubt",
    "new": "not in base",
    "not-comparable": "not comparable with base",
    "improved": "better than base",
}
_CHANGES: Final[dict[MetricName, str]] = {
    "peak_allocated_bytes": "Δ mem.",
    "step_seconds": "Δ time",
    "scaling_efficiency": "Δ scal.",
}
"""The headers of metrics that are judged against a stored baseline."""
_WIDTH_OF_ALL_COLUMNS: Final = 92
_SHOWN_NOTES: Final = 6
_SHOWN_DIGITS: Final = 4
"""The digits of a change as a share: a table shows what a reader compares, and sentences the rest."""
_LARGE_SPREAD: Final = 0.10
"""Processes of a case are reported if they differ by more than this share of the least, in own work or in memory."""
_LARGE_SPREAD_ON_CPU: Final = 1.0
"""The same for own work on a CPU, where equal processes beside busy neighbours were 49 % apart."""
_LEAST_SHARE: Final = 0.01
"""Share of a step below which a lag is not reported: it may be many times nearly nothing."""

METRIC_NAMES: Final[dict[MetricName, str]] = {
    "step_seconds": "step time",
    "mean_step_seconds": "mean step time",
    "gpu_seconds": "GPU seconds",
    "input_seconds": "waiting for batches",
    "peak_allocated_bytes": "peak memory",
    "peak_reserved_bytes": "reserved memory",
    "device_used_bytes": "device memory",
    "scaling_efficiency": "scaling efficiency",
    "build_peak_bytes": "peak of building",
    "forward_peak_bytes": "peak of forward",
    "backward_peak_bytes": "peak of backward",
    "between_peak_bytes": "peak between backward passes",
    "optimizer_peak_bytes": "peak of the optimizer",
    "step_peak_bytes": "memory of each step",
    "step_growth_bytes": "growth of memory over steps",
    "evaluate_peak_bytes": "peak of the evaluation",
    "checkpoint_peak_bytes": "peak of saving a checkpoint",
    "checkpoint_host_peak_bytes": "the host's peak of saving a checkpoint",
    "evaluation_counts": "counts of the evaluation",
    "evaluate_kept_bytes": "memory that the evaluation leaves behind",
    "checkpoint_kept_bytes": "memory that saving a checkpoint leaves behind",
    "heap_growth": "growth of the host's heap",
    "flops_per_step": "FLOPs",
    "recomputed_flops_per_step": "recomputed FLOPs",
    "bytes_per_step": "bytes moved",
    "waits": "waits for the GPU",
    "pageable": "copies of memory that is not pinned",
    "collectives": "collectives",
    "compilations": "compilations",
    "graph_breaks": "graph breaks",
    "captures": "captures of CUDA graphs",
    "mallocs": "requests for memory to the driver",
    "frees": "memory given back to the driver",
    "work": "kernels, library calls and copies",
    "gpu_work": "tasks of the GPU",
    "launches": "kernels",
    "library_calls": "library calls",
    "d2d": "copies within the GPU's memory",
    "h2d_bytes": "bytes copied to the GPU",
    "d2h_bytes": "bytes copied from the GPU",
    "collective_bytes": "bytes of collectives",
    "fp32_flops": "FLOPs in FP32 instead of TF32",
    "unaligned_flops": "FLOPs on unaligned rows",
    "nchw_flops": "FLOPs of convolutions with channels not last",
    "stream_waits": "waits of streams",
    "replays": "launches of CUDA graphs",
    "memsets": "blocks of memory set",
    "blocks": "blocks of threads",
    "kernels": "kernels, those of libraries included",
    "python_calls": "calls of Python functions",
    "operators": "operators",
    "reads": "values read",
    "other_reads": "other values read",
    "loads": "samples loaded",
    "loaded_bytes": "bytes of batches",
    "loader_workers": "processes that load",
    "repeated_updates": "repeated updates",
}


def _note(metric: MetricVerdict) -> str:
    """Return what is to be told of a metric that passes. The notes of counts name the metric themselves."""
    of_counts = metric.metric in (*COUNT_FIGURES, "evaluation_counts")
    return metric.note if of_counts else f"{METRIC_NAMES[metric.metric]} {metric.note}"


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
        # A change that is left out is in the sentence of a regression and in the JSON report.
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
    model_bytes = [reply.model_bytes for reply in _measured(result) if reply.model_bytes]
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
    """Return ``+0.4 %`` where the metric was compared, or ``+18.3 % backward`` where the peak of a phase alone has grown."""
    metric, where = result.verdict.metric(name) if result.verdict else None, ""
    if name == "peak_allocated_bytes" and result.verdict and (metric is None or metric.status != "regressed"):
        # If only a phase has grown, the row shows that phase.
        worse = [other for other in result.verdict.metrics if is_memory_metric(other) and other.status == "regressed"]
        if worse:
            metric = max(worse, key=lambda other: other.change or 0.0)
            where = f" {PHASES[metric.metric]}" if metric.metric in PHASES else ""
            where = " of a step" if metric.metric == "step_peak_bytes" else where
    if metric is None or metric.change is None:
        return ""
    return f"{format_percent(round(metric.change, _SHOWN_DIGITS) + 0.0)}{where}"


def _measured(result: Result) -> list[Measurement]:
    return [reply for reply in result.replies if isinstance(reply, Measurement)]


def _rank_spread(result: Result) -> Iterator[str]:
    """Yield sentences for large differences between the processes of a case."""
    spread = result.summary.ranks if result.summary else None
    if result.summary is None or spread is None:
        return
    much = _LARGE_SPREAD_ON_CPU if result.device == CPU else _LARGE_SPREAD
    median = result.summary.median_step_seconds
    if spread.lag and spread.lag_seconds and spread.lag > much and median:
        share = spread.lag_seconds / median
        if share > _LEAST_SHARE:
            longer = f"{format_percent(spread.lag, signed=False)} ({format_seconds(spread.lag_seconds)} a step) longer"
            yield f"rank {spread.slowest} is slowest: it works {longer} than the fastest before they exchange anything"
    least, most = spread.least_peak_allocated_bytes, spread.most_peak_allocated_bytes
    if most > least * (1 + _LARGE_SPREAD):
        yield f"peak memory of its processes is {format_bytes(least)} to {format_bytes(most)}"


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


def _and_more(items: Collection[str]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
