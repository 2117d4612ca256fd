"""Tests that pytest-benchmark reads what is exported for it, and writes the cases into its own file."""

import json
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from plugin_project import BUILD, GEMMA, LLAMA, LLAMA_2, recorded

from pytest_gputrain.cli.main import main
from pytest_gputrain.report.export.pytest_benchmark import stats
from pytest_gputrain.utils.units import GiB

pytest_benchmark_stats = pytest.importorskip("pytest_benchmark.stats")

MIXED = f"""{BUILD}

def test_benchmarked(benchmark):
    assert benchmark(sum, [1, 2]) == 3


def test_mine(gputrain):
    gputrain.check(build, precision="fp32", steps=2)
"""


def benchmarks(project, name="bench.json"):
    """By name in a file of pytest-benchmark."""
    benchmarks = json.loads((project.path / name).read_text())["benchmarks"]
    by_name = {benchmark["name"]: benchmark for benchmark in benchmarks}
    assert len(by_name) == len(benchmarks)
    return by_name


SECONDS = st.lists(st.floats(1e-7, 1e4), min_size=1, max_size=30)


@given(SECONDS)
@example([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 9.0])
def test_statistics_are_those_of_pytest_benchmark(data):
    reference = pytest_benchmark_stats.Stats()
    for seconds in data:
        reference.update(seconds)
    statistics = stats(data)
    expected = reference.as_dict()
    assert set(statistics) == {*expected, "data", "iterations"}
    outliers = ("iqr_outliers", "stddev_outliers", "outliers")  # a step on the border falls on either side by rounding
    assert {name: statistics[name] for name in expected if name not in outliers} == pytest.approx(
        {name: value for name, value in expected.items() if name not in outliers}
    )
    if data[-1] == 9.0:
        assert [statistics[name] for name in outliers] == [expected[name] for name in outliers] == [1, 1, "1;1"]


def test_cases_appear_in_the_file_of_pytest_benchmark(suite):
    suite.answer(recorded("h100_out_of_memory"), to=GEMMA)
    suite.answer(recorded("crashed"), to=LLAMA_2)
    suite.run("--benchmark-json=bench.json", "--gpu-runs=2").assert_outcomes(passed=1, failed=2)
    (case,) = benchmarks(suite).values()
    assert (case["name"], case["group"], case["fullname"]) == (LLAMA, "tuning", f"test_tuning.py::{LLAMA}")
    assert case["stats"]["data"] == recorded()["step_seconds"] * 2
    assert case["stats"]["median"] == 4.70
    assert case["extra_info"]["peak_allocated_bytes"] == 35 * GiB
    assert case["extra_info"]["verdict"] == "new"


def test_pytest_benchmark_compares_what_it_writes_with_what_is_exported(suite, monkeypatch):
    monkeypatch.chdir(suite.path)
    suite.run("--benchmark-json=before.json", "--gpu-json=report.json").assert_outcomes(passed=3)
    assert main(["export", "report.json", "--format=pytest-benchmark", "-o", "exported.json"]) == 0
    saved, exported = benchmarks(suite, "before.json"), benchmarks(suite, "exported.json")
    assert list(saved) == list(exported) == [LLAMA, GEMMA, LLAMA_2]
    assert exported == saved
    command = [sys.executable, "-m", "pytest_benchmark", "compare", "--columns=median", "before.json", "exported.json"]
    table = subprocess.run(command, cwd=suite.path, capture_output=True, text=True, timeout=600, check=True).stdout
    assert "benchmark 'tuning': 6 tests" in table
    rows = [line.split()[1:3] for line in table.splitlines() if GEMMA in line]
    assert rows == [["(before)", "4.7000"], ["(exported)", "4.7000"]]


def test_a_slower_case_fails_a_comparison_of_pytest_benchmark(suite):
    suite.run("--benchmark-autosave").assert_outcomes(passed=3)
    suite.answer(recorded(slower=2), to=GEMMA)
    result = suite.run("--benchmark-compare", "--benchmark-compare-fail=median:10%")
    result.stderr.fnmatch_lines(["*Performance has regressed:*", f"*{GEMMA}*"])
    assert result.ret != 0


@pytest.mark.slow
def test_cases_stand_beside_benchmarks_of_the_fixture_under_xdist_too(cpu):
    pytest.importorskip("xdist")
    cpu.write(test_both=MIXED)
    for arguments, both in (([], ["build-fp32@tiny", "test_benchmarked"]), (["-n2"], ["build-fp32@tiny"])):
        cpu.spawn("--benchmark-json=bench.json", *arguments).assert_outcomes(passed=2)
        assert sorted(benchmarks(cpu)) == both  # its own fixture is off under xdist


def test_they_stay_out_of_its_way_unless_it_saves_or_compares(suite):
    assert "benchmark 'tuning'" not in suite.run().stdout.str()
    suite.run("--benchmark-json=bench.json", "--benchmark-disable").assert_outcomes(passed=3)
    assert not (suite.path / "bench.json").exists()
