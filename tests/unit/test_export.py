"""Tests exports by reading them as their consumers do: with readers and schemas transcribed from these."""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_examples import CASE, crashed, measurement, out_of_memory, prediction, report, result, timed_out

from pytest_gputrain import Case
from pytest_gputrain.cli.main import main
from pytest_gputrain.records import Report, Result, Summary, Verdict
from pytest_gputrain.records.study import Search, Try
from pytest_gputrain.report import json_report
from pytest_gputrain.report.export.formats import FORMATS
from pytest_gputrain.report.export.points import file_names, left_out, points
from pytest_gputrain.report.export.pytest_benchmark import stats
from pytest_gputrain.utils.units import MiB


def measured(name: str, *seconds: tuple[float, ...], peak: int = 10 * MiB, **fields: Any) -> Result:
    """A case with one process for each of ``seconds``."""
    case = CASE.replace(model=name)
    runs = tuple(
        measurement(
            step_seconds=steps, losses=tuple(3.0 - number for number in range(len(steps))), peak_allocated_bytes=peak
        )
        for steps in seconds
    )
    summary = Summary(
        median_step_seconds=sorted(run.median_step_seconds for run in runs)[len(runs) // 2],
        samples_per_second=2.0,
        tokens_per_second=None,
        peak_allocated_bytes=peak,
        model_flops_utilization=None,
    )
    return result(case, replies=runs, summary=summary, **fields)


def failing(name: str, reply: Any, **fields: Any) -> Result:
    case = CASE.replace(model=name)
    verdict = Verdict(status="failed", sentence=f"{case} failed")
    return result(case, replies=(reply,), summary=None, verdict=verdict, **fields)


REGRESSED = measured("gemma-7b", (1.0, 1.1, 1.2), verdict=Verdict(status="regressed", sentence="gemma-7b is slower"))
RUN = report(
    measured("llama-3.1-8b", (0.5, 0.4, 0.6), (0.55, 0.45, 0.65), (0.7, 0.7, 0.7)),
    REGRESSED,
    failing("phi-3-mini-128k", out_of_memory()),
    failing("llama-2-7b", crashed()),
    failing("llama-2-13b", timed_out()),
    branch="main",
)
LLAMA, GEMMA = "llm/llama-3.1-8b-lora-bf16", "llm/gemma-7b-lora-bf16"
PREDICTED = report(result(reply=prediction(), device="predicted/h100"))


def text_of(name: str, *reports: Report) -> str:
    text = FORMATS[name].export(reports)
    assert isinstance(text, str)
    return text


def texts_of(name: str, *reports: Report) -> dict[str, str]:
    texts = FORMATS[name].export(reports)
    assert not isinstance(texts, str)
    return dict(texts)


# What is handed on


def test_cases_without_figures_are_left_out_with_a_sentence_each() -> None:
    assert [point.name for point in points(RUN.results)] == [LLAMA, GEMMA]
    out_of_memory_case, crashed_case, timed_out_case = left_out(RUN.results)
    assert out_of_memory_case.startswith("phi-3-mini-128k-lora-bf16 is left out: it ran out of device memory (measure")
    assert crashed_case.startswith("llama-2-7b-lora-bf16 is left out: it gave no measurement (measure")
    assert timed_out_case.startswith("llama-2-13b-lora-bf16 is left out: it was ended after")


def test_a_case_of_which_some_processes_failed_is_left_out() -> None:
    half = measured("llama-3.1-8b", (0.5,), (0.5,))
    half = msgspec.structs.replace(half, replies=(*half.replies, out_of_memory()))
    assert points([half]) == []
    assert [sentence.partition(" (")[0] for sentence in left_out([half])] == [
        "llama-3.1-8b-lora-bf16 is left out: it ran out of device memory"
    ]


def test_figures_of_another_batch_than_the_case_has_are_left_out() -> None:
    tried = Search(tries=(Try(batch_size=4, outcome="fits"),), most=4, largest=4, fastest=4)
    searched = measured("llama-3.1-8b", (0.5,), search=tried, verdict=None)
    assert points([searched]) == []


def test_of_a_case_reported_twice_the_judged_one_counts_and_then_the_last() -> None:
    judged = measured("llama-3.1-8b", (0.5,))
    only = [measured("llama-3.1-8b", (seconds,), verdict=None) for seconds in (0.6, 0.7)]
    assert [point.result for point in points([only[0], judged, only[1]])] == [judged]
    assert [point.result for point in points(only)] == [only[1]]


def test_predictions_have_memory_only() -> None:
    assert [point.peak_allocated_bytes for point in points(PREDICTED.results)] == [32 * 1024**3]
    assert points(PREDICTED.results, timed=True) == []
    assert left_out(PREDICTED.results, timed=True) == ["llama-3.1-8b-lora-bf16 is left out: a prediction has no time"]


@given(st.lists(st.text(max_size=6), unique=True))
def test_file_names_differ_and_stay_in_their_folder(names: list[str]) -> None:
    files = list(file_names(names, "csv"))
    assert len(set(files)) == len(names)
    assert all(file == Path(file).name and file.endswith(".csv") for file in files)


@pytest.mark.parametrize("name", [name for name, format_ in FORMATS.items() if not format_.complete])
def test_no_format_shows_a_failed_case(name: str) -> None:
    written = FORMATS[name].export([RUN])
    text = written if isinstance(written, str) else "".join([*written, *written.values()])
    assert "gemma-7b" in text
    assert not any(failed in text for failed in ("phi-3", "llama-2"))


# pytest-benchmark; its own reader and statistics are in tests/plugin/test_benchmark_json.py


def test_pytest_benchmark_names_cases_by_file_and_key() -> None:
    document = json.loads(text_of("pytest-benchmark", RUN))
    llama, gemma = document["benchmarks"]
    assert (llama["group"], llama["fullname"]) == ("llm", "benchmarks/test_llm.py::llama-3.1-8b-lora-bf16")
    assert llama["stats"]["data"] == [0.5, 0.4, 0.6, 0.55, 0.45, 0.65, 0.7, 0.7, 0.7]
    assert llama["extra_info"]["peak_allocated_bytes"] == 10 * MiB
    assert (llama["params"]["model"], llama["params"]["batch_size"]) == ("llama-3.1-8b", 2)
    assert gemma["extra_info"]["verdict"] == "regressed"
    assert document["commit_info"] == {"id": "c0ffee", "dirty": False, "branch": "main"}


def test_pytest_benchmark_tells_a_commit_with_changes() -> None:
    changed = msgspec.structs.replace(RUN, commit="c0ffee+dirty")
    assert json.loads(text_of("pytest-benchmark", changed))["commit_info"] == {
        "id": "c0ffee",
        "dirty": True,
        "branch": "main",
    }


def test_statistics_of_a_single_step_are_of_that_step() -> None:
    statistics = stats([0.25])
    assert {statistics[name] for name in ("min", "max", "mean", "median", "q1", "q3", "ld15iqr", "hd15iqr", "total")} == {
        0.25
    }
    assert (statistics["stddev"], statistics["iqr"], statistics["outliers"], statistics["ops"], statistics["rounds"]) == (
        0,
        0,
        "0;0",
        4.0,
        1,
    )


# github-action-benchmark

BENCHMARK_RESULTS = {  # interface BenchmarkResult of src/extract.ts; extractCustomBenchmarkResult takes an array of it
    "type": "array",
    "minItems": 1,  # extractResult: "No benchmark result was found"
    "items": {
        "type": "object",
        "required": ["name", "value", "unit"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string"},
            "value": {"type": "number"},
            "range": {"type": "string", "pattern": r"(\+-|±)\s*\d.+"},  # src/extractRangeInfo.ts
            "unit": {"type": "string"},
            "extra": {"type": "string"},
        },
    },
}


def test_github_action_benchmark_gets_peak_memory_in_one_unit() -> None:
    entries = json.loads(text_of("github-action-benchmark", RUN))
    jsonschema.validate(entries, BENCHMARK_RESULTS)
    assert [(entry["name"], entry["value"], entry["unit"]) for entry in entries] == [
        (f"{LLAMA}: peak memory", 10.0, "MiB"),
        (f"{GEMMA}: peak memory", 10.0, "MiB"),
    ]
    assert [entry.get("range") for entry in entries] == ["± 0.0", None]


def test_github_action_benchmark_tells_predicted_from_measured_memory() -> None:
    (entry,) = json.loads(text_of("github-action-benchmark", PREDICTED))
    assert (entry["name"], entry["value"]) == (f"{LLAMA}: predicted peak memory", 32 * 1024)


# Bencher

BMF = {  # https://bencher.dev/docs/reference/bencher-metric-format; lengths from its "Order of Precedence"
    "type": "object",
    "propertyNames": {"minLength": 1, "maxLength": 1024},
    "patternProperties": {
        ".+": {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z-]{1,64}$"},
            "patternProperties": {
                ".+": {
                    "type": "object",
                    "additionalProperties": False,  # JsonNewMetric of bencher_json
                    "properties": {name: {"type": "number"} for name in ("value", "lower_value", "upper_value")},
                    "required": ["value"],
                }
            },
        }
    },
}


