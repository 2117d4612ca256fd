"""Prepares the charts of reports for the HTML page: published figures, scaling, loss curves, tensors at a memory peak."""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

from pytest_gputrain.gate.count_lines import format_count
from pytest_gputrain.gate.memory import PHASES, PeaksByPhase, in_phase
from pytest_gputrain.gate.messages import count
from pytest_gputrain.gate.scaling import one_worker
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.records import CountFigure, Emulated, LossStudy, Measured, Measurement, Result, TrainingPhase
from pytest_gputrain.records.counts import MAIN
from pytest_gputrain.report.html.charts import Bar, Chart, Charts, Line
from pytest_gputrain.report.results import latest, of_kind
from pytest_gputrain.utils.units import format_bytes, format_percent, format_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class LegendEntry:
    """A line of a legend, by the number of its colour; or a fact below a chart, without one."""

    text: str
    colour: int | None = None
    bad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionedChart:
    """A chart with what is written about it."""

    title: str
    about: str
    chart: Chart
    legend: tuple[LegendEntry, ...] = ()
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    """A table below the chart, folded away."""
    table: str = ""
    """The title of the table."""


def scaling(results: Sequence[Result], charts: Charts) -> Iterator[CaptionedChart]:
    """Return charts of the throughput by the number of GPUs, for cases that differ in nothing else."""
    speeds_by_case: defaultdict[tuple[str, str, str, str, str], dict[int, tuple[float, str]]] = defaultdict(dict)
    for result in latest(of_kind(results, Measured)):
        runs = [reply for reply in result.replies if isinstance(reply, Measurement)]
        if not runs or result.summary is None:
            continue
        alone = one_worker(result.case)
        plain = alone.replace(named=tuple(name for name in alone.named if name not in ("gpus", "servers")), servers=0)
        group = (result.suite, result.device, str(plain), repr(plain.identity()), result.scale)
        number = max(1, runs[0].environment.device_count - sum(rank.role == "server" for rank in runs[0].ranks))
        speed = result.summary.samples_per_second
        speeds_by_case[group][number] = (speed, str(result.case))
        seconds = [run.one_worker_seconds for run in runs if run.one_worker_seconds]
        if seconds and number > 1:
            samples = runs[0].batch_size / number * result.case.gradient_accumulation
            speeds_by_case[group].setdefault(1, (samples / statistics.median(seconds), f"{result.case}, one worker alone"))
    for (suite, device, name, _, scale), by_workers in speeds_by_case.items():
        if len(by_workers) < 2:
            continue
        workers = sorted(by_workers)
        speeds = [by_workers[number][0] for number in workers]
        least, worker_noun = workers[0], "processes" if device == CPU else "GPUs"
        shares = [speed / (speeds[0] / least * number) for number, speed in zip(workers, speeds, strict=True)]
        labels = [
            f"{number} {worker_noun}: {format_rate(speed)}, {format_percent(share, signed=False)} of linear"
            for number, speed, share in zip(workers, speeds, shares, strict=True)
        ]
        ideal = [(number, speeds[0] / least * number) for number in (least, workers[-1])]
        yield CaptionedChart(
            title=name,
            about=f"{suite} on {device}, {scale} scale. Dotted: linear, each as fast as {least} alone.",
            chart=charts.lines(
                [Line(name=name, x=workers, y=speeds, labels=labels)],
                x=worker_noun,
                y="samples/s",
                title=f"Throughput of {name}",
                description="; ".join(labels),
                ideal=ideal,
            ),
            legend=tuple(LegendEntry(text=text) for text in labels[1:]),
        )


def losses(results: Sequence[Result], charts: Charts) -> Iterator[CaptionedChart]:
    """Return charts of the curves of ``--gpu-loss``, one chart for each case."""
    for result in of_kind(results, LossStudy):
        curves = [curve for curve in result.loss_curves if curve.losses]
        if not curves:
            continue
        lines, legend = [], []
        for number, curve in enumerate(curves):
            steps = range(1, len(curve.losses) + 1)
            labels = [f"{curve.precision}, step {step}: {loss:.4g}" for step, loss in zip(steps, curve.losses, strict=True)]
            broken = curve.non_finite_step is not None
            lines.append(Line(name=curve.precision, x=steps, y=curve.losses, labels=labels, ends=broken))
            gap = "" if curve.gap is None else f", {format_percent(curve.gap)} from fp32"
            text = f"{curve.precision}: {curve.losses[0]:.4g} to {curve.losses[-1]:.4g}, {curve.trend or 'no trend'}{gap}"
            text += f", not finite in step {curve.non_finite_step}" if broken else ""
            legend.append(LegendEntry(text=text, colour=number % len(_SERIES), bad=broken or curve.trend == "diverging"))
        legend += [
            LegendEntry(
                text=f"{curve.precision}: {curve.outcome.replace('_', ' ')}: {curve.reason}", bad=curve.outcome != "left_out"
            )
            for curve in result.loss_curves
            if not curve.losses
        ]
        yield CaptionedChart(
            title=str(result.case),
            about=f"{result.suite} on {result.device}, {result.scale} scale",
            chart=charts.lines(
                lines,
                x="step",
                y="loss",
                title=f"Loss curves of {result.case}",
                description="; ".join(entry.text for entry in legend),
            ),
            legend=tuple(legend),
        )


_SERIES: Final = range(5)

