"""Judges the counts of a case's steps, such as kernel launches and waits, against those of its baseline. Pure.

Both are of emulated GPUs, of a CPU, or of real GPUs of one model, where libraries choose the same kernels.

Each step is compared with the step of the same number, steps of the warm-up included, if both update or both do not. The
first steps are compared so, too, since what a step allocates or sets up late is the same in each run. Only steps in which
the baseline itself compiles or captures, up to the first that does neither, are not judged: they are not steady. A CPU runs
graphs as they are, so there what is compiled is all that differs in such steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from pytest_gputrain.gate.count_lines import Difference, describe_falls, describe_growth, lines_beside
from pytest_gputrain.records import CountFigure, Counts, MetricVerdict, Status, StepCounts
from pytest_gputrain.records.counts import COUNT_FIGURES, OF_THE_PROGRAM, PARTS_OF_WORK
from pytest_gputrain.records.tolerance import CountTerms

BY_THE_RULES: Final = CountTerms()

_WORK_RATIO: Final = 0.01
_LEAST_WORK: Final = 5
"""More work than this fails if it is more than the ratio, too. On 294 commits of public libraries both together failed for
twelve, of which five had slowed down unintended, and seven were meant to do more."""
_MOST_WORK: Final = 60
"""More work than this fails in steps of any size: one copy in each of 32 blocks, forwards and backwards, is 64."""
_EXCUSED_WORK_RATIO: Final = 0.05
"""More work than this fails even in a step that waits less."""
_BYTES_RATIO: Final = 0.01
_SLOW_CLASSES: Final[tuple[CountFigure, ...]] = ("fp32_flops", "unaligned_flops", "nchw_flops")
_FLOPS_RATIO: Final = 0.01
"""The share of a step's FLOPs in libraries that may move to a slower class."""
_STREAM_WAITS_RATIO: Final = 0.5
_LEAST_STREAM_WAITS: Final = 8
"""More waits of streams than this fail if they are more than the ratio, too. A stream that copies ahead of time adds one to
none and saves time."""
_TOLD: Final[tuple[CountFigure, ...]] = (
    "memsets",
    "blocks",
    "kernels",
    "python_calls",
    "other_reads",
    *OF_THE_PROGRAM,
)
"""The figures that fail nothing without a tolerance."""
_PYTHON_RATIO: Final = 0.1
"""More calls of Python functions than this share are told, unless the GPU has less to do. On 294 commits of public libraries
they changed in a quarter, nearly always by less than 2 %, and this fired once, rightly."""
_STEADY_STEPS: Final = 5
"""The last steps, in which a baseline asks the driver for no memory if the cache of its allocator has stopped to grow."""


class JudgedCounts(NamedTuple):
    """The result of judging the counts of a case. Each text follows the case: ``waits for the GPU 2 times a step (1 before):
    ...``."""

    metrics: tuple[MetricVerdict, ...]
    """The verdict on each figure, with the values of the step that changed most in the direction of its status; of the last
    step if none changed."""
    worse: tuple[str, ...]
    doubtful: tuple[str, ...]
    """Growth that a second run does not confirm."""
    better: tuple[str, ...]
    told: tuple[str, ...]
    """Growth that passes, with the reason. The notes of the metrics are the same."""
    work_rose: bool
    """Whether any step has more work than before, within the limit or not."""


UNJUDGED: Final = JudgedCounts((), (), (), (), (), work_rose=False)
"""The result for counts that are not compared."""


class _Pair(NamedTuple):
    """The figures of one step, before and now."""

    step: int
    before: StepCounts
    now: StepCounts


class _Finding(NamedTuple):
    """The judged change of a figure."""

    metric: MetricVerdict
    difference: Difference | None
    """How steps differ. None if they do not, or fall by less than what counts as an improvement."""
    passes: str = ""
    """Why growth passes, to follow its sentence."""
    step: int = 0
    """The index of the step whose values the metric has."""

    def without_fewer_bytes(self) -> _Finding:
        """Return the finding, which is no improvement by bytes alone."""
        if self.metric.status != "improved" or not self.metric.metric.endswith("_bytes"):
            return self
        return _Finding(msgspec.structs.replace(self.metric, status="pass"), None, step=self.step)


