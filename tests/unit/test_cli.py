"""Tests what ``gputrain export`` prints: published tables with or without a report's figures, reports, and bad input."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit_examples import CASE, measurement, out_of_memory, report, result

from pytest_gputrain import GiB, MiB
from pytest_gputrain.cli.main import main
from pytest_gputrain.records import Published, Result, Summary, Verdict
from pytest_gputrain.report import json_report
from pytest_gputrain.report.export.published import CSV_HEADERS
from pytest_gputrain.report.tables import TextTable, render
from pytest_gputrain.storage.published import PublishedStore

STORE = PublishedStore(Path(__file__).parents[2] / "baselines" / "published")


def _row(platform: str, suite: str, key: str) -> Published:
    row = STORE.get(platform, suite, key)
    assert row is not None
    return row


def measured(row: Published, *, seconds: float = 4.7, **fields: Any) -> Result:
    """What a run of a row's case at full scale leaves in a report."""
    samples = row.case.batch_size * row.case.gpus / seconds
    reply = measurement(step_seconds=(seconds,), peak_reserved_bytes=39 * GiB, device_used_bytes=39 * GiB)
    return result(
        row.case,
        **{
            "suite": row.suite,
            "key": str(row.case),
            "platform": row.platform,
            "replies": (reply,),
            "summary": Summary(
                median_step_seconds=seconds,
                samples_per_second=samples,
                tokens_per_second=None,
                peak_allocated_bytes=reply.peak_allocated_bytes,
                model_flops_utilization=None,
            ),
            **fields,
        },
    )


