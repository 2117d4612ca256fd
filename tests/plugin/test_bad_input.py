"""Tests bad input: one clear sentence, from the right test only, before anything is launched."""

import json
from collections.abc import Callable

import pytest
from plugin_project import GEMMA, H100_FOLDER, SUITE, Project, assert_refused, failures, only_sentence, recorded

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
    'method="lra"': "* names the unknown method 'lra' (did you mean 'lora'?); known: full, lora, *",
    'precision="bf-16"': "* names the unknown precision 'bf-16' (did you mean 'bf16'?); known: fp32, bf16, *",
    'parallel="fdsp"': "* names the unknown parallel 'fdsp' (did you mean 'fsdp'?); known: single, *",
    'optimizer="adamww"': "* names the unknown optimizer 'adamww' (did you mean 'adamw'?); known: adamw, *",
    'platforms=("h10",)': "* names the unknown platform 'h10' (did you mean 'h100'?); known: *",
    'model=""': "* names no model; known: *",
    "batch_size=0": "* has batch_size=0; it must be at least 1",
    "sequence_length=1": "* has sequence_length=1; it must be at least 2",
    "gpus=2": "* asks for 2 GPUs, but parallel='single' uses one; choose a parallelism",
    'steps="ten"': "* has steps='ten'; it must be a whole number",
    "batch_size=2.5": "* has batch_size=2.5; it must be a whole number",
    'platforms="h100"': "* takes a list of platforms: platforms=['h100']",
    "platforms=None": "* has platforms=None; it must be a tuple",
    "platforms=(['h100'],)": "* has platforms=(*; each of them must be text",
    "model=7": "* has model=7; it must be text",
    "precision=None": "* has precision=None; it must be text",
    "optimizer=object()": "* has optimizer=<object object at *>; it must be text",
    "named=None": "* has named=None; it must be a tuple",
}
"""Fields of a case, and what is said of them."""
ARGUMENTS = {
    "'gemma-7b'": "'gemma-7b' is neither a Case nor a function that builds a step",
    "GOOD, batchsize=2": "batchsize is not a field of a case (did you mean 'batch_size'?); known: model, *",
    "GOOD, steps=0": "* has steps=0; it must be at least 1",
}


def test_bad_cases_and_arguments_fail_their_own_tests_with_one_sentence_each(h100: Project) -> None:
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


def test_a_misspelt_platform_is_selected_and_fails_under_any_platform_and_on_any_machine(h100: Project) -> None:
    h100.write(test_odd=CASES.format(fields='platforms=("h10",)'))
    assert "unknown platform 'h10'" in only_sentence(h100.run("-m", "h100"), "test_case[bad]")
    h100.machine(None)
    result = h100.run("-m", "h100")
    result.assert_outcomes(skipped=2, failed=1)
    assert "unknown platform 'h10'" in only_sentence(result, "test_case[bad]")


def test_a_misspelt_axis_stops_collection_of_its_file_with_a_hint(suite: Project) -> None:
    suite.write(test_axis=SUITE.replace("method=", "metod="))
    result = suite.run("--continue-on-collection-errors")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*TypeError: grid() has no axis 'metod' (did you mean 'method'?)"])


def test_two_cases_of_one_id_fail_the_second_also_where_the_first_is_deselected(h100: Project) -> None:
    h100.write(test_odd=CASES.format(fields="batch_size=4"))
    result = h100.run()
    result.assert_outcomes(passed=2, failed=1)
    assert only_sentence(result, "test_case[bad]") == (
        f"two different cases of the suite odd have the id {GEMMA} (batch_size 1 -> 4): they would share one baseline; vary "
        "the difference in a grid, which puts it into the ids, or name one by model=..."
    )
    h100.run("-k", "bad", "--gpu-baseline-update").assert_outcomes(failed=1, deselected=2)
    assert not h100.baseline_file("odd", H100_FOLDER).exists()


def test_the_same_id_in_two_suites_is_fine(h100: Project) -> None:
    h100.write(test_one=SUITE, test_two=SUITE.replace("batch_size=2", "batch_size=4"))
    h100.run().assert_outcomes(passed=6)


def _emptied(text: str) -> str:
    document = json.loads(text)
    document["cases"][GEMMA]["runs"] = []
    return json.dumps(document)


EDITS: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "* is not a baseline file: *"),
    "text": (lambda text: "figures: none", "* is not a baseline file: JSON is malformed: *"),
    "bytes": (lambda text: "\xff\x00", "* is not a baseline file: *"),
    "truncated": (
        lambda text: text[: len(text) // 2],
        "* is not a baseline file: Input data was truncated; restore it from git, *",
    ),
    "conflict": (
        lambda text: f"<<<<<<< HEAD\n{text}=======\n{text}>>>>>>> theirs\n",
        "* holds merge-conflict markers (lines 1, *, *); resolve them, or take one side and record again",
    ),
    "format": (
        lambda text: text.replace('"format": 2', '"format": 3'),
        "* has format 3, this version reads format 2; update *, or restore it from git, *",
    ),
    "type": (
        lambda text: text.replace('"peak_allocated_bytes": 37580963840', '"peak_allocated_bytes": "35 GiB"'),
        "* is not valid in the run for *: Expected `int*",
    ),
    "field": (lambda text: text.replace('"runs"', '"rnus"'), "* is not a baseline file: *"),
    "negative": (
        lambda text: text.replace("[4.71", "[-4.71"),
        "* holds impossible figures for *; restore it from git, or delete the entry *",
    ),
    "reference": (
        lambda text: text.replace('"environment": "', '"environment": "0'),
        "* refers to the environment '0*, which it does not hold; *",
    ),
    "no runs": (_emptied, f"* holds no run for {GEMMA}; delete the entry and record it again"),
}


