"""Tests ``check(case, scaling=True)``: the scaling efficiency of several workers is a gated figure."""

import statistics

import pytest
from plugin_project import GEMMA, H100, H100_FOLDER, failures, only_sentence, recorded, skips

SCALING = """
import pytest
from pytest_gputrain import Case, grid

BASE = Case(model="gemma-7b", method="lora", sequence_length=64, batch_size=2)
CASES = [*grid(BASE.replace(parallel="ddp"), gpus=[2, 4]), BASE]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scaling(gputrain, case):
    gputrain.check(case, scaling=True)
"""
TWO, FOUR = "gemma-7b-lora-bf16-ddp-gpus=2", "gemma-7b-lora-bf16-ddp-gpus=4"
ALONE = "gemma-7b-lora-bf16-gpus=1"
"""Under the id that it has where it is measured beside a case; replies are kept by what is measured, not by the id."""


def _only(key):
    return f"test_scale.py::test_scaling[{key}]"


SECONDS = statistics.median(recorded()["step_seconds"])


def _answer(project, *, two=1.05, four=1.25, single=1.0):
    """Let the cases take these multiples of the recorded time, which is one worker's."""
    for key, slower, gpus in ((TWO, two, 2), (FOUR, four, 4), (ALONE, single, 1), (GEMMA, single, 1)):
        reply = recorded(slower=slower, device_count=gpus)
        reply["batch_size"] *= gpus
        project.answer(reply, to=key)


