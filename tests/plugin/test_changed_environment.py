"""Checks tests of one case that change environment variables: each gets figures of its own environment, and says so."""

import json
import platform

import pytest
from immediate_scheduler import stand_in
from plugin_project import GEMMA, H100, H100_FOLDER, LLAMA_2, Project, failures, only_sentence, recorded

from pytest_gputrain.cases.libraries import versions

SECRET = "hush-hush-hush"

WIDE = """
def build(setup):
    import os

    import torch

    weight = torch.zeros(int(os.environ.get("WIDTH", "64")), 64, device=setup.device, requires_grad=True)

    def step():
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    return step


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
import pytest
from pytest_gputrain import Case

CASE = Case(model="gemma-7b", method="lora", batch_size=2, sequence_length=8192)


@pytest.mark.parametrize("case", [CASE], ids=str)
def test_changed(gputrain, monkeypatch, case):
    {change}
    gputrain.check(case)


def test_plain(gputrain):
    gputrain.check(CASE)
"""
"""A case whose replies are recorded, first in another environment."""


def two(change: str = 'monkeypatch.setenv("FLAG", "1")') -> str:
    return TWO.format(change=change)


def peaks(project: Project) -> dict[str, list[int]]:
    """Of each run, by name of the test."""
    return {
        result["nodeid"].partition("::")[2]: [reply["peak_allocated_bytes"] for reply in result["replies"]]
        for result in project.report()["results"]
    }


def variables(project: Project) -> list[dict[str, str | None]]:
    return [launched["variables"] for launched in project.launches]


@pytest.mark.slow
@pytest.mark.parametrize("nodeids", [NARROW_FIRST, NARROW_FIRST[::-1], NARROW_FIRST[1:]], ids=["first", "last", "alone"])
def test_each_test_has_the_figures_of_its_own_environment(project: Project, nodeids: tuple[str, ...]) -> None:
    project.write(test_mine=WIDE)
    result = project.run("--gpu-json=report.json", *nodeids)
    result.assert_outcomes(passed=len(nodeids))
    peaks_by_test = peaks(project)
    (wide,) = peaks_by_test.pop("test_wide")
    assert wide >= 2 * 256 * 64 * 4
    assert all(narrow[0] < 0.3 * wide for narrow in peaks_by_test.values())
    names = {result["nodeid"].partition("::")[2]: result["variables"] for result in project.report()["results"]}
    assert names.pop("test_wide") == ["TOKEN", "WIDTH"]
    assert all(none == [] for none in names.values())
    assert SECRET not in (project.path / "report.json").read_text()
    told = "build-fp32 was run in 2 environments: test_mine.py::test_wide changes TOKEN, WIDTH"
    assert (told in result.stdout.str()) is (len(nodeids) > 1)


@pytest.mark.slow
def test_one_test_can_compare_environments_of_set_and_deleted_variables(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "16")
    compare = """

def test_all(gputrain, monkeypatch):
    def peak():
        return gputrain.measure(build, precision="fp32", steps=1, warmup=0).peak_allocated_bytes

    narrow = peak()
    monkeypatch.setenv("WIDTH", "256")
    wide = peak()
    monkeypatch.delenv("WIDTH")
    none = peak()
    monkeypatch.undo()
    assert narrow == peak()
    assert wide > 3 * none > 9 * narrow
"""
    project.write(test_mine=WIDE.partition("def test_narrow")[0] + compare)
    project.run().assert_outcomes(passed=1)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--gpu-isolation=inline", "-n2"])
def test_inline_runs_and_workers_of_xdist_have_the_environment_of_each_test(project: Project, option: str) -> None:
    pytest.importorskip("xdist")
    project.write(test_mine=WIDE)
    project.spawn(option, "--gpu-json=report.json", "--gpu-baseline-update").assert_outcomes(passed=2)
    peaks_by_test = peaks(project)
    assert peaks_by_test["test_wide"][0] > 3 * peaks_by_test["test_narrow"][0]
    (entry,) = project.baselines("mine").values()
    assert [run["peak_allocated_bytes"] for run in entry["runs"]] == peaks_by_test["test_narrow"]