def test_bencher_gets_nanoseconds_and_bytes() -> None:
    measures = json.loads(text_of("bencher", RUN))
    jsonschema.validate(measures, BMF)
    assert list(measures) == [LLAMA, GEMMA]
    assert measures[GEMMA]["latency"] == pytest.approx({"value": 1.1e9, "lower_value": 1.05e9, "upper_value": 1.15e9})
    assert measures[LLAMA]["latency"]["value"] == pytest.approx(0.55e9)
    assert measures[LLAMA]["peak-memory"]["value"] == 10 * MiB


def test_bencher_gets_predicted_memory_as_another_measure() -> None:
    measures = json.loads(text_of("bencher", PREDICTED))
    jsonschema.validate(measures, BMF)
    assert measures == {LLAMA: {"predicted-peak-memory": {"value": 32 * 1024**3}}}


STEPS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9).map(tuple)


@given(st.lists(STEPS, min_size=1, max_size=5))
def test_the_value_lies_between_its_bounds(runs: list[tuple[float, ...]]) -> None:
    latency = json.loads(text_of("bencher", report(measured("llama-3.1-8b", *runs))))[LLAMA]["latency"]
    assert 0 < latency["lower_value"] <= latency["value"] <= latency["upper_value"] < math.inf


# Apache Otava


