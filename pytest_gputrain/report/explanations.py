"""Writes the sentences for what a table of results cannot show: doubts, what was not compared, and what changed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from pytest_gputrain.gate.contention import describe_throttling
from pytest_gputrain.gate.count_lines import describe_most, most_of_a_step
from pytest_gputrain.gate.messages import count
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.records import Measured, Measurement, MetricName, MetricVerdict, Result
from pytest_gputrain.records.counts import COUNT_FIGURES
from pytest_gputrain.report import emulations
from pytest_gputrain.utils.units import format_bytes, format_percent, format_seconds

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
_SHOWN_NOTES: Final = 6
_LARGE_SPREAD: Final = 0.10
"""Processes of a case are reported if they differ by more than this share of the least, in own work or in memory."""
_LARGE_SPREAD_ON_CPU: Final = 1.0
"""This share for own work on a CPU, where equal processes beside busy neighbours were 49 % apart."""
_LEAST_SHARE: Final = 0.01
"""Share of a step below which a lag is not reported: it may be many times nearly nothing."""


def explain(results: Sequence[Result], *, against_base: bool = False) -> list[str]:
    """Yield sentences on cases that passed or were skipped without a full comparison. Regressions have their own failures.

    Args:
        against_base: the results are compared with those of another version, and not with baselines.
    """
    spreads = (f"{result.case}: {how}" for result in results for how in _rank_spread(result))
    slowed = (f"{result.case}: {why}" for result in results if (why := describe_throttling(_measured(result))))
    noted = [*_changed(results), *spreads, *slowed]
    more = f"(and {len(noted) - _SHOWN_NOTES} more; the JSON report has all)"
    return [
        *_doubts(results, _DOUBTS_OF_BASE if against_base else _DOUBTS),
        *_environments(results),
        *_uncompiled(results),
        *emulations.explain(results),
        *_accepted(results),
        *_not_compared(results),
        *_uncounted(results),
        *_reused(results),
        *noted[:_SHOWN_NOTES],
        *([more] if len(noted) > _SHOWN_NOTES else []),
    ]


def advice(results: Sequence[Result]) -> str:
    """Return a line on what to do after a run: how to record first figures, or how to accept figures that are worse; empty
    for other runs."""
    verdicts = [result.verdict for result in results if result.verdict]
    sentences = [verdict.sentence for verdict in verdicts if verdict.status == "new"]
    held = any(verdict.status != "new" or verdict.held_to for verdict in verdicts)
    worse = sum(
        isinstance(one, Measured) and one.verdict is not None and one.verdict.status == "regressed" for one in results
    )
    if worse:
        them = "it" if worse == 1 else "them"
        return f"{count(worse, 'case')} regressed; if that is expected, record {them} with --gpu-baseline-update"
    return "" if held or not sentences else _doubt(_DOUBTS["new"], sentences)


def _doubts(results: Sequence[Result], descriptions: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each kind of doubt about cases that neither passed nor failed."""
    doubts: defaultdict[str, list[str]] = defaultdict(list)
    for verdict in (result.verdict for result in results if result.verdict):
        held_to = verdict.held_to if verdict.status == "new" else None
        other = "other-conditions" if verdict.status == "pass" and verdict.other_conditions else ""
        # Other failing verdicts do not come from a comparison with a baseline, so an update of baselines has not accepted
        # them.
        kind = "accepted" if verdict.before == "regressed" else held_to or other or verdict.status
        doubts[kind].append(verdict.sentence)
    return (_doubt(description, doubts[kind]) for kind, description in descriptions.items() if doubts[kind])


def _doubt(description: str, sentences: Sequence[str]) -> str:
    return f"{count(len(sentences), 'case')} {description}: {sentences[0]}{_and_more(sentences)}"


def _environments(results: Sequence[Result]) -> Iterator[str]:
    """Yield the cases that ran in different environments, and what their tests change there."""
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


