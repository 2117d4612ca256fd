"""The page of `gputrain emulate --html`."""

import re

import msgspec
import pytest
from test_html import Reader, squeezed

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from pytest_gputrain.records import CountCause, Counts, Place, StepCounts
from pytest_gputrain.records.emulation import (
    EmulatedDevice,
    EmulatedProcess,
    Emulation,
    MemoryPart,
    Peak,
    ProgramFit,
    Refused,
    Tensors,
)
from pytest_gputrain.report.asked import asked_by
from pytest_gputrain.report.html import page

GIB = 1 << 30


def cause(what, number, line, *counts, library=None, bytes_=()):
    own = Place(file="train.py", function="main", text=f"line_{line}()", line=line)
    return CountCause(what=what, own=own, library=library, counts=(number, *counts), bytes=bytes_)


STEPS = Counts(
    steps=(0, 1, 1),
    kinds=(StepCounts(launches=40, waits=9), StepCounts(launches=50, waits=1, h2d_pageable=1, h2d_bytes=2048)),
    causes=(
        cause("launches", 40, 1, 45, library=Place(file="torch/nn/modules/linear.py", function="Linear.forward")),
        cause("launches", 0, 2, 5),
        cause("waits", 9, 2, 1),
        cause("h2d_pageable", 0, 3, 1, bytes_=(0, 2048)),
    ),
)
ASKED = Counts(
    steps=(0,),
    kinds=(StepCounts(launches=150, waits=12),),
    causes=tuple(cause("launches", 20 - line, line) for line in range(1, 16)),
)


def test_the_lines_with_the_largest_share_of_a_figure_come_first_and_the_others_are_added_up():
    told = asked_by(EmulatedProcess(process=1, asked=ASKED))
    assert [line for line, _ in told.lines] == [
        *(f"train.py:{line} in main, line_{line}()" for line in range(1, 13)),
        "3 other lines",
    ]
    assert told.lines[-1][1]["work"] == 7 + 6 + 5
    told = asked_by(EmulatedProcess(process=1, asked=ASKED, steps=STEPS))
    cells = [told.cells(figures) for _, figures in told.lines]
    assert cells == [["1", "", "5", ""], ["", "1", "", "2.00 KiB"], ["", "", "45", ""]]


def report(**changes):
    peak = Peak(
        seconds=1.0,
        event=20,
        events=30,
        bytes=12 * GIB,
        parts=(MemoryPart(name="forward pass", bytes=9 * GIB), MemoryPart(name="optimizer", bytes=3 * GIB)),
        tensors=(Tensors(bytes=3 * GIB, count=3, where="train.py:7 in <module>", part="forward pass"),),
    )
    device = EmulatedDevice(
        index=0,
        gpu=2,
        peak_allocated_bytes=12 * GIB,
        peak_reserved_bytes=14 * GIB,
        peak=peak,
        course=tuple((number, min(number, 40 - number) * GIB * 6 // 10, 14 * GIB) for number in range(31)),
        refused=(Refused(bytes=70 * GIB, free=60 * GIB, where="train.py:9 in grow"),),
    )
    device = msgspec.structs.replace(device, **changes)
    return Emulation(
        generator="pytest-gputrain 0.1.0",
        device_name="NVIDIA H100 80GB HBM3",
        platform="h100",
        device_count=4,
        device_memory_bytes=80 * GIB,
        torch="2.13.0",
        command=("python", "train.py", "--name=<script>alert(1)</script>"),
        exit_status=0,
        processes=(
            EmulatedProcess(
                process=77,
                rank="2",
                devices=(device,),
                unknown=("cuDNN's workspaces",),
                packages={"torch": "2.13.0", "peft": "0.20.0"},
                asked=ASKED,
                steps=STEPS,
            ),
        ),
        use=(),
        fit=ProgramFit(verdict="does not fit", headroom_bytes=-10 * GIB, sentence="70.0 GiB were asked for"),
        notes=("the kernels for sm_80 decided what was allocated",),
    )


def test_what_the_page_says(snapshot):
    whole, none = report(), msgspec.structs.replace(report(), processes=())
    html = page.page_of_emulation(whole)
    assert html.count("<svg") == 3
    assert "allocation 20: 12.0 GiB in use, 14.0 GiB reserved" in html
    scenes = {"a peak": whole, "not recorded": report(course=(), peak=None), "no process": none}
    assert {
        what: [line for line in map(squeezed, Reader(page.page_of_emulation(made)).text.splitlines()) if line]
        for what, made in scenes.items()
    } == snapshot


def test_the_page_loads_nothing_and_runs_nothing_of_the_programs():
    html = page.page_of_emulation(report())
    assert "<script>alert" not in html
    assert "alert(1)" in html  # as text
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]+"', html)
    assert "default-src 'none'" in html
