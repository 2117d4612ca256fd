"""Tests what a run reports: the JSON report, the table, the exit status."""

import json
import sys
import tempfile

import pytest
from plugin_project import (
    FOLDER_VANISHES,
    GEMMA,
    H100,
    LLAMA,
    SUITE,
    failures,
    only_sentence,
    recorded,
    table_rows,
)

from pytest_gputrain import GiB

TEST = f"test_tuning[{GEMMA}]"
JSON = "--gpu-json=report.json"


def test_the_report_holds_case_environment_figures_verdict_and_what_is_derived(gated):
    gated.run(JSON, "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    (result,) = gated.report()["results"]
    assert result["nodeid"] == f"test_tuning.py::{TEST}"
    assert (result["case"]["model"], result["suite"], result["key"]) == ("gemma-7b", "tuning", GEMMA)
    (reply,) = result["replies"]
    assert reply["step_seconds"] == recorded()["step_seconds"]
    environment = reply["environment"]
    assert (environment["device_name"], environment["packages"]["torch"]) == (H100, "2.9.1+cu128")
    assert environment["driver"] == "570.86.10", "which only the parent knows"
    assert result["verdict"]["status"] == "pass"
    baseline = {metric["metric"]: metric["baseline"] for metric in result["verdict"]["metrics"]}
    flops = {"flops_per_step": 8e14, "recomputed_flops_per_step": 2.6e14}
    assert baseline == {"step_seconds": 4.70, "peak_allocated_bytes": 35 * GiB, **flops}
    assert result["summary"]["tokens_per_second"] == pytest.approx(2 * 8192 / 4.70)
    assert result["summary"]["model_flops_utilization"] == pytest.approx(800e12 / 4.70 / 989.4e12)


def test_the_report_adds_how_the_gpus_are_linked_and_a_cpu_claims_no_utilization(h100):
    pair = SUITE.replace("batch_size=2", 'batch_size=2, parallel="ddp", gpus=2')
    for gpus, suite, topology in ((1, SUITE, []), (2, pair, [["X", "NV18"], ["NV18", "X"]])):
        h100.machine(H100, gpus=gpus)
        h100.write(test_pair=suite)
        result = h100.run(JSON)
        replies = [reply for result in h100.report()["results"] for reply in result["replies"]]
        assert [reply["environment"]["topology"] for reply in replies] == [topology] * 3
        assert result.stdout.str().count("GPUs linked by NV18") == gpus - 1
    h100.machine(None)
    h100.write(test_pair=SUITE)
    h100.run(JSON).stdout.fnmatch_lines(["pair on CPU, tiny scale (tiny stand-ins for the models named)*"])
    assert {result["summary"]["model_flops_utilization"] for result in h100.report()["results"]} == {None}


def test_a_secret_in_the_command_line_is_masked_in_the_report_and_that_is_told(suite, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest", "--token=hush", "-v"])
    result = suite.run(JSON, "-k", "gemma")
    assert suite.report()["arguments"] == ["--token=***", "-v"]
    result.stdout.fnmatch_lines(["*what looks like a secret in the command line is [*][*][*] in the report*"])


def test_the_exit_status_in_the_report_is_that_of_the_run(suite):
    suite.run(JSON).assert_outcomes(passed=3)
    assert suite.report()["exit_status"] == 0
    suite.answer(recorded("crashed"), to=LLAMA)
    result = suite.run("--gpu-json=deep/er/report.json")
    assert suite.verdicts("deep/er/report.json")[LLAMA] == "failed"
    assert suite.report("deep/er/report.json")["exit_status"] == result.ret == 1
    suite.run("-x", JSON)
    assert list(suite.verdicts()) == [LLAMA], "it stopped, and reports what ran"


FROM_A_FIXTURE = """
import pytest
from pytest_gputrain import Case


@pytest.fixture
def figures(gputrain):
    return gputrain.measure(Case(model="gemma-7b", method="lora", sequence_length=8192))


def test_figures(figures):
    assert figures.peak_allocated_bytes > 0
"""


def test_a_case_of_a_fixture_is_reported_with_figures_or_as_failed(h100):
    h100.write(test_figures=FROM_A_FIXTURE)
    result = h100.run(JSON)
    result.assert_outcomes(passed=1)
    assert h100.report()["results"][0]["verdict"] is None, "it was only measured"
    assert table_rows(result.stdout.str()) == ["Gemma 7B | LoRA | bf16 | 35.0 GiB | (15.0 GiB) | 4.70 s | measured"]
    h100.answer(recorded("crashed"))
    h100.run(JSON).assert_outcomes(errors=1)
    assert h100.report()["results"][0]["replies"][0]["outcome"] == "crashed"


def test_a_run_without_cases_has_an_empty_valid_report_and_no_section(project):
    project.write(test_plain="def test_plain():\n    pass\n")
    result = project.run(JSON)
    result.assert_outcomes(passed=1)
    assert project.report()["results"] == []
    assert "Model  " not in result.stdout.str()
    assert "gputrain =" not in project.run().stdout.str()


BASELINES_VANISH = FOLDER_VANISHES.replace('Path("deep").rmdir()', '__import__("shutil").rmtree("baselines")').replace(
    "deep", "baselines"
)


@pytest.mark.parametrize(
    ("option", "vanish", "what"),
    [
        ("--gpu-json=deep/report.json", FOLDER_VANISHES, "the report *deep/report.json"),
        ("--gpu-html=deep/page.html", FOLDER_VANISHES, "the report *deep/page.html"),
        ("--gpu-history=deep/history.jsonl", FOLDER_VANISHES, "the history *deep/history.jsonl"),
        ("--gpu-baseline-update", BASELINES_VANISH, "*.json"),
    ],
    ids=["json", "html", "history", "baselines"],
)
def test_what_cannot_be_written_fails_the_run_and_keeps_the_figures(suite, monkeypatch, option, vanish, what):
    if "html" in option:
        pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    aside = suite.path / "aside"
    aside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(aside))
    suite.write(test_vanish=vanish)
    result = suite.run(option)
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (saved_file,) = aside.glob("gputrain-*.json")
    assert len(json.loads(saved_file.read_text())["results"]) == 3
    result.stdout.fnmatch_lines([f"{what} cannot be written: *; all figures are in {saved_file}"])
    if vanish is BASELINES_VANISH:
        (suite.path / "baselines").unlink()
        assert suite.run(option, JSON).ret == suite.report()["exit_status"] == pytest.ExitCode.TESTS_FAILED


def test_an_earlier_report_is_compared_instead_of_the_baselines(gated):
    gated.answer(recorded(slower=2))
    gated.run("--gpu-json=earlier.json").assert_outcomes(failed=3)
    gated.run("--gpu-baseline=earlier.json", "--gpu-strict").assert_outcomes(passed=3)
    gated.answer(recorded(slower=2.1), to=GEMMA)
    assert " 5.0 %" in only_sentence(gated.run("--gpu-baseline=earlier.json"), TEST)
    # A case without figures there is new.
    gated.answer(recorded("crashed"), to=GEMMA)
    gated.run("--gpu-json=crashed.json")
    gated.run("--gpu-json=deselected.json", "-k", "llama")
    gated.answer(recorded(), to=GEMMA)
    for lacking in ("crashed.json", "deselected.json"):
        result = gated.run(f"--gpu-baseline={lacking}", "--gpu-strict")
        assert f"{GEMMA}: {lacking} has no figures of it" in failures(result)[TEST]
    # Nor is the time of another device.
    gated.machine("NVIDIA A100-SXM4-80GB")
    gated.answer(recorded(slower=9, device_name="NVIDIA A100-SXM4-80GB"))
    result = gated.run("--gpu-baseline=deselected.json", "-k", "llama")
    result.assert_outcomes(passed=2, deselected=1)
    result.stdout.fnmatch_lines(["2 cases with step time not compared: recorded on NVIDIA H100*, here NVIDIA A100*"])


def test_colour_can_be_asked_for_and_without_a_terminal_reporter_there_is_a_report(suite):
    assert "\x1b[33mnew" in suite.spawn("--color=yes").stdout.str()
    suite.spawn("-p", "no:terminal", JSON)
    assert len(suite.report()["results"]) == 3