def judge_counts(
    before: Counts, now: Counts, terms: CountTerms = BY_THE_RULES, again: Counts | None = None, where: str = "a step"
) -> JudgedCounts | None:
    """Judge the counts of a case.

    Args:
        again: the counts of a second run. A figure that would fail is in doubt if any step has another value there.
        where: how texts name the counted part, such as ``a step``.

    Returns:
        The result; None if no step can be compared, because none updates where the step of its number did.
    """
    before, now, again = _aligned(before, now, again)
    pairs = _pairs(before, now)
    if not pairs:
        return None
    if now.on_cpu and before.first != now.first:
        terms = dataclasses.replace(terms, mode="tell")
    graphs = before.launches_graphs or now.launches_graphs
    figures = [figure for figure in _judged_figures(terms) if figure in now.figures and (graphs or figure != "gpu_work")]
    findings = [_Rule(figure, terms, on_cpu=now.on_cpu, where=where).judge(pairs, now, again) for figure in figures]
    called = [pair for pair in pairs if pair.before.python_calls and pair.now.python_calls]
    uncompared = _uncompared_calls(before, now, called)
    if called and not uncompared:
        figures.append("python_calls")
        findings.append(_Rule("python_calls", terms, on_cpu=now.on_cpu, where=where).judge(called, now, again))
    work_rose = any(pair.now.work > pair.before.work for pair in pairs)
    if work_rose:
        findings = [finding.without_fewer_bytes() for finding in findings]

    def of_status(status: Status, passes: str = "") -> list[Difference]:
        found = (f for f in findings if f.metric.status == status and f.passes == passes)
        return [finding.difference for finding in found if finding.difference]

    notes: dict[str, str] = {}
    for reason in dict.fromkeys(finding.passes for finding in findings if finding.passes):
        told = of_status("pass", reason)
        clauses = describe_growth(told, before, now)
        clauses |= describe_falls(one for one in told if one.metric in OF_THE_PROGRAM)
        notes |= {figure: f"{clause}, {reason}" for figure, clause in clauses.items()}
    metrics = [
        msgspec.structs.replace(
            finding.metric,
            note=notes.get(finding.metric.metric, ""),
            lines=lines_beside(figure, finding.step, before, now) if _is_drawn(finding.metric) else (),
        )
        for figure, finding in zip(figures, findings, strict=True)
    ]
    if uncompared:
        metrics.append(MetricVerdict(metric="python_calls", status="not-comparable", note=uncompared))
    return JudgedCounts(
        metrics=tuple(metrics),
        worse=tuple(describe_growth(of_status("regressed"), before, now).values()),
        doubtful=tuple(
            f"{what}, which a second run in a fresh process does not confirm"
            for what in describe_growth(of_status("inconclusive"), before, now).values()
        ),
        better=tuple(describe_falls(of_status("improved")).values()),
        told=tuple(notes.values()),
        work_rose=work_rose,
    )


def with_evaluation(
    steps: JudgedCounts, before: Counts | None, now: Counts | None, terms: CountTerms, again: Counts | None = None
) -> JudgedCounts:
    """Judge the counts of the evaluation of a case by the same rules, and add the results to those of the steps.

    Args:
        steps: the result for the counts of the steps.
        before: the counts of the evaluation; None if there is none. The same for ``now`` and ``again``.
    """
    judged = judge_counts(before, now, terms, again, "in its evaluation") if before and now and terms.mode != "off" else None
    if judged is None:
        return steps
    status: Status = "regressed" if judged.worse else "inconclusive" if judged.doubtful else "pass"
    status = "improved" if status == "pass" and judged.better else status
    metric = MetricVerdict(metric="evaluation_counts", status=status, note="; ".join(judged.told))
    return steps._replace(
        metrics=(*steps.metrics, metric),
        worse=(*steps.worse, *judged.worse),
        doubtful=(*steps.doubtful, *judged.doubtful),
        better=(*steps.better, *judged.better),
        told=(*steps.told, *judged.told),
    )


def have_steps_in_common(before: Counts, now: Counts) -> bool:
    """Tell whether the counts have any step that can be compared."""
    aligned_before, aligned_now, _ = _aligned(before, now, None)
    return bool(_pairs(aligned_before, aligned_now))


