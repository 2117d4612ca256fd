"""Tests what passes and what fails: first runs, strict runs, regressions."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from plugin_project import BUILD, GEMMA, H100_FOLDER, LLAMA, LLAMA_2, SUITE, Project, failures, only_sentence, recorded

from pytest_gputrain import GiB

MINE = f"""{BUILD}

def test_mine(gputrain):
    gputrain.check(build, precision="fp32", steps=3, warmup=1)
"""

GROWING = """
import pytest


def build(setup):
    from pathlib import Path

    import torch

    size = int(Path(__file__).with_name("size.txt").read_text())
    weight = torch.zeros(size, 1024, requires_grad=True)

    def step():
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    return step


def other(setup):
    import torch

    weight = torch.zeros(64, 64)
    return lambda: weight.sum()


def test_before(gputrain):
    gputrain.check(other, precision="fp32", steps=3, warmup=1)


def test_grown(gputrain):
    gputrain.check(build, precision="fp32", steps=3, warmup=1)


def test_after():
    pass
"""


@pytest.fixture
def gated(suite: Project) -> Project:
    """Three cases with an H100's baseline."""
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    return suite


def test_first_run_passes_as_new_and_names_the_remedy(project: Project) -> None:
    project.write(test_mine=MINE)
    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "1 case without a baseline: build-fp32 has no baseline; record it with --gpu-baseline-update-new-only",
            "*build*fp32* new*",
        ]
    )


def test_first_run_creates_no_baseline(suite: Project) -> None:
    suite.run().assert_outcomes(passed=3)
    assert not (suite.path / "baselines").exists()


def test_strict_fails_a_new_case_with_its_remedy(suite: Project) -> None:
    result = suite.run("--gpu-strict", "-k", "gemma")
    assert only_sentence(result, f"test_tuning[{GEMMA}]") == (
        f"{GEMMA} has no baseline; record it with --gpu-baseline-update-new-only (strict)"
    )


