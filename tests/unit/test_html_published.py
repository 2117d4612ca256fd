"""Tests the bars of published tables: every printed figure has one, and they show what is to be compared."""

import functools
from pathlib import Path

import pytest
from test_cli import LLAMA, measured, run, updates
from test_html import Reader, squeezed
from unit_examples import report

from pytest_gputrain.report import json_report
from pytest_gputrain.storage.published import PublishedStore

pytest.importorskip("jinja2", reason="the extra `report` is not installed")
pytest.importorskip("matplotlib", reason="the extra `report` is not installed")

from pytest_gputrain.report.html import page
from pytest_gputrain.report.html.charts import Charts
from pytest_gputrain.report.html.published import whole_tables
from pytest_gputrain.report.published import METRICS

TABLES = {table.name: table for table in PublishedStore(Path(__file__).parents[2] / "baselines" / "published").tables}


class Recorder(Charts):
    """Draws, and keeps what it drew."""

    def __init__(self):
        super().__init__()
        self.drawn = {}

    def bars(self, groups, *, title, **others):
        self.drawn[title] = {name: list(bars) for name, bars in groups}
        return super().bars(groups, title=title, **others)


@functools.cache
def drawing(name):
    """Of a table as it is published, once for all tests."""
    return draw(name)


def draw(name, *results):
    by_row = {(result.platform, str(result.case)): result for result in results}

    def find(row):
        return by_row.get((row.platform, str(row.case)))

    charts = Recorder()
    return list(whole_tables([TABLES[name]], find, charts)), charts.drawn


@pytest.mark.parametrize("name", TABLES)
def test_every_printed_figure_has_one_bar_of_its_length(name):
    figures = [
        getattr(of_framework, metric.field)
        for metric in METRICS
        for row in TABLES[name].published()
        for of_framework in row.figures.values()
    ]
    lengths = [
        part[0] for groups in drawing(name)[1].values() for bars in groups.values() for bar in bars for part in bar.parts
    ]
    assert sorted(filter(None, lengths)) == sorted(figure.middle for figure in figures if figure)
    assert bool(lengths) == (name != "paddle-distributed"), "whose figures are pictures"


LLAVA = next(row for row in TABLES["paddlemix"].published() if str(row.case) == "llava-1.6-7b-pretrain-bf16-zero2")
DRAWINGS = {
    "paddlemix": ("paddlemix", ()),
    "pangu-deepspeed": ("pangu-deepspeed", ()),
    "llm-trainer": ("llm-trainer", ()),
    "llm-trainer, and one row measured": ("llm-trainer", (measured(LLAMA, seconds=4.8),)),
    "paddlemix, and one row measured": ("paddlemix", (measured(LLAVA, seconds=2.0),)),
    "pangu-deepspeed, and one row measured": ("pangu-deepspeed", (updates(5.4),)),
}


@pytest.mark.parametrize("what", DRAWINGS)
def test_what_is_compared_stands_side_by_side(what, snapshot):
    """Frameworks, GPUs or sizes of buckets, each in a colour of its own, and what was measured here behind its row."""
    name, results = DRAWINGS[what]
    charts, drawn = draw(name, *results) if results else drawing(name)
    bars = {
        f"{title}: {group}": " | ".join(f"{bar.text.strip()} in {[part[1] for part in bar.parts]}" for bar in bars)
        for title, groups in drawn.items()
        for group, bars in groups.items()
        if (any("here" in bar.text for bar in bars) if results else group == next(iter(groups)))
    }
    legends = {"; ".join(f"{entry.text} ({entry.colour})" for entry in chart.legend): chart.about for chart in charts}
    assert {"bars": bars, "legends": legends} == snapshot


@pytest.mark.parametrize("name", TABLES)
def test_every_figure_is_there_for_a_screen_reader(name):
    for chart in drawing(name)[0]:
        assert all(text in chart.chart.svg for text in ('role="img"', "<title", "<desc"))
        assert chart.headers[:2] == ("Case", "Published")
        assert all(row[1].split()[0] in chart.chart.svg for row in chart.rows)


def test_the_command_writes_a_page_from_the_tables_alone(capsys, tmp_path):
    code, out, err = run(capsys, "--published", "--format", "html", "-o", str(tmp_path / "tables.html"))
    assert (code, out, err) == (0, "", "")
    reader = Reader((tmp_path / "tables.html").read_text())
    assert reader.sections == ["tables"]
    assert "paddle-distributed prints no figures, so nothing of it is drawn" in reader.text
    assert {tag for tag, attributes in reader.elements if "src" in attributes or "srcset" in attributes} == set()
    assert {link["href"] for link in reader.all("link")} == {"data:,"}
    policy = next(meta["content"] for meta in reader.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'")


def test_bars_of_tables_show_what_a_report_measured_and_need_the_extra_and_the_tables(capsys, monkeypatch, tmp_path):
    json_report.write(report(measured(LLAMA, seconds=4.8)), tmp_path / "report.json")
    _, out, _ = run(capsys, str(tmp_path / "report.json"), "--published", "llm-trainer", "--format", "html")
    assert "4.80 s here (0.75 x)" in squeezed(Reader(out).text)
    monkeypatch.setattr(page, "_NEEDED", ("matplotlob",))
    code, out, err = run(capsys, "--published", "--format", "html")
    assert (code, out) == (2, "")
    assert err.startswith("gputrain: the HTML report needs matplotlob; install it with: pip install ")
