"""Tests the bars of published tables: every printed figure has one, and they show what is to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_cli import LLAMA, ZERO, measured, run, updates
from test_html import Reader, squeezed
from unit_examples import report

from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.records import Published, Result
from pytest_gputrain.report import json_report
from pytest_gputrain.storage.published import PublishedStore

pytest.importorskip("jinja2", reason="the extra `report` is not installed")
pytest.importorskip("matplotlib", reason="the extra `report` is not installed")

from pytest_gputrain.report.html import page
from pytest_gputrain.report.html.charts import Bar, Chart, Charts
from pytest_gputrain.report.html.published import whole_tables
from pytest_gputrain.report.html.sections import CaptionedChart
from pytest_gputrain.report.published import METRICS

TABLES = {table.name: table for table in PublishedStore(Path(__file__).parents[2] / "baselines" / "published").tables}
Drawing = dict[str, dict[str, list[Bar]]]
"""Bars by title of the chart and name of the group."""


class Recorder(Charts):
    """Draws, and keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: Drawing = {}

    def bars(self, groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str, **others: Any) -> Chart:
        self.drawn[title] = {name: list(bars) for name, bars in groups}
        return super().bars(groups, title=title, **others)


def draw(name: str, *results: Result) -> tuple[list[CaptionedChart], Drawing]:
    by_row = {(result.platform, str(result.case)): result for result in results}

    def find(row: Published) -> Result | None:
        return by_row.get((row.platform, str(row.case)))

    charts = Recorder()
    return list(whole_tables([TABLES[name]], find, charts)), charts.drawn


def report_of(folder: Path, *results: Result) -> str:
    json_report.write(report(*results), folder / "report.json")
    return str(folder / "report.json")


def texts(bars: Sequence[Bar]) -> list[str]:
    return [bar.text.strip() for bar in bars]


def colours(bars: Sequence[Bar]) -> list[int]:
    return [part[1] for bar in bars for part in bar.parts]


@pytest.mark.parametrize("name", TABLES)
def test_every_printed_figure_has_one_bar_of_its_length(name: str) -> None:
    figures = [
        getattr(of_framework, metric.field)
        for metric in METRICS
        for row in TABLES[name].published()
        for of_framework in row.figures.values()
    ]
    lengths = [
        part[0] for groups in draw(name)[1].values() for bars in groups.values() for bar in bars for part in bar.parts
    ]
    assert sorted(filter(None, lengths)) == sorted(figure.middle for figure in figures if figure)
    assert bool(lengths) == (name != "paddle-distributed"), "whose figures are pictures"


def test_paddle_stands_beside_pytorch() -> None:
    (chart, *_), drawn = draw("paddlemix")
    groups = drawn["paddlemix on H800: samples/s"]
    assert len(groups) == 12
    assert texts(groups["llava-1.6-7b, pretrain, bf16, zero2"]) == ["65 PyTorch", "82 Paddle"]
    assert {tuple(colours(bars)) for bars in groups.values()} == {(1, 2)}
    assert [(entry.text, entry.colour) for entry in chart.legend] == [("PyTorch", 1), ("Paddle", 2)]
    assert chart.about.startswith("Longer is faster.")


def test_memory_is_drawn_by_stage_and_size_of_buckets() -> None:
    groups = draw("pangu-deepspeed")[1]["pangu-deepspeed: device memory of pangu-350m"]
    offloaded = groups["fp16-amp, zero2, offload optimizer"]
    assert texts(offloaded) == [
        "3,668 MiB bucket 2e8",
        "4,240 MiB bucket 5e8",
        "5,194 MiB bucket 1e9",
        "12,824 MiB bucket 5e9",
    ]
    assert len(set(colours(offloaded))) == 4
    assert [name for name in groups if "zero3" in name] == [
        "fp16-amp, zero3",
        "fp16-amp, zero3, offload optimizer",
        "fp16-amp, zero3, offload optimizer, offload param",
        "fp16-amp, zero3, offload optimizer, offload param, overlap comm",
    ]
    large = draw("pangu-deepspeed")[1]["pangu-deepspeed: device memory of pangu-2.6b"]
    assert texts(large["fp16-amp, single"]) == ["OOM V100", "52,783 MiB A100"]
    assert texts(large["bf16, zero0"]) == ["error"]
    live = large["bf16, zero3, offload optimizer, offload param, overlap comm"]
    assert texts(live) == ["15,981 MiB live 1e9", "12,023 MiB live 5e8", "12,023 MiB live 2e8"]
    assert colours(live) == colours(offloaded)[2::-1], "the colour is the size's"