def test_ci_fails_new_cases_also_where_the_device_has_no_baseline(suite: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert only_sentence(suite.run("-k", "gemma"), f"test_tuning[{GEMMA}]") == (
        f"{GEMMA} has no baseline; record it with --gpu-baseline-update-new-only (strict)"
    )
    suite.run("--no-gpu-strict").assert_outcomes(passed=3)
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.run().assert_outcomes(passed=3)


def test_ci_fails_cases_that_only_another_device_has_and_names_it(suite: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.machine("NVIDIA A100-SXM4-80GB")
    monkeypatch.setenv("CI", "true")
    sentence = only_sentence(suite.run("-k", "gemma"), f"test_tuning[{GEMMA}]")
    assert f"this machine is nvidia-a100-sxm4-80gb; there are some for {H100_FOLDER}" in sentence


def test_ci_fails_a_case_that_the_report_to_compare_with_lacks(suite: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.run("-k", "llama", "--gpu-json=before.json").assert_outcomes(passed=2, deselected=1)
    monkeypatch.setenv("CI", "true")
    assert list(failures(suite.run("--gpu-baseline=before.json"))) == [f"test_tuning[{GEMMA}]"]


def test_ini_strictness_fails_new_cases(suite: Project) -> None:
    suite.ini("gpu_strict = true")
    suite.run().assert_outcomes(failed=3)


def test_ini_strictness_off_wins_over_ci(suite: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.run("--gpu-baseline-update", "-k", "llama").assert_outcomes(passed=2, deselected=1)
    monkeypatch.setenv("CI", "true")
    suite.run("-o", "gpu_strict=false").assert_outcomes(passed=3)


def test_command_line_strictness_wins_over_the_ini_file(suite: Project) -> None:
    suite.ini("gpu_strict = false")
    suite.run("--gpu-strict").assert_outcomes(failed=3)


def test_unchanged_figures_pass(gated: Project) -> None:
    result = gated.run("--gpu-strict", "--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert set(gated.verdicts().values()) == {"pass"}


def test_two_percent_slower_passes(gated: Project) -> None:
    gated.answer(recorded(slower=1.02))
    gated.run().assert_outcomes(passed=3)


def test_five_percent_slower_fails_its_own_test_only(gated: Project) -> None:
    gated.answer(recorded(slower=1.05), to=GEMMA)
    result = gated.run()
    result.assert_outcomes(passed=2, failed=1)
    sentence = only_sentence(result, f"test_tuning[{GEMMA}]")
    assert sentence.startswith(f"{GEMMA} is 5.0 % slower at 4.94 s a step than baseline 4.70 s +- 0.03 (5 runs); ")
    assert "; limit 3.0 %; 3 of 3 fresh runs slower (baseline of 20" in sentence
    assert sentence.endswith("); same environment")


def test_two_gib_bigger_fails_its_own_test_only(gated: Project) -> None:
    gated.answer(recorded(bigger=2 * GiB), to=GEMMA)
    result = gated.run()
    result.assert_outcomes(passed=2, failed=1)
    assert only_sentence(result, f"test_tuning[{GEMMA}]").startswith(
        f"{GEMMA} needs 2.00 GiB (5.7 %) more memory: 37.0 GiB against 35.0 GiB peak allocated in 3 runs, limit 35.8 GiB ("
    )


def test_slower_and_bigger_is_still_one_sentence(gated: Project) -> None:
    gated.answer(recorded(slower=1.1, bigger=2 * GiB), to=GEMMA)
    sentence = only_sentence(gated.run(), f"test_tuning[{GEMMA}]")
    assert "is 10.0 % slower" in sentence
    assert "and needs 2.00 GiB (5.7 %) more memory" in sentence


def test_a_regression_names_what_changed_in_the_environment(gated: Project) -> None:
    packages = recorded()["environment"]["packages"] | {"torch": "2.10.0+cu130"}
    gated.answer(recorded(slower=1.05, packages=packages, runtime="13.0"), to=GEMMA)
    sentence = only_sentence(gated.run(), f"test_tuning[{GEMMA}]")
    assert sentence.endswith("since then: torch 2.9.1+cu128 -> 2.10.0+cu130, runtime 12.8 -> 13.0")


def test_tolerances_are_the_users(gated: Project) -> None:
    gated.answer(recorded(slower=1.05, bigger=2 * GiB))
    gated.run("--gpu-time-tolerance=6%", "--gpu-memory-tolerance=2GiB").assert_outcomes(passed=3)
    gated.answer(recorded(slower=1.02))
    gated.run("--gpu-time-tolerance=1%").assert_outcomes(failed=3)


def test_ten_percent_faster_passes_as_improved(gated: Project) -> None:
    gated.answer(recorded(slower=0.9))
    result = gated.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert set(gated.verdicts().values()) == {"improved"}
    result.stdout.fnmatch_lines(["3 cases better than the baseline: *10.0 % faster*record it with --gpu-baseline-update*"])


def test_running_out_of_memory_where_the_baseline_fitted_fails(gated: Project) -> None:
    gated.answer(recorded("h100_out_of_memory"), to=GEMMA)
    sentence = only_sentence(gated.run(), f"test_tuning[{GEMMA}]")
    assert sentence.startswith(f"{GEMMA} ran out of device memory (warmup in step 1): CUDA out of memory.")
    assert "fitted with 35.0 GiB allocated" in sentence


def test_running_out_of_memory_without_a_baseline_fails(suite: Project) -> None:
    suite.answer(recorded("h100_out_of_memory"), to=GEMMA)
    sentence = only_sentence(suite.run(), f"test_tuning[{GEMMA}]")
    assert sentence.endswith("if that is expected, record it with --gpu-baseline-update")


def test_running_out_of_memory_can_be_recorded_and_passes_from_then_on(suite: Project) -> None:
    suite.answer(recorded("h100_out_of_memory"), to=GEMMA)
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    result = suite.run("--gpu-strict")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*Gemma*OOM*OOM*pass*"])


def test_fitting_again_is_an_improvement(suite: Project) -> None:
    suite.answer(recorded("h100_out_of_memory"))
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    suite.answer(recorded())
    suite.run("--gpu-json=report.json").assert_outcomes(passed=3)
    assert set(suite.verdicts().values()) == {"improved"}


def test_a_crash_fails_whatever_the_baseline(gated: Project) -> None:
    gated.answer(recorded("crashed"), to=GEMMA)
    result = gated.run()
    assert only_sentence(result, f"test_tuning[{GEMMA}]") == (
        f"{GEMMA} gave no measurement (measure in step 4): "
        "RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    result.stdout.fnmatch_lines([f"*worker of {GEMMA}*", "Traceback (most recent call last):", "*RuntimeError: CUDA error"])


def test_one_crash_among_several_runs_fails(gated: Project) -> None:
    gated.answer(recorded(), recorded("crashed"), recorded(), to=GEMMA)
    assert list(failures(gated.run("--gpu-runs=3"))) == [f"test_tuning[{GEMMA}]"]


def test_changed_knobs_are_not_compared_and_pass_unless_strict(gated: Project) -> None:
    gated.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=4"))
    result = gated.run()
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["3 cases not comparable with the baseline: *(batch_size 2 -> 4); record it with*"])
    gated.run("--gpu-strict").assert_outcomes(failed=3)


def test_more_steps_are_still_the_same_case(gated: Project) -> None:
    gated.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=2, steps=50, warmup=7"))
    gated.run("--gpu-strict").assert_outcomes(passed=3)


def test_memory_growth_measured_here_fails_exactly_its_test(project: Project) -> None:
    project.write(test_growing=GROWING)
    size = project.path / "size.txt"
    size.write_text("1024")
    project.run("--gpu-baseline-update").assert_outcomes(passed=3)
    size.write_text("1280")
    result = project.run("--junitxml=junit.xml")
    result.assert_outcomes(passed=2, failed=1)
    sentence = only_sentence(result, "test_grown")
    assert sentence.startswith("build-fp32 needs 5.00 MiB (25.0 %) more memory: 25.0 MiB against 20.0 MiB peak allocated, ")
    grown = "15.0 MiB (3 x float32[1280, 1024] by mul in backward at test_growing.py:14)"
    assert f", limit 20.4 MiB, in backward, now {grown}, " in sentence
    assert ", and more in build, forward and between backward passes (baseline of 20" in sentence
    assert sentence.endswith("); same environment")

    suite = ElementTree.parse(project.path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "0")
    grown = next(case for case in suite if case.get("name") == "test_grown")
    properties = {entry.get("name"): entry.get("value") for entry in grown.iter("property")}
    assert properties["gputrain.case"] == "build-fp32@tiny"
    assert properties["gputrain.verdict"] == "regressed"
    assert int(properties["gputrain.peak_allocated_bytes"]) >= 5 * 1280 * 1024 * 4
    assert float(properties["gputrain.median_step_seconds"]) > 0
    (failure,) = grown.iter("failure")
    assert failure.text is not None
    assert sentence in failure.text


@pytest.mark.parametrize(("value", "strict"), [("true", True), ("woodpecker", True), ("false", False), ("", False)])
def test_ci_is_strict_by_itself(h100: Project, monkeypatch: pytest.MonkeyPatch, value: str, strict: bool) -> None:
    h100.write(test_tuning=SUITE)
    monkeypatch.setenv("CI", value)
    h100.run().assert_outcomes(**{"failed" if strict else "passed": 3})


def test_time_on_a_cpu_is_judged_on_request_against_five_runs(project: Project) -> None:
    project.machine(None)
    project.write(test_tuning=SUITE)
    project.run("--gpu-baseline-update", "-o", "gpu_judge_cpu_time=true").assert_outcomes(passed=3)
    assert [len(entry["runs"]) for entry in project.baselines("tuning").values()] == [5] * 3
    project.answer(recorded("cpu_measured", slower=1.2), to=GEMMA)
    project.run().assert_outcomes(passed=3)
    assert "is 20.0 % slower" in only_sentence(project.run("-o", "gpu_judge_cpu_time=true"), f"test_tuning[{GEMMA}]")


# Further processes


def _launches(project: Project, *arguments: str) -> list[str]:
    """Ids of the cases that a run launches, in order."""
    before = len(project.launches)
    project.run(*arguments)
    return [launched["id"] for launched in project.launches[before:]]


def test_a_case_that_looks_slower_once_is_measured_until_three_agree(gated: Project) -> None:
    gated.answer(recorded(slower=1.2), recorded(), to=GEMMA)
    result = gated.run("--gpu-strict", "--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert gated.verdicts()[GEMMA] == "pass"
    result.stdout.fnmatch_lines([f"{GEMMA}: step time measured 4 times: +20.0 %, +0.0 %, +0.0 %, +0.0 %"])
    assert [len(result["replies"]) for result in gated.report()["results"]] == [1, 4, 1]


def test_a_case_that_is_as_before_is_measured_once(gated: Project) -> None:
    assert sorted(_launches(gated)) == sorted([LLAMA, GEMMA, LLAMA_2])


def test_reruns_are_bounded(gated: Project) -> None:
    gated.answer(recorded(slower=1.2), to=GEMMA)
    assert _launches(gated, "-k", "gemma") == [GEMMA] * 3
    assert _launches(gated, "-k", "gemma", "-o", "gpu_reruns=1") == [GEMMA] * 2
    assert _launches(gated, "-k", "gemma", "-o", "gpu_reruns=0") == [GEMMA]


def test_without_reruns_the_limit_is_wider(gated: Project) -> None:
    gated.answer(recorded(slower=1.12), to=GEMMA)
    assert list(failures(gated.run("-o", "gpu_reruns=0"))) == [f"test_tuning[{GEMMA}]"]
    gated.answer(recorded(slower=1.025), to=GEMMA)
    gated.run("-o", "gpu_reruns=0", "--gpu-strict").assert_outcomes(passed=3)


def test_a_crash_among_the_further_processes_fails(gated: Project) -> None:
    gated.answer(recorded(slower=1.2), recorded("crashed"), to=GEMMA)
    assert "gave no measurement" in only_sentence(gated.run(), f"test_tuning[{GEMMA}]")


def test_running_out_of_memory_once_of_three_is_inconclusive_and_fails_when_strict(gated: Project) -> None:
    gated.answer(recorded("h100_out_of_memory"), recorded(), to=GEMMA)
    result = gated.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert gated.verdicts()[GEMMA] == "inconclusive"
    result.stdout.fnmatch_lines([f"1 case in doubt: {GEMMA} ran out of device memory *in 1 of 3 runs; *"])
    sentence = only_sentence(gated.run("--gpu-strict"), f"test_tuning[{GEMMA}]")
    assert sentence.endswith("same environment (strict)")


def test_more_memory_in_one_process_only_passes(gated: Project) -> None:
    gated.answer(recorded(bigger=2 * GiB), recorded(), to=GEMMA)
    gated.run("--gpu-strict").assert_outcomes(passed=3)


MANY = """
import pytest
from pytest_gputrain import Case, grid

CASES = grid(Case(model="gemma-7b", method="lora", sequence_length=512), batch_size=range(1, 13))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_many(gputrain, case):
    gputrain.check(case)
"""


@pytest.fixture
def many(h100: Project) -> Project:
    """Twelve cases with baselines."""
    h100.write(test_many=MANY)
    h100.run("--gpu-baseline-update").assert_outcomes(passed=12)
    return h100


def test_a_day_on_which_all_cases_are_slower_fails_once_and_not_each_case(many: Project) -> None:
    many.answer(recorded(slower=1.05))
    result = many.run("--gpu-json=report.json", "--junitxml=junit.xml")
    result.assert_outcomes(passed=12, failed=1)
    assert set(many.verdicts().values()) == {"inconclusive"}
    sentence = only_sentence(result, "all_cases_together")
    assert sentence == "all cases together regressed: the median case is +5.0 % off its baseline; what do all share?"
    result.stdout.fnmatch_lines([f"FAILED gputrain::all_cases_together - {sentence}"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert sentence in many.report()["notes"]
    suite = ElementTree.parse(many.path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("13", "1")
    (entry,) = (case for case in suite if list(case.iter("failure")))
    assert (entry.get("classname"), entry.get("name")) == ("gputrain", "all_cases_together")
    assert next(entry.iter("failure")).get("message") == sentence


def test_ten_cases_are_asked_before_one_is_called_slower_and_none_twice(many: Project) -> None:
    many.answer(recorded(slower=1.05))
    assert len(_launches(many)) == 12
    two = [f"test_many.py::test_many[gemma-7b-lora-bf16-batch_size={size}]" for size in (4, 5)]
    assert len(_launches(many, *two)) == 6  # too few to tell a slower day


def test_a_slower_case_among_many_fails_alone(many: Project) -> None:
    slow = "gemma-7b-lora-bf16-batch_size=1"
    many.answer(recorded(slower=1.05), to=slow)
    result = many.run()
    assert list(failures(result)) == [f"test_many[{slow}]"]
    assert "all cases together" not in result.stdout.str()


def test_a_new_case_in_front_leaves_the_others_the_noise_of_their_suite(h100: Project) -> None:
    h100.write(test_many=MANY)
    h100.answer(*(recorded(slower=times) for times in (1.0, 1.06, 0.95, 1.04, 0.97)))
    h100.run("--gpu-baseline-update").assert_outcomes(passed=12)
    first, slow = (f"gemma-7b-lora-bf16-batch_size={size}" for size in (1, 12))
    h100.answer(recorded())
    h100.answer(recorded(slower=1.1), to=slow)
    limits = []
    for _ in range(2):
        h100.run("--gpu-json=report.json")
        (metrics,) = (result["verdict"]["metrics"] for result in h100.report()["results"] if result["key"] == slow)
        (metric,) = (metric for metric in metrics if metric["metric"] == "step_seconds")
        limits.append(metric["limit"] / metric["baseline"])
        file = h100.baseline_file("many", H100_FOLDER)
        stored = json.loads(file.read_text())
        stored["cases"].pop(first, None)
        file.write_text(json.dumps(stored))
    assert limits[1] == pytest.approx(limits[0], rel=1e-3)


def test_a_slower_case_on_a_slower_day_fails_alone(many: Project) -> None:
    slow = "gemma-7b-lora-bf16-batch_size=1"
    many.answer(recorded(slower=1.02))
    many.answer(recorded(slower=1.15), to=slow)
    result = many.run()
    assert list(failures(result)) == [f"test_many[{slow}]"]
    result.stdout.fnmatch_lines(["the median case is +2.0 % off its baseline: the machine rather than a case"])