@pytest.fixture
def four(project, monkeypatch):
    """Four H100 and cases for two, four and one of them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    project.machine(H100, gpus=4)
    project.write(test_scale=SCALING)
    _answer(project)
    return project


@pytest.fixture
def gated(four):
    four.run("--gpu-baseline-update").assert_outcomes(passed=3)
    return four


def _efficiencies(project):
    return {result["key"]: result["summary"]["scaling_efficiency"] for result in project.report()["results"]}


def _metric(project, key):
    (case_result,) = (result for result in project.report()["results"] if result["key"] == key)
    (metric,) = (metric for metric in case_result["verdict"]["metrics"] if metric["metric"] == "scaling_efficiency")
    return metric


def test_efficiency_is_the_throughput_over_that_of_one_worker_which_is_measured_once(four):
    result = four.run("--gpu-json=report.json")
    assert _efficiencies(four) == {TWO: pytest.approx(1 / 1.05), FOUR: pytest.approx(1 / 1.25), GEMMA: None}
    rates = {result["key"]: result["summary"]["samples_per_second"] for result in four.report()["results"]}
    assert _efficiencies(four)[FOUR] == pytest.approx(rates[FOUR] / (4 * rates[GEMMA]))
    assert [launched["processes"] for launched in four.launches] == [2, 1, 4]
    result.stdout.fnmatch_lines(["*ddp-gpus=2 *95.2 %*", "*ddp-gpus=4 *80.0 %*"])


def test_a_single_worker_is_measured_only_where_an_efficiency_is_judged(four):
    for arguments in (["--gpu-find-batch"], ["--gpu-loss=20"], ["--gpu-baseline=published"]):
        four.run(*arguments, "--gpu-json=report.json", _only(TWO))
        assert 1 not in {launched["processes"] for launched in four.launches}
        assert _efficiencies(four) == {TWO: None}
    four.write(test_scale=SCALING.replace("scaling=True", "scaling=False"))
    four.run("--gpu-json=report.json", "-k", "ddp").assert_outcomes(passed=2, deselected=1)
    four.write(test_scale=SCALING)
    four.answer(recorded("h100_out_of_memory"), to=FOUR)
    four.run(_only(FOUR)).assert_outcomes(failed=1)
    assert 1 not in {launched["processes"] for launched in four.launches}


def test_an_update_without_one_worker_says_what_it_leaves_out(four):
    four.answer(recorded("h100_out_of_memory"), to=ALONE)
    four.run(_only(FOUR), "--gpu-baseline-update", "--gpu-json=report.json").assert_outcomes(passed=1)
    (result,) = four.report()["results"]
    assert "without a scaling efficiency (one worker alone ran out of device memory" in result["verdict"]["sentence"]


def test_a_worse_efficiency_fails_a_better_one_is_an_improvement_and_the_same_passes(gated):
    gated.run("--gpu-json=report.json", "--gpu-strict").assert_outcomes(passed=3)
    assert set(gated.verdicts().values()) == {"pass"}
    _answer(gated, single=1.02, four=1.22)
    gated.run("--gpu-json=report.json", "--gpu-time-tolerance=3%").assert_outcomes(passed=3)
    assert gated.verdicts()[FOUR] == "improved"
    assert _metric(gated, FOUR)["baseline"] == pytest.approx(0.8)
    _answer(gated, four=1.4)
    sentence = only_sentence(gated.run("--gpu-time-tolerance=10%"), f"test_scaling[{FOUR}]")
    assert "scales 10.7 % worse: an efficiency of 71.4 % against 80.0 %; limit 9.1 %; 3 of 3 fresh runs worse" in sentence
    # One worker became faster and the others did not: their exchange takes a larger share, though none is slower.
    _answer(gated, single=0.9)
    told = failures(gated.run())
    assert set(told) == {f"test_scaling[{TWO}]", f"test_scaling[{FOUR}]"}
    assert "slower" not in told[f"test_scaling[{FOUR}]"]
    assert f"one worker alone {SECONDS:.2f} s -> {SECONDS * 0.9:.2f} s" in told[f"test_scaling[{FOUR}]"]


def test_a_baseline_without_efficiency_is_told_judged_by_the_rest_and_completed_by_an_update(four):
    four.write(test_scale=SCALING.replace(", scaling=True", ""))
    four.run("--gpu-baseline-update").assert_outcomes(passed=3)
    four.write(test_scale=SCALING)
    result = four.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert four.verdicts() == {TWO: "new", FOUR: "new", GEMMA: "pass"}
    result.stdout.fnmatch_lines(["*has no scaling efficiency in its baseline of *; record it with --gpu-baseline-update*"])
    assert set(failures(four.run("--gpu-strict"))) == {f"test_scaling[{TWO}]", f"test_scaling[{FOUR}]"}
    _answer(four, four=1.5)
    assert "slower" in only_sentence(four.run(), f"test_scaling[{FOUR}]")
    before = four.baselines("scale", H100_FOLDER)
    four.run("--gpu-baseline-update").assert_outcomes(passed=3)
    after = four.baselines("scale", H100_FOLDER)
    assert before[FOUR]["runs"][0].get("one_worker_seconds") is None
    assert after[FOUR]["runs"][0]["one_worker_seconds"] == pytest.approx(SECONDS)
    assert "one_worker_seconds" not in after[GEMMA]["runs"][0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h100_out_of_memory", "one worker alone ran out of device memory"),
        ("crashed", "one worker alone gave no measurement"),
        ("timed_out", "one worker alone was ended after"),
    ],
)
def test_one_worker_without_figures_is_told_and_the_case_is_judged(gated, name, says):
    gated.answer(recorded(name), to=ALONE)
    result = gated.run(_only(FOUR), "--gpu-json=report.json")
    assert gated.verdicts() == {FOUR: "not-comparable"}
    result.stdout.fnmatch_lines([f"*has no scaling efficiency: {says}*"])
    statuses = {metric["metric"]: metric["status"] for metric in gated.report()["results"][0]["verdict"]["metrics"]}
    assert statuses["step_seconds"] == statuses["peak_allocated_bytes"] == "pass"
    gated.run(_only(FOUR), "--gpu-strict").assert_outcomes(failed=1)
    _answer(gated, four=1.5)
    gated.answer(recorded(name), to=ALONE)
    assert "slower" in only_sentence(gated.run(_only(FOUR)), f"test_scaling[{FOUR}]")


def test_on_a_cpu_a_case_scales_with_all_its_processes_and_its_efficiency_is_shown_and_not_judged(cpu):
    cpu.write(test_scale=SCALING)
    result = cpu.run("-o", "gpu_processes=2", "--gpu-baseline-update")
    result.assert_outcomes(passed=2, skipped=1)
    assert skips(result) == {f"test_scaling[{FOUR}]": "needs 4 processes; -o gpu_processes=4 runs them on a CPU"}
    cpu.answer(recorded("cpu_measured", slower=3), to=TWO)
    result = cpu.run("-o", "gpu_processes=2", "--gpu-json=report.json", "--gpu-strict")
    result.assert_outcomes(passed=2, skipped=1)
    assert _efficiencies(cpu)[f"{TWO}@tiny"] == pytest.approx(1 / 3)
    assert _metric(cpu, f"{TWO}@tiny")["status"] == "not-comparable"
    result.stdout.fnmatch_lines(["*scaling efficiency not compared: time on a CPU is shown, not judged"])
