"""Tests exports by reading them as their consumers do: with readers and schemas transcribed from these."""

import csv
import datetime
import io
import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unit_examples import CASE, crashed, emulated_run, measurement, out_of_memory, report, result, summary, timed_out

from pytest_gputrain import Case
from pytest_gputrain.cli.main import main
from pytest_gputrain.records import Counts, StepCounts, Verdict
from pytest_gputrain.records.study import Search, Try
from pytest_gputrain.report import json_report
from pytest_gputrain.report.export.formats import FORMATS
from pytest_gputrain.report.export.points import file_names, left_out, points
from pytest_gputrain.report.export.pytest_benchmark import stats
from pytest_gputrain.utils.units import MiB


def measured(name, *seconds, peak=10 * MiB, **fields):
    """A case with one process for each of ``seconds``."""
    runs = tuple(
        measurement(step_seconds=steps, losses=(3.0, 2.0, 1.0)[: len(steps)], peak_allocated_bytes=peak) for steps in seconds
    )
    median = sorted(run.median_step_seconds for run in runs)[len(runs) // 2]
    figures = summary(median, peak, samples_per_second=2.0)
    return result(CASE.replace(model=name), replies=runs, summary=figures, **fields)


def failing(name, reply, **fields):
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
COUNTS = Counts(steps=(0, 1), kinds=(StepCounts(waits=1, launches=800, library_calls=40), StepCounts(h2d_bytes=4096)))
EMULATED = report(result(reply=emulated_run(counts=COUNTS), device="emulated/h100"))


def text_of(name, *reports):
    return FORMATS[name].export(reports)


def test_cases_without_figures_are_left_out_with_a_sentence_each(snapshot):
    half = measured("half-failed", (0.5,), (0.5,))
    half = msgspec.structs.replace(half, replies=(*half.replies, out_of_memory()))
    assert [point.name for point in points([*RUN.results, half])] == [LLAMA, GEMMA]
    assert left_out([*RUN.results, half]) == snapshot


def test_emulated_runs_have_memory_only_and_figures_of_another_batch_are_left_out():
    assert [point.peak_allocated_bytes for point in points(EMULATED.results)] == [32 * 1024**3]
    assert points(EMULATED.results, timed=True) == []
    assert left_out(EMULATED.results, timed=True) == ["llama-3.1-8b-lora-bf16 is left out: an emulated GPU has no time"]
    tried = Search(tries=(Try(batch_size=4, outcome="fits"),), most=4, largest=4, fastest=4)
    assert points([measured("llama-3.1-8b", (0.5,), search=tried, verdict=None)]) == []


def test_counts_of_a_step_are_columns_and_measures():
    (row,) = csv.DictReader(io.StringIO(text_of("csv", EMULATED)))
    assert (row["waits_per_step"], row["work_per_step"], row["h2d_bytes_per_step"]) == ("0.5", "420.0", "2048.0")
    (measures,) = json.loads(text_of("bencher", EMULATED)).values()
    assert (measures["emulated-waits"], measures["emulated-work"]) == ({"value": 0.5}, {"value": 420.0})
    (row,) = csv.DictReader(io.StringIO(text_of("csv", report(RUN.results[0]))))
    assert row["waits_per_step"] == ""


def test_of_a_case_reported_twice_the_judged_one_counts_and_then_the_last():
    judged = measured("llama-3.1-8b", (0.5,))
    only = [measured("llama-3.1-8b", (seconds,), verdict=None) for seconds in (0.6, 0.7)]
    assert [point.result for point in points([only[0], judged, only[1]])] == [judged]
    assert [point.result for point in points(only)] == [only[1]]


@given(st.lists(st.text(max_size=6), unique=True))
@example(["llm/Gemma", "llm/gemma"])
def test_file_names_differ_also_where_capitals_are_no_difference_and_stay_in_their_folder(names):
    files = list(file_names(names, "csv"))
    assert len({file.lower() for file in files}) == len(names)
    assert all(file == Path(file).name and file.endswith(".csv") for file in files)


@pytest.mark.parametrize("name", [name for name, format_ in FORMATS.items() if not format_.complete])
def test_no_format_shows_a_failed_case(name):
    written = FORMATS[name].export([RUN])
    text = written if isinstance(written, str) else "".join([*written, *written.values()])
    assert "gemma-7b" in text
    assert not any(failed in text for failed in ("phi-3", "llama-2"))


KNOBS = [name for name in Case.__struct_fields__ if name not in ("platforms", "named")]


UNITS = ("_seconds", "_bytes", "_second", "_utilization", "gpus", "batch_size", "processes")


def without_knobs(row):
    return {name: cell for name, cell in row.items() if cell and name not in KNOBS}


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("html", "terminal", "otava")])
def test_what_is_written(name, snapshot):
    """pytest-benchmark's own reader and statistics are in tests/plugin/test_benchmark_json.py."""
    said = {}
    for what, written in {"run": RUN, "emulated": EMULATED}.items():
        text = said[what] = text_of(name, written)
        if name == "csv":
            rows = list(csv.DictReader(io.StringIO(text)))
            assert all(float(row[name] or 0) >= 0 for row in rows for name in row if name.endswith(UNITS)), (
                "numbers or nothing"
            )
            said[what] = [without_knobs(row) for row in rows]
        elif name != "markdown":
            said[what] = json.loads(text)
    for benchmark in said["run"]["benchmarks"] if name == "pytest-benchmark" else ():
        assert set(benchmark["params"]) == {*KNOBS} - {"steps", "warmup", "epoch"}
        assert benchmark.pop("params").items() >= {"batch_size": 2, "method": "lora"}.items()
    assert said == snapshot


