"""Tests recording baselines: which files and entries are written, and which stay as they are."""

import json
from pathlib import Path

import pytest
from plugin_project import BUILD, GEMMA, H100, H100_FOLDER, LLAMA, LLAMA_2, SUITE, failures, only_sentence, recorded

from pytest_gputrain import GiB

ALL, TEST = sorted([LLAMA, GEMMA, LLAMA_2]), f"test_tuning[{GEMMA}]"
UPDATE = "--gpu-baseline-update"
OUT_OF_MEMORY = recorded("h100_out_of_memory")


def entries(project):
    """Those of the H100, or none."""
    return project.baselines("tuning", H100_FOLDER) if project.baseline_file("tuning", H100_FOLDER).exists() else {}


def changed(project, before):
    after = entries(project)
    return {key for key in before | after if before.get(key) != after.get(key)}


def launched(project):
    return [launch["id"] for launch in project.launches]


def test_an_update_records_every_case_that_ran_with_its_commit_and_replaces_the_figures_of_before(suite):
    for command in ("init -q", "add tox.ini", "commit -qm first"):
        suite.git(*command.split())
    result = suite.run(UPDATE)
    result.assert_outcomes(passed=3)
    assert sorted(entries(suite)) == ALL
    runs = entries(suite)[GEMMA]["runs"]
    assert [run["peak_allocated_bytes"] for run in runs] == [35 * GiB] * 5
    assert [run["step_seconds"] for run in runs] == [recorded()["step_seconds"]] * 5
    assert {run["commit"] for run in runs} == {suite.git("rev-parse", "--short=12", "HEAD")}
    path = suite.baseline_file("tuning", H100_FOLDER)
    told = "all runs of these baselines come from this session, so they do not show how much days differ"
    result.stdout.fnmatch_lines([f"3 baselines recorded in {path}; review the difference in git", told])
    assert [file for file in (suite.path / "baselines").rglob("*") if file.is_file()] == [path], "nothing stray"
    suite.answer(recorded(slower=2, bigger=5 * GiB))
    (suite.path / "tox.ini").write_text("[pytest]\n# changed\n")
    suite.run(UPDATE, "--gpu-runs=2").assert_outcomes(passed=3)
    for entry in entries(suite).values():
        assert [run["peak_allocated_bytes"] for run in entry["runs"]] == [40 * GiB] * 2
        assert entry["runs"][0]["commit"].endswith("+dirty")
    suite.run("--gpu-strict").assert_outcomes(passed=3)


@pytest.mark.slow
def test_an_update_on_a_cpu_records_one_run_and_changes_what_is_judged_there_alone(project):
    """Step times, host memory, dates and sessions differ between the processes, allocated bytes do not."""
    test = "\n\ndef test_mine(gputrain):\n    gputrain.check(build, precision='fp32', steps=2)\n"
    project.write(test_mine=BUILD + test, test_other=BUILD + test)
    assert "come from this session" not in project.run(UPDATE).stdout.str()
    assert [len(entry["runs"]) for entry in project.baselines("mine").values()] == [1]
    mine, other = (project.baseline_file(name, "cpu") for name in ("mine", "other"))
    before = mine.read_bytes(), other.read_bytes()
    project.write(test_other=BUILD.replace("(64, 64", "(64, 65") + test)
    project.run(UPDATE).assert_outcomes(passed=2)
    assert mine.read_bytes() == before[0]
    assert other.read_bytes() != before[1]


