"""Tests what a run reports: the JSON report, the table, the exit status."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import psutil
import pytest
from leftovers import wait_for, wait_until
from plugin_project import (
    BUILD,
    FOLDER_VANISHES,
    GEMMA,
    H100,
    LLAMA,
    SUITE,
    Project,
    failures,
    only_sentence,
    recorded,
    table_rows,
)

from pytest_gputrain import GiB
from pytest_gputrain.report import json_report

TEST = f"test_tuning[{GEMMA}]"
JSON = "--gpu-json=report.json"
ONE = (JSON, "-k", "gemma")

HANGING = f"""{BUILD}

def hanging(setup):
    import os
    import subprocess
    import time
    from pathlib import Path

    child = subprocess.Popen(["sleep", "600"])
    Path("pids.txt.part").write_text(f"{{os.getpid()}} {{child.pid}}")
    os.rename("pids.txt.part", "pids.txt")
    time.sleep(600)


def test_before(gputrain):
    gputrain.check(build, precision="fp32", steps=2, warmup=1)


def test_hanging(gputrain):
    gputrain.check(hanging, precision="fp32")


def test_never():
    pass
"""

FROM_A_FIXTURE = """
import pytest
from pytest_gputrain import Case

CASE = Case(model="gemma-7b", method="lora", sequence_length=8192)


@pytest.fixture
def figures(gputrain):
    return gputrain.measure(CASE)


def test_figures(figures):
    assert figures.peak_allocated_bytes > 0
"""


def test_the_report_is_valid_under_the_published_schema_which_refuses_one_without_figures(gated: Project) -> None:
    gated.answer(recorded(slower=1.1), to=LLAMA)
    gated.answer(recorded("crashed"), to=GEMMA)
    gated.run(JSON, "--gpu-runs=2").assert_outcomes(passed=1, failed=2)
    schema, report = json_report.schema(), gated.report()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(report, schema)
    del report["results"][0]["replies"][0]["peak_allocated_bytes"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, schema)


def test_the_report_holds_case_environment_figures_verdict_and_what_is_derived(gated: Project) -> None:
    gated.run(*ONE).assert_outcomes(passed=1, deselected=2)
    (result,) = gated.report()["results"]
    assert result["nodeid"] == f"test_tuning.py::{TEST}"
    assert result["case"]["model"] == "gemma-7b"
    assert (result["suite"], result["key"], result["scale"]) == ("tuning", GEMMA, "full")
    (reply,) = result["replies"]
    assert reply["step_seconds"] == recorded()["step_seconds"]
    environment = reply["environment"]
    assert (environment["device_name"], environment["packages"]["torch"]) == (H100, "2.9.1+cu128")
    assert environment["driver"] == "570.86.10", "which only the parent knows"
    assert result["verdict"]["status"] == "pass"
    assert {metric["metric"]: metric["baseline"] for metric in result["verdict"]["metrics"]} == {
        "step_seconds": 4.70,
        "peak_allocated_bytes": 35 * GiB,
        "flops_per_step": 8e14,
    }
    summary = result["summary"]
    assert summary["tokens_per_second"] == pytest.approx(2 * 8192 / 4.70)
    assert summary["samples_per_second"] == pytest.approx(2 / 4.70)
    assert summary["model_flops_utilization"] == pytest.approx(800e12 / 4.70 / 989.4e12)


def test_the_report_adds_how_the_gpus_are_linked_and_a_cpu_claims_no_utilization(h100: Project) -> None:
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


def test_the_exit_status_in_the_report_is_that_of_the_run(suite: Project) -> None:
    suite.run(JSON).assert_outcomes(passed=3)
    assert suite.report()["exit_status"] == 0
    suite.answer(recorded("crashed"), to=LLAMA)
    result = suite.run("--gpu-json=deep/er/report.json")
    result.assert_outcomes(passed=2, failed=1)
    assert suite.verdicts("deep/er/report.json")[LLAMA] == "failed"
    assert suite.report("deep/er/report.json")["exit_status"] == result.ret == 1
    result = suite.run("-x", JSON)
    assert list(failures(result)) == [f"test_tuning[{LLAMA}]"]
    assert list(suite.verdicts()) == [LLAMA], "it stopped, and reports what ran"


def test_a_case_of_a_fixture_is_reported_with_figures_or_as_failed(h100: Project) -> None:
    h100.write(test_figures=FROM_A_FIXTURE)
    result = h100.run(JSON)
    result.assert_outcomes(passed=1)
    (reported,) = h100.report()["results"]
    assert reported["verdict"] is None, "it was only measured"
    assert table_rows(result.stdout.str()) == ["Gemma 7B | LoRA | bf16 | 35.0 GiB | (15.0 GiB) | 4.70 s | measured"]
    h100.answer(recorded("crashed"))
    h100.run(JSON).assert_outcomes(errors=1)
    (reported,) = h100.report()["results"]
    assert reported["replies"][0]["outcome"] == "crashed"


def test_a_run_without_cases_has_an_empty_valid_report_and_no_section(project: Project) -> None:
    project.write(test_plain="def test_plain():\n    pass\n")
    result = project.run(JSON)
    result.assert_outcomes(passed=1)
    assert project.report()["results"] == []
    jsonschema.validate(project.report(), json_report.schema())
    assert "Model  " not in result.stdout.str()
    assert "gputrain =" not in project.run().stdout.str()


BASELINES_VANISH = """
import shutil
from pathlib import Path


def test_zz_folder_becomes_a_file():
    shutil.rmtree("baselines")
    Path("baselines").write_text("")
