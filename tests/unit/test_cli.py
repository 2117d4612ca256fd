"""Tests what ``gputrain export`` prints: published tables with or without a report's figures, reports, and bad input."""

import csv
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from unit_examples import CASE, SETTINGS, emulated_run, measurement, out_of_memory, report, result, summary

from pytest_gputrain import GiB
from pytest_gputrain.cli.main import main
from pytest_gputrain.records import Verdict
from pytest_gputrain.report import json_report
from pytest_gputrain.report.export.published import CSV_HEADERS
from pytest_gputrain.report.tables import TextTable, render
from pytest_gputrain.storage.published import PublishedStore

STORE = PublishedStore(Path(__file__).parents[2] / "baselines" / "published")


def _row(platform, suite, key):
    return STORE.get(platform, suite, key)


def measured(row, *, seconds=4.7, **fields):
    """What a run of a row's case at full scale leaves in a report."""
    reply = measurement(step_seconds=(seconds,), peak_reserved_bytes=39 * GiB, device_used_bytes=39 * GiB)
    return result(
        row.case,
        **{
            "suite": row.suite,
            "key": str(row.case),
            "platform": row.platform,
            "replies": (reply,),
            "summary": summary(seconds, samples_per_second=row.case.batch_size * row.case.gpus / seconds),
            **fields,
        },
    )


LLAMA = _row("h100", "llm_finetuning", "llama-3.1-8b-lora-bf16")


@pytest.fixture
def written(tmp_path):
    def write(*results):
        json_report.write(report(*results), tmp_path / "report.json")
        return str(tmp_path / "report.json")

    return write


def run(capsys, *arguments):
    code = main(["export", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def csv_rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def tables(text):
    """The tables of a Markdown output: headers and rows."""
    blocks = [[line for line in block.splitlines() if line.startswith("|")] for block in text.split("\n\n")]
    cells = [[[_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block] for block in blocks if block]
    return [[header, *rows] for header, _, *rows in cells]


def _plain(cell):
    return re.sub(r"\\(.)", r"\1", cell).strip()


def test_csv_is_one_table_of_numbers_with_every_row_of_every_published_one(capsys, tmp_path):
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
    numbers = [cell for row in rows for name, cell in row.items() if "_" in name and cell]
    assert len(numbers) > 100
    assert all(float(number) > 0 for number in numbers)
    assert "10.0" in {cells["published_update_seconds"] for cells in rows if "pangu" in cells["table"]}, "9-11s/it"
    assert run(capsys, "--published", "--format=csv", "-o", str(tmp_path / "new" / "tables.csv")) == (0, "", "")
    assert (tmp_path / "new" / "tables.csv").read_text() == out


def test_markdown_cells_are_the_published_ones(capsys, snapshot):
    _, out, _ = run(capsys, "--published", "pangu-deepspeed", "--format", "markdown")
    table = STORE.tables[-1]
    assert len(tables(out)) == len(table.platforms)
    derived = []
    for platform, (headers, *rows) in zip(table.platforms, tables(out), strict=True):
        assert headers[1:4] == ["Total time/epoch", "Derived from its sec/update", "Time per sample"]
        for cells, row in zip(rows, table.published(platform), strict=True):
            derived.append("{1} | {2} | {3}".format(*cells))
            del cells[2]
            assert cells[: len(row.cells)] == [" ".join(cell.split()) for cell in row.cells.values()]
    assert derived[::4] == snapshot


ZERO = _row(
    "v100", "deepspeed_zero", "pangu-350m-full-fp16-amp-zero3-offload_optimizer=false-offload_param=false-"
    "overlap_comm=false-allgather_bucket_size=1000000000"
)  # fmt: skip
LLAVA = _row("h800", "vision_language", "llava-1.6-7b-pretrain-bf16-zero2")
TOO_BIG = _row("h100", "llm_finetuning", "gemma-2-9b-qlora-fp32-attention=sdpa-4.49")


def updates(seconds):
    """Two whole updates of eight micro-batches each."""
    return measured(ZERO, replies=(measurement(step_seconds=(seconds / 8,) * 16),), seconds=seconds / 8)


RESULTS = {
    "a row for each of two frameworks": (measured(LLAVA, seconds=2.0),),
    "a time of an epoch": (updates(5.4),),
    "measured several times, of which the last counts": (measured(LLAMA, seconds=9.0), measured(LLAMA, seconds=5.0)),
    "out of memory here": (measured(LLAMA, replies=(out_of_memory(),), summary=None),),
    "published as out of memory": (measured(TOO_BIG, seconds=20.0),),
}


@pytest.mark.parametrize("what", RESULTS)
def test_measured_figures_of_all_reports_stand_beside_the_published_ones(capsys, tmp_path, snapshot, what):
    """In the rows of their platform only; those of the others stay as they are."""
    path = [str(tmp_path / f"{number}.json") for number in range(len(RESULTS[what]))]
    for name, one in zip(path, RESULTS[what], strict=True):
        json_report.write(report(one), Path(name))
    code, out, err = run(capsys, *path, "--published", "--format", "csv")
    assert (code, err) == (0, "")
    rows = [
        {name: cell[:7] for name, cell in row.items() if cell and name.startswith(("measured", "ratio", "epoch"))}
        for row in csv_rows(out)
        if row["measured"]
    ]
    _, out, _ = run(capsys, *path, "--published", "--format", "markdown")
    shown = [dict(zip(headers, cells, strict=True)) for headers, *lines in tables(out) for cells in lines]
    beside = [
        {name: cell for name, cell in row.items() if re.match("Measured|Derived|Ratio", name)}
        for row in shown
        if any(cell and "easured " in name for name, cell in row.items())
    ]
    assert {"csv": rows, "markdown": beside} == snapshot


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"platform": "h200"}, "measured on h200, for which the tables have nothing"),
        ({"scale": "tiny", "key": f"{LLAMA.case}@tiny"}, "measured at tiny scale"),
        ({"suite": "mine"}, "of h100 without a row in the tables"),
    ],
)
def test_results_that_no_table_shows_are_told_in_one_line(capsys, written, fields, sentence):
    path = written(measured(LLAMA, **fields), measured(LLAMA, **fields))
    code, out, err = run(capsys, path, "--published", "llm-trainer")
    assert code == 0
    assert "Measured" not in out
    assert err.startswith(f"gputrain: 2 results of {path} {sentence}")
    assert err.count("\n") == 1


