"""Tests what each verdict means for the test, the exit status and JUnit: passes, fails, fails when strict."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from plugin_project import GEMMA, H100_FOLDER, LLAMA, LLAMA_2, SUITE, Project, only_sentence, recorded

from pytest_gputrain import GiB

TEST = f"test_tuning[{GEMMA}]"


def _slower(project: Project) -> None:
    project.answer(recorded(slower=1.1), to=GEMMA)


def _faster(project: Project) -> None:
    project.answer(recorded(slower=0.8), to=GEMMA)


def _out_of_memory_once(project: Project) -> None:
    project.answer(recorded("h100_out_of_memory"), recorded(), to=GEMMA)


def _out_of_memory(project: Project) -> None:
    project.answer(recorded("h100_out_of_memory"), to=GEMMA)


def _without_baseline(project: Project) -> None:
    project.baseline_file("tuning", H100_FOLDER).unlink()
    project.run("--gpu-baseline-update", "-k", "not gemma").assert_outcomes(passed=2, deselected=1)


def _another_case(project: Project) -> None:
    project.run("--gpu-baseline-update", "--gpu-set", "batch_size=4", "-k", "gemma")
    file = project.baseline_file("tuning", H100_FOLDER)
    file.write_text(file.read_text().replace('"batch_size": 2', '"batch_size": 8'))


def _limited(project: Project) -> None:
    mark = "CASES[1] = pytest.param(CASES[1], marks=pytest.mark.gpu_limit(memory='1 GiB'))"
    project.write(test_tuning=SUITE.replace("\n\n\n@pytest", f"\n{mark}\n\n\n@pytest"))


def _crashed(project: Project) -> None:
    project.answer(recorded("crashed"), to=GEMMA)


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize(
    ("verdict", "happens", "fails", "fails_strict"),
    [
        ("pass", lambda project: None, False, False),
        ("regressed", _slower, True, True),
        ("regressed", _out_of_memory, True, True),
        ("improved", _faster, False, False),
        ("inconclusive", _out_of_memory_once, False, True),
        ("new", _without_baseline, False, True),
        ("not-comparable", _another_case, False, True),
        ("over-limit", _limited, True, True),
        ("failed", _crashed, True, True),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_<>") if callable(value) else str(value),
)
def test_a_verdict_passes_or_fails(
    suite: Project, verdict: str, happens: object, fails: bool, fails_strict: bool, strict: bool
) -> None:
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    assert callable(happens)
    happens(suite)
    arguments = ["-k", "gemma", "--gpu-json=report.json", "--junitxml=junit.xml"]
    result = suite.run(*arguments, *(["--gpu-strict"] if strict else []))
    failed = fails_strict if strict else fails
    assert suite.verdicts() == {GEMMA: verdict}
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK)
    assert suite.report()["exit_status"] == int(failed)
    xml = ElementTree.parse(suite.path / "junit.xml").getroot()[0]
    assert (xml.get("tests"), xml.get("failures"), xml.get("errors")) == ("1", str(int(failed)), "0")
    properties = {entry.get("name"): entry.get("value") for entry in xml.iter("property")}
    assert properties["gputrain.verdict"] == verdict
    if failed:
        sentence = only_sentence(result, TEST)
        assert sentence.endswith(" (strict)") is (strict and not fails)
        assert [entry.get("message") for entry in xml.iter("failure")] == [f"Failed: {sentence}"]


@pytest.mark.parametrize(
    ("free", "processes", "why"),
    [
        (70 * GiB, 0, "70.0 GiB were free when it started, 78.0 GiB for its baseline"),
        (78 * GiB, 1, "it ran beside python (pid 4711, 1.00 GiB) on GPU 0"),
    ],
)
def test_running_out_of_what_others_took_says_nothing_of_the_case(
    suite: Project, free: int, processes: int, why: str
) -> None:
    suite.occupied(free_bytes=78 * GiB)
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    assert [run["free_bytes"] for run in suite.baselines("tuning", H100_FOLDER)[GEMMA]["runs"]] == [78 * GiB] * 5
    _out_of_memory(suite)
    before = len(suite.launches)
    suite.occupied(free_bytes=free, processes=processes)
    result = suite.run("--gpu-json=report.json")
    result.assert_outcomes(passed=3)
    assert suite.verdicts() == {LLAMA: "pass", GEMMA: "inconclusive", LLAMA_2: "pass"}
    assert len(suite.launches) - before == 3
    result.stdout.fnmatch_lines(
        [f"1 case in doubt: {GEMMA} ran out of device memory *; {why}, so that says nothing of the *"]
    )
    suite.run("--gpu-strict", "-k", "gemma").assert_outcomes(failed=1, deselected=2)


def test_running_out_of_as_much_as_was_free_before_is_a_regression(suite: Project) -> None:
    suite.occupied(free_bytes=78 * GiB)
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    _out_of_memory(suite)
    suite.occupied(free_bytes=78 * GiB - 2**20)
    assert "in 2 of 2 runs" in only_sentence(suite.run(), TEST)