@pytest.mark.parametrize(
    ("bigger", "slower", "told"),
    [
        (0, 1.0, "3 baselines in * are unchanged, because their judged figures are the same"),
        (1, 1.0, "1 baseline recorded in *; review the difference in git; 2 more have the same figures*"),
        (8 * GiB, 1.0, f"1 case recorded although worse than the baseline before: {GEMMA} has today's figures as its *"),
        (
            0,
            1.05,
            f"*{GEMMA} has today's figures as its baseline now; against the baseline that it replaces: {GEMMA} * 5.0 %*",
        ),
    ],
    ids=["same", "a byte", "bigger", "slower"],
)
def test_an_update_changes_the_entries_of_other_figures_alone_and_names_what_it_accepts(gated, bigger, slower, told):
    before, file = entries(gated), gated.baseline_file("tuning", H100_FOLDER).read_bytes()
    gated.answer(recorded(bigger=bigger, slower=slower), to=GEMMA)
    result = gated.run(UPDATE, "--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines([told])
    assert changed(gated, before) == ({GEMMA} if bigger or slower > 1 else set())
    assert (gated.baseline_file("tuning", H100_FOLDER).read_bytes() == file) is (not bigger and slower == 1)
    was = {entry["key"]: entry["verdict"]["before"] for entry in gated.report()["results"]}
    assert was == {LLAMA: "pass", GEMMA: "regressed" if bigger > 1 or slower > 1 else "pass", LLAMA_2: "pass"}


def test_an_update_keeps_the_entries_of_deselected_cases_and_the_files_of_other_devices(gated):
    before = entries(gated)
    gated.answer(recorded(bigger=GiB))
    gated.run(UPDATE, "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    assert changed(gated, before) == {GEMMA}
    before = entries(gated)
    gated.machine("NVIDIA A100-SXM4-80GB")
    gated.run(UPDATE).assert_outcomes(passed=3)
    assert changed(gated, before) == set()
    assert gated.baseline_file("tuning", "nvidia-a100-sxm4-80gb").exists()


def test_new_only_adds_new_cases_and_leaves_the_text_of_the_others_which_it_gates(suite):
    suite.run(UPDATE, "-k", "not gemma").assert_outcomes(passed=2, deselected=1)
    file, before = suite.baseline_file("tuning", H100_FOLDER), entries(suite)
    lines_before = file.read_text().splitlines()
    suite.answer(recorded(slower=1.01, bigger=1000))
    (suite.path / "launches.jsonl").unlink()
    suite.run("--gpu-baseline-new").assert_outcomes(passed=3)
    assert sorted(launched(suite)) == sorted([*[GEMMA] * 5, LLAMA, LLAMA_2]), "a known case is measured once"
    assert changed(suite, before) == {GEMMA}
    remaining = iter(file.read_text().splitlines())
    assert all(line in remaining for line in lines_before)
    with_all = file.read_bytes(), file.stat().st_mtime_ns
    suite.answer(recorded(slower=1.08), to=GEMMA)
    assert list(failures(suite.run("--gpu-baseline-new"))) == [TEST]
    assert (file.read_bytes(), file.stat().st_mtime_ns) == with_all


def test_a_baseline_with_a_field_of_a_newer_version_is_judged_and_kept(gated):
    file = gated.baseline_file("tuning", H100_FOLDER)
    document = json.loads(file.read_text())
    document["cases"][GEMMA]["runs"][0]["of_tomorrow"] = {"any": [1]}
    for key in (GEMMA, LLAMA):
        document["cases"][key]["of_all_runs"] = 0.02
    file.write_text(json.dumps(document, indent=1))
    gated.run().assert_outcomes(passed=3)
    gated.answer(recorded(slower=1.08))
    assert len(failures(gated.run())) == 3
    gated.answer(recorded(slower=1.08), to=LLAMA)
    gated.answer(recorded(), to=GEMMA)
    gated.run(UPDATE, "-k", "llama-3.1 or gemma").assert_outcomes(passed=2, deselected=1)
    assert entries(gated)[GEMMA] == document["cases"][GEMMA]
    assert entries(gated)[LLAMA] != document["cases"][LLAMA]
    assert "of_all_runs" not in entries(gated)[LLAMA], "whose runs were replaced"


# What becomes no baseline


@pytest.mark.parametrize(
    ("replies", "beside", "sentence"),
    [
        ([recorded(), recorded("crashed")], 0, "* gave no measurement *"),
        ([OUT_OF_MEMORY], 2, "*; it ran beside python (pid 4711, 1.00 GiB) on GPU 0 and *, so it is not recorded*"),
    ],
    ids=["later crash", "out of memory beside others"],
)
def test_what_gave_no_figures_becomes_no_baseline_and_fails(gated, replies, beside, sentence):
    gated.answer(*replies, to=GEMMA)
    gated.occupied(free_bytes=78 * GiB, processes=beside)
    before = entries(gated)
    result = gated.run(UPDATE, *(["-k", "gemma"] if beside else []), "--junitxml=junit.xml", "--gpu-json=report.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    pytest.LineMatcher([only_sentence(result, TEST)]).fnmatch_lines([sentence])
    assert changed(gated, before) == set()
    assert gated.verdicts()[GEMMA] == "failed"
    of_case = [len(list(case.iter("failure"))) for case in gated.junit()[""] if case.get("name") == TEST]
    assert of_case == ([1] if len(replies) == 1 else [0, 1]), "a failure in a later run is an entry of its own"


def test_a_first_baseline_that_does_not_fit_is_told_as_no_regression_and_measure_records_nothing(suite):
    suite.answer(OUT_OF_MEMORY, to=GEMMA)
    suite.write(test_other=SUITE.replace("gputrain.check(case)", "case.model == 'gemma-7b' or gputrain.measure(case)"))
    result = suite.run(UPDATE, "--gpu-runs=1")
    result.assert_outcomes(passed=6)
    assert "worse than the baseline before" not in result.stdout.str()
    assert GEMMA in entries(suite)
    assert not suite.baseline_file("other", H100_FOLDER).exists()


FAILING = """
import pytest

def build(setup):
    return lambda: None

@pytest.fixture
def checked(gputrain):
    gputrain.check(build, model="of a fixture")

def test_fails(gputrain):
    gputrain.check(build)
    assert False

def test_fails_by_its_fixture(checked):
    assert False

def test_passes(gputrain):
    gputrain.check(build, model="other")
"""


def test_figures_of_a_test_that_fails_otherwise_become_no_baseline_and_are_measured_no_further(h100):
    h100.write(test_mine=FAILING)
    result = h100.run(UPDATE, "--gpu-runs=2")
    result.assert_outcomes(passed=1, failed=2)
    failing = ["build-bf16", "of a fixture-bf16"]
    result.stdout.fnmatch_lines([f"not recorded: {name}, because its test failed" for name in failing])
    assert launched(h100) == [*failing, "other-bf16", "other-bf16"]
    assert list(h100.baselines("mine", H100_FOLDER)) == ["other-bf16"]


# Several runs


def test_the_runs_of_all_cases_are_recorded_in_turn_and_others_are_made_at_once(suite):
    result = suite.run(UPDATE, "--gpu-runs=3", "--gpu-json=report.json")
    assert launched(suite) == [LLAMA, GEMMA, LLAMA_2] * 3
    result.stdout.fnmatch_lines(["gputrain: further runs of 3 baselines, one of each in turn"])
    assert [(len(result["replies"]), result["to_come"]) for result in suite.report()["results"]] == [(3, 0)] * 3
    assert set(suite.verdicts().values()) == {"recorded"}
    (suite.path / "launches.jsonl").unlink()
    suite.run("--gpu-runs=2").assert_outcomes(passed=3)
    assert launched(suite) == [LLAMA, LLAMA, GEMMA, GEMMA, LLAMA_2, LLAMA_2]


def test_the_runs_of_one_worker_are_recorded_in_turn_with_the_case(project):
    project.machine(H100, gpus=2)
    two = SUITE.replace("sequence_length=8192", "sequence_length=8192, parallel='ddp', gpus=2, servers=0")
    project.write(test_tuning=two.replace("check(case)", "check(case, scaling=True)"))
    project.run(UPDATE, "--gpu-runs=2", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    assert launched(project) == [f"{GEMMA}-ddp", GEMMA] * 2


@pytest.mark.slow
def test_an_inline_case_has_all_its_runs_in_its_test(project):
    test = "def test_mine(gputrain):\n    gputrain.check(build, precision='fp32', steps=2, inline=True)\n"
    project.write(test_mine=f"{BUILD}\n\n{test}")
    assert "further runs" not in project.run(UPDATE, "--gpu-runs=2").stdout.str()
    assert [len(entry["runs"]) for entry in project.baselines("mine").values()] == [2]


@pytest.mark.parametrize("arguments", [[], ["--gpu-json=report.json"]], ids=["alone", "with a report"])
def test_an_update_that_is_ended_keeps_old_baselines_and_all_figures(suite, arguments):
    suite.run(UPDATE, "-k", "not gemma").assert_outcomes(passed=2, deselected=1)
    before = entries(suite)
    suite.answer(recorded(slower=2))
    suite.when_launched("raise KeyboardInterrupt", of="before == 3 * 4 + 1")
    result = suite.spawn(UPDATE, *arguments)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    (line,) = (line for line in result.outlines if line.startswith("not recorded: "))
    trouble, _, place = line.partition("; all figures are in ")
    assert trouble == "not recorded: 2 cases, because the run was ended before all had 5 runs"
    assert changed(suite, before) == {LLAMA}
    assert len(entries(suite)[LLAMA]["runs"]) == 5
    report = json.loads(Path(place).read_text())
    assert {result["key"]: len(result["replies"]) for result in report["results"]} == {LLAMA: 5, GEMMA: 4, LLAMA_2: 4}
    suite.machine(H100)
    suite.answer(recorded(slower=2))
    suite.run(f"--gpu-baseline={place}", "--gpu-strict").assert_outcomes(passed=3)


def test_an_update_that_stops_at_a_failure_records_nothing_half(suite):
    suite.answer(recorded("crashed"), to=GEMMA)
    result = suite.run(UPDATE, "-x")
    result.assert_outcomes(passed=1, failed=1)
    assert launched(suite) == [LLAMA, GEMMA]
    result.stdout.fnmatch_lines(["not recorded: 1 case, because the run was ended before all had 5 runs; all figures *"])
    assert not suite.baseline_file("tuning", H100_FOLDER).exists()
