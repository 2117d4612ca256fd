"""Prepares the charts of `gputrain emulate --html`: how memory went, what was in it at the peak, and each line's work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytest_gputrain.gate.messages import count
from pytest_gputrain.records.emulation import EmulatedDevice, EmulatedProcess, Emulation, Peak
from pytest_gputrain.records.expected import slowest
from pytest_gputrain.report import expected
from pytest_gputrain.report.asked import asked_by
from pytest_gputrain.report.html.charts import Bar, Chart, Charts, Line, axis_unit
from pytest_gputrain.report.html.sections import CaptionedChart, LegendEntry
from pytest_gputrain.utils.units import format_bytes

_LINES: Final = ("in use", "reserved")


def courses(report: Emulation, charts: Charts) -> Iterator[CaptionedChart]:
    """Return charts of memory from the first allocation to the last, for each process and GPU."""
    for process in report.processes:
        for device in process.devices:
            if device.course:
                yield _course(process, device, report, charts)


def peaks(report: Emulation, charts: Charts) -> Iterator[CaptionedChart]:
    """Return charts of the memory at the peak, by the part of training that allocated it, with the largest tensors."""
    for process in report.processes:
        for device in process.devices:
            if device.peak is not None:
                yield _peak(process, device, device.peak, charts)


def asked(report: Emulation, charts: Charts) -> Iterator[CaptionedChart]:
    """Return charts of the work that each line of the program gives to the GPU, with a table of all counts."""
    for process in report.processes:
        told = asked_by(process)
        if told is None or not told.lines:
            continue
        whose = _of_process(process)
        groups = []
        for place, figures in told.lines:
            said = ", ".join(f"{name} {cell}" for name, cell in zip(told.columns, told.cells(figures), strict=True) if cell)
            groups.append((place, [Bar(parts=((figures.get("work", 0), 0),), text=said)]))
        yield CaptionedChart(
            title=whose,
            about=f"What each line asks of the GPU {told.about}. Bars are as long as the work.",
            chart=charts.bars(
                groups,
                title=f"Work of each line of {whose}",
                description="; ".join(f"{place}: {bar.text}" for place, (bar,) in groups),
            ),
            headers=("line", *told.columns),
            rows=tuple((place, *told.cells(figures)) for place, figures in (*told.lines, *told.sums)),
            table="all that each line asks for",
        )


def notes(report: Emulation) -> Iterator[str]:
    """Return the notes beside the charts, with the verdict first."""
    yield f"{report.fit.verdict.capitalize()}: {report.fit.sentence}."
    for note in report.notes:
        yield f"{note[0].upper()}{note[1:]}."
    yield f"Versions: {report.versions}."
    if not report.processes:
        yield "No process of the program that used the GPU ended by Python's own end, so there is nothing to draw."
    if one := slowest(process.expected for process in report.processes):
        yield f"Expected time of a step: {expected.describe(one)}."
    for process in report.processes:
        if process.unknown:
            yield f"Process {process.process}: not known, and not counted: {', '.join(process.unknown)}."
        for device in process.devices:
            if not device.course:
                yield f"Memory of {_whose(process, device)} is not drawn: the program recorded its memory itself."
            for refused in device.refused:
                yield (
                    f"Out of memory on GPU {device.gpu}: {format_bytes(refused.bytes)} were asked for and "
                    f"{format_bytes(refused.free)} were free, at {refused.where or 'a place without a Python line'}."
                )


def _of_process(process: EmulatedProcess) -> str:
    return f"rank {process.rank}" if process.rank else f"process {process.process}"


def _whose(process: EmulatedProcess, device: EmulatedDevice) -> str:
    return f"{_of_process(process)} on GPU {device.gpu}"


def _course(process: EmulatedProcess, device: EmulatedDevice, report: Emulation, charts: Charts) -> CaptionedChart:
    size, unit = axis_unit("bytes", max(reserved for _, _, reserved in device.course))
    numbers = [number for number, _, _ in device.course]
    lines = [
        Line(
            name=name,
            x=numbers,
            y=[heights[which] / size for heights in device.course],
            labels=[
                f"allocation {number:,}: {format_bytes(in_use)} in use, {format_bytes(reserved)} reserved"
                for number, in_use, reserved in device.course
            ],
        )
        for which, name in enumerate(_LINES, 1)
    ]
    at_least = "at least " if process.unknown_in_torch else ""
    facts = (
        f"peak allocated {at_least}{format_bytes(device.peak_allocated_bytes)}",
        f"peak reserved {at_least}{format_bytes(device.peak_reserved_bytes)} of {format_bytes(report.device_memory_bytes)}",
    )
    mark = None
    if device.peak is not None:
        mark = (device.peak.event, f"peak: {format_bytes(device.peak.bytes)} in use")
    chart = charts.lines(
        lines,
        x="allocation",
        y=unit,
        title=f"Memory of {_whose(process, device)}",
        description="; ".join(facts),
        mark=mark,
    )
    names = tuple(LegendEntry(text=name, colour=number) for number, name in enumerate(_LINES))
    return CaptionedChart(
        title=_whose(process, device),
        about=(
            f"{report.device_name}. The axis counts allocations. Of neighbouring allocations the picture shows the highest."
        ),
        # The labels of both lines are the same at each point, so the labels of the first line suffice.
        chart=Chart(svg=chart.svg, points=chart.points[: len(device.course)]),
        legend=(*names, *(LegendEntry(text=fact) for fact in facts)),
    )


def _peak(process: EmulatedProcess, device: EmulatedDevice, peak: Peak, charts: Charts) -> CaptionedChart:
    size, _ = axis_unit("bytes", max(part.bytes for part in peak.parts))
    groups = [(part.name, [Bar(parts=((part.bytes / size, 0),), text=format_bytes(part.bytes))]) for part in peak.parts]
    rows = tuple(
        (
            group.where,
            format_bytes(group.bytes * group.count),
            f"{group.count} x {format_bytes(group.bytes)}",
            group.part,
        )
        for group in peak.tensors
    )
    return CaptionedChart(
        title=_whose(process, device),
        about=f"At allocation {peak.event:,} of {peak.events:,}, {format_bytes(peak.bytes)} in use.",
        chart=charts.bars(
            groups,
            title=f"Memory at the peak of {_whose(process, device)}",
            description="; ".join(f"{part.name}: {format_bytes(part.bytes)}" for part in peak.parts),
        ),
        headers=("line", "together", "tensors", "part"),
        rows=rows,
        table=f"the {count(len(rows), 'largest group')} of tensors",
    )
