"""Tests what a run reports: the JSON report, the table, the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jsonschema
import psutil
import pytest
from plugin_project import (
    BUILD,
    FOLDER_VANISHES,
    GEMMA,
    H100,
    H100_FOLDER,
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


def test_report_is_valid_under_the_published_schema(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(recorded(slower=1.1), to=LLAMA)
    suite.answer(recorded("crashed"), to=GEMMA)
    suite.run("--gpu-json=report.json", "--gpu-runs=2").assert_outcomes(passed=1, failed=2)
    schema = json_report.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(suite.report(), schema)


def test_schema_refuses_a_report_without_figures(suite: Project) -> None:
    suite.run("--gpu-json=report.json").assert_outcomes(passed=3)
    report = suite.report()
    del report["results"][0]["replies"][0]["peak_allocated_bytes"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, json_report.schema())


def test_report_holds_case_environment_figures_and_verdict(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.run("--gpu-json=report.json", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    (result,) = suite.report()["results"]
    assert result["nodeid"] == f"test_tuning.py::test_tuning[{GEMMA}]"
    assert result["case"]["model"] == "gemma-7b"
    assert (result["suite"], result["key"], result["scale"]) == ("tuning", GEMMA, "full")
    (reply,) = result["replies"]
    assert reply["step_seconds"] == recorded()["step_seconds"]
    assert reply["environment"]["device_name"] == "NVIDIA H100 80GB HBM3"
    assert reply["environment"]["packages"]["torch"] == "2.9.1+cu128"
    assert result["verdict"]["status"] == "pass"
    assert {metric["metric"]: metric["baseline"] for metric in result["verdict"]["metrics"]} == {
        "step_seconds": 4.70,
        "peak_allocated_bytes": 35 * GiB,
        "flops_per_step": 8e14,
    }


def test_report_adds_the_driver_that_only_the_parent_knows(suite: Project) -> None:
    suite.run("--gpu-json=report.json", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    assert suite.report()["results"][0]["replies"][0]["environment"]["driver"] == "570.86.10"


def test_report_adds_how_the_gpus_are_linked(h100: Project) -> None:
    h100.machine(H100, gpus=2)
    h100.write(test_pair=SUITE.replace("batch_size=2", 'batch_size=2, parallel="ddp", gpus=2'))
    result = h100.run("--gpu-json=report.json")
    topologies = [reply["environment"]["topology"] for result in h100.report()["results"] for reply in result["replies"]]
    assert topologies == [[["X", "NV18"], ["NV18", "X"]]] * 3
    assert result.stdout.str().count("GPUs linked by NV18") == 1


def test_one_gpu_is_linked_to_none(suite: Project) -> None:
    result = suite.run("--gpu-json=report.json")
    assert suite.report()["results"][0]["replies"][0]["environment"]["topology"] == []
    assert "GPUs linked" not in result.stdout.str()


def test_report_derives_throughput_and_utilization(suite: Project) -> None:
    suite.run("--gpu-json=report.json", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    summary = suite.report()["results"][0]["summary"]
    assert summary["tokens_per_second"] == pytest.approx(2 * 8192 / 4.70)
    assert summary["samples_per_second"] == pytest.approx(2 / 4.70)
    assert summary["model_flops_utilization"] == pytest.approx(800e12 / 4.70 / 989.4e12)


def test_report_of_a_cpu_claims_no_utilization(project: Project) -> None:
    project.machine(None)
    project.write(test_tuning=SUITE)
    project.run("--gpu-json=report.json").assert_outcomes(passed=3)
    assert {result["summary"]["model_flops_utilization"] for result in project.report()["results"]} == {None}


def test_report_is_written_when_a_test_fails(suite: Project) -> None:
    suite.answer(recorded("crashed"), to=GEMMA)
    result = suite.run("--gpu-json=deep/er/report.json")
    result.assert_outcomes(passed=2, failed=1)
    assert suite.verdicts("deep/er/report.json")[GEMMA] == "failed"
    assert suite.report("deep/er/report.json")["exit_status"] == result.ret == 1


def test_report_of_a_passing_run_has_exit_status_zero(suite: Project) -> None:
    suite.run("--gpu-json=report.json").assert_outcomes(passed=3)
    assert suite.report()["exit_status"] == 0


def test_report_marks_figures_that_were_only_measured(h100: Project) -> None:
    h100.write(test_figures=FROM_A_FIXTURE)
    result = h100.run("--gpu-json=report.json")
    result.assert_outcomes(passed=1)
    (reported,) = h100.report()["results"]
    assert reported["verdict"] is None
    assert table_rows(result.stdout.str()) == ["Gemma 7B | LoRA | bf16 | 35.0 GiB | (15.0 GiB) | 4.70 s | measured"]


def test_report_holds_a_case_that_failed_in_a_fixture(h100: Project) -> None:
    h100.write(test_figures=FROM_A_FIXTURE)
    h100.answer(recorded("crashed"))
    h100.run("--gpu-json=report.json").assert_outcomes(errors=1)
    (reported,) = h100.report()["results"]
    assert reported["replies"][0]["outcome"] == "crashed"


def test_report_of_a_run_without_cases_is_empty_but_valid(project: Project) -> None:
    project.write(test_plain="def test_plain():\n    pass\n")
    project.run("--gpu-json=report.json").assert_outcomes(passed=1)
    assert project.report()["results"] == []
    jsonschema.validate(project.report(), json_report.schema())


def test_runs_without_cases_show_no_section(project: Project) -> None:
    project.write(test_plain="def test_plain():\n    pass\n")
    assert "gputrain =" not in project.run().stdout.str()


def test_a_report_that_cannot_be_written_fails_the_run_and_keeps_the_figures(
    suite: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = suite.path / "aside"
    aside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(aside))
    suite.write(test_vanish=FOLDER_VANISHES)
    result = suite.run("--gpu-json=deep/report.json")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [f"the report *deep/report.json cannot be written: *; all figures are in {aside}/gputrain-*.json"]
    )
    (saved_file,) = aside.glob("gputrain-*.json")
    assert len(json.loads(saved_file.read_text())["results"]) == 3


BASELINES_VANISH = """
import shutil
from pathlib import Path