"""


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
def test_what_cannot_be_written_fails_the_run_and_keeps_the_figures(
    suite: Project, monkeypatch: pytest.MonkeyPatch, option: str, vanish: str, what: str
) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGINT), (signal.SIGKILL,)], ids=str)
def test_what_ends_a_run_keeps_what_was_measured_and_leaves_no_process(project: Project, signals: tuple[int, ...]) -> None:
    project.write(test_hanging=HANGING)
    pids = project.path / "pids.txt"
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--gpu-json=report.json"],
        cwd=project.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # What a shell starts in the background ignores interrupts, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads are here
    )
    try:
        wait_for(pids)
        worker, child = map(int, pids.read_text().split())
        for number in signals:
            run.send_signal(number)
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)
    if signals == (signal.SIGKILL,):  # nobody is left who could end what the worker has started, or report
        os.kill(child, signal.SIGKILL)
        return
    wait_until(lambda: not psutil.pid_exists(child))
    assert run.returncode == pytest.ExitCode.INTERRUPTED or len(signals) > 1, output
    jsonschema.validate(project.report(), json_report.schema())
    assert project.verdicts() == {"build-fp32@tiny": "new"}
    assert project.report()["exit_status"] == pytest.ExitCode.INTERRUPTED


# An earlier report as the baseline


def test_an_earlier_report_is_compared_instead_of_the_baselines(gated: Project) -> None:
    gated.answer(recorded(slower=2))
    gated.run("--gpu-json=earlier.json").assert_outcomes(failed=3)
    gated.run("--gpu-baseline=earlier.json", "--gpu-strict").assert_outcomes(passed=3)
    gated.answer(recorded(slower=2.1), to=GEMMA)
    result = gated.run("--gpu-baseline=earlier.json", JSON)
    assert only_sentence(result, TEST).startswith(f"{GEMMA} is 5.0 % slower at ")
    assert sorted(gated.verdicts().values()) == ["pass", "pass", "regressed"]


def test_a_case_without_figures_in_the_earlier_report_is_new(suite: Project) -> None:
    suite.answer(recorded("crashed"), to=GEMMA)
    suite.run("--gpu-json=crashed.json")
    suite.answer(recorded(), to=GEMMA)
    suite.run("--gpu-json=deselected.json", "-k", "llama")
    for lacking in ("crashed.json", "deselected.json"):
        result = suite.run(f"--gpu-baseline={lacking}", "--gpu-strict", JSON)
        assert suite.verdicts()[GEMMA] == "new"
        assert only_sentence(result, TEST) == (
            f"{GEMMA} has no baseline (not in {lacking}); record it with --gpu-baseline-update-new-only (strict)"
        )
    # Nor is the time of another device.
    suite.machine("NVIDIA A100-SXM4-80GB")
    suite.answer(recorded(slower=9, device_name="NVIDIA A100-SXM4-80GB"))
    result = suite.run("--gpu-baseline=deselected.json", "-k", "llama")
    result.assert_outcomes(passed=2, deselected=1)
    result.stdout.fnmatch_lines(["2 cases with step time not compared: recorded on NVIDIA H100*, here NVIDIA A100*"])


# The table


def test_the_table_shows_figures_changes_and_verdicts(gated: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    gated.answer(recorded(slower=1.05, bigger=2 * GiB), to=GEMMA)
    monkeypatch.setenv("COLUMNS", "80")
    section = gated.run("-q").stdout.str().partition("= gputrain =")[2].partition("\n=")[0].splitlines()
    assert max(map(len, section)) <= 80
    row = next(line for line in section if "Gemma 7B" in line)
    words = ("LoRA", "bf16", "37.0 GiB", "4.94 s", "+5.7 %", "+5.0 %", "regressed")
    assert [word for word in words if word not in row] == [], "words are whole in a narrow terminal"

    monkeypatch.setenv("COLUMNS", "200")
    gated.answer(recorded("h100_out_of_memory"), to=LLAMA)
    gated.write(test_other=SUITE.replace('"llama-3.1-8b", "gemma-7b", ', ""))
    result = gated.run("-qq")
    assert "\x1b" not in result.stdout.str(), "no terminal is here"
    assert table_rows(result.stdout.str()) == [
        "Llama 2 13B | LoRA | bf16 | 35.0 GiB | (15.0 GiB) | 4.70 s | new",
        "Llama 3.1 8B | LoRA | bf16 | OOM | OOM | regressed",
        "Gemma 7B | LoRA | bf16 | 37.0 GiB | (15.0 GiB) | 4.94 s | +5.7 % | +5.0 % | regressed",
        "Llama 2 13B | LoRA | bf16 | 35.0 GiB | (15.0 GiB) | 4.70 s | +0.0 % | +0.0 % | pass",
    ]
    suites = ["other on H100 x1, full scale", "tuning on H100 x1, full scale"]
    assert [line.rstrip() for line in result.outlines if " on H100 x1" in line] == suites


def test_the_table_names_what_became_of_a_case_without_figures(suite: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = suite.path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    for reply, outcome in {"crashed": "crashed", "timed_out": "timed out"}.items():
        suite.answer(recorded(reply))
        result = suite.run(*ONE, "..")
        assert table_rows(result.stdout.str()) == [f"Gemma 7B | LoRA | bf16 | {outcome} | {outcome} | failed"]
    assert Path(inner, "report.json").exists(), "relative paths are those of the current folder"


def test_colour_can_be_asked_for_and_without_a_terminal_reporter_there_is_a_report(suite: Project) -> None:
    assert "\x1b[33mnew" in suite.spawn("--color=yes").stdout.str()
    suite.spawn("-p", "no:terminal", JSON)
    assert len(suite.report()["results"]) == 3