def _uncompiled(results: Sequence[Result]) -> Iterator[str]:
    """Yield the cases that call torch.compile on a CPU."""
    names = _names_of(result for result in results if any(reply.uncompiled for reply in _measured(result)))
    if names:
        yield (
            f"{count(len(names), 'case')} not compiled: {names[0]}{_and_more(names)} use{'s' if len(names) == 1 else ''} "
            "torch.compile, which has no effect on memory and time on a CPU, because tensors are counted one by one; its "
            "effect shows on a GPU"
        )


def _accepted(results: Sequence[Result]) -> Iterator[str]:
    """Yield the counts that an update has changed, with both values."""
    accepted: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for result in results:
        if result.verdict and result.verdict.accepted:
            accepted[result.verdict.accepted].append(str(result.case))
    for changes, cases in accepted.items():
        yield f"{count(len(cases), 'case')} recorded with {', '.join(changes)}: {', '.join(cases)}"


def _not_compared(results: Sequence[Result]) -> Iterator[str]:
    """Yield the metrics and limits that were not judged although their cases were."""
    reasons: Counter[str] = Counter()
    for verdict in (result.verdict for result in results if result.verdict):
        for metric in verdict.metrics if verdict.status != "not-comparable" else ():
            if metric.status == "not-comparable":
                reasons[f"{METRIC_NAMES[metric.metric]} not compared: {metric.note}"] += 1
        for limit in verdict.limits:
            if limit.status == "not-judged":
                reasons[f"the limit of {METRIC_NAMES[limit.metric]} not judged: {limit.note}"] += 1
    return (f"{count(number, 'case')} with {reason}" for reason, number in reasons.items())


def _uncounted(results: Sequence[Result]) -> Iterator[str]:
    """Yield what could not be counted or measured, with the first case of each such note."""
    cases: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        for note in next((reply.notes for reply in _measured(result)), ()):
            cases[note].append(result)
    for note, of_note in cases.items():
        names = _names_of(of_note)
        yield f"{count(len(names), 'case')}: {note}: {names[0]}{_and_more(names)}"


def _reused(results: Sequence[Result]) -> Iterator[str]:
    """Yield the cases that were not measured again for the test that judged them."""
    reused = [
        f"{result.case} in {result.nodeid} has the figures of {result.measured_for}"
        for result in results
        if result.verdict and result.measured_for
    ]
    if reused:
        number = count(len(reused), "case")
        yield f"{number} not measured again, even if what the code reads has changed: {reused[0]}{_and_more(reused)}"


def _changed(results: Sequence[Result]) -> Iterator[str]:
    """Yield what has changed within the limits, and which optimizers update more than once a step."""
    for result in results:
        if result.verdict and result.verdict.status == "pass":
            notes = (metric for metric in result.verdict.metrics if metric.status == "pass" and metric.note)
            yield from (f"{result.case}: {_note(metric)}" for metric in notes)
        yield from _repeated_updates(result)


def _note(metric: MetricVerdict) -> str:
    """Return the note on a metric that passes. Notes on counts name the metric themselves."""
    of_counts = metric.metric in (*COUNT_FIGURES, "evaluation_counts")
    return metric.note if of_counts else f"{METRIC_NAMES[metric.metric]} {metric.note}"


def _repeated_updates(result: Result) -> Iterator[str]:
    """Say that an optimizer of a new case updates more than once a step, which may be meant or a mistake."""
    counts = result.figures.counts if result.figures else None
    if not counts or not counts.steps or not result.verdict or result.verdict.status not in ("new", "recorded"):
        return
    if most_of_a_step("repeated_updates", counts):
        said, line = describe_most("repeated_updates", counts)
        yield f"{result.case} {said}{f' ({line})' if line else ''}; yield after each update if each is a step"


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


def _measured(result: Result) -> list[Measurement]:
    return [reply for reply in result.replies if isinstance(reply, Measurement)]


def _names_of(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(str(result.case) for result in results))


def _and_more(items: Collection[str]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