@pytest.mark.slow
@pytest.mark.parametrize("nodeids", [NARROW_FIRST, NARROW_FIRST[::-1]], ids=["first", "last"])
def test_all_runs_of_a_baseline_are_of_one_environment(project: Project, nodeids: tuple[str, ...]) -> None:
    project.write(test_mine=WIDE)
    result = project.run("--gpu-json=report.json", "--gpu-baseline-update", "--gpu-runs=2", *nodeids)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.OK
    peaks_by_test = peaks(project)
    assert [len(set(of_test)) for of_test in peaks_by_test.values()] == [1, 1], (
        "the second runs begin when no test runs any more"
    )
    assert peaks_by_test["test_wide"][0] > 3 * peaks_by_test["test_narrow"][0]
    (entry,) = project.baselines("mine").values()
    assert [run["peak_allocated_bytes"] for run in entry["runs"]] == peaks_by_test["test_narrow"]
    assert all("variables" not in run for run in entry["runs"])
    result.stdout.fnmatch_lines(
        [
            "*build-fp32 is not recorded as test_mine.py::test_wide ran it, which changes environment variables (TOKEN, "
            "WIDTH): its baseline is that of test_mine.py::test_narrow, which changes no variable"
        ]
    )
    assert project.verdicts("report.json") == {
        "build-fp32@tiny": "not-comparable" if nodeids[1:] == NARROW_FIRST[1:] else "recorded"
    }


@pytest.mark.slow
def test_a_baseline_and_a_regression_name_what_the_test_changes(project: Project) -> None:
    project.write(test_mine=WIDE)
    result = project.run("--gpu-baseline-update", "-k", "wide")
    result.stdout.fnmatch_lines(["recorded with environment variables that a test changes: build-fp32 (TOKEN, WIDTH)"])
    (entry,) = project.baselines("mine").values()
    assert [run["variables"] for run in entry["runs"]] == [["TOKEN", "WIDTH"]]
    assert SECRET not in project.baseline_file("mine").read_text()
    project.run().assert_outcomes(passed=2)  # it needs less
    project.run("--gpu-baseline-update", "-k", "narrow")
    sentence = only_sentence(project.run(), "test_wide")
    assert "since then: TOKEN changed by this test, WIDTH changed by this test" in sentence
    project.write(test_mine=WIDE.replace("test_wide", "test_small").replace('"256"', '"16"'))
    project.run("--gpu-baseline-update", "-k", "small")
    sentence = only_sentence(project.run(), "test_narrow")
    assert "TOKEN not changed by this test, WIDTH not changed by this test" in sentence


def test_a_regression_names_what_changed_beside_the_libraries_but_not_what_was_never_noted(suite: Project) -> None:
    before = {"cudnn": "9.8.0", "nccl": "2.26.2", "cores": 16, "nics": ["2 x mlx5_core 400 Gb/sec (4X NDR)"]}
    after = {"cudnn": "9.10.2", "nccl": "2.26.2", "cores": 8, "nics": ["1 x mlx5_core 400 Gb/sec (4X NDR)"]}
    suite.answer(recorded(device_name=H100, **before))
    suite.run("--gpu-baseline-update")
    suite.answer(recorded(device_name=H100, slower=1.5, **after))
    assert (
        "since then: cuDNN 9.8.0 -> 9.10.2, CPU cores 16 -> 8, network cards 2 x mlx5_core 400 Gb/sec (4X NDR) -> "
        "1 x mlx5_core 400 Gb/sec (4X NDR)"
    ) in only_sentence(suite.run("-k", GEMMA), f"test_tuning[{GEMMA}]")
    path = suite.baseline_file("tuning", H100_FOLDER)
    document = json.loads(path.read_text())
    for environment in document["environments"].values():  # as of an earlier version
        for name in ("cudnn", "nccl", "cores", "host_memory_bytes", "nics"):
            environment.pop(name, None)
    path.write_text(json.dumps(document))
    assert "; same environment" in only_sentence(suite.run("-k", GEMMA), f"test_tuning[{GEMMA}]")