def test_pytest_benchmark_gets_a_commit_with_changes_and_the_statistics_of_a_single_step():
    changed = msgspec.structs.replace(RUN, commit="c0ffee+dirty")
    about = json.loads(text_of("pytest-benchmark", changed))["commit_info"]
    assert about == {"id": "c0ffee", "dirty": True, "branch": "main"}
    same = ("min", "max", "mean", "median", "q1", "q3", "ld15iqr", "hd15iqr", "total")
    others = {"stddev": 0, "iqr": 0, "outliers": "0;0", "ops": 4.0, "rounds": 1}
    assert {**dict.fromkeys(same, 0.25), **others}.items() <= stats([0.25]).items()


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


@pytest.mark.parametrize("written", [RUN, EMULATED], ids=["run", "emulated"])
@pytest.mark.parametrize(("name", "schema"), [("github-action-benchmark", BENCHMARK_RESULTS), ("bencher", BMF)])
def test_what_is_written_has_the_form_that_its_reader_wants(name, schema, written):
    jsonschema.validate(json.loads(text_of(name, written)), schema)


def test_a_long_name_is_cut_and_the_other_cases_are_written(tmp_path):
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


def read_by_otava(folder, test):
    """What CsvImporter.fetch_data of otava/importer.py makes of one test, configured by create_csv_test_config.

    A missing column, a short row and a cell of a metric that is no number are errors there, as here.
    """
    config = json.loads(folder["otava.yaml"])["tests"][test]
    assert config["type"] == "csv"
    header, *rows = csv.reader(io.StringIO(folder[config["file"]]))
    time = header.index(config["time_column"])
    read = {
        "time": [datetime.datetime.fromisoformat(row[time]) for row in rows],
        **{name: [row[header.index(name)] for row in rows] for name in config["attributes"]},
    }
    for name, metric in config["metrics"].items():
        assert int(metric["direction"]) == -1, "smaller is better"
        read[name] = [float(row[header.index(metric["column"])]) for row in rows]
    assert all(len(row) == len(header) for row in rows)
    return read


def test_otava_reads_a_series_of_each_case_in_the_order_of_time_without_runs_that_failed():
    days = [
        report(measured("llama-3.1-8b", (seconds,)), REGRESSED, created=f"2026-02-0{day}T00:00:00Z", commit=f"c{day}")
        for day, seconds in ((2, 0.6), (1, 0.5))
    ]
    bad = report(failing("llama-3.1-8b", crashed()), created="2026-02-03T00:00:00Z")
    folder = text_of("otava", *days, bad)
    series = read_by_otava(folder, "nvidia-h100-80gb-hbm3/llm/llama-3.1-8b-lora-bf16")
    assert (series["commit"], series["step_seconds"]) == (["c1", "c2"], [0.5, 0.6])
    assert series["peak_allocated_bytes"] == [10 * MiB] * 2
    assert sorted(series["time"]) == series["time"]
    assert len(folder) == 3


def test_csv_has_a_column_for_every_knob_in_the_order_of_the_case():
    tuned = CASE.replace(
        model="gemma-7b", activation_checkpointing=0.5, pin_memory=True, overlap_comm=False, reduce_bucket_size=10**6
    )
    header, *rows = csv.reader(io.StringIO(text_of("csv", report(measured("llama-3.1-8b", (0.5,)), result(tuned)))))
    assert len(set(header)) == len(header)
    first = ["model", "method", "precision", "parallel", "gpus", "batch_size"]
    assert [name for name in header if name in KNOBS] == first + [name for name in KNOBS if name not in first]
    plain, other = (dict(zip(header, row, strict=True)) for row in rows)
    assert {name: (plain[name], other[name]) for name in KNOBS if plain[name] != other[name]} == {
        "model": ("llama-3.1-8b", "gemma-7b"),
        "activation_checkpointing": ("0.0", "0.5"),
        "pin_memory": ("false", "true"),
        "overlap_comm": ("", "false"),
        "reduce_bucket_size": ("0", "1000000"),
    }


@pytest.fixture
def written(tmp_path):
    json_report.write(RUN, tmp_path / "report.json")
    return str(tmp_path / "report.json")


def test_the_command_prints_or_writes_a_file_or_a_folder_and_tells_what_it_left_out(written, tmp_path, capsys):
    assert main(["export", written, "--format", "bencher"]) == 0
    out, err = capsys.readouterr()
    assert out == text_of("bencher", RUN)
    assert err.startswith("gputrain: phi-3-mini-128k-lora-bf16 is left out: it ran out of device memory (")
    assert len(err.splitlines()) == 3
    assert main(["export", written, "--format=bencher", "-o", str(tmp_path / "new" / "run.json")]) == 0
    assert (tmp_path / "new" / "run.json").read_text() == out
    assert main(["export", written, written, "--format=otava", "-o", str(tmp_path / "otava")]) == 0
    assert len(list((tmp_path / "otava").iterdir())) == 3