LLAMA = _row("h100", "llm_finetuning", "llama-3.1-8b-lora-bf16")


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(*results: Result) -> str:
        json_report.write(report(*results), tmp_path / "report.json")
        return str(tmp_path / "report.json")

    return write


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["export", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def csv_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown output: headers and rows."""
    blocks = [[line for line in block.splitlines() if line.startswith("|")] for block in text.split("\n\n")]
    cells = [[[_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block] for block in blocks if block]
    return [[header, *rows] for header, _, *rows in cells]


def _plain(cell: str) -> str:
    return re.sub(r"\\(.)", r"\1", cell).strip()


def test_csv_is_one_table_with_every_row_of_every_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--published", "--format", "csv")
    assert (code, err) == (0, "")
    expected = [
        (table.name, row.platform, row.suite, str(row.case), framework)
        for table in STORE.tables
        for row in table.published()
        for framework in row.figures or [""]
    ]
    rows = csv_rows(out)
    assert [tuple(row[name] for name in ("table", "platform", "suite", "case", "framework")) for row in rows] == expected
    assert {len(row) for row in csv.reader(io.StringIO(out))} == {len(CSV_HEADERS)}


def test_figures_of_csv_are_numbers(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    _, out, _ = run(capsys, written(measured(LLAMA, seconds=4.8)), "--published", "--format", "csv")
    numbers = [cell for row in csv_rows(out) for name, cell in row.items() if "_" in name and cell]
    assert len(numbers) > 100
    assert all(float(number) > 0 for number in numbers)
    (row,) = (row for row in csv_rows(out) if row["measured"])
    assert (row["case"], row["published"], row["measured"]) == ("llama-3.1-8b-lora-bf16", "measured", "measured")
    assert (row["published_step_seconds"], row["measured_step_seconds"]) == ("6.4", "4.8")
    assert float(row["ratio_step_seconds"]) == pytest.approx(0.75)
    assert row["measured_device_used_bytes"] == str(39 * GiB)
    assert float(row["ratio_device_used_bytes"]) == pytest.approx(39 * GiB / (36_000 * MiB))


def test_csv_has_the_middle_of_a_range_and_a_row_for_each_framework(
    capsys: pytest.CaptureFixture[str], written: Any
) -> None:
    row = _row("h800", "vision_language", "llava-1.6-7b-pretrain-bf16-zero2")
    path = written(measured(row, seconds=2.0))
    _, out, _ = run(capsys, path, "--published", "paddlemix", "--format", "csv")
    both = [cells for cells in csv_rows(out) if cells["measured"]]
    assert [cells["framework"] for cells in both] == ["pytorch", "paddle"]
    assert [f"{float(cells['ratio_samples_per_second']):.2f}" for cells in both] == ["0.98", "0.78"]
    _, out, _ = run(capsys, "--published", "pangu-deepspeed", "--format", "csv")
    assert "10.0" in {cells["published_update_seconds"] for cells in csv_rows(out)}, "9-11s/it"


def test_markdown_cells_are_the_published_ones(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--published", "pangu-deepspeed", "--format", "markdown")
    table = STORE.tables[-1]
    assert len(tables(out)) == len(table.platforms)
    for platform, (headers, *rows) in zip(table.platforms, tables(out), strict=True):
        assert headers[:4] == ["Model", "Total time/epoch", "Derived from its sec/update", "Time per sample"]
        for cells, row in zip(rows, table.published(platform), strict=True):
            del cells[2]
            assert cells[: len(row.cells)] == [" ".join(cell.split()) for cell in row.cells.values()]


ZERO = _row(
    "v100", "deepspeed_zero", "pangu-350m-full-fp16-amp-zero3-offload_optimizer=false-offload_param=false-"
    "overlap_comm=false-allgather_bucket_size=1000000000"
)  # fmt: skip


def updates(seconds: float) -> Result:
    """Two whole updates of eight micro-batches each."""
    return measured(ZERO, replies=(measurement(step_seconds=(seconds / 8,) * 16),), seconds=seconds / 8)


def test_the_time_of_an_epoch_is_derived_beside_its_column(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    _, out, _ = run(capsys, "--published", "pangu-deepspeed", "--format", "markdown")
    v100, a100 = ([dict(zip(headers, cells, strict=True)) for cells in rows] for headers, *rows in tables(out))
    printed = [(row["Total time/epoch"], row["Derived from its sec/update"]) for row in v100]
    assert printed[2:5] == [("7.5min", "7.6min"), ("6.5min", "7.3min"), ("14min", "14.6min")]
    assert (printed[9], printed[10]) == (("47min", "46.9min"), ("3.3h", "3.4h"))
    assert printed[15] == ("-", ""), "it ran out of memory"
    assert (a100[6]["Time per sample"], a100[6]["Derived from its sec/update"]) == ("9-11s/it", "3.1-3.8h")
    _, out, _ = run(capsys, written(updates(5.4)), "--published", "pangu-deepspeed", "--format", "markdown")
    headers, *rows = tables(out)[0]
    assert headers[1:5] == [
        "Total time/epoch",
        "Derived from its sec/update",
        "Derived from measured sec/update",
        "Ratio time/epoch",
    ]
    assert [cells[1:5] for cells in rows if cells[3]] == [["47min", "46.9min", "37.5min", "0.80"]]


def test_the_time_of_an_epoch_is_in_csv_too(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    _, out, _ = run(capsys, written(updates(5.4)), "--published", "--format", "csv")
    (mine,) = (row for row in csv_rows(out) if row["measured"])
    names = ("published_epoch_seconds", "epoch_seconds_from_published_update", "epoch_seconds_from_measured_update")
    assert [float(mine[name]) for name in names] == [47 * 60, 10_000 / 24 * 6.75, pytest.approx(10_000 / 24 * 5.4)]
    assert {row["table"] for row in csv_rows(out) if row[names[1]]} == {"pangu-deepspeed"}


def test_measured_figures_stand_beside_the_published_ones(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    _, out, err = run(capsys, written(measured(LLAMA, seconds=4.8)), "--published", "llm-trainer", "--format=markdown")
    (h100,) = (table for table in tables(out) if "Measured sec/step" in table[0])
    rows = [dict(zip(h100[0], cells, strict=True)) for cells in h100[1:]]
    (mine,) = (row for row in rows if row["Measured sec/step"])
    assert list(mine.values())[:2] == ["Llama 3.1 8B", "LoRA"]
    assert (mine["Sec/step"], mine["Measured sec/step"], mine["Ratio sec/step"]) == ("6.4", "4.80 s", "0.75")
    assert (mine["Measured device memory"], mine["Ratio device memory"]) == ("39,936 MiB", "1.11")
    assert err == ""


def test_figures_of_several_reports_are_beside_the_published_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gemma = _row("h100", "llm_finetuning", "gemma-2-9b-qlora-fp32-attention=sdpa-4.49")
    for name, row in (("a.json", LLAMA), ("b.json", gemma)):
        json_report.write(report(measured(row, seconds=3.0)), tmp_path / name)
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    _, out, _ = run(capsys, *paths, "--published", "llm-trainer", "--format", "csv")
    assert {row["case"] for row in csv_rows(out) if row["measured"]} == {str(LLAMA.case), str(gemma.case)}


def test_published_tables_are_written_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = run(capsys, "--published", "--format=csv")[1]
    assert run(capsys, "--published", "--format=csv", "-o", str(tmp_path / "new" / "tables.csv")) == (0, "", "")
    assert (tmp_path / "new" / "tables.csv").read_text() == printed


def test_tables_of_other_platforms_stay_as_published(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    _, out, _ = run(capsys, written(measured(LLAMA)), "--published", "--format", "csv")
    assert {row["platform"] for row in csv_rows(out) if row["measured"]} == {"h100"}
    _, out, _ = run(capsys, written(measured(LLAMA)), "--published", "--format", "markdown")
    assert sum("Measured sec/step" in headers for headers, *_ in tables(out)) == 1


def test_both_frameworks_have_a_ratio(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    row = _row("h800", "vision_language", "llava-1.6-7b-pretrain-bf16-zero2")
    path = written(measured(row, seconds=2.0))
    _, out, _ = run(capsys, path, "--published", "paddlemix", "--format", "markdown")
    ((header, first, *_),) = tables(out)
    cells = dict(zip(header, first, strict=True))
    assert cells["Measured samples/s"] == "64"
    assert (cells["Ratio samples/s (PyTorch)"], cells["Ratio samples/s (Paddle)"]) == ("0.98", "0.78")


def test_of_a_case_measured_several_times_the_last_counts(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    path = written(measured(LLAMA, seconds=9.0), measured(LLAMA, seconds=5.0))
    _, out, _ = run(capsys, path, "--published", "llm-trainer")
    assert "5.00 s" in out
    assert "9.00 s" not in out


def test_running_out_of_memory_is_shown_as_measured(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    path = written(measured(LLAMA, replies=(out_of_memory(),), summary=None))
    _, out, _ = run(capsys, path, "--published", "llm-trainer", "--format", "markdown")
    assert "| 6.4 | OOM |  | OOM |  | OOM |" in out
    _, out, _ = run(capsys, path, "--published", "llm-trainer", "--format", "csv")
    assert [row["case"] for row in csv_rows(out) if row["measured"] == "OOM"] == [str(LLAMA.case)]


def test_a_case_published_as_out_of_memory_shows_what_it_measures(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    row = _row("h100", "llm_finetuning", "gemma-2-9b-qlora-fp32-attention=sdpa-4.49")
    path = written(measured(row, seconds=20.0))
    _, out, _ = run(capsys, path, "--published", "llm-trainer", "--format", "markdown")
    assert "| OOM (8.4 GiB) | OOM | 20.0 s |" in out
    _, out, _ = run(capsys, path, "--published", "llm-trainer", "--format", "csv")
    (mine,) = (row for row in csv_rows(out) if row["measured"])
    assert (mine["published"], mine["published_step_seconds"], mine["measured_step_seconds"]) == (
        "out_of_memory",
        "",
        "20.0",
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"platform": "h200"}, "measured on h200, for which the tables have nothing"),
        ({"scale": "tiny", "key": f"{LLAMA.case}@tiny"}, "measured at tiny scale"),
        ({"suite": "mine"}, "of h100 without a row in the tables"),
    ],
)
def test_results_that_no_table_shows_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], written: Any, fields: dict[str, Any], sentence: str
) -> None:
    path = written(measured(LLAMA, **fields), measured(LLAMA, **fields))
    code, out, err = run(capsys, path, "--published", "llm-trainer")
    assert code == 0
    assert "Measured" not in out
    assert err.startswith(f"gputrain: 2 results of {path} {sentence}")
    assert err.count("\n") == 1


def test_markdown_rows_have_the_cells_of_their_header(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    _, out, _ = run(capsys, written(measured(LLAMA)), "--published", "--format", "markdown")
    lines = out.splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("| --- |")]
    assert len(rules) == sum(len(table.platforms) for table in STORE.tables)
    for rule in rules:
        table = [lines[rule - 1]]
        table += lines[rule : next(at for at in range(rule, len(lines) + 1) if at == len(lines) or not lines[at])]
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "| Llama 3.1 8B \\*\\* | QLoRA | H100 x 1 |" in out


def test_markdown_shows_what_a_cell_holds() -> None:
    cell = "a | *b* `c` <br> [d](e)\nf"
    text_table = TextTable(title="t", headers=("h",), rows=((cell,),))
    text = render([text_table], "markdown")
    assert r"| a \| \*b\* \`c\` \<br\> \[d\](e) f |" in text


def test_terminal_tables_fold_rather_than_cut(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--published", "pangu-deepspeed")
    assert "…" not in out
    assert "3*12824MB" in out
    assert "9-11s/it" in out


def test_a_report_alone_is_printed_as_at_the_end_of_a_run(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    path = written(result(CASE))
    _, out, _ = run(capsys, path)
    assert "llm on H100 x1, full scale" in out
    assert "Llama 3.1 8B" in out
    assert run(capsys, path, "--format", "terminal")[1] == out
    assert run(capsys, path, path)[1].count("llm on H100 x1, full scale") == 2


def test_a_regression_in_a_report_that_is_printed_is_no_verdict_of_the_command(
    capsys: pytest.CaptureFixture[str], written: Any
) -> None:
    code, out, _ = run(capsys, written(result(CASE, verdict=Verdict(status="regressed", sentence="slower"))))
    assert (code, "regressed" in out) == (0, True)


def test_table_is_refused_and_names_export(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "report.json"]) == 2
    assert capsys.readouterr() == ("", "gputrain: there is no gputrain table; gputrain export prints the same tables\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing to export; give a report of --gpu-json, or --published"),
        (["gone.json"], "gone.json cannot be read: No such file or directory"),
        (
            ["--published", "lm-trainer"],
            "there is no published table 'lm-trainer' (did you mean 'llm-trainer'?); known: amd-diffusion, llm-",
        ),
        (["--published", "report.json"], "there is no published table 'report.json'; known: amd-diffusion, "),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"gputrain: {sentence}")
    assert err.count("\n") == 1


def test_a_file_that_is_no_report_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    code, _, err = run(capsys, str(tmp_path / "no.json"), "--published")
    assert code == 2
    assert "no.json is not a report of --gpu-json" in err


def test_tables_of_another_folder_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "damaged.json").write_text("{")
    code, _, err = run(capsys, "--published", "--baseline-dir", str(tmp_path))
    assert code == 2
    assert "damaged.json is not a published table" in err


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = "import sys; from pytest_gputrain.cli.main import main; sys.exit(main(['export', '--published']))"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait(60) == 0
    command.stderr.close()