def test_a_long_name_is_cut_and_the_other_cases_are_written(tmp_path: Path) -> None:
    long = [CASE.replace(model="m" * 300 + end) for end in ("a", "b")]
    path = tmp_path / "report.json"
    json_report.write(report(*(result(case) for case in (CASE, *long))), path)
    assert main(["export", str(path), "--format=otava", "-o", str(tmp_path / "out")]) == 0
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert len(files) == 4
    assert max(map(len, files)) < 240
    tests = json.loads((tmp_path / "out" / "otava.yaml").read_text())["tests"]
    assert {test["file"] for test in tests.values()} == set(files) - {"otava.yaml"}
    assert any("m" * 300 in name for name in tests), "it names the case in full"


def test_names_that_differ_in_capitals_have_files_of_their_own() -> None:
    """Where a file system takes them for one, the second would replace the first."""
    assert list(file_names(["llm/Gemma", "llm/gemma"], "csv")) == ["llm.Gemma.csv", "llm.gemma_2.csv"]


def read_by_otava(folder: dict[str, str], test: str) -> dict[str, list[Any]]:
    """What CsvImporter.fetch_data of otava/importer.py makes of one test, configured by create_csv_test_config.

    A missing column, a short row and a cell of a metric that is no number are errors there, as here.
    """
    config = json.loads(folder["otava.yaml"])["tests"][test]
    assert config["type"] == "csv"
    header, *rows = csv.reader(io.StringIO(folder[config["file"]]))
    time = header.index(config["time_column"])
    read: dict[str, list[Any]] = {
        "time": [datetime.datetime.fromisoformat(row[time]) for row in rows],
        **{name: [row[header.index(name)] for row in rows] for name in config["attributes"]},
    }
    for name, metric in config["metrics"].items():
        assert int(metric["direction"]) == -1, "smaller is better"
        read[name] = [float(row[header.index(metric["column"])]) for row in rows]
    assert all(len(row) == len(header) for row in rows)
    return read


