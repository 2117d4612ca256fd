"""Tests ``--gpu-history``: the lines that pytest appends, in one process and under xdist, and its notes about them."""

import json

import pytest
from plugin_project import GEMMA, H100_FOLDER, LLAMA, LLAMA_2, recorded

from pytest_gputrain import GiB


def lines(project, name="history.jsonl"):
    return [json.loads(line) for line in (project.path / name).read_text().splitlines()]


def test_every_run_appends_its_cases(suite):
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.run("--gpu-history=history.jsonl").assert_outcomes(passed=3)
    suite.answer(recorded(slower=1.1), to=LLAMA)
    result = suite.run("--gpu-history=history.jsonl", "--gpu-json=report.json")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines([f"3 lines appended to {suite.path}/history.jsonl"])
    history = lines(suite)
    assert [line["key"] for line in history] == [LLAMA, GEMMA, LLAMA_2] * 2
    assert [line["verdict"] for line in history] == ["pass"] * 3 + ["regressed", "pass", "pass"]
    assert len({line["session"] for line in history}) == 2
    assert {line["session"] for line in history[3:]} == {suite.report()["session"]}
    assert (history[3]["median_step_seconds"], history[3]["runs"]) == (pytest.approx(1.1 * 4.70), 3)
    assert (history[3]["device"], history[3]["version_torch"]) == (H100_FOLDER, "2.9.1+cu128")
    assert (history[3]["peak_allocated_bytes"], history[3]["baseline_step_seconds"]) == (35 * GiB, 4.70)
    assert history[3]["version_driver"] == "570.86.10"


def test_cases_that_fail_have_lines_too_and_a_line_that_a_crash_cut_off_is_removed(suite):
    (suite.path / "history.jsonl").write_text('{"format":2,"kin')
    suite.answer(recorded("crashed"), to=GEMMA)
    suite.answer(recorded("h100_out_of_memory"), to=LLAMA)
    result = suite.run("--gpu-history=history.jsonl")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["the last line of * was cut off by a crash (16 bytes) and has been removed"])
    outcomes = {LLAMA: "out_of_memory", GEMMA: "crashed", LLAMA_2: "measured"}
    assert {line["key"]: line["outcome"] for line in lines(suite)} == outcomes


def test_runs_without_cases_and_searches_append_nothing(suite):
    suite.write(test_plain="def test_plain():\n    pass\n")
    suite.run("--gpu-history=history.jsonl", "-k", "plain").assert_outcomes(passed=1, deselected=3)
    suite.run("--gpu-history=history.jsonl", "--gpu-find-batch", "-o", "gpu_find_batch_max=2", "-k", "gemma")
    assert not (suite.path / "history.jsonl").exists()
