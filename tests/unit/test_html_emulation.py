"""The page of `gputrain emulate --html`."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from pytest_gputrain.records.emulation import EmulatedDevice, EmulatedProcess, Emulation, Part, Peak, Refused, Tensors
from pytest_gputrain.report.html import page

GIB = 1 << 30


def report(**changes):
    peak = Peak(
        seconds=1.0,
        event=20,
        events=30,
        bytes=12 * GIB,
        parts=(Part(name="forward pass", bytes=9 * GIB), Part(name="optimizer", bytes=3 * GIB)),
        tensors=(Tensors(bytes=3 * GIB, count=3, where="train.py:7 in <module>", part="forward pass"),),
    )
    device = EmulatedDevice(
        index=0,
        gpu=2,
        peak_allocated=12 * GIB,
        peak_reserved=14 * GIB,
        peak=peak,
        course=tuple((number, min(number, 40 - number) * GIB * 6 // 10, 14 * GIB) for number in range(31)),
        refused=(Refused(bytes=70 * GIB, free=60 * GIB, where="train.py:9 in grow"),),
    )
    device = msgspec.structs.replace(device, **changes)
    return Emulation(
        gpu="NVIDIA H100 80GB HBM3",
        marker="h100",
        gpus=4,
        memory_bytes=80 * GIB,
        torch="2.13.0",
        command=("python", "train.py", "--name=<script>alert(1)</script>"),
        status=0,
        processes=(EmulatedProcess(process=77, rank="2", devices=(device,), unknown=("cuDNN's workspaces",)),),
        use=(),
    )


def text_of(html):
    texts, parser = [], HTMLParser(convert_charrefs=True)
    parser.handle_data = texts.append
    parser.feed(html)
    return " ".join(" ".join(texts).split())


def test_memory_is_drawn_with_the_peak_and_what_is_in_it():
    html = page.page_of_emulation(report())
    text = text_of(html)
    assert "rank 2 on GPU 2" in text
    assert "peak: 12.0 GiB in use" in text
    assert "peak allocated at least 12.0 GiB" in text
    assert "peak reserved at least 14.0 GiB of 80.0 GiB" in text
    assert "At allocation 20 of 30" in text
    assert "train.py:7 in <module> 9.00 GiB 3 x 3.00 GiB forward pass" in text
    assert "not known, and not counted: cuDNN's workspaces." in text
    assert "Out of memory on GPU 2: 70.0 GiB were asked for and 60.0 GiB were free, at train.py:9 in grow." in text
    assert html.count("<svg") == 2
    assert "allocation 20: 12.0 GiB in use, 14.0 GiB reserved" in html


def test_the_page_loads_nothing_and_runs_nothing_of_the_programs():
    html = page.page_of_emulation(report())
    assert "<script>alert" not in html
    assert "alert(1)" in html  # as text
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]+"', html)
    assert "default-src 'none'" in html


def test_what_was_not_recorded_is_said():
    text = text_of(page.page_of_emulation(report(course=(), peak=None)))
    assert "Memory of rank 2 on GPU 2 is not drawn: the program recorded its memory itself." in text
    nothing = msgspec.structs.replace(report(), processes=())
    assert "there is nothing to draw" in text_of(page.page_of_emulation(nothing))
