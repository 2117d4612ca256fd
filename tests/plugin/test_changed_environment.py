"""Checks tests of one case that change environment variables: each gets figures of its own environment, and says so."""

import json
import platform

import pytest
from immediate_scheduler import stand_in
from plugin_project import GEMMA, H100, H100_FOLDER, LLAMA_2, failures, only_sentence, recorded

from pytest_gputrain.cases.libraries import versions

TWO_WIDTHS = """
def build(setup):
    import os

    import torch

    weight = torch.zeros(int(os.environ.get("WIDTH", "64")), 64, requires_grad=True)
    return lambda: (weight**2).sum().backward()


def test_narrow(gputrain):
    gputrain.check(build, precision="fp32", steps=1, warmup=0)


def test_wide(gputrain, monkeypatch):
    monkeypatch.setenv("WIDTH", "256")
    monkeypatch.setenv("TOKEN", "hush-hush-hush")
    gputrain.check(build, precision="fp32", steps=1, warmup=0)
"""
"""Own code whose memory follows a variable."""
NARROW_FIRST = ("test_mine.py::test_narrow", "test_mine.py::test_wide")

TWO = """
import os

import pytest
from pytest_gputrain import Case

os.environ["AT_IMPORT"] = "1"
CASE = Case(model="gemma-7b", method="lora", batch_size=2, sequence_length=8192)


@pytest.mark.parametrize("case", [CASE], ids=str)
def test_changed(gputrain, monkeypatch, case):
    {change}
    gputrain.check(case)


def test_plain(gputrain):
    gputrain.check(CASE)
"""
"""A case whose replies are recorded, first in another environment."""


@pytest.fixture
def at_import(monkeypatch):
    """Undo with the test what the file of its project changes when it is imported, which is no test's change."""
    monkeypatch.setenv("AT_IMPORT", "0")


@pytest.fixture
def two(h100, at_import):
    write_two(h100)
    return h100


def write_two(project, change='monkeypatch.setenv("FLAG", "1")'):
    project.write(test_two=TWO.format(change=change))


def of_tests(project, name="report.json"):
    return {result["nodeid"].partition("::")[2]: result for result in project.report(name)["results"]}


def flags(project):
    return [launched["variables"].get("FLAG") for launched in project.launches]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "nodeids", "runs"),
    [
        (["--gpu-runs=2"], NARROW_FIRST, 2),
        (["--gpu-runs=2"], NARROW_FIRST[::-1], 2),
        (["--gpu-isolation=inline"], NARROW_FIRST, 1),
        (["-n2"], NARROW_FIRST, 1),
    ],
    ids=["first", "last", "inline", "xdist"],
)
def test_each_test_has_the_figures_of_its_own_environment_and_a_baseline_those_of_one(project, options, nodeids, runs):
    if "-n2" in options:
        pytest.importorskip("xdist")
    project.write(test_mine=TWO_WIDTHS)
    result = project.spawn("--gpu-json=report.json", "--gpu-baseline-update", *options, *nodeids)
    result.assert_outcomes(passed=2)
    peaks = {
        name: [reply["peak_allocated_bytes"] for reply in entry["replies"]] for name, entry in of_tests(project).items()
    }
    assert [len(set(of_test)) for of_test in peaks.values()] == [1, 1], "also where second runs begin when no test runs"
    assert peaks["test_wide"][0] > 3 * peaks["test_narrow"][0]
    set_here = {name: {"TOKEN", "WIDTH"} & set(entry["variables"]) for name, entry in of_tests(project).items()}
    assert set_here == {"test_narrow": set(), "test_wide": {"TOKEN", "WIDTH"}}
    (entry,) = project.baselines("mine").values()
    assert [run["peak_allocated_bytes"] for run in entry["runs"]] == peaks["test_narrow"]
    assert len(entry["runs"]) == runs
    assert "hush" not in (project.path / "report.json").read_text() + project.baseline_file("mine").read_text()
    result.stdout.fnmatch_lines(
        [
            "*build-fp32 is not recorded as test_mine.py::test_wide ran it, which changes environment variables (*TOKEN*, "
            "WIDTH): its baseline is that of test_mine.py::test_narrow, which changes *"
        ]
    )


def test_a_baseline_and_a_regression_name_what_the_test_changes(two):
    result = two.run("--gpu-baseline-update", "-k", "changed")
    result.stdout.fnmatch_lines([f"recorded with environment variables that a test changes: {GEMMA} (FLAG)"])
    assert [run["variables"] for run in two.baselines("two", H100_FOLDER)[GEMMA]["runs"]] == [["FLAG"]] * 5
    two.answer(recorded(slower=1.2))
    told = failures(two.run())
    assert "; same environment" in told[f"test_changed[{GEMMA}]"]
    assert "since then: FLAG not changed by this test" in told["test_plain"]
    two.run("--gpu-baseline-update", "-k", "plain")
    two.answer(recorded(slower=1.5))
    assert "since then: FLAG changed by this test" in only_sentence(two.run("-k", "changed"), f"test_changed[{GEMMA}]")
    result = two.run("-k", "two")
    assert f"{GEMMA} was run in 2 environments: test_two.py::test_changed[{GEMMA}] changes FLAG" in result.stdout.str()


