"""Tests recording baselines: which files and entries are written, and which stay as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from plugin_project import BUILD, GEMMA, H100, H100_FOLDER, LLAMA, LLAMA_2, SUITE, Project, failures, only_sentence, recorded

from pytest_gputrain import GiB


@pytest.fixture
def suite(h100: Project) -> Project:
    h100.write(test_tuning=SUITE)
    return h100


def test_update_records_every_case_that_ran(suite: Project) -> None:
    result = suite.run("--gpu-baseline-update")
    result.assert_outcomes(passed=3)
    entries = suite.baselines("tuning", H100_FOLDER)
    assert sorted(entries) == sorted([LLAMA, GEMMA, LLAMA_2])
    runs = entries[GEMMA]["runs"]
    assert [run["peak_allocated_bytes"] for run in runs] == [35 * GiB] * 5
    assert [run["step_seconds"] for run in runs] == [recorded()["step_seconds"]] * 5
    path = suite.baseline_file("tuning", H100_FOLDER)
    result.stdout.fnmatch_lines(
        [
            f"3 baselines recorded in {path}; review the difference in git",
            "all runs of these baselines are of this session, so they do not tell how much days differ",
        ]
    )


def test_update_then_gate_passes_for_what_is_measured_here(project: Project) -> None:
    project.write(test_mine=f"{BUILD}\n\ndef test_mine(gputrain):\n    gputrain.check(build, precision='fp32', steps=2)\n")
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    project.run("--gpu-strict", "--gpu-json=report.json").assert_outcomes(passed=1)
    assert project.verdicts() == {"build-fp32@tiny": "pass"}


def test_update_replaces_the_figures_of_before(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(recorded(slower=2, bigger=5 * GiB))
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    for entry in suite.baselines("tuning", H100_FOLDER).values():
        assert [run["peak_allocated_bytes"] for run in entry["runs"]] == [40 * GiB] * 5
    suite.run("--gpu-strict").assert_outcomes(passed=3)


def test_update_tells_what_the_verdict_would_have_been(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(recorded(slower=1.05), to=GEMMA)
    suite.run("--gpu-baseline-update", "--gpu-json=report.json").assert_outcomes(passed=3)
    sentences = {result["key"]: result["verdict"]["sentence"] for result in suite.report()["results"]}
    assert sentences[GEMMA].startswith(
        f"{GEMMA} has today's figures as its baseline now; before, {GEMMA} is 5.0 % slower at "
    )


def test_an_update_records_as_many_runs_as_are_asked_for(suite: Project) -> None:
    suite.run("--gpu-baseline-update", "--gpu-runs=2").assert_outcomes(passed=3)
    assert [len(entry["runs"]) for entry in suite.baselines("tuning", H100_FOLDER).values()] == [2] * 3


@pytest.mark.slow
def test_an_update_on_a_cpu_records_one_run_and_needs_no_warning(project: Project) -> None:
    project.machine(None)
    project.write(test_tuning=SUITE)
    result = project.run("--gpu-baseline-update")
    assert [len(entry["runs"]) for entry in project.baselines("tuning").values()] == [1] * 3
    assert "of this session" not in result.stdout.str()


def test_new_only_measures_a_known_case_once(suite: Project) -> None:
    suite.run("--gpu-baseline-update", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    before = len(suite.launches)
    suite.run("--gpu-baseline-update-new-only").assert_outcomes(passed=3)
    launched = [launch["id"] for launch in suite.launches[before:]]
    assert (launched.count(GEMMA), launched.count(LLAMA)) == (1, 5)


def test_update_keeps_the_entries_of_deselected_cases(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    before = suite.baselines("tuning", H100_FOLDER)
    suite.answer(recorded(bigger=GiB))
    suite.run("--gpu-baseline-update", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    after = suite.baselines("tuning", H100_FOLDER)
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed == {GEMMA}


def test_update_keeps_the_files_of_other_devices(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    h100_file = suite.baseline_file("tuning", H100_FOLDER)
    before = h100_file.read_bytes()
    suite.machine("NVIDIA A100-SXM4-80GB")
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    assert h100_file.read_bytes() == before
    assert suite.baseline_file("tuning", "nvidia-a100-sxm4-80gb").exists()


def test_update_on_a_crash_keeps_the_old_baseline_and_fails(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    before = suite.baselines("tuning", H100_FOLDER)
    suite.answer(recorded("crashed"), to=GEMMA)
    result = suite.run("--gpu-baseline-update")
    result.assert_outcomes(passed=2, failed=1)
    assert list(failures(result)) == [f"test_tuning[{GEMMA}]"]
    assert suite.baselines("tuning", H100_FOLDER)[GEMMA] == before[GEMMA]


def test_update_on_a_time_out_records_nothing_for_that_case(suite: Project) -> None:
    suite.answer(recorded("timed_out"), to=GEMMA)
    result = suite.run("--gpu-baseline-update")
    assert only_sentence(result, f"test_tuning[{GEMMA}]") == (
        f"{GEMMA} was ended after 90.0 s (measure in step 3); --gpu-timeout allows more"
    )
    assert sorted(suite.baselines("tuning", H100_FOLDER)) == sorted([LLAMA, LLAMA_2])


def test_the_runs_of_all_cases_are_recorded_in_turn(suite: Project) -> None:
    result = suite.run("--gpu-baseline-update", "--gpu-runs=3", "--gpu-json=report.json")
    assert [launched["id"] for launched in suite.launches] == [LLAMA, GEMMA, LLAMA_2] * 3
    result.stdout.fnmatch_lines(["gputrain: further runs of 3 baselines, one of each in turn"])
    assert [(len(result["replies"]), result["to_come"]) for result in suite.report()["results"]] == [(3, 0)] * 3
    assert set(suite.verdicts().values()) == {"recorded"}


def test_runs_that_are_not_recorded_are_made_at_once(suite: Project) -> None:
    suite.run("--gpu-runs=2").assert_outcomes(passed=3)
    assert [launched["id"] for launched in suite.launches] == [LLAMA, LLAMA, GEMMA, GEMMA, LLAMA_2, LLAMA_2]


def test_the_runs_of_one_worker_are_recorded_in_turn_with_the_case(project: Project) -> None:
    project.machine(H100, gpus=2)
    project.write(
        test_tuning=SUITE.replace("sequence_length=8192", "sequence_length=8192, parallel='ddp', gpus=2, servers=0").replace(
            "check(case)", "check(case, scaling=True)"
        )
    )
    project.run("--gpu-baseline-update", "--gpu-runs=2", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    assert [launched["id"] for launched in project.launches] == [f"{GEMMA}-ddp", GEMMA] * 2


def test_a_case_whose_test_fails_is_measured_no_further(suite: Project) -> None:
    suite.write(test_tuning=f"{SUITE}    assert case.model != 'gemma-7b'\n")
    suite.run("--gpu-baseline-update", "--gpu-runs=2").assert_outcomes(passed=2, failed=1)
    assert [launched["id"] for launched in suite.launches] == [LLAMA, GEMMA, LLAMA_2, LLAMA, LLAMA_2]
    assert sorted(suite.baselines("tuning", H100_FOLDER)) == sorted([LLAMA, LLAMA_2])


def test_a_crash_in_a_later_run_fails_the_run_and_is_an_entry_of_its_own_in_junit(suite: Project) -> None:
    suite.answer(recorded(), recorded("crashed"), to=GEMMA)
    result = suite.run("--gpu-baseline-update", "--junitxml=junit.xml", "--gpu-json=report.json")
    assert "gave no measurement" in only_sentence(result, f"test_tuning[{GEMMA}]")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    entries = ElementTree.parse(suite.path / "junit.xml").getroot()[0]
    failures = [len(list(case.iter("failure"))) for case in entries if case.get("name") == f"test_tuning[{GEMMA}]"]
    assert failures == [0, 1]
    assert suite.verdicts()[GEMMA] == "failed"
    assert sorted(suite.baselines("tuning", H100_FOLDER)) == sorted([LLAMA, LLAMA_2])


def _end_in_the_launch(project: Project, number: int, how: str) -> None:
    """From now on, the ``number``-th launch does ``how`` instead."""
    conftest = project.path / "conftest.py"
    text = conftest.read_text()
    anchor = "        name = str(task.case)\n"
    assert anchor in text
    conftest.write_text(
        text.replace(anchor, f"{anchor}        if sum(asked.values()) == {number - 1}:\n            {how}\n")
    )


@pytest.mark.parametrize("arguments", [[], ["--gpu-json=report.json"]], ids=["alone", "with a report"])
def test_an_update_that_is_ended_keeps_old_baselines_and_all_figures(suite: Project, arguments: list[str]) -> None:
    suite.run("--gpu-baseline-update", "-k", "not gemma").assert_outcomes(passed=2, deselected=1)
    before = suite.baselines("tuning", H100_FOLDER)
    suite.answer(recorded(slower=2))
    _end_in_the_launch(suite, 3 * 4 + 2, "raise KeyboardInterrupt")
    result = suite.spawn("--gpu-baseline-update", *arguments)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    (line,) = (line for line in result.outlines if line.startswith("not recorded: "))
    trouble, _, place = line.partition("; all figures are in ")
    assert trouble == "not recorded: 2 cases, because the run was ended before all had 5 runs"
    after = suite.baselines("tuning", H100_FOLDER)
    assert after[LLAMA_2] == before[LLAMA_2]
    assert GEMMA not in after
    assert [run["step_seconds"][0] for run in after[LLAMA]["runs"]] == [recorded(slower=2)["step_seconds"][0]] * 5
    report = json.loads(Path(place).read_text())
    assert {result["key"]: len(result["replies"]) for result in report["results"]} == {LLAMA: 5, GEMMA: 4, LLAMA_2: 4}
    suite.machine(H100)
    suite.answer(recorded(slower=2))
    suite.run(f"--gpu-baseline={place}", "--gpu-strict").assert_outcomes(passed=3)


def test_an_update_that_stops_at_a_failure_records_nothing_half(suite: Project) -> None:
    suite.answer(recorded("crashed"), to=GEMMA)
    result = suite.run("--gpu-baseline-update", "-x")
    result.assert_outcomes(passed=1, failed=1)
    assert len(suite.launches) == 2
    result.stdout.fnmatch_lines(["not recorded: 1 case, because the run was ended before all had 5 runs; all figures *"])
    assert not suite.baseline_file("tuning", H100_FOLDER).exists()


_MEET = """
            (HERE / f"here-{__import__('os').getpid()}").touch()
            while len(list(HERE.glob("here-*"))) < 3:
                __import__("time").sleep(0.01)