def test_zz_folder_becomes_a_file():
    shutil.rmtree("baselines")
    Path("baselines").write_text("")
"""


def test_baselines_that_cannot_be_written_fail_the_run_and_keep_the_figures(
    suite: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = suite.path / "aside"
    aside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(aside))
    suite.write(test_vanish=BASELINES_VANISH)
    result = suite.run("--gpu-baseline-update")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (saved_file,) = aside.glob("gputrain-*.json")
    assert len(json.loads(saved_file.read_text())["results"]) == 3
    result.stdout.fnmatch_lines([f"*.json cannot be written: *; all figures are in {saved_file}"])


def test_the_exit_status_in_the_report_is_that_of_the_run(suite: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(suite.path))
    suite.write(test_vanish=BASELINES_VANISH)
    result = suite.run("--gpu-baseline-update", "--gpu-json=report.json")
    assert suite.report()["exit_status"] == result.ret


@pytest.mark.slow
@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGINT)], ids=["Ctrl-C", "SIGTERM, Ctrl-C"])
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
        _wait_for(pids.exists)
        worker, child = map(int, pids.read_text().split())
        for number in signals:
            run.send_signal(number)
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    _wait_for(lambda: not psutil.pid_exists(worker) and not psutil.pid_exists(child))
    assert run.returncode == pytest.ExitCode.INTERRUPTED or len(signals) > 1, output
    jsonschema.validate(project.report(), json_report.schema())
    assert project.verdicts() == {"build-fp32@tiny": "new"}
    assert project.report()["exit_status"] == pytest.ExitCode.INTERRUPTED


@pytest.mark.slow
def test_a_killed_pytest_leaves_no_worker(project: Project) -> None:
    project.write(test_hanging=HANGING.replace("def test_before", "def before"))
    pids = project.path / "pids.txt"
    run = subprocess.Popen([sys.executable, "-m", "pytest"], cwd=project.path, stdout=subprocess.DEVNULL)
    try:
        _wait_for(pids.exists)
        worker, child = map(int, pids.read_text().split())
    finally:
        run.kill()
        run.wait()
    _wait_for(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _wait_for(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_earlier_report_serves_as_the_baseline(suite: Project) -> None:
    suite.run("--gpu-json=earlier.json").assert_outcomes(passed=3)
    suite.answer(recorded(slower=1.05), to=GEMMA)
    result = suite.run("--gpu-baseline=earlier.json", "--gpu-json=report.json")
    assert only_sentence(result, f"test_tuning[{GEMMA}]").startswith(f"{GEMMA} is 5.0 % slower at ")
    assert sorted(suite.verdicts().values()) == ["pass", "pass", "regressed"]


def test_an_earlier_report_is_compared_instead_of_the_baselines(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(recorded(slower=2))
    suite.run("--gpu-json=earlier.json").assert_outcomes(failed=3)
    suite.run("--gpu-baseline=earlier.json", "--gpu-strict").assert_outcomes(passed=3)


def test_a_case_missing_in_the_earlier_report_is_new(suite: Project) -> None:
    suite.run("--gpu-json=earlier.json", "-k", "llama").assert_outcomes(passed=2, deselected=1)
    result = suite.run("--gpu-baseline=earlier.json", "--gpu-strict")
    assert only_sentence(result, f"test_tuning[{GEMMA}]") == (
        f"{GEMMA} has no baseline (not in earlier.json); record it with --gpu-baseline-update-new-only (strict)"
    )


def test_a_crash_in_the_earlier_report_is_no_baseline(suite: Project) -> None:
    suite.answer(recorded("crashed"), to=GEMMA)
    suite.run("--gpu-json=earlier.json").assert_outcomes(passed=2, failed=1)
    suite.answer(recorded(), to=GEMMA)
    suite.run("--gpu-baseline=earlier.json", "--gpu-json=report.json").assert_outcomes(passed=3)
    assert suite.verdicts()[GEMMA] == "new"


def test_time_of_another_device_in_a_report_is_never_compared(suite: Project) -> None:
    suite.run("--gpu-json=earlier.json").assert_outcomes(passed=3)
    suite.machine("NVIDIA A100-SXM4-80GB")
    suite.answer(recorded(slower=9, device_name="NVIDIA A100-SXM4-80GB"))
    result = suite.run("--gpu-baseline=earlier.json")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["3 cases with step time not compared: recorded on NVIDIA H100*, here NVIDIA A100*"])


def test_a_file_that_is_no_report_is_a_usage_error(suite: Project) -> None:
    (suite.path / "other.json").write_text('{"format": 2, "results": 5}')
    result = suite.spawn("--gpu-baseline=other.json", "-k", "gemma")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *other.json is not a report of --gpu-json: *; give the file that --gpu-json wrote"])
    assert suite.launches == []


def test_table_shows_figures_changes_and_verdicts(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(recorded(slower=1.05, bigger=2 * GiB), to=GEMMA)
    suite.answer(recorded("h100_out_of_memory"), to=LLAMA)
    result = suite.run()
    assert table_rows(result.stdout.str()) == [
        "Llama 3.1 8B | LoRA | bf16 | OOM | OOM | regressed",
        "Gemma 7B | LoRA | bf16 | 37.0 GiB | (15.0 GiB) | 4.94 s | +5.7 % | +5.0 % | regressed",
        "Llama 2 13B | LoRA | bf16 | 35.0 GiB | (15.0 GiB) | 4.70 s | +0.0 % | +0.0 % | pass",
    ]
    result.stdout.fnmatch_lines(["tuning on H100 x1, full scale*"])


@pytest.mark.parametrize(
    ("reply", "row"),
    [("crashed", "crashed | crashed | failed"), ("timed_out", "timed out | timed out | failed")],
)
def test_table_names_what_became_of_a_case_without_figures(suite: Project, reply: str, row: str) -> None:
    suite.answer(recorded(reply))
    result = suite.run("-k", "gemma")
    assert table_rows(result.stdout.str()) == [f"Gemma 7B | LoRA | bf16 | {row}"]


def test_table_is_marked_as_stand_ins_at_tiny_scale(project: Project) -> None:
    project.machine(None)
    project.write(test_tuning=SUITE)
    project.run().stdout.fnmatch_lines(["tuning on CPU, tiny scale (tiny stand-ins for the models named)*"])


def test_table_fits_a_terminal_of_eighty_columns_with_its_words_whole(
    suite: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(recorded(slower=1.05, bigger=2 * GiB), to=GEMMA)
    output = suite.run().stdout.str()
    section = output.partition("= gputrain =")[2].splitlines()
    assert max(map(len, section)) <= 80
    row = next(line for line in section if "Gemma 7B" in line)
    for word in ("LoRA", "bf16", "37.0 GiB", "4.94 s", "+5.7 %", "+5.0 %", "regressed"):
        assert word in row


def test_table_has_a_part_for_every_suite(suite: Project) -> None:
    suite.write(test_other=SUITE)
    result = suite.run()
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["tuning on H100 x1*"])
    result.stdout.fnmatch_lines(["other on H100 x1*"])


def test_output_without_a_terminal_has_no_escape_sequences(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(recorded(slower=1.05), to=GEMMA)
    result = suite.spawn()
    result.assert_outcomes(passed=2, failed=1)
    assert "\x1b" not in result.stdout.str()


def test_colour_can_be_asked_for(suite: Project) -> None:
    result = suite.spawn("--color=yes")
    assert "\x1b[33mnew" in result.stdout.str()


def test_quiet_runs_still_show_the_table(suite: Project) -> None:
    assert len(table_rows(suite.run("-qq").stdout.str())) == 3


def test_a_run_without_terminal_reporter_still_writes_the_report(suite: Project) -> None:
    suite.spawn("-p", "no:terminal", "--gpu-json=report.json")
    assert len(suite.report()["results"]) == 3


def test_stopping_at_the_first_failure_reports_what_ran(suite: Project) -> None:
    suite.answer(recorded("crashed"), to=LLAMA)
    result = suite.run("-x", "--gpu-json=report.json")
    assert list(failures(result)) == [f"test_tuning[{LLAMA}]"]
    assert list(suite.verdicts()) == [LLAMA]


def test_report_names_the_file_of_relative_paths_by_the_current_folder(
    suite: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = suite.path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    suite.run("--gpu-json=report.json", "..").assert_outcomes(passed=3)
    assert Path(inner, "report.json").exists()
    assert not suite.baseline_file("tuning", H100_FOLDER).exists()