def test_two_other_environments_are_not_both_recorded(suite: Project) -> None:
    suite.write(
        test_tuning="""
        import pytest
        from pytest_gputrain import Case

        CASE = Case(model="gemma-7b", method="lora", batch_size=2, sequence_length=8192)


        @pytest.mark.parametrize("flag", ["1", "2"])
        def test_changed(gputrain, monkeypatch, flag):
            monkeypatch.setenv("FLAG", flag)
            gputrain.check(CASE)
        """
    )
    result = suite.run("--gpu-baseline-update", "--gpu-runs=1", "--gpu-json=report.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*gemma-7b-lora-bf16 is not recorded as test_tuning.py::test_changed[[]2] ran it, which changes environment "
            "variables (FLAG): its baseline is that of test_tuning.py::test_changed[[]1], which changes FLAG; give own code "
            "a model=NAME for each environment, or *"
        ]
    )
    assert len(suite.baselines("tuning", H100_FOLDER)[GEMMA]["runs"]) == 1


def test_what_no_worker_sees_is_no_difference_and_what_is_no_text_is_told(
    h100: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AT_IMPORT", "0")  # undone with this test
    unseen = {"TOKENIZERS_PARALLELISM": "true", "CUDA_VISIBLE_DEVICES": "0", "MASTER_PORT": "1", "HF_HUB_OFFLINE": "0"}
    unseen["PYTEST_XDIST_WORKER_COUNT"] = "7"
    changes = "\n    ".join(f"monkeypatch.setenv({name!r}, {value!r})" for name, value in unseen.items())
    h100.write(test_two=f"import os\n\nos.environ['AT_IMPORT'] = '1'\n{two(changes)}")
    h100.run("--gpu-json=report.json").assert_outcomes(passed=2)
    assert variables(h100) == [{}]
    assert [result["variables"] for result in h100.report()["results"]] == [[], []]
    h100.write(test_two=two('monkeypatch.setenv("FLAG", "\\udcff")'))
    sentence = failures(h100.run())[f"test_changed[{GEMMA}]"]
    why = "its test sets the environment variable FLAG, which is not UTF-8; set it before pytest starts"
    assert sentence.strip() == f"{GEMMA} was not measured: {why}"


def test_one_worker_alone_has_the_environment_of_the_case(h100: Project) -> None:
    h100.machine(H100, gpus=2)
    case = 'Case(model="gemma-7b", method="lora", batch_size=2, sequence_length=8192, parallel="ddp", gpus=2)'
    test = "def test_it(gputrain, monkeypatch):\n    monkeypatch.setenv('FLAG', '1')\n"
    h100.write(test_scaling_of=f"from pytest_gputrain import Case\n\n\n{test}    gputrain.check({case}, scaling=True)\n")
    h100.run().assert_outcomes(passed=1)
    assert [launched["gpus"] != [] for launched in h100.launches] == [True, True]
    assert variables(h100) == [{"FLAG": "1"}] * 2


def test_cases_that_a_test_in_doubt_looks_at_have_the_environment_of_the_session(h100: Project) -> None:
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
    before = len(h100.launches)
    doubtful = "gemma-7b-lora-bf16-batch_size=1"
    h100.answer(recorded(device_name=H100, slower=1.2), to=doubtful)
    h100.run().assert_outcomes(passed=11, failed=1)
    of_doubtful = [launched["flag"] for launched in h100.launches[before:] if launched["id"] == doubtful]
    of_others = [launched["flag"] for launched in h100.launches[before:] if launched["id"] != doubtful]
    assert (of_doubtful, of_others) == (["1"] * 3, [None] * 11)
    assert h100.launches[before + 1]["id"] != doubtful, "it looked at others at once"


# Other ways to run


def test_a_resumed_run_takes_figures_of_the_same_environment(h100: Project) -> None:
    h100.answer(recorded(device_name=H100, python=platform.python_version(), packages=versions()))
    h100.write(test_two=two())
    h100.run("--gpu-json=first.json").assert_outcomes(passed=2)
    assert variables(h100) == [{"FLAG": "1"}, {}]
    h100.run("--gpu-resume=first.json", "--gpu-json=second.json").assert_outcomes(passed=2)
    assert len(h100.launches) == 2
    assert [result["variables"] for result in h100.report("second.json")["results"]] == [["FLAG"], []]
    h100.write(test_two=two('monkeypatch.setenv("FLAG", "2")'))
    h100.run("--gpu-resume=first.json").assert_outcomes(passed=2)
    assert variables(h100)[2:] == [{"FLAG": "2"}]


def test_a_report_and_the_history_have_the_figures_of_each_environment(h100: Project) -> None:
    h100.answer(recorded(device_name=H100), recorded(device_name=H100, bigger=10 << 30))
    h100.write(test_two=two())
    h100.run("--gpu-json=first.json", "--gpu-history=history.jsonl")
    h100.run("--gpu-baseline=first.json").assert_outcomes(passed=2)
    h100.run("--gpu-history=history.jsonl", "test_two.py::test_changed")
    lines = [json.loads(line) for line in (h100.path / "history.jsonl").read_text().splitlines()]
    assert [line["changed_variables"] for line in lines] == [None, "FLAG"]
    h100.answer(recorded(device_name=H100, bigger=10 << 30))
    assert list(failures(h100.run("--gpu-baseline=first.json"))) == [f"test_changed[{GEMMA}]"]


def test_a_fleet_foresees_cases_in_the_environment_that_tests_begin_in(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("AT_IMPORT", "0")
    project.machine(None)
    project.answer(recorded(device_name=H100))
    scheduler = stand_in(monkeypatch)
    scheduler.nodes = [(H100, 8)]
    cases = 'import os\nos.environ["AT_IMPORT"] = "1"\n' + two().replace(
        "[CASE]", '[CASE, CASE.replace(model="llama-2-13b")]'
    )
    project.write(test_two=cases)
    project.run("-m", "h100", "--gpu-executor=slurm", "--gpu-platform=h100")
    ordered = [(str(order.task.case), order.task.variables) for order in scheduler.orders]
    plain, changed = {"AT_IMPORT": "1"}, {"AT_IMPORT": "1", "FLAG": "1"}
    assert sorted(case for case, digest in ordered if digest == changed) == sorted([GEMMA, LLAMA_2])
    assert sorted(case for case, digest in ordered if digest == plain) == sorted([GEMMA, LLAMA_2])
    assert len(ordered) == 4


DRY = ("--gpu-predict", "--gpu-platform=h100")


@pytest.mark.slow
def test_a_prediction_predicts_for_each_environment(project: Project) -> None:
    project.write(test_mine=WIDE)
    project.run(*DRY, "--gpu-json=report.json").assert_outcomes(passed=2)
    narrow, wide = (result["reply"]["peak_allocated_bytes"] for result in project.report()["results"])
    assert wide > 3 * narrow
    assert [result["variables"] for result in project.report()["results"]] == [[], ["TOKEN", "WIDTH"]]
    result = project.run(*DRY, "--gpu-baseline-update")
    result.stdout.fnmatch_lines(["*build-fp32 is not recorded as test_mine.py::test_wide ran it*"])
    sentence = only_sentence(project.run(*DRY), "test_wide")
    assert "more in backward" in sentence