def test_otava_reads_a_series_of_each_case_in_the_order_of_time() -> None:
    days = [
        report(measured("llama-3.1-8b", (seconds,)), REGRESSED, created=f"2026-02-0{day}T00:00:00Z", commit=f"c{day}")
        for day, seconds in ((2, 0.6), (1, 0.5))
    ]
    folder = texts_of("otava", *days)
    series = read_by_otava(folder, "nvidia-h100-80gb-hbm3/llm/llama-3.1-8b-lora-bf16")
    assert (series["commit"], series["step_seconds"]) == (["c1", "c2"], [0.5, 0.6])
    assert series["peak_allocated_bytes"] == [10 * MiB] * 2
    assert sorted(series["time"]) == series["time"]
    assert len(folder) == 3


def test_otava_reads_no_number_of_a_run_in_which_the_case_failed() -> None:
    bad = failing("llama-3.1-8b", crashed())
    days = [report(measured("llama-3.1-8b", (0.5,))), report(bad, created="2026-02-02T00:00:00Z")]
    series = read_by_otava(texts_of("otava", *days), "nvidia-h100-80gb-hbm3/llm/llama-3.1-8b-lora-bf16")
    assert series["step_seconds"] == [0.5]


# CSV and Markdown


def test_csv_has_a_row_for_every_case_and_no_figure_for_failed_ones() -> None:
    rows = list(csv.DictReader(io.StringIO(text_of("csv", RUN, RUN))))
    assert [row["case"].split("-lora")[0] for row in rows[:5]] == [
        "llama-3.1-8b",
        "gemma-7b",
        "phi-3-mini-128k",
        "llama-2-7b",
        "llama-2-13b",
    ]
    assert len(rows) == 10
    assert [row["step_seconds"] for row in rows[:5]] == ["0.55", "1.1", "", "", ""]
    assert [row["peak_allocated_bytes"] for row in rows[:5]] == [str(10 * MiB)] * 2 + [""] * 3
    assert [row["verdict"] for row in rows[:5]] == ["pass", "regressed", "failed", "failed", "failed"]
    assert {row["commit"] for row in rows} == {"c0ffee"}
    some = ("created", "model", "gpus", "batch_size", "processes", "samples_per_second", "tokens_per_second", "model_bytes")
    model_bytes = str(measurement().model_bytes)
    assert [rows[0][name] for name in some] == [RUN.created, "llama-3.1-8b", "1", "2", "3", "2.0", "", model_bytes]


def test_csv_has_a_column_for_every_knob_in_the_order_of_the_case() -> None:
    tuned = CASE.replace(
        model="gemma-7b", activation_checkpointing=0.5, pin_memory=True, overlap_comm=False, reduce_bucket_size=10**6
    )
    header, *rows = csv.reader(io.StringIO(text_of("csv", report(measured("llama-3.1-8b", (0.5,)), result(tuned)))))
    assert len(set(header)) == len(header)
    knobs = [name for name in Case.__struct_fields__ if name not in ("platforms", "named")]
    first = ["model", "method", "precision", "parallel", "gpus", "batch_size"]
    assert [name for name in header if name in knobs] == first + [name for name in knobs if name not in first]
    plain, other = (dict(zip(header, row, strict=True)) for row in rows)
    some = (
        "activation_checkpointing",
        "pin_memory",
        "overlap_comm",
        "reduce_bucket_size",
        "resolution",
        "code",
        "optimizer",
    )
    assert [other[name] for name in some] == ["0.5", "true", "false", "1000000", "", "", "adamw"]
    assert [plain[name] for name in some] == ["0.0", "false", "", "0", "", "", "adamw"]


