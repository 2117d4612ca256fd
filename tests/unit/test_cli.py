"""Tests ``gputrain table``: published tables in three formats, with or without a report's figures, and bad input."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit_examples import CASE, measurement, out_of_memory, report, result

from pytest_gputrain import GiB
from pytest_gputrain.cli.main import main
from pytest_gputrain.records import Published, Result, Summary
from pytest_gputrain.report import json_report
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
    code = main(["table", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def blocks(text: str) -> list[list[list[str]]]:
    """The tables of a CSV output."""
    return [list(csv.reader(io.StringIO(block))) for block in text.strip().split("\n\n")]


def test_csv_has_every_row_of_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--published", "--format", "csv")
    assert (code, err) == (0, "")
    rows = [row for block in blocks(out) for row in block[1:]]
    expected = [(table.name, row.platform, str(row.case)) for table in STORE.tables for row in table.published()]
    assert sorted((row[0], row[1], row[2]) for row in rows) == sorted(expected)
    assert all(len(row) == len(block[0]) for block in blocks(out) for row in block)


def test_csv_cells_are_the_published_ones(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--published", "pangu-deepspeed", "--format", "csv")
    for block in blocks(out):
        for cells, row in zip(block[1:], STORE.tables[-1].published(block[1][1]), strict=True):
            assert cells[3:] == list(row.cells.values())
    assert blocks(out)[0][0][3:6] == ["Model", "Total time/epoch", "Time per sample"]


def test_measured_figures_stand_beside_the_published_ones(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    _, out, err = run(
        capsys, "--published", "llm-trainer", "--report", written(measured(LLAMA, seconds=4.8)), "--format=csv"
    )
    (h100,) = (block for block in blocks(out) if block[1][1] == "h100")
    rows = [dict(zip(h100[0], cells, strict=True)) for cells in h100[1:]]
    mine = next(row for row in rows if row["case"] == "llama-3.1-8b-lora-bf16")
    assert (mine["Sec/step"], mine["Measured sec/step"], mine["Ratio sec/step"]) == ("6.4", "4.80 s", "0.75")
    assert (mine["Measured peak reserved"], mine["Ratio peak reserved"]) == ("39.0 GiB", "1.08")
    assert {row["Measured sec/step"] for row in rows if row is not mine} == {""}
    assert err == ""


def test_tables_of_other_platforms_stay_as_published(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    _, out, _ = run(capsys, "--published", "--report", written(measured(LLAMA)), "--format", "csv")
    assert [block[1][1] for block in blocks(out) if "Measured sec/step" in block[0]] == ["h100"]


def test_both_frameworks_have_a_ratio(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    row = _row("h800", "vision_language", "llava-1.6-7b-pretrain-bf16-zero2")
    path = written(measured(row, seconds=2.0))
    _, out, _ = run(capsys, "--published", "paddlemix", "--report", path, "--format", "csv")
    ((header, first, *_),) = blocks(out)
    cells = dict(zip(header, first, strict=True))
    assert cells["Measured samples/s"] == "64"
    assert (cells["Ratio samples/s (PyTorch)"], cells["Ratio samples/s (Paddle)"]) == ("0.98", "0.78")


def test_of_a_case_measured_several_times_the_last_counts(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    path = written(measured(LLAMA, seconds=9.0), measured(LLAMA, seconds=5.0))
    _, out, _ = run(capsys, "--published", "llm-trainer", "--report", path)
    assert "5.00 s" in out
    assert "9.00 s" not in out


def test_running_out_of_memory_is_shown_as_measured(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    path = written(measured(LLAMA, replies=(out_of_memory(),), summary=None))
    _, out, _ = run(capsys, "--published", "llm-trainer", "--report", path, "--format", "csv")
    assert "6.4,OOM,,OOM,,OOM," in out


def test_a_case_published_as_out_of_memory_shows_what_it_measures(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    row = _row("h100", "llm_finetuning", "gemma-2-9b-qlora-bf16")
    path = written(measured(row, seconds=20.0))
    _, out, _ = run(capsys, "--published", "llm-trainer", "--report", path, "--format", "csv")
    assert "OOM (8.4 GiB),OOM,20.0 s," in out


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
    code, out, err = run(capsys, "--published", "llm-trainer", "--report", path)
    assert code == 0
    assert "Measured" not in out
    assert err.startswith(f"gputrain: 2 results of {path} {sentence}")
    assert err.count("\n") == 1


def test_markdown_rows_have_the_cells_of_their_header(capsys: pytest.CaptureFixture[str], written: Any) -> None:
    _, out, _ = run(capsys, "--published", "--report", written(measured(LLAMA)), "--format", "markdown")
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
    text_table = TextTable(title="t", headers=("h",), rows=((cell,),), keys=((),))
    text = render([text_table], "markdown", width=80, colour=False)
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
    _, as_csv, _ = run(capsys, path, "--format", "csv")
    assert as_csv.splitlines()[0].startswith("suite,device,scale,case,step_seconds,")
    assert "llm,nvidia-h100-80gb-hbm3,full,llama-3.1-8b-lora-bf16," in as_csv
    _, as_markdown, _ = run(capsys, path, "--format", "markdown")
    assert "| llm | nvidia-h100-80gb-hbm3 | full | llama-3.1-8b-lora-bf16 |" in as_markdown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing to print; give a report, or --published"),
        (["gone.json"], "gone.json cannot be read: No such file or directory"),
        (["--published", "lm-trainer"], "there is no published table 'lm-trainer'; known: amd-diffusion, llm-trainer,"),
        (["a.json", "--report", "b.json"], "two reports were given, a.json and b.json; give one"),
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
    code, _, err = run(capsys, "--published", "--report", str(tmp_path / "no.json"))
    assert code == 2
    assert "no.json is not a report of --gpu-json" in err


def test_tables_of_another_folder_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "damaged.json").write_text("{")
    code, _, err = run(capsys, "--published", "--baseline-dir", str(tmp_path))
    assert code == 2
    assert "damaged.json is not a published table" in err


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = "import sys; from pytest_gputrain.cli.main import main; sys.exit(main(['table', '--published']))"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait(60) == 0
    command.stderr.close()