def test_cells_in_markdown_are_escaped():
    odd = render([TextTable(title="t", headers=("h",), rows=(("a | *b* `c` <br> [d](e)\nf",),))], "markdown")
    assert r"| a \| \*b\* \`c\` \<br\> \[d\](e) f |" in odd


def test_a_report_alone_is_printed_as_at_the_end_of_a_run_without_a_verdict(capsys, written):
    path = written(result(CASE, verdict=Verdict(status="regressed", sentence="slower")))
    code, out, _ = run(capsys, path)
    assert code == 0
    assert all(words in out for words in ("llm on H100 x1, full scale", "Llama 3.1 8B", "regressed"))
    assert run(capsys, path, "--format", "terminal")[1] == out
    assert run(capsys, path, path)[1].count("llm on H100 x1, full scale") == 2


BAD_INPUT = """
export
export gone.json
export no.json --published
export --published lm-trainer
export --published report.json
export --published --baseline-dir .
export report.json report.json --format=bencher
export report.json --format=otava
export report.json --format=otava -o report.json
export emulated.json --format=pytest-benchmark
export report.json -o table.txt
export report.json --published --format=bencher
export report.json --format=csv -o report.json/x
doctor --replay gone.json
export report.json --history history.jsonl
export --published --history history.jsonl --format=html
compare report.json gone.json
compare report.json no.json
compare report.json report.json
compare report.json empty.json
doctor --replay no.json
doctor --replay list.json
doctor --replay os.json
check-baselines gone
"""


def test_bad_input_is_one_sentence_and_code_2(capsys, tmp_path, monkeypatch, snapshot):
    monkeypatch.chdir(tmp_path)
    texts = {"no.json": "{}", "published/damaged.json": "{", "list.json": "[3]", "os.json": '{"library": "os", "calls": {}}'}
    for name, text in texts.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    emulated = result(reply=emulated_run(), device="emulated/h100")
    for name, results in {"report": (result(),), "emulated": (emulated,), "empty": ()}.items():
        json_report.write(report(*results, settings=SETTINGS if name == "empty" else {}), Path(f"{name}.json"))
    said = {}
    for words in BAD_INPUT.strip().splitlines():
        assert main(words.split()) == 2, words
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        said[words] = err.strip().replace(str(tmp_path), "")
    assert said == snapshot


def test_a_reader_that_stops_early_is_no_error():
    code = "import sys; from pytest_gputrain.cli.main import main; sys.exit(main(['export', '--published']))"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait(60) == 0
    command.stderr.close()
