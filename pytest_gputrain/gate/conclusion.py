"""Concludes the verdict of a case, with its sentence, from what was decided of its metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pytest_gputrain.gate.comparison import Comparison
from pytest_gputrain.gate.contention import describe_throttling
from pytest_gputrain.gate.counts import JudgedCounts
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.memory import describe_memory, describe_missing_phases, is_memory_metric, phase_prefix
from pytest_gputrain.gate.messages import describe_changes, describe_counters, describe_failure, describe_metric, record_it
from pytest_gputrain.gate.own_training import other_shapes
from pytest_gputrain.records import MetricName, MetricVerdict, OutOfMemory, Reply, Status, Verdict
from pytest_gputrain.records.counts import COUNT_FIGURES, OF_THE_PROGRAM
from pytest_gputrain.utils.units import format_percent, format_seconds

_COUNTED: Final[tuple[MetricName, ...]] = (*COUNT_FIGURES, "evaluation_counts")
_EXACT: Final[tuple[MetricName, ...]] = ("flops_per_step", "recomputed_flops_per_step", *_COUNTED)
"""Metrics that are counted exactly, so that they can be compared even if no time or memory can."""
_COMPARED: Final = MetricVerdict(metric="step_seconds", status="pass", value=0.0)
"""The stand-in for each metric that is compared."""
_SUBJECTS: Final[dict[MetricName, tuple[str, str]]] = {
    "gpu_seconds": ("its GPU seconds ", "are not compared: "),
    "input_seconds": ("its wait for batches ", "is not compared: "),
    "step_seconds": ("its step time ", "is not compared: "),
    "mean_step_seconds": ("its mean step was ", ""),
    "recomputed_flops_per_step": ("its recomputed FLOPs ", ""),
}
"""The words that begin the note on a metric, and those that follow if it does not pass."""


def without_baseline(criteria: Criteria, replies: Sequence[Reply], no_scaling: str) -> Verdict:
    """Conclude that a case is new, or that it fails because it needs more memory than there is."""
    case, hint = criteria.case, f" ({criteria.hint})" if criteria.hint else ""
    if out := next((reply for reply in replies if isinstance(reply, OutOfMemory)), None):
        remedy = "" if criteria.other_side else f"; if that is expected, {record_it()}"
        return Verdict(status="failed", sentence=f"{case} {describe_failure(out)}{remedy}")
    if criteria.other_side:
        return Verdict(status="new", sentence=f"{case}: {criteria.other_side.name} has no figures of it")
    beside = f", and no scaling efficiency ({no_scaling})" if no_scaling else ""
    sentence = f"{case} has no baseline{hint}{beside}; {criteria.elsewhere or record_it('new')}"
    return Verdict(status="new", sentence=sentence)


def to_record(
    sides: Comparison, status: Status, said: str, metrics: tuple[MetricVerdict, ...] = (), why: str = ""
) -> Verdict:
    """Return a verdict that advises to record a new baseline, if the case was compared with a stored one.

    Args:
        said: the rest of a sentence that begins with the case.
        why: the purpose of recording, as the end of the sentence.
    """
    sentence = f"{sides.case} {said}{sides.side.advise(sides.side.record() + why)}"
    return Verdict(status=status, sentence=sentence, metrics=metrics)


@dataclass(frozen=True)
class Conclusion:
    """Makes one verdict from all metrics and counts of a case that were compared with its baseline or with another
    report."""

    sides: Comparison
    metrics: tuple[MetricVerdict, ...]
    counts: JudgedCounts

    def verdict(self) -> Verdict:
        """Return the verdict on the case: the gravest verdict of its metrics."""
        gravest = (self._foreign, self._worse, self._unclear, self._not_gated, self._better)
        return next(filter(None, (say() for say in gravest)), None) or self._passed()

    def _foreign(self) -> Verdict | None:
        measures = [metric for metric in self.metrics if metric.metric not in _EXACT]
        if any(metric.status != "not-comparable" for metric in measures):
            return None
        reasons = "; ".join(dict.fromkeys(metric.note for metric in measures))
        said = f"cannot be compared with {self.sides.side.name}: {reasons}"
        return to_record(self.sides, "not-comparable", said, self.metrics)

    def _worse(self) -> Verdict | None:
        sides, counts, measured, fitted = self.sides, self.counts, self.sides.measured, self.sides.fitted
        worse = [*filter(None, [sides.lost_tensors]), *self._described("regressed"), *counts.worse]
        if not worse:
            return None
        since = [
            other_shapes(measured[0].batch_shapes, fitted[-1].batch_shapes, sides.side),
            describe_changes(measured[0].environment, fitted, sides.criteria.variables),
            *describe_counters(measured[0], fitted, self._with_status("regressed")),
            *(_describe_seconds(metric) for metric in self.metrics if metric.metric in ("gpu_seconds", "input_seconds")),
            describe_throttling(measured),
        ]
        unclear = ", and ".join(self._described("inconclusive"))
        doubts = [f"{unclear}, which {self._explanation()} may explain"] if unclear else []
        doubt = "".join(f"; it also {what}" for what in (*doubts, *counts.doubtful))
        gain = f"; but it {', and '.join(counts.better)}" if counts.better else ""
        said = f"{', and '.join(worse)} ({sides.side.short}); {', '.join(filter(None, since))}{doubt}{self._told()}{gain}"
        return self._verdict("regressed", said)

    def _unclear(self) -> Verdict | None:
        doubtful = [*self.counts.doubtful]
        if unclear := ", and ".join(self._described("inconclusive")):
            allowed = format_percent(self.sides.tolerance.time, signed=False)
            exceeded = f"the tolerance of {allowed}" if "step_seconds" in self._with_status("inconclusive") else "its limit"
            doubtful.insert(0, f"{unclear}; this exceeds {exceeded}, but {self._explanation()} may explain it")
        return self._verdict("inconclusive", "; it also ".join(doubtful)) if doubtful else None

    def _not_gated(self) -> Verdict | None:
        """Return a verdict that does not pass if something that was asked for or recorded cannot be judged; else None."""
        sides, side = self.sides, self.sides.side.name
        record = sides.side.advise(sides.side.record())
        missing = {metric.metric: metric for metric in self.metrics if metric.status in ("new", "not-comparable")}
        efficiency, gpu, operators, waits = (
            missing.get(name, _COMPARED) for name in ("scaling_efficiency", "gpu_seconds", "operators", "waits")
        )
        counted = waits if operators is _COMPARED and sides.measured[0].counts is None else operators
        is_judged = sides.fitted[-1].counts and sides.criteria.counts.mode == "judge"
        new, gone = (describe_missing_phases(self.metrics, status) for status in ("new", "not-comparable"))
        in_full = f"is not compared in full with {side}"
        reasons: tuple[tuple[object, Status, str], ...] = (
            (new, "new", f"has {new} in {side}{record}"),
            (gone, "not-comparable", f"has {gone}, as {side} had{record}"),
            (efficiency.status == "new", "new", f"has no scaling efficiency in {side}{record}"),
            (efficiency.value is None, "not-comparable", f"has no scaling efficiency: {efficiency.note}"),
            (is_judged and counted is not _COMPARED, "not-comparable", f"{in_full}: {counted.note}{record}"),
            (gpu.value is None, "not-comparable", f"{in_full}: its GPU seconds were not measured{record}"),
        )
        return next((self._verdict(status, said) for applies, status, said in reasons if applies), None)

    def _better(self) -> Verdict | None:
        better = [*self._described("improved"), *self.counts.better]
        said = f"{', and '.join(better)}{self._told()}"
        return to_record(self.sides, "improved", said, self.metrics, " to keep it") if better else None

    def _passed(self) -> Verdict:
        notes = [f"{_subject_of_note(metric)}{metric.note}" for metric in self.metrics if metric.note]
        of_steps = (metric.sensitivity for metric in self.metrics if metric.metric != "gpu_seconds")
        caught = next((sensitivity for sensitivity in of_steps if sensitivity is not None), None)
        if caught is not None:
            notes.append(f"a slowdown of {format_percent(caught, signed=False)} would be caught 99 times in 100")
        return self._verdict("pass", f"is within its limits{': ' if notes else ''}{'; '.join(notes)}")

    def _verdict(self, status: Status, said: str) -> Verdict:
        return Verdict(status=status, sentence=f"{self.sides.case} {said}", metrics=self.metrics)

    def _with_status(self, status: Status) -> set[MetricName]:
        return {metric.metric for metric in self.metrics if metric.status == status}

    def _described(self, status: Status) -> list[str]:
        """Describe the metrics of this status, except counts, which have sentences of their own."""
        chosen = [metric for metric in self.metrics if metric.status == status]
        parts = [
            f"{describe_metric(metric)}{f'; {metric.note}' if metric.note else ''}"
            for metric in chosen
            if not is_memory_metric(metric) and metric.metric not in _COUNTED
        ]
        timed = bool(chosen) and chosen[0].metric == "step_seconds"
        parts[timed:timed] = describe_memory(chosen, self.sides.measured[0], self.sides.fitted)
        return parts

    def _told(self) -> str:
        return "".join(
            f"; it also {metric.note}" for metric in self.metrics if metric.metric in OF_THE_PROGRAM and metric.note
        )

    def _explanation(self) -> str:
        """Say what may explain the inconclusive metrics."""
        unclear, sides = self._with_status("inconclusive"), self.sides
        if unclear == {"mean_step_seconds"} and sides.held_up:
            return "the host"
        if "step_seconds" not in unclear or not sides.pace.changed or not sides.other_host:
            return "noise or the whole suite"
        return "the host" if len(unclear) == 1 else "the host, noise or the whole suite"


def _describe_seconds(metric: MetricVerdict) -> str:
    """Describe how GPU seconds or the wait for batches have changed in a case that something else makes worse; empty if they
    are worse themselves."""
    if metric.value is None or metric.baseline is None or metric.status in ("regressed", "not-comparable"):
        return ""
    before, now = format_seconds(metric.baseline), format_seconds(metric.value)
    if metric.metric == "input_seconds":
        return f"waiting for batches {before} -> {now} a step" if before != now else ""
    return f"GPU seconds {before} -> {now}" if before != now else f"the same {now} of the GPU"


def _subject_of_note(metric: MetricVerdict) -> str:
    """Return the words that begin the note on a figure."""
    name = metric.metric
    if name == "python_calls" and metric.status == "not-comparable":
        return "its calls of Python functions are not compared: "
    if name not in _SUBJECTS or (name == "step_seconds" and metric.gpu_busy_share is None):
        return phase_prefix(metric)
    subject, otherwise = _SUBJECTS[name]
    return subject if metric.status == "pass" else subject + otherwise