"""


def test_several_runs_at_once_lose_no_baseline(suite: Project) -> None:
    suite.machine(H100, gpus=3)
    _end_in_the_launch(suite, 1, _MEET.strip())
    names = ("llama-3", "gemma", "llama-2")
    command = [sys.executable, "-m", "pytest", "-q", "--gpu-baseline-update", "--gpu-history=history.jsonl", "--gpu-runs=1"]
    runs = [subprocess.Popen([*command, "-k", name], cwd=suite.path, stdout=subprocess.DEVNULL) for name in names]
    try:
        assert [run.wait(60) for run in runs] == [0, 0, 0]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert sorted(suite.baselines("tuning", H100_FOLDER)) == sorted([LLAMA, GEMMA, LLAMA_2])
    assert len((suite.path / "history.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_an_inline_case_has_all_its_runs_in_its_test(project: Project) -> None:
    test = "def test_mine(gputrain):\n    gputrain.check(build, precision='fp32', steps=2, inline=True)\n"
    project.write(test_mine=f"{BUILD}\n\n{test}")
    result = project.run("--gpu-baseline-update", "--gpu-runs=2")
    assert "further runs" not in result.stdout.str()
    assert [len(entry["runs"]) for entry in project.baselines("mine").values()] == [2]


def test_one_crash_among_several_runs_is_not_recorded(suite: Project) -> None:
    suite.answer(recorded(), recorded("crashed"), to=GEMMA)
    suite.run("--gpu-baseline-update", "--gpu-runs=2").assert_outcomes(passed=3, failed=1)
    assert GEMMA not in suite.baselines("tuning", H100_FOLDER)


def test_running_out_of_memory_in_one_of_several_runs_is_not_recorded(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    before = suite.baseline_file("tuning", H100_FOLDER).read_text()
    suite.answer(recorded(), recorded(), recorded("h100_out_of_memory"), recorded(), to=GEMMA)
    result = suite.run("--gpu-baseline-update", "-k", "gemma")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*in 1 of 3 runs, so it is not recorded: a baseline fits always or never*"])
    assert suite.baseline_file("tuning", H100_FOLDER).read_text() == before


def test_running_out_of_what_others_took_is_not_recorded(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    before = suite.baseline_file("tuning", H100_FOLDER).read_text()
    suite.answer(recorded("h100_out_of_memory"), to=GEMMA)
    suite.occupied(free_bytes=78 * GiB, processes=2)
    result = suite.run("--gpu-baseline-update", "-k", "gemma")
    result.assert_outcomes(failed=1, deselected=2)
    result.stdout.fnmatch_lines(
        ["*; it ran beside python (pid 4711, 1.00 GiB) on GPU 0 and python (pid 4712, *, so it is not recorded*"]
    )
    assert suite.baseline_file("tuning", H100_FOLDER).read_text() == before


def test_new_only_adds_new_cases_and_leaves_the_text_of_the_others(suite: Project) -> None:
    suite.run("--gpu-baseline-update", "-k", "not gemma").assert_outcomes(passed=2, deselected=1)
    file = suite.baseline_file("tuning", H100_FOLDER)
    before = json.loads(file.read_text())["cases"]
    lines_before = file.read_text().splitlines()
    suite.answer(recorded(slower=1.01, bigger=1000))
    suite.run("--gpu-baseline-update-new-only").assert_outcomes(passed=3)
    after = suite.baselines("tuning", H100_FOLDER)
    assert sorted(after) == sorted([LLAMA, GEMMA, LLAMA_2])
    assert {key: after[key] for key in before} == before
    remaining = iter(file.read_text().splitlines())
    assert all(line in remaining for line in lines_before)


def test_new_only_with_nothing_new_leaves_the_file_untouched(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    file = suite.baseline_file("tuning", H100_FOLDER)
    before = file.read_bytes(), file.stat().st_mtime_ns
    suite.answer(recorded(slower=1.01))
    suite.run("--gpu-baseline-update-new-only").assert_outcomes(passed=3)
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


def test_new_only_still_fails_a_regression(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(recorded(slower=1.05), to=GEMMA)
    assert list(failures(suite.run("--gpu-baseline-update-new-only"))) == [f"test_tuning[{GEMMA}]"]


def test_figures_of_a_test_that_fails_otherwise_become_no_baseline(h100: Project) -> None:
    h100.write(
        test_mine="""
        def build(setup):
            return lambda: None

        def test_fails(gputrain):
            gputrain.check(build)
            assert False

        def test_passes(gputrain):
            gputrain.check(build, model="other")
    """
    )
    result = h100.run("--gpu-baseline-update")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["not recorded: build-bf16, because its test failed"])
    assert list(h100.baselines("mine", H100_FOLDER)) == ["other-bf16"]


def test_the_same_figures_recorded_again_change_nothing(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    file = suite.baseline_file("tuning", H100_FOLDER)
    before = file.read_bytes()
    result = suite.run("--gpu-baseline-update")
    result.assert_outcomes(passed=3)
    assert file.read_bytes() == before
    result.stdout.fnmatch_lines(["3 baselines in * stay as they were: their judged figures are the same"])


def test_a_changed_figure_changes_its_own_entry_alone(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    before = suite.baselines("tuning", H100_FOLDER)
    suite.answer(recorded(bigger=1), to=GEMMA)
    result = suite.run("--gpu-baseline-update")
    after = suite.baselines("tuning", H100_FOLDER)
    assert [key for key in before if after[key] != before[key]] == [GEMMA]
    result.stdout.fnmatch_lines(["1 baseline recorded in *; review the difference in git; 2 more have the same figures*"])


@pytest.mark.slow
def test_an_update_on_a_cpu_changes_what_is_judged_there_alone(project: Project) -> None:
    """Step times, host memory, dates and sessions differ between the processes, allocated bytes do not."""
    test = "\n\ndef test_mine(gputrain):\n    gputrain.check(build, precision='fp32', steps=2)\n"
    project.write(test_mine=BUILD + test, test_other=BUILD + test)
    project.run("--gpu-baseline-update").assert_outcomes(passed=2)
    mine, other = (project.baseline_file(name, "cpu") for name in ("mine", "other"))
    before = mine.read_bytes(), other.read_bytes()
    project.write(test_other=BUILD.replace("(64, 64", "(64, 65") + test)
    project.run("--gpu-baseline-update").assert_outcomes(passed=2)
    assert mine.read_bytes() == before[0]
    assert other.read_bytes() != before[1]


def test_measure_alone_records_nothing(h100: Project) -> None:
    h100.write(test_tuning=SUITE.replace("gputrain.check(case)", "gputrain.measure(case)"))
    h100.run("--gpu-baseline-update").assert_outcomes(passed=3)
    assert not h100.baseline_file("tuning", H100_FOLDER).exists()


def test_no_stray_file_stays_beside_the_baselines(suite: Project) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    written = {path.relative_to(suite.path).as_posix() for path in (suite.path / "baselines").rglob("*") if path.is_file()}
    assert written == {f"baselines/{H100_FOLDER}/tuning.json"}


def test_baseline_dir_of_the_ini_file_is_relative_to_it(suite: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.ini("gpu_baseline_dir = figures")
    elsewhere = suite.path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    suite.run("--gpu-baseline-update", f"--rootdir={suite.path}", "-c", "../tox.ini", str(suite.path)).assert_outcomes(
        passed=3
    )
    assert (suite.path / "figures" / H100_FOLDER / "tuning.json").exists()


def test_the_commit_is_stored_with_uncommitted_changes_marked(suite: Project) -> None:
    def git(*arguments: str) -> str:
        run = suite.pytester.run("git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments)
        assert run.ret == 0
        return run.stdout.str().strip()

    git("init", "-q")
    git("add", "tox.ini")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "--short=12", "HEAD")
    suite.run("--gpu-baseline-update", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    (suite.path / "tox.ini").write_text("[pytest]\n# changed\n")
    suite.run("--gpu-baseline-update", "-k", "llama-3").assert_outcomes(passed=1, deselected=2)
    entries = suite.baselines("tuning", H100_FOLDER)
    assert entries[GEMMA]["runs"][0]["commit"] == head
    assert entries[LLAMA]["runs"][0]["commit"] == f"{head}+dirty"


def test_figures_of_a_fixture_become_no_baseline_where_its_test_fails(h100: Project) -> None:
    h100.write(
        test_mine="""
        import pytest

        def build(setup):
            return lambda: None

        @pytest.fixture
        def checked(gputrain):
            gputrain.check(build)

        def test_fails(checked):
            assert False
        """
    )
    result = h100.run("--gpu-baseline-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["not recorded: build-bf16, because its test failed"])
    assert not (h100.path / "baselines" / H100_FOLDER).exists()


def test_a_first_baseline_that_does_not_fit_is_told_as_no_regression(h100: Project) -> None:
    h100.write(test_tuning=SUITE)
    h100.answer(recorded("h100_out_of_memory"), to=GEMMA)
    result = h100.run("--gpu-baseline-update", "--gpu-runs=1")
    result.assert_outcomes(passed=3)
    assert "worse than the baseline before" not in result.stdout.str()


def test_an_update_names_the_regressions_that_it_accepts(h100: Project) -> None:
    h100.write(test_tuning=SUITE)
    h100.run("--gpu-baseline-update", "--gpu-runs=3").assert_outcomes(passed=3)
    h100.answer(recorded("h100_measured", bigger=8 * 2**30), to=GEMMA)
    result = h100.run("--gpu-baseline-update", "--gpu-runs=3", "--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [f"1 case recorded although worse than the baseline before: {GEMMA} has today's figures as*"]
    )
    before = {entry["key"]: entry["verdict"]["before"] for entry in h100.report("report.json")["results"]}
    assert before[GEMMA] == "regressed"
    assert set(before.values()) == {"regressed", "pass"}