def _pairs(before: Counts, now: Counts) -> list[_Pair]:
    """Return the steps that are compared; the counts are aligned already."""
    steps = zip(before.steps, now.steps, strict=False)
    pairs = (_Pair(step, before.kinds[old], now.kinds[new]) for step, (old, new) in enumerate(steps))
    return [pair for pair in pairs if pair.before.update == pair.now.update]


def _aligned(before: Counts, now: Counts, again: Counts | None) -> tuple[Counts, Counts, Counts | None]:
    """Return the counts from the first timed step that all of them have. A run with fewer warm-up steps has counted earlier
    ones."""

    def without(steps: int, counts: Counts) -> Counts:
        return msgspec.structs.replace(counts, steps=counts.steps[max(0, steps) :])

    later = 0 if now.on_cpu else now.first - before.first
    return without(later, before), without(-later, now), None if again is None else without(-later, again)


def most_without_growth(figure: CountFigure, value: float) -> float:
    """Return the highest value that the rules do not call growth from this one."""
    match figure:
        case "work" | "gpu_work" | "operators" | "launches" | "library_calls" | "d2d" | "replays":
            return value + max(_LEAST_WORK, min(_WORK_RATIO * value, _MOST_WORK))
        case "h2d_bytes" | "d2h_bytes" | "collective_bytes":
            return value + _BYTES_RATIO * value
        case "fp32_flops" | "unaligned_flops" | "nchw_flops":
            return value + _FLOPS_RATIO * value
        case "python_calls":
            return value + _PYTHON_RATIO * value
        case "stream_waits":
            return value + max(_STREAM_WAITS_RATIO * value, _LEAST_STREAM_WAITS)
        case _:
            return value


def _is_drawn(metric: MetricVerdict) -> bool:
    """Tell whether reports draw the figure by line: the work, on a CPU the operators, and whatever has grown."""
    return metric.metric in ("work", "operators") or (metric.value or 0) > (metric.baseline or 0)


def _judged_figures(terms: CountTerms) -> Iterator[CountFigure]:
    """Yield the figures of all judged steps: the sum of the work, and each part with a tolerance of its own."""
    figures = (name for name in COUNT_FIGURES if name != "python_calls")
    yield from (name for name in figures if name not in PARTS_OF_WORK or name in terms.tolerances)


def _has_no_less_to_do(pair: _Pair) -> bool:
    """Tell whether a step gives the GPU as much work as before, or more; on a CPU, whether it runs as many operators or
    more."""
    return pair.now.work >= pair.before.work and pair.now.operators >= pair.before.operators


def _uncompared_calls(before: Counts, now: Counts, called: Sequence[_Pair]) -> str:
    """Say why calls of Python functions are not compared although one side has them; empty if they are compared.

    Args:
        called: the steps in which both sides have them.
    """
    if before.python == now.python:
        return "they were recorded in other steps" if now.python and not called else ""
    if before.python and now.python:
        return f"they were recorded with Python {before.python}, and this is Python {now.python}"
    return "they were not recorded" if now.python else "they were not counted"


