"""Tests ``--gpu-resume``: a run measures what an earlier report lacks, and takes no figures of other code."""

import json
import platform
import re

import pytest
from immediate_scheduler import stand_in
from plugin_project import GEMMA, H100, H100_FOLDER, LLAMA, LLAMA_2, SUITE, assert_refused, only_sentence, recorded

from pytest_gputrain.cases.libraries import versions


def ours(name="h100_measured", **fields):
    """A recorded reply as of the libraries that are installed."""
    return recorded(name, python=platform.python_version(), packages=versions(), **fields)


@pytest.fixture
def suite(suite):
    suite.answer(ours())
    return suite


def interrupt(project, name):
    """From now on, the third launch sends pytest this signal; `machine` undoes it."""
    project.when_launched(f"import os, signal\nos.kill(os.getpid(), signal.{name})", of="before == 2")


def launched(project, since=0):
    return [launch["id"] for launch in project.launches[since:]]


def test_a_run_that_was_ended_goes_on_where_it_was(suite):
    interrupt(suite, "SIGTERM")
    assert suite.spawn("--gpu-json=first.json").ret == pytest.ExitCode.INTERRUPTED
    first = suite.report("first.json")
    assert (len(first["results"]), first["exit_status"]) == (2, pytest.ExitCode.INTERRUPTED)
    suite.machine(H100)
    suite.answer(ours())
    before = len(suite.launches)
    result = suite.run("--gpu-resume=first.json", "--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert launched(suite, before) == [LLAMA_2]
    result.stdout.fnmatch_lines(["2 cases taken from *first.json; it is not known whether the code is the same"])
    origins = {
        result["key"]: [(origin["session"], origin["runs"]) for origin in result["resumed"]]
        for result in suite.report()["results"]
    }
    assert origins == {LLAMA: [(first["session"], 1)], GEMMA: [(first["session"], 1)], LLAMA_2: []}


def test_a_killed_run_leaves_a_report_to_resume(suite):
    interrupt(suite, "SIGKILL")
    soon = "from pytest_gputrain.report import collector\nassert collector._PAUSE_FACTOR\n"
    soon += "collector._SAVE_EVERY_SECONDS = collector._PAUSE_FACTOR = 0\n"
    conftest = suite.path / "conftest.py"
    conftest.write_text(soon + conftest.read_text())
    assert suite.spawn("--gpu-json=report.json").ret < 0
    report = suite.report()
    assert (len(report["results"]), report["exit_status"]) == (2, pytest.ExitCode.INTERRUPTED)


def test_cases_without_figures_are_run_and_those_out_of_memory_are_not(suite):
    suite.answer(recorded("crashed"), to=LLAMA)
    suite.answer(ours("h100_out_of_memory"), to=GEMMA)
    suite.answer(recorded("timed_out"), to=LLAMA_2)
    suite.run("--gpu-json=report.json").assert_outcomes(failed=3)
    suite.answer(ours(), to=LLAMA)
    suite.answer(ours(), to=LLAMA_2)
    before = len(suite.launches)
    result = suite.run("--gpu-resume=report.json")
    assert sorted(launched(suite, before)) == sorted([LLAMA, LLAMA_2])
    assert only_sentence(result, f"test_tuning[{GEMMA}]").startswith(f"{GEMMA} ran out of device memory")


def test_what_is_taken_is_judged_anew(suite):
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(ours(slower=1.05), to=GEMMA)
    suite.run("--gpu-json=report.json", "--gpu-time-tolerance=9%").assert_outcomes(passed=3)
    result = suite.run("--gpu-resume=report.json", "-o", "gpu_reruns=4")
    assert re.match(rf"{GEMMA} .* 5\.0 %.*3 of 3 fresh runs", only_sentence(result, f"test_tuning[{GEMMA}]"))


def test_other_steps_scales_processes_and_machines_are_measured(suite):
    suite.run("--gpu-json=report.json").assert_outcomes(passed=3)

    def assert_nothing_taken(*arguments):
        before = len(suite.launches)
        suite.run("--gpu-resume=report.json", *arguments).stdout.fnmatch_lines(["no case taken from *"])
        assert len(suite.launches) == before + 3

    assert_nothing_taken("--gpu-steps=7")
    assert_nothing_taken("--gpu-scale=tiny")
    suite.machine("NVIDIA A100-SXM4-80GB")
    suite.answer(ours(device_name="NVIDIA A100-SXM4-80GB"))
    assert_nothing_taken()
    suite.machine(H100)
    suite.answer(ours(device_count=4))  # as if of more processes than the case has now
    suite.run("--gpu-json=report.json").assert_outcomes(passed=3)
    assert_nothing_taken()


def test_a_baseline_has_the_runs_of_both_with_their_dates(suite):
    update = ("--gpu-baseline-update", "-k", "gemma")
    suite.run(*update, "--gpu-runs=2", "--gpu-json=first.json").assert_outcomes(passed=1, deselected=2)
    suite.run(*update, "--gpu-runs=3", "--gpu-resume=first.json", "--gpu-json=report.json")
    assert len(suite.launches) == 3
    first, second = (suite.report(name)["session"] for name in ("first.json", "report.json"))
    sessions = [run["session"] for run in suite.baselines("tuning", H100_FOLDER)[GEMMA]["runs"]]
    assert sessions == [first, first, second]


def test_the_history_has_every_measurement_once(suite):
    history = "--gpu-history=history.jsonl"
    suite.run("--gpu-json=first.json", history, "-k", "gemma")
    suite.run("--gpu-json=second.json", "--gpu-resume=first.json", "-k", "not llama-2", "--gpu-runs=3")
    suite.run("--gpu-json=report.json", "--gpu-resume=second.json", history).assert_outcomes(passed=3)
    first, second, third = (suite.report(f"{name}.json")["session"] for name in ("first", "second", "report"))
    lines = map(json.loads, (suite.path / "history.jsonl").read_text().splitlines())
    assert sorted((line["key"], line["session"], line["runs"]) for line in lines) == sorted(
        [(GEMMA, first, 1), (GEMMA, second, 2), (LLAMA, second, 3), (LLAMA_2, third, 1)]
    )


def test_what_a_resumed_run_does_not_get_to_stays_in_its_report(suite):
    suite.run("--gpu-json=report.json").assert_outcomes(passed=3)
    arguments = ["--gpu-json=report.json", "--gpu-resume=report.json"]
    suite.run(*arguments, "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    is_judged_by_case = {result["key"]: result["verdict"] is not None for result in suite.report()["results"]}
    assert is_judged_by_case == {GEMMA: True, LLAMA: False, LLAMA_2: False}
    before = len(suite.launches)
    suite.run(*arguments).assert_outcomes(passed=3)
    assert len(suite.launches) == before


def test_two_workers_resume_as_one(suite):
    pytest.importorskip("xdist")
    suite.run("--gpu-json=first.json", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    before = len(suite.launches)
    result = suite.spawn("-n2", "--gpu-resume=first.json", "--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert sorted(launched(suite, before)) == sorted([LLAMA, LLAMA_2])
    result.stdout.fnmatch_lines(["1 case taken from *"])


def test_a_fleet_is_not_asked_for_what_there_is(suite, monkeypatch):
    scheduler = stand_in(monkeypatch)
    scheduler.nodes = [(H100, 1)]
    arguments = ["-m", "h100", "--gpu-executor=slurm"]
    suite.write(test_tuning=SUITE.replace("batch_size=2", 'batch_size=2, platforms=("h100",)'))
    suite.run(*arguments, "--gpu-json=first.json", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    suite.run(*arguments, "--gpu-resume=first.json", "--gpu-json=report.json").assert_outcomes(passed=3)
    assert sorted(scheduler.submitted) == sorted([LLAMA, GEMMA, LLAMA_2])
    # The device is that of the node which ran the case, whatever the others turn out to be.
    assert {result["device"] for result in suite.report()["results"]} == {H100_FOLDER}


def test_one_worker_alone_is_not_measured_again(h100):
    h100.machine(H100, gpus=2)
    several = SUITE.replace("batch_size=2", "batch_size=2, gpus=2, parallel='ddp'")
    h100.write(test_several=several.replace("check(case)", "check(case, scaling=True)"))
    h100.answer(ours(device_count=2))
    h100.run("--gpu-json=first.json").assert_outcomes(passed=3)
    h100.run("--gpu-resume=first.json", "--gpu-json=report.json").assert_outcomes(passed=3)
    assert len(h100.launches) == 6
    first, second = (
        {result["key"]: result["summary"]["scaling_efficiency"] for result in h100.report(f"{name}.json")["results"]}
        for name in ("first", "report")
    )
    assert first == second
    assert None not in first.values()


def test_figures_of_another_code_are_refused(suite):
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    (suite.path / ".gitignore").write_text("*\n!test_*.py\n!baselines\n!baselines/**\n")
    for command in ("init -q", "add .", "commit -qm first"):
        suite.git(*command.split())
    # The run's own changes of committed baselines are none of the code.
    suite.run("--gpu-baseline-update", "--gpu-json=clean.json").assert_outcomes(passed=3)
    suite.run("--gpu-resume=clean.json").stdout.fnmatch_lines(["3 cases taken from *clean.json"])
    test = suite.path / "test_tuning.py"
    test.write_text(SUITE + "# changed\n")
    before = len(suite.launches)
    commit = suite.git("rev-parse", "--short=12", "HEAD")
    refused = f"*clean.json is of {commit} with other uncommitted changes; restore them, or leave * out*"
    assert_refused(suite, f"--gpu-resume: {refused}", "--gpu-resume=clean.json", launched=before)
    suite.run("--gpu-json=dirty.json").assert_outcomes(passed=3)
    suite.run("--gpu-resume=dirty.json").stdout.fnmatch_lines(["3 cases taken from *dirty.json"])
    test.write_text(SUITE + "# changed again\n")
    assert_refused(suite, "*with other uncommitted changes*", "--gpu-resume=dirty.json", launched=before + 3)
    suite.git("commit", "-qam", "second")
    refused = (
        f"*is of commit {commit}, and this is {suite.git('rev-parse', '--short=12', 'HEAD')}; check that commit out, or*"
    )
    assert_refused(suite, refused, "--gpu-resume=clean.json", launched=before + 3)


def test_figures_of_other_libraries_or_beside_others_that_nobody_looked_for_are_refused(suite):
    suite.run("--gpu-json=report.json", "-o", "gpu_foreign=ignore")
    sentence = "*was measured with gpu_foreign=ignore; give the same, or*"
    assert_refused(suite, sentence, "--gpu-resume=report.json", launched=3)
    suite.answer(recorded())
    suite.run("--gpu-json=report.json")
    sentence = "--gpu-resume: *report.json was measured with *, and here is *; install that, or leave*"
    assert_refused(suite, sentence, "--gpu-resume=report.json", launched=6)


def test_what_is_no_report_and_what_is_a_study_is_refused(suite):
    assert_refused(suite, "--gpu-resume: *nothing.json cannot be read: No such file*", "--gpu-resume=nothing.json")
    for study in ("--gpu-find-batch", "--gpu-loss=20", "--gpu-emulate"):
        sentence = f"{study.partition('=')[0]} and --gpu-resume contradict each other: *"
        assert_refused(suite, sentence, "--gpu-resume=report.json", study)