def test_two_other_environments_are_not_both_recorded(two):
    flags_of_test = '@pytest.mark.parametrize("flag", "12")\ndef test_changed(gputrain, monkeypatch, flag, case):'
    text = TWO.format(change='monkeypatch.setenv("FLAG", flag)').partition("def test_plain")[0]
    two.write(test_two=text.replace("def test_changed(gputrain, monkeypatch, case):", flags_of_test))
    result = two.run("--gpu-baseline-update", "--gpu-runs=1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [f"*{GEMMA} is not recorded as *?2-* ran it, *: its baseline is that of *?1-*, which changes FLAG; give own code *"]
    )
    assert len(two.baselines("two", H100_FOLDER)[GEMMA]["runs"]) == 1


def test_what_no_worker_sees_is_no_difference_and_what_is_no_text_is_told(two):
    unseen = {"TOKENIZERS_PARALLELISM": "true", "CUDA_VISIBLE_DEVICES": "0", "MASTER_PORT": "1", "HF_HUB_OFFLINE": "0"}
    unseen["PYTEST_XDIST_WORKER_COUNT"] = "7"
    write_two(two, "\n    ".join(f"monkeypatch.setenv({name!r}, {value!r})" for name, value in unseen.items()))
    two.run("--gpu-json=report.json").assert_outcomes(passed=2)
    assert [launched["variables"] for launched in two.launches] == [{}]
    assert [result["variables"] for result in two.report()["results"]] == [[], []]
    write_two(two, 'monkeypatch.setenv("FLAG", "\\udcff")')
    sentence = failures(two.run())[f"test_changed[{GEMMA}]"]
    why = "its test sets the environment variable FLAG, which is not UTF-8; set it before pytest starts"
    assert sentence.strip() == f"{GEMMA} was not measured: {why}"


def test_one_worker_alone_has_the_environment_of_the_case(two):
    two.machine(H100, gpus=2)
    text = TWO.format(change='monkeypatch.setenv("FLAG", "1")').replace("check(case)", "check(case, scaling=True)")
    two.write(test_two=text.replace("sequence_length=8192", "sequence_length=8192, parallel='ddp', gpus=2"))
    two.run("-k", "changed").assert_outcomes(passed=1, deselected=1)
    assert ([len(launched["gpus"]) for launched in two.launches], flags(two)) == ([2, 1], ["1", "1"])


def test_cases_that_a_test_in_doubt_looks_at_have_the_environment_of_the_session(h100):
    h100.write(
        test_many="""
        import pytest
        from pytest_gputrain import Case, grid

        CASES = grid(Case(model="gemma-7b", method="lora", sequence_length=512), batch_size=range(1, 13))


        @pytest.mark.parametrize("case", CASES, ids=str)
        def test_it(gputrain, monkeypatch, case):
            if case.batch_size == 1:
                monkeypatch.setenv("FLAG", "1")
            gputrain.check(case)
        """
    )
    h100.run("--gpu-baseline-update", "--gpu-runs=3").assert_outcomes(passed=12)
    (h100.path / "launches.jsonl").unlink()
    doubtful = "gemma-7b-lora-bf16-batch_size=1"
    h100.answer(recorded(device_name=H100, slower=1.2), to=doubtful)
    h100.run().assert_outcomes(passed=11, failed=1)
    seen = [(launched["id"] == doubtful, launched["flag"]) for launched in h100.launches]
    assert sorted(seen, key=str) == [(False, None)] * 11 + [(True, "1")] * 3
    assert not seen[1][0], "it looked at others at once"


# Other ways to run


def test_a_resumed_run_takes_figures_of_the_same_environment(two):
    two.answer(recorded(device_name=H100, python=platform.python_version(), packages=versions()))
    two.run("--gpu-json=first.json").assert_outcomes(passed=2)
    two.run("--gpu-resume=first.json", "--gpu-json=second.json").assert_outcomes(passed=2)
    assert flags(two) == ["1", None]
    assert [result["variables"] for result in two.report("second.json")["results"]] == [["FLAG"], []]
    write_two(two, 'monkeypatch.setenv("FLAG", "2")')
    two.run("--gpu-resume=first.json").assert_outcomes(passed=2)
    assert flags(two)[2:] == ["2"]


def test_a_report_and_the_history_have_the_figures_of_each_environment(two):
    two.answer(recorded(device_name=H100), recorded(device_name=H100, bigger=10 << 30))
    two.run("--gpu-json=first.json", "--gpu-history=history.jsonl")
    two.run("--gpu-baseline=first.json").assert_outcomes(passed=2)
    two.run("--gpu-history=history.jsonl", "-k", "changed")
    lines = [json.loads(line) for line in (two.path / "history.jsonl").read_text().splitlines()]
    assert [line["changed_variables"] for line in lines] == [None, "FLAG"]
    two.answer(recorded(device_name=H100, bigger=10 << 30))
    assert list(failures(two.run("--gpu-baseline=first.json"))) == [f"test_changed[{GEMMA}]"]


def test_a_fleet_foresees_cases_in_the_environment_that_tests_begin_in(cpu, at_import, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cpu.answer(recorded(device_name=H100))
    scheduler = stand_in(monkeypatch)
    scheduler.nodes = [(H100, 8)]
    text = TWO.format(change='monkeypatch.setenv("FLAG", "1")')
    cpu.write(test_two=text.replace("[CASE]", '[CASE, CASE.replace(model="llama-2-13b")]'))
    cpu.run("-m", "h100", "--gpu-executor=slurm", "--gpu-platform=h100")
    ordered = [(str(order.task.case), *sorted(order.task.variables.items())) for order in scheduler.orders]
    plain, changed = [("AT_IMPORT", "1")], [("AT_IMPORT", "1"), ("FLAG", "1")]
    assert sorted(ordered) == sorted((case, *digest) for case in (GEMMA, LLAMA_2) for digest in (plain, changed))
