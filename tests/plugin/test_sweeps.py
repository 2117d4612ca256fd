"""Tests ``--gpu-set``: a test and a row for each combination, each with its own id."""

from plugin_project import BUILD, GEMMA, H100_FOLDER, SUITE, failures, only_sentence

ONE = """
import pytest
from pytest_gputrain import Case

CASE = Case(model="gemma-7b", method="lora", sequence_length=64, batch_size=2)


def test_it(gputrain):
    gputrain.check(CASE)
"""


def test_each_combination_is_a_test_a_launch_and_a_result(h100):
    h100.write(test_one=ONE)
    result = h100.run("--gpu-set=batch_size=2,4", "--gpu-set=lora_rank=0,8", "--gpu-json=report.json", "-v")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines([f"*test_it[[]batch_size={size}-lora_rank={rank}]*" for size in (2, 4) for rank in (0, 8)])
    assert [launched["id"] for launched in h100.launches] == [
        GEMMA,
        f"{GEMMA}-lora_rank=8",
        f"{GEMMA}-batch_size=4",
        f"{GEMMA}-batch_size=4-lora_rank=8",
    ]
    cases = [result["case"] for result in h100.report()["results"]]
    assert [(case.get("batch_size", 1), case.get("lora_rank", 0)) for case in cases] == [(2, 0), (2, 8), (4, 0), (4, 8)]


def test_parametrized_ids_end_in_the_knobs_which_tell_rows_and_baselines_apart(suite):
    result = suite.run("--gpu-set=batch_size=2,4", "-k", "gemma", "-v", "--gpu-baseline-update")
    result.assert_outcomes(passed=2, deselected=4)
    result.stdout.fnmatch_lines(
        [
            f"*test_tuning[[]{GEMMA}-batch_size=2]*",
            f"*test_tuning[[]{GEMMA}-batch_size=4]*",
            "Gemma 7B *bf16-batch_size=4*recorded*",
        ]
    )
    assert sorted(suite.baselines("tuning", H100_FOLDER)) == [GEMMA, f"{GEMMA}-batch_size=4"]
    suite.run("--gpu-strict", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    suite.run("--gpu-strict", "--gpu-set=batch_size=4", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    assert list(failures(suite.run("--gpu-strict", "--gpu-set=batch_size=8", "-k", "gemma")))


def test_platforms_of_the_command_line_replace_those_of_the_file(h100):
    h100.write(test_two=SUITE.replace("batch_size=2", 'batch_size=2, platforms=("a100",)'))
    h100.run("-m", "h100").assert_outcomes(deselected=3)
    h100.run("-m", "h100", "--gpu-set=platforms=h100,h200", "-k", "gemma", "--gpu-baseline-update")
    assert list(h100.baselines("two", H100_FOLDER)) == [GEMMA]


def test_the_command_line_counts_before_keywords_of_own_code_which_has_no_model_to_set(h100):
    h100.write(test_mine=f"{BUILD}\n\ndef test_it(gputrain):\n    gputrain.check(build, batch_size=2)\n")
    assert only_sentence(h100.run("--gpu-set=model=gemma-7b"), "test_it[model=gemma-7b]") == (
        "build-bf16-batch_size=2 is own code, which has no model for --gpu-set; deselect its test"
    )
    assert h100.launches == []
    h100.run("--gpu-set=batch_size=8", "--gpu-set=precision=fp32", "--gpu-json=report.json").assert_outcomes(passed=1)
    (result,) = h100.report()["results"]
    assert (result["case"]["batch_size"], result["key"]) == (8, "build-fp32-batch_size=8")


def test_what_cannot_be_varied_fails_its_own_test_and_tests_without_cases_are_left_alone(h100):
    h100.write(
        test_late="def test_late(request):\n    request.getfixturevalue('gputrain')\n\n\ndef test_other():\n    pass\n",
        test_one=ONE.replace("batch_size=2", "named=None"),
        test_two=ONE,
    )
    result = h100.run("--gpu-set=gpus=1,2")
    result.assert_outcomes(passed=2, failed=4)
    told = [text.strip() for text in failures(result).values()]
    assert "name it as an argument" in told[0]
    assert "has named=None; it must be a tuple" in told[1]
    single = f"the case {GEMMA}-gpus=2 asks for 2 GPUs, but parallel='single' uses one; choose a parallelism"
    assert told[-1] == single