class _Rule:
    """The rule by which one figure is judged."""

    def __init__(self, figure: CountFigure, terms: CountTerms, *, on_cpu: bool, where: str) -> None:
        self._figure = figure
        self._where = where
        self._on_cpu = on_cpu
        self._tolerance = terms.tolerances.get(figure)
        self._parts: tuple[CountFigure, ...] = (figure,)
        if figure == "work":
            self._parts = tuple(part for part in PARTS_OF_WORK if part not in terms.tolerances)
        self._only_told = terms.mode == "tell" or (figure in _TOLD and not self._tolerance)

    def judge(self, pairs: Sequence[_Pair], now: Counts, again: Counts | None) -> _Finding:
        """Judge the figure in all steps that are compared."""
        more = [self._value(pair.now) - self._value(pair.before) for pair in pairs]
        if self._figure in OF_THE_PROGRAM and not self._tolerance:
            more = list(map(abs, more))
        steady = self._steady(pairs)
        above = [at for at, pair in enumerate(pairs) if self._value(pair.now) > self._limit(pair.before, pair.now)]
        tail = steady or range(max(len(pairs) - _STEADY_STEPS, len(pairs) // 2), len(pairs))
        below = [at for at in tail if self._value(pairs[at].before) > self._limit(pairs[at].now, pairs[at].before)]
        grown = [at for at, change in enumerate(more) if change > 0]
        if self._figure == "python_calls":
            grown = [at for at in above if _has_no_less_to_do(pairs[at])]
        excused = [at for at in above if self._is_excused(pairs[at])]
        failing = [at for at in above if at in steady and at not in excused]
        status: Status = "pass"
        passes = ""
        if failing and not self._only_told:
            confirmed = again is None or self._values(now) == self._values(again)
            status = "regressed" if confirmed else "inconclusive"
            chosen, shown = above, max(failing, key=more.__getitem__)
        elif grown:
            chosen, shown = grown, max(grown, key=more.__getitem__)
            passes = self._why_it_passes(shown, above, excused)
        elif below and not self._only_told:
            status, chosen, shown = "improved", below, min(below, key=more.__getitem__)
        else:
            chosen, shown = [], len(pairs) - 1
        pair = pairs[shown]
        metric = MetricVerdict(
            metric=self._figure,
            status=status,
            value=self._value(pair.now),
            baseline=self._value(pair.before),
            limit=None if self._only_told else self._limit(pair.before, pair.now),
        )
        if not chosen:
            return _Finding(metric, None, step=pair.step)
        when = self._where
        if len(chosen) < len(pairs):
            when = f"in step {pair.step + 1}" if len(chosen) == 1 else f"in {len(chosen)} of its {len(pairs)} steps"
        difference = Difference(self._figure, self._parts, pair.step, pair.before, pair.now, when)
        return _Finding(metric, difference, passes, pair.step)

    def _why_it_passes(self, at: int, above: Sequence[int], excused: Sequence[int]) -> str:
        """Say why the growth of a figure in a step does not fail."""
        if self._only_told:
            return "which is not judged"
        if at in excused:
            return f"which passes because the step {'reads fewer values' if self._on_cpu else 'waits less for the GPU'}"
        return "which passes outside of steady steps" if at in above else "within the limit"

    def _values(self, counts: Counts) -> list[int]:
        return [self._value(counts.kinds[kind]) for kind in counts.steps]

    def _value(self, step: StepCounts) -> int:
        return sum(step.figure(part) for part in self._parts)

    def _limit(self, base: StepCounts, other: StepCounts) -> float:
        """Return the highest value that is no growth from step ``base`` to step ``other``."""
        value = self._value(base)
        whole = other.library_flops if self._figure.endswith("_flops") else value
        if self._tolerance:
            return value + self._tolerance.ratio * whole + self._tolerance.more
        if self._figure in _SLOW_CLASSES:
            # If a step computes more of everything, its slow part may grow in the same proportion. What moved from one
            # slower class to another was slow before.
            others = set(_SLOW_CLASSES) - {self._figure}
            left = sum(max(0, base.figure(other_class) - other.figure(other_class)) for other_class in others)
            growth = whole / base.library_flops if base.library_flops else 1.0
            return value * max(1.0, growth) + left + _FLOPS_RATIO * whole
        return most_without_growth(self._figure, value)

    def _steady(self, pairs: Sequence[_Pair]) -> range:
        """Return the indices of the pairs of steps in which growth fails."""
        if self._figure in ("mallocs", "frees") and not self._tolerance:
            asked = [at for at, pair in enumerate(pairs) if self._value(pair.before)]
            steady = range(asked[-1] + 1 if asked else 0, len(pairs))
            return steady if len(steady) >= min(_STEADY_STEPS, len(pairs)) else range(0)
        if self._on_cpu and self._figure != "compilations":
            return range(len(pairs))
        compiling = (pair.before.compilations or pair.before.graph_breaks or pair.before.captures for pair in pairs)
        first = sum(1 for _ in itertools.takewhile(bool, compiling))
        return range(first if self._on_cpu else min(first, len(pairs) // 2), len(pairs))

    def _is_excused(self, pair: _Pair) -> bool:
        """Tell whether a step's work grows a little, while the host waits less often and never more."""
        if self._figure not in ("work", "gpu_work", "operators") or self._tolerance:
            return False
        waits, copies = pair.now.waits - pair.before.waits, pair.now.pageable - pair.before.pageable
        waits += pair.now.reads - pair.before.reads
        little = self._value(pair.now) <= self._value(pair.before) * (1 + _EXCUSED_WORK_RATIO)
        return little and waits <= 0 and copies <= 0 and waits + copies < 0