@pytest.mark.parametrize(("edit", "sentence"), EDITS.values(), ids=EDITS)
def test_a_broken_baseline_file_fails_before_anything_is_launched(
    gated: Project, edit: Callable[[str], str], sentence: str
) -> None:
    file = gated.baseline_file("tuning", H100_FOLDER)
    broken = edit(file.read_text())
    assert broken != file.read_text()
    file.write_text(broken)
    result = gated.run("-k", "gemma", "--gpu-baseline-update")
    failure = only_sentence(result, f"test_tuning[{GEMMA}]")
    pytest.LineMatcher([failure]).fnmatch_lines([sentence])
    assert str(file) in failure
    assert gated.launches == []
    assert file.read_text() == broken


def test_a_broken_baseline_file_leaves_other_suites_and_measuring_alone(gated: Project) -> None:
    gated.baseline_file("tuning", H100_FOLDER).write_text("{")
    gated.write(test_other=SUITE, test_measured=SUITE.replace("check(case)", "measure(case)"))
    result = gated.run()
    result.assert_outcomes(passed=6, failed=3)
    assert {name.partition("[")[0] for name in failures(result)} == {"test_tuning"}


def test_a_baseline_folder_that_was_named_must_exist_for_cases(suite: Project) -> None:
    result = suite.run("--gpu-baseline-dir=baseline", "-k", "gemma")
    sentence = only_sentence(result, f"test_tuning[{GEMMA}]")
    assert sentence == f"the baseline folder {suite.path / 'baseline'} does not exist; --gpu-baseline-update makes it"
    assert suite.launches == []
    suite.write(test_other="def test_it(): pass")
    suite.run("--gpu-baseline-dir=baseline", "-k", "test_it").assert_outcomes(passed=1, deselected=3)


TOLERANCE, ON = "is not a tolerance; write it as 3% or 0.03", "is not a whole number from"
BAD_OPTIONS = {
    "--gpu-time-tolerance=3": f"--gpu-time-tolerance: '3' {TOLERANCE}",
    "--gpu-time-tolerance=-1%": f"--gpu-time-tolerance: '-1%' {TOLERANCE}",
    "--gpu-time-tolerance=nan": f"--gpu-time-tolerance: 'nan' {TOLERANCE}",
    "--gpu-memory-tolerance=512": "--gpu-memory-tolerance: '512' is not a tolerance; write it as 2%, 0.02, 512MiB or *",
    "--gpu-runs=0": f"--gpu-runs: '0' {ON} 1 to 20",
    "--gpu-runs=two": f"--gpu-runs: 'two' {ON} 1 to 20",
    "--gpu-steps=0": f"--gpu-steps: '0' {ON} 1 on",
    "--gpu-warmup=-1": f"--gpu-warmup: '-1' {ON} 0 on",
    "--gpu-timeout=soon": "--gpu-timeout: 'soon' is not a time; write it as 90s, 15min or 2h",
    "--gpu-timeout=0": "--gpu-timeout: '0' is not a time; write it as 90s, 15min or 2h",
    "--gpu-scale=huge": "--gpu-scale: 'huge' is none of auto, full, tiny",
    "--gpu-isolation=thread": "--gpu-isolation: 'thread' is none of auto, process, inline",
    "--gpu-ids=0,0": "--gpu-ids: '0,0' is not a list of GPU indices or UUIDs, each once, separated by commas",
    "--gpu-platform=h10": "--gpu-platform: 'h10' is unknown (did you mean 'h100'?); known: *",
    "--gpu-baseline=gone.json": "--gpu-baseline: 'gone.json' is neither 'measured', 'published' nor a report that exists",
    "--gpu-baseline-dir=": "--gpu-baseline-dir: *",
    "--gpu-baseline-update --gpu-baseline-dir=tox.ini/baselines": (
        "baselines cannot be written to */tox.ini/baselines (Not a directory); make it writable or choose another *"
    ),
    "--gpu-baseline=tuning.json --gpu-baseline-update": (
        "--gpu-baseline-update records into --gpu-baseline-dir; it cannot update a report"
    ),
    "-o gpu_time_tolerance=3": f"gpu_time_tolerance: '3' {TOLERANCE}",
}


def test_a_bad_option_value_is_a_usage_error(suite: Project) -> None:
    (suite.path / "tuning.json").touch()
    for arguments, sentence in BAD_OPTIONS.items():
        assert_refused(suite, sentence, *arguments.split())


def test_a_test_beside_a_bad_one_keeps_its_verdict(gated: Project) -> None:
    gated.answer(recorded(slower=1.05), to=GEMMA)
    gated.write(test_odd=CASES.format(fields='model="gema"'))
    result = gated.run()
    result.assert_outcomes(passed=4, failed=2)
    assert set(failures(result)) == {f"test_tuning[{GEMMA}]", "test_case[bad]"}
    sentence = only_sentence(gated.run("--gpu-ids=7", "-k", "gemma and tuning"), f"test_tuning[{GEMMA}]")
    assert sentence.startswith("--gpu-ids: no visible GPU '7', or several; visible: 0 (GPU-")