_PHASES: Final[tuple[TrainingPhase, ...]] = (
    "build",
    "forward",
    "backward",
    "between",
    "optimizer",
    "evaluate",
    "checkpoint",
)
"""The phases that are drawn: those of memory of the GPU."""
_ORIGINS: Final = (
    "made while building: weights",
    "in forward, or between backward passes: activations",
    "in backward: gradients",
    "by the optimizer: its state",
)
_COLOUR_OF: Final[dict[TrainingPhase, int]] = {"build": 0, "backward": 2, "optimizer": 3}
_COLOUR_OF_OTHERS: Final = 1
_REST: Final = 4


def memory(results: Sequence[Result], charts: Charts) -> Iterator[CaptionedChart]:
    """Return charts of the tensors at the peak of each phase on an emulated GPU, by the phase that made them."""
    for result in latest(results):
        figures = result.figures if isinstance(result, Emulated) else None
        if figures is None or not any(figures.largest.values()) or figures.peak_phase is None:
            continue
        phases = [phase for phase in _PHASES if phase in figures.phase_peak_bytes]
        bars = [(f"peak {in_phase(phase)}", [_stack(figures, phase)]) for phase in phases]
        limit, card = figures.device_memory_bytes, f"an emulated {figures.device_name}"
        peak = format_bytes(figures.peak_allocated_bytes)
        colours = {colour for _, members in bars for bar in members for _, colour in bar.parts}
        rows = [
            (
                phase,
                format_bytes(tensor.bytes),
                str(tensor.count),
                tensor.operator,
                tensor.phase,
                " x ".join(map(str, tensor.shape)),
                tensor.dtype,
            )
            for phase in phases
            for tensor in figures.largest.get(phase, ())
        ]
        yield CaptionedChart(
            title=str(result.case),
            about=f"{peak} at the peak, {in_phase(figures.peak_phase)}, on {card}",
            chart=charts.bars(
                bars,
                title=f"Live tensors of {result.case}",
                description="; ".join(f"{name}: {bar.text}" for name, (bar,) in bars),
                limit=(limit, f"{format_bytes(limit)} of {card}"),
            ),
            legend=tuple(
                LegendEntry(text=text, colour=number)
                for number, text in enumerate((*_ORIGINS, "tensors not among the largest"))
                if number in colours
            ),
            headers=("Peak of", "Size", "Tensors", "Operator", "Made in", "Shape", "Type"),
            rows=tuple(rows),
            table=f"The largest tensors ({count(len(rows), 'row')})",
        )


_BASELINE, _NOW = 4, 0
_MOST_COUNTS: Final = 2
"""Counts of a case that are drawn. Those that fail it come first, and of them those that all tables have."""


def beside_baseline(result: Result, charts: Charts) -> Iterator[CaptionedChart]:
    """Return charts of a result beside its baseline: memory by phase, and counts by line.

    Charts of what fails the case come first.
    """
    charted: list[tuple[bool, CaptionedChart]] = []
    metrics = result.verdict.metrics if result.verdict else ()
    compared = [metric for metric in metrics if metric.value is not None and metric.baseline is not None]
    memory = [metric for metric in compared if metric.metric in PHASES] or [
        metric for metric in compared if metric.metric in ("peak_allocated_bytes", "peak_reserved_bytes")
    ]
    if memory:
        names = {"peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved", **PHASES}
        chart = _beside(
            "Peak memory by phase" if memory[0].metric in PHASES else "Peak memory",
            [(names[one.metric], one.baseline or 0, one.value or 0, one.status == "regressed") for one in memory],
            format_bytes,
            charts,
        )
        charted.append((any(one.status == "regressed" for one in memory), chart))
    drawn = sorted(
        (metric for metric in compared if metric.lines),
        key=lambda metric: (metric.status != "regressed", metric.metric not in MAIN),
    )
    for metric in drawn[:_MOST_COUNTS]:
        figure = cast("CountFigure", metric.metric)
        chart = _beside(
            f"{figure.capitalize().replace('_', ' ')} of a step by line",
            [(line.line, line.baseline, line.value, line.more > 0) for line in metric.lines],
            functools.partial(format_count, figure),
            charts,
        )
        charted.append((metric.status == "regressed", chart))
    yield from (chart for _, chart in sorted(charted, key=lambda one: not one[0]))


def _beside(
    title: str, rows: Sequence[tuple[str, float, float, bool]], show: Callable[[int], str], charts: Charts
) -> CaptionedChart:
    """Return a chart of rows. Each row has a name, the baseline's figure, today's figure, and whether it has grown."""
    groups = [
        (
            name,
            [
                Bar(parts=((before, _BASELINE),), text=f"{show(round(before))} before"),
                Bar(parts=((now, _NOW),), text=f"{show(round(now))} now", bad=grown),
            ],
        )
        for name, before, now, grown in rows
    ]
    description = "; ".join(f"{name}: {before.text}, {now.text}" for name, (before, now) in groups)
    return CaptionedChart(title=title, about="", chart=charts.bars(groups, title=title, description=description))


def _stack(figures: PeaksByPhase, phase: TrainingPhase) -> Bar:
    sizes = [0.0] * (_REST + 1)
    for tensor in figures.largest.get(phase, ()):
        sizes[_COLOUR_OF.get(tensor.phase, _COLOUR_OF_OTHERS)] += tensor.bytes
    peak = figures.phase_peak_bytes[phase]
    sizes[_REST] = max(0.0, peak - sum(sizes))
    return Bar(parts=tuple((size, number) for number, size in enumerate(sizes) if size), text=format_bytes(peak))