def test_seconds_a_step_are_drawn_by_gpu() -> None:
    titles = [PLATFORMS[marker].title for marker in ("h100", "rtx_pro_6000", "a100")]
    charts, drawn = draw("llm-trainer")
    groups = drawn["llm-trainer: sec/step of gemma-2-9b"]
    assert texts(groups["lora, bf16, single"]) == [
        f"{seconds} s {title}" for seconds, title in zip(("12.9", "17.2", "20.0"), titles, strict=True)
    ]
    assert texts(groups["qlora, fp32, single"]) == [f"OOM {titles[0]}", f"40.3 s {titles[1]}", f"OOM {titles[2]}"]
    assert {tuple(colours(bars)) for bars in groups.values()} == {(1, 2, 3)}
    assert [entry.text for entry in charts[0].legend] == titles
    assert set(drawn["llm-trainer: model memory of gemma-2-9b"]) == {"lora, bf16", "qlora, fp32"}, "CPU Offload is no figure"


def test_what_was_measured_stands_behind_its_row() -> None:
    charts, drawn = draw("llm-trainer", measured(LLAMA, seconds=4.8))
    groups = drawn["llm-trainer: sec/step of llama-3.1-8b"]
    assert texts(groups["lora, bf16"])[:2] == ["6.4 s H100", "4.80 s here (0.75 x)"]
    assert colours(groups["lora, bf16"]) == [1, 0, 2, 3]
    assert colours(groups["full, bf16"]) == [1, 2, 3]
    assert [entry.text for entry in charts[0].legend][-1] == "measured here"
    row = next(row for row in TABLES["paddlemix"].published() if str(row.case) == "llava-1.6-7b-pretrain-bf16-zero2")
    both = draw("paddlemix", measured(row, seconds=2.0))[1]["paddlemix on H800: samples/s"]
    assert texts(both["llava-1.6-7b, pretrain, bf16, zero2"])[2] == "64 here (0.98 x PyTorch, 0.78 x Paddle)"
    zero3 = draw("pangu-deepspeed", updates(5.4))[1]["pangu-deepspeed: sec/update of pangu-350m"]["fp16-amp, zero3"]
    assert texts(zero3) == ["6.75 s bucket 1e9", "5.40 s here (0.80 x)"]


@pytest.mark.parametrize("name", TABLES)
def test_every_figure_is_there_for_a_screen_reader(name: str) -> None:
    for chart in draw(name)[0]:
        assert all(text in chart.chart.svg for text in ('role="img"', "<title", "<desc"))
        assert chart.headers[:2] == ("Case", "Published")
        assert all(row[1].split()[0] in chart.chart.svg for row in chart.rows)


def test_the_command_writes_a_page_from_the_tables_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "--published", "--format", "html", "-o", str(tmp_path / "tables.html"))
    assert (code, out, err) == (0, "", "")
    reader = Reader((tmp_path / "tables.html").read_text())
    assert reader.sections == ["tables"]
    assert "paddle-distributed prints no figures, so nothing of it is drawn" in reader.text
    assert {tag for tag, attributes in reader.elements if "src" in attributes or "srcset" in attributes} == set()
    assert {link["href"] for link in reader.all("link")} == {"data:,"}
    policy = next(meta["content"] for meta in reader.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'")


def test_the_command_draws_what_a_report_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = run(
        capsys, report_of(tmp_path, measured(LLAMA, seconds=4.8)), "--published", "llm-trainer", "--format", "html"
    )
    assert "4.80 s here (0.75 x)" in squeezed(Reader(out).text)


def test_what_was_measured_with_other_knobs_is_not_put_beside_a_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changed = msgspec.structs.replace(measured(ZERO), case=ZERO.case.replace(gradient_accumulation=4))
    path = report_of(tmp_path, changed)
    _, out, err = run(capsys, path, "--published", "pangu-deepspeed", "--format", "csv")
    assert err == f"gputrain: 1 result of {path} of v100 without a row in the tables\n"
    assert ",measured,measured," not in out


def test_bars_of_tables_need_the_extra_and_the_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, err = run(capsys, report_of(tmp_path, measured(LLAMA)), "--format", "html")
    assert (code, out) == (2, "")
    assert err == "gputrain: html draws published tables; give --published, or the command html for reports\n"
    monkeypatch.setattr(page, "_NEEDED", ("matplotlob",))
    code, out, err = run(capsys, "--published", "--format", "html")
    assert (code, out) == (2, "")
    assert err.startswith("gputrain: the HTML report needs matplotlob; install it with: pip install ")
