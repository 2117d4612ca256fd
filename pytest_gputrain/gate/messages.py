"""Writes the parts of the sentences that verdicts consist of: failures, metrics, changed counters and environments. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

from msgspec import UNSET

from pytest_gputrain.records import (
    Baseline,
    BaselineRun,
    Crashed,
    EmulatedRun,
    Environment,
    Lost,
    Measurement,
    MetricName,
    MetricVerdict,
    OutOfMemory,
    TimedOut,
)
from pytest_gputrain.utils.units import (
    format_bytes,
    format_flops,
    format_nics,
    format_percent,
    format_seconds,
    format_spread,
    format_topology,
)

REPLACED: Final = "; against the baseline that it replaces: "
"""Comes before the sentence of the case in a sentence that says that its figures were recorded."""


def describe_failure(reply: Crashed | TimedOut | OutOfMemory | Lost, wanted: str = "measurement") -> str:
    """Say what went wrong, as the rest of a sentence that begins with the case.

    Args:
        wanted: the word for what the case should have given, such as figures.
    """
    if isinstance(reply, Lost):
        return f"was lost by the fleet, which says nothing about the case: {reply.sentence}"
    at = f" in step {reply.step + 1}" if reply.step is not None and reply.phase in ("warmup", "measure") else ""
    rank = "" if isinstance(reply, TimedOut) or reply.rank is None else f", rank {reply.rank}"
    place = f"({reply.phase}{at}{rank})"
    if isinstance(reply, OutOfMemory):
        return f"ran out of {reply.where} memory {place}: {reply.message}"
    measured_before = f"was {_in_short(reply.measured)}, but " if reply.measured else ""
    if isinstance(reply, TimedOut):
        after = format_seconds(reply.timeout_seconds)
        return f"{measured_before}was ended after {after} {place}; --gpu-timeout allows more{reply.advice}"
    return (
        f"{measured_before}failed afterwards {place}: {reply.sentence}"
        if measured_before
        else f"gave no {wanted} {place}: {reply.sentence}"
    )


def _in_short(figures: Measurement | EmulatedRun) -> str:
    allocated = f"{format_bytes(figures.peak_allocated_bytes)} allocated"
    if isinstance(figures, EmulatedRun):
        return f"emulated ({allocated})"
    return f"measured ({allocated}, {format_seconds(figures.median_step_seconds)} a step)"


_MEMORY: Final[dict[MetricName, str]] = {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "device_used_bytes": "in use on the device",
    "build_peak_bytes": "allocated in build",
    "forward_peak_bytes": "allocated in forward",
    "backward_peak_bytes": "allocated in backward",
    "between_peak_bytes": "allocated between backward passes",
    "optimizer_peak_bytes": "allocated in optimizer",
    "evaluate_peak_bytes": "allocated in evaluation",
    "checkpoint_peak_bytes": "allocated while saving a checkpoint",
    "checkpoint_host_peak_bytes": "allocated on the host while saving a checkpoint",
}


def describe_metric(metric: MetricVerdict) -> str:
    """Say what a metric means for its case, as the rest of a sentence that begins with the case.

    Against runs of one's own ``is 7.2 % slower: 5.04 s a step against 4.70 s +- 0.03 (5 runs); limit 3.0 %; 3 of 3
    fresh runs slower``, against a figure ``is 7.2 % slower: 5.04 s against 4.70 s a step, limit 4.84 s``.
    """
    assert metric.value is not None
    assert metric.baseline is not None
    delta = metric.value / metric.baseline - 1 if metric.baseline else math.inf
    size, more = format_percent(abs(delta), signed=False), delta > 0
    of = f" in {metric.runs} runs" if metric.runs and metric.runs > 1 else ""
    match metric.metric:
        case "gpu_seconds":
            word, value = "longer" if more else "shorter", format_seconds(metric.value)
            values = f"{value} a step against {_spread(metric)}"
            return f"keeps the GPU busy {size} {word}: {values}{_limit(metric, more)}{_votes(metric, word)}"
        case "input_seconds":
            word = "longer" if more else "shorter"
            values = f"{format_seconds(metric.value)} against {format_seconds(metric.baseline)} a step"
            bound = f", limit {format_seconds(metric.limit)}" if metric.limit is not None and more else ""
            return f"waits {word} for its batches: {values}{bound}{_votes(metric, word)}"
        case "step_seconds" | "mean_step_seconds":
            word, value = "slower" if more else "faster", format_seconds(metric.value)
            if metric.baseline_runs is None or metric.sd is None:
                limit = f", limit {format_seconds(metric.limit)}" if metric.limit is not None and more else ""
                return f"is {size} {word}: {value} against {format_seconds(metric.baseline)} a step{of}{limit}"
            values = f"{value} a step against {_spread(metric)}"
            which = " in the mean of its steps" if metric.metric == "mean_step_seconds" else ""
            return f"is {size} {word}{which}: {values}{_limit(metric, more)}{_votes(metric, word)}"
        case "scaling_efficiency":
            word = "better" if more else "worse"
            values = f"{format_percent(metric.value, signed=False)} against {format_percent(metric.baseline, signed=False)}"
            return f"scales {size} {word}: an efficiency of {values}{_limit(metric, not more)}{_votes(metric, word)}"
        case "flops_per_step":
            values = f"{format_flops(metric.value)} against {format_flops(metric.baseline)} a step"
            return f"computes {size} {'more' if more else 'less'}: {values}{_limit(metric, more)}"
        case "recomputed_flops_per_step":
            if switched := describe_checkpointing(round(metric.baseline), round(metric.value)):
                return f"recomputes {format_flops(metric.value)} a step against {format_flops(metric.baseline)}: {switched}"
            values = f"{format_flops(metric.value)} against {format_flops(metric.baseline)} a step"
            return f"recomputes {size} {'more' if more else 'less'}: {values}"
        case _:
            most = metric.limit if more else None
            limit = f", limit {format_bytes(most)}" if most is not None and most > metric.baseline else ""
            word, change = "more" if more else "less", abs(metric.value - metric.baseline)
            ends = format_bytes(metric.value), format_bytes(metric.baseline)
            needed = f"{format_bytes(change)} ({size})"
            if ends[0] == ends[1]:  # Both figures would be printed alike, so the exact bytes are shown.
                ends, needed = (f"{metric.value:,.0f}", f"{metric.baseline:,.0f} bytes"), count(round(change), "byte")
            return f"needs {needed} {word} memory: {ends[0]} against {ends[1]} {_MEMORY[metric.metric]}{of}{limit}"


def _spread(metric: MetricVerdict) -> str:
    """Return the time of a baseline with the spread of its runs: ``4.70 s +- 0.03 (5 runs)``."""
    assert metric.baseline is not None
    runs, sd = metric.baseline_runs or 1, metric.sd or 0.0
    shown = format_seconds(metric.baseline) if runs == 1 else format_spread(metric.baseline, metric.baseline * sd)
    return f"{shown} ({count(runs, 'run')})"


def _limit(metric: MetricVerdict, worse: bool) -> str:
    if metric.limit is None or not metric.baseline or not worse:
        return ""
    return f"; limit {format_percent(abs(metric.limit / metric.baseline - 1), signed=False)}"


def _votes(metric: MetricVerdict, word: str) -> str:
    return "" if not metric.runs else f"; {metric.votes} of {count(metric.runs, 'fresh run')} {word}"


def describe_checkpointing(before: int | None, now: int | None) -> str:
    """Say that activation checkpointing was switched on or off; empty if it was not, or if nobody knows.

    Args:
        before: FLOPs of a step that were recomputed, None if they were not counted.
        now: the same of this run.
    """
    if before is None or now is None or bool(before) == bool(now):
        return ""
    return f"activation checkpointing is {'new' if now else 'gone'}"


def describe_counters(
    measured: Measurement, fitted: Sequence[BaselineRun], described: Collection[MetricName] = ()
) -> Iterable[str]:
    """Describe changes of exact counters. They tell a model that has changed from one that is only slower.

    Args:
        described: the metrics that other sentences describe.
    """
    computed, before = measured.flops_per_step, fitted[-1].flops_per_step
    if "flops_per_step" not in described and computed and before and computed != before:
        yield f"{format_percent(computed / before - 1)} FLOPs per step"
    if "recomputed_flops_per_step" not in described:
        yield describe_checkpointing(fitted[-1].recomputed_flops_per_step, measured.recomputed_flops_per_step)
    if measured.model_bytes and fitted[-1].model_bytes and measured.model_bytes != fitted[-1].model_bytes:
        yield f"model memory {format_bytes(fitted[-1].model_bytes)} -> {format_bytes(measured.model_bytes)}"
    alone, alone_before = measured.one_worker_seconds, fitted[-1].one_worker_seconds
    if alone and alone_before:
        yield f"one worker alone {format_seconds(alone_before)} -> {format_seconds(alone)}"


_SHOWN: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    "topology": ("topology", format_topology),
    "power_limit_watts": ("power limit", lambda watts: f"{watts:.0f} W"),
    "device_memory_bytes": ("device memory", lambda size: "unknown" if size is None else format_bytes(size)),
    "cudnn": ("cuDNN", str),
    "nccl": ("NCCL", str),
    "cores": ("CPU cores", str),
    "host_memory_bytes": ("host memory", format_bytes),
    "nics": ("network cards", format_nics),
}
"""The name of a fact, and how its value is shown; what is shown alike, such as the last bytes of a memory, is no change."""
_OF_ROCM: Final = {"cudnn": "MIOpen", "nccl": "RCCL"}


def describe_changes(here: Environment | None, runs: Sequence[BaselineRun], variables: Sequence[str] = ()) -> str:
    """Describe how this environment differs from the latest one of the baseline.

    Args:
        variables: names of the environment variables that the test has changed.
    """
    if here is None or not runs:
        return "environment unknown"
    there = runs[-1].environment
    changes = []
    for name in Environment.__struct_fields__:
        before, after = getattr(there, name), getattr(here, name)
        if UNSET in (before, after) or (name == "power_limit_watts" and None in (before, after)):
            continue  # an unknown value is no change
        if name == "gpu_digests":
            changes += [] if {*before} & {*after} else ["another machine"]
        elif name == "packages":
            changes += [
                f"{package} {before.get(package, 'absent')} -> {after.get(package, 'absent')}"
                for package in sorted({*before, *after})
                if before.get(package) != after.get(package)
            ]
        elif before != after:
            title, show = _SHOWN.get(name, (name.replace("_", " "), str))
            if (shown_before := show(before)) != (shown_after := show(after)):
                title = _OF_ROCM.get(name, title) if here.device_type == "rocm" else title
                changes.append(f"{title} {shown_before} -> {shown_after}")
    recorded = runs[-1].variables
    changes += [f"{name} changed by this test" for name in variables if name not in recorded]
    changes += [f"{name} not changed by this test" for name in recorded if name not in variables]
    return f"since then: {', '.join(changes)}" if changes else "same environment"


def describe_process_count(here: Environment, fitted: Sequence[BaselineRun]) -> str:
    """Say how many processes a baseline was recorded with, if this run has another number; empty if it has the same."""
    counts = {run.environment.device_count for run in fitted} - {here.device_count}
    return f"recorded with {min(counts)} processes, here {here.device_count}" if counts else ""


def record_it(which: Literal["update", "new"] = "update", platform: str = "") -> str:
    """Return the remedy that records a baseline, with the options that the command needs.

    Args:
        which: ``new`` for a case without a baseline, which leaves those of other cases as they are.
        platform: the marker of an emulated GPU; empty for a run that measures.
    """
    emulated = f"--gpu-platform={platform} --gpu-emulate " if platform else ""
    return f"record it with {emulated}--gpu-baseline-{which}"


class OtherSide(NamedTuple):
    """The words that sentences use for the other side of a comparison, and for the remedy."""

    name: str
    """The full name: ``its baseline of 2026-11-29``."""
    short: str
    """The name in brackets and tables: ``baseline of 2026-11-29``."""
    remedies: bool
    """Whether that side is a stored baseline, which can be recorded again."""
    platform: str = ""
    """The marker of the platform of an emulated run; empty for a measured one."""

    @classmethod
    def stored(cls, baseline: Baseline) -> OtherSide:
        date = max((run.date[:10] for run in baseline.runs), default="an unknown day")
        return cls(f"its baseline of {date}", f"baseline of {date}", remedies=True)

    @classmethod
    def base(cls, name: str = "base") -> OtherSide:
        """Return the other side of a comparison with a report of that name, which nobody records."""
        return cls(name, name, remedies=False)

    def record(self, which: Literal["update", "new"] = "update") -> str:
        return record_it(which, self.platform)

    def if_expected(self) -> str:
        return f"if that is expected, {self.record()}"

    def advise(self, remedy: str) -> str:
        """Return the remedy as the end of a sentence; empty if the other side is not recorded by anybody."""
        return f"; {remedy}" if self.remedies else ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(words: Iterable[str]) -> str:
    """Return ``a, b and c``."""
    *most, last = [*words] or [""]
    return f"{', '.join(most)} and {last}" if most else last