def test_markdown_has_a_row_for_every_case() -> None:
    lines = text_of("markdown", RUN).splitlines()
    assert lines[0] == "## Run of c0ffee on 2026-02-01T00:00:00Z: 1 regressed, 3 failed, 1 pass"
    assert "| regressed | llm | gemma-7b-lora-bf16 | nvidia-h100-80gb-hbm3 | 1.10 s |  | 10.0 MiB |  |" in lines
    assert "| failed | llm | llama-2-7b-lora-bf16 | nvidia-h100-80gb-hbm3 | crashed |  | crashed |  |" in lines
    assert text_of("markdown", RUN, RUN).count("## Run of c0ffee on ") == 2


def test_csv_and_markdown_of_predictions_have_memory_only() -> None:
    (row,) = csv.DictReader(io.StringIO(text_of("csv", PREDICTED)))
    assert (row["step_seconds"], row["peak_allocated_bytes"], row["processes"]) == ("", str(32 * 1024**3), "0")
    assert "| llm | llama-3.1-8b-lora-bf16 | predicted/h100 |  |  | 32.0 GiB |  |" in text_of("markdown", PREDICTED)


def test_cells_of_csv_are_numbers_or_nothing_where_the_header_says_a_unit() -> None:
    units = ("_seconds", "_bytes", "_second", "_utilization", "gpus", "batch_size", "processes")
    for row in csv.DictReader(io.StringIO(text_of("csv", RUN, PREDICTED))):
        assert all(cell == "" or float(cell) >= 0 for name, cell in row.items() if name.endswith(units))


# The command


@pytest.fixture
def written(tmp_path: Path) -> str:
    json_report.write(RUN, tmp_path / "report.json")
    return str(tmp_path / "report.json")


def test_the_command_prints_and_tells_what_it_left_out(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", written, "--format", "bencher"]) == 0
    out, err = capsys.readouterr()
    assert list(json.loads(out)) == [LLAMA, GEMMA]
    assert err.startswith("gputrain: phi-3-mini-128k-lora-bf16 is left out: it ran out of device memory (")
    assert len(err.splitlines()) == 3


def test_the_command_writes_a_file_and_a_folder(written: str, tmp_path: Path) -> None:
    assert main(["export", written, "--format=bencher", "-o", str(tmp_path / "new" / "run.json")]) == 0
    assert (tmp_path / "new" / "run.json").read_text() == text_of("bencher", RUN)
    assert main(["export", written, written, "--format=otava", "-o", str(tmp_path / "otava")]) == 0
    assert len(list((tmp_path / "otava").iterdir())) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gone.json", "--format=csv"], "gone.json cannot be read: No such file or directory"),
        (["report.json", "report.json", "--format=bencher"], "bencher holds one run, and 2 reports were given; give one"),
        (["report.json", "--format=otava"], "otava writes several files; give a folder for them with -o"),
        (
            ["report.json", "--format=otava", "-o", "report.json"],
            "otava writes several files, and report.json is not a folder",
        ),
        (["predicted.json", "--format=pytest-benchmark"], "predicted.json has no case with figures for pytest-benchmark"),
        (["report.json", "-o", "table.txt"], "terminal is printed; give the --format that table.txt is to have"),
        (
            ["report.json", "--published", "--format=bencher"],
            "bencher has no form for published tables; give one of terminal, ",
        ),
        (["report.json", "--format=csv", "-o", "report.json/x"], "report.json/x cannot be written: "),
    ],
)
def test_bad_input_to_the_command_is_one_sentence_and_code_2(
    arguments: list[str],
    sentence: str,
    written: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    json_report.write(PREDICTED, tmp_path / "predicted.json")
    assert main(["export", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"gputrain: {sentence}")
    assert err.count("\n") == 1
