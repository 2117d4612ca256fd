"""Tests bad input: one clear sentence, from the right test only, before anything is launched."""

import pytest
from plugin_project import GEMMA, H100_FOLDER, SUITE, assert_refused, failures, only_sentence

CASES = """
import pytest
from pytest_gputrain import Case

GOOD = Case(model="gemma-7b", method="lora", sequence_length=64)
CASES = {{"good": GOOD, "bad": GOOD.replace({fields}), "last": GOOD.replace(model="llama-2-13b")}}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_case(gputrain, case):
    gputrain.check(case)
"""
ODD = """
import pytest
from pytest_gputrain import Case

GOOD = Case(model="gemma-7b", method="lora", sequence_length=64)
CASES = [
    pytest.param(GOOD, id="good"),
{cases}]


@pytest.mark.parametrize("case", CASES)
def test_case(gputrain, case):
    gputrain.check(case)
{arguments}"""
BAD = {
    'model="gemma-7"': "the case gemma-7-lora-bf16 names the unknown model 'gemma-7' (did you mean 'gemma-7b'?); known: *",
    'platforms=("h10",)': "* names the unknown platform 'h10' (did you mean 'h100'?); known: *",
    "batch_size=0": "* has batch_size=0; it must be at least 1",
    "gpus=2": "* asks for 2 GPUs, but parallel='single' uses one; choose a parallelism",
    'platforms="h100"': "* takes a list of platforms: platforms=['h100']",
    "optimizer=object()": "* has optimizer=<object object at *>; it must be text",
    "named=None": "* has named=None; it must be a tuple",
}
"""Fields of a case, and what is said of them; tests/unit/test_cases.py has the others."""
ARGUMENTS = {
    "'gemma-7b'": "'gemma-7b' is neither a Case, a Script, nor a function that builds a step",
    "GOOD, batchsize=2": "batchsize is not a field of a case (did you mean 'batch_size'?); known: model, *",
    "GOOD, steps=0": "* has steps=0; it must be at least 1",
}


def test_bad_cases_and_arguments_fail_their_own_tests_with_one_sentence_each(h100):
    cases = "".join(f"    pytest.param(GOOD.replace({fields}), id='{at}'),\n" for at, fields in enumerate(BAD))
    arguments = "".join(
        f"\n\ndef test_argument_{at}(gputrain):\n    gputrain.check({what})\n" for at, what in enumerate(ARGUMENTS)
    )
    h100.write(test_odd=ODD.format(cases=cases, arguments=arguments))
    result = h100.run()
    expected = {f"test_case[{at}]": sentence for at, sentence in enumerate(BAD.values())}
    expected |= {f"test_argument_{at}": sentence for at, sentence in enumerate(ARGUMENTS.values())}
    result.assert_outcomes(passed=1, failed=len(expected))
    told = {name: text.strip() for name, text in failures(result).items()}
    assert told.keys() == expected.keys()
    for name, sentence in expected.items():
        assert "\n" not in told[name]
        pytest.LineMatcher([told[name]]).fnmatch_lines([sentence.replace("[", "[[]")])
    assert len(h100.launches) == 1


def test_a_misspelt_platform_is_selected_and_fails_under_any_platform_and_on_any_machine(h100):
    h100.write(test_odd=CASES.format(fields='platforms=("h10",)'))
    assert "unknown platform 'h10'" in only_sentence(h100.run("-m", "h100"), "test_case[bad]")
    h100.machine(None)
    result = h100.run("-m", "h100")
    result.assert_outcomes(skipped=2, failed=1)
    assert "unknown platform 'h10'" in only_sentence(result, "test_case[bad]")


def test_two_cases_of_one_id_fail_the_second_also_where_the_first_is_deselected(h100):
    h100.write(test_odd=CASES.format(fields="batch_size=4"))
    result = h100.run()
    result.assert_outcomes(passed=2, failed=1)
    assert only_sentence(result, "test_case[bad]") == (
        f"two different cases of the suite odd have the id {GEMMA} (batch_size 1 -> 4): they would share one baseline; vary "
        "the difference in a grid, which puts it into the ids, or name one by model=..."
    )
    h100.run("-k", "bad", "--gpu-baseline-update").assert_outcomes(failed=1, deselected=2)
    assert not h100.baseline_file("odd", H100_FOLDER).exists()


def test_a_broken_baseline_file_fails_before_anything_is_launched(gated):
    file = gated.baseline_file("tuning", H100_FOLDER)
    broken = file.read_text()[:-100]
    file.write_text(broken)
    result = gated.run("-k", "gemma", "--gpu-baseline-update")
    sentence = f"*{file} is not a baseline file: Input data was truncated; restore it from git, *"
    pytest.LineMatcher([only_sentence(result, f"test_tuning[{GEMMA}]")]).fnmatch_lines([sentence])
    assert gated.launches == []
    assert file.read_text() == broken


def test_a_broken_baseline_file_leaves_other_suites_and_measuring_alone(gated):
    gated.baseline_file("tuning", H100_FOLDER).write_text("{")
    gated.write(test_other=SUITE, test_measured=SUITE.replace("check(case)", "measure(case)"))
    result = gated.run()
    result.assert_outcomes(passed=6, failed=3)
    assert {name.partition("[")[0] for name in failures(result)} == {"test_tuning"}


def test_a_baseline_folder_that_was_named_must_exist_for_cases(suite):
    result = suite.run("--gpu-baseline-dir=baseline", "-k", "gemma")
    sentence = only_sentence(result, f"test_tuning[{GEMMA}]")
    assert sentence == f"the baseline folder {suite.path / 'baseline'} does not exist; --gpu-baseline-update makes it"
    assert suite.launches == []
    suite.write(test_other="def test_it(): pass")
    suite.run("--gpu-baseline-dir=baseline", "-k", "test_it").assert_outcomes(passed=1, deselected=3)


def test_a_bad_option_value_is_a_usage_error(suite):
    (suite.path / "tuning.json").touch()
    (suite.path / "circle").symlink_to("circle")
    tolerance = "is not a tolerance; write it as 3% or 0.03"
    not_written = (
        "baselines cannot be written to */tox.ini/baselines (Not a directory); make it writable or choose another *"
    )
    for arguments, sentence in {
        "--gpu-time-tolerance=3": f"--gpu-time-tolerance: '3' {tolerance}",
        "-o gpu_time_tolerance=3": f"gpu_time_tolerance: '3' {tolerance}",
        "--gpu-platform=h10": "--gpu-platform: 'h10' is unknown (did you mean 'h100'?); known: *",
        "--gpu-baseline-dir=": "--gpu-baseline-dir: *",
        "--gpu-baseline-update --gpu-baseline-dir=tox.ini/baselines": not_written,
        "--gpu-json=circle": "--gpu-json: */circle cannot be written (Too many levels of symbolic links); give another file",
        "--gpu-baseline=tuning.json --gpu-baseline-update": "--gpu-baseline-update records into --gpu-baseline-dir; *",
    }.items():
        assert_refused(suite, sentence, *arguments.split())
    sentence = only_sentence(suite.run("--gpu-ids=7", "-k", "gemma"), f"test_tuning[{GEMMA}]")
    assert sentence.startswith("--gpu-ids: no visible GPU '7', or several; visible: 0 (GPU-")
