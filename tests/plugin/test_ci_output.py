"""Tests what a run writes for CI: annotations and the step summary of GitHub, properties in JUnit's XML."""

import re

import pytest
from plugin_project import FOLDER_VANISHES, GEMMA, H100_FOLDER, LLAMA, LLAMA_2, SUITE, junit_properties, recorded

from pytest_gputrain import GiB
from pytest_gputrain.report import github, summary

ODD = "a%,b::c"
WITH_ODD_NAME = f"""
import pytest
from pytest_gputrain import Case


@pytest.mark.parametrize("name", ["{ODD}"])
def test_odd(gputrain, name):
    assert gputrain.measure(Case(model="gemma-7b", method="lora", sequence_length=8)).peak_allocated_bytes < 5, "two\\nlines"


def test_other():
    assert not "ours"
"""


@pytest.fixture
def job(suite, monkeypatch):
    """A job of GitHub's, in whose repository the project is a folder."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(suite.path.parent))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "step.md"))
    return suite


def commands(lines):
    """Properties and message of each annotation, read as GitHub's runner does (ActionCommand.TryParseV2, `UnescapeData`)."""
    annotations = []
    for line in lines:
        if match := re.fullmatch(r"::error (.*?)::(.*)", line, re.DOTALL):
            properties = dict(pair.split("=", 1) for pair in match[1].split(","))
            annotations.append(({name: _unescaped(value) for name, value in properties.items()}, _unescaped(match[2])))
    return annotations


def _unescaped(text):
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


def _regress(project):
    project.run("--gpu-baseline-update", "--gpu-summary=none").assert_outcomes(passed=3)
    project.answer(recorded(slower=1.1, bigger=2 * GiB), to=GEMMA)
    project.answer(recorded("crashed"), to=LLAMA_2)


@pytest.mark.parametrize("workers", [0, 2])
def test_failures_are_annotated_on_the_lines_of_their_tests(job, workers):
    _regress(job)
    result = job.spawn("-n2") if workers else job.run()
    result.assert_outcomes(passed=1, failed=2)
    annotations = {properties["title"]: (properties, message) for properties, message in commands(result.stdout.lines)}
    assert sorted(annotations) == [f"test_tuning[{GEMMA}]", f"test_tuning[{LLAMA_2}]"]
    properties, message = annotations[f"test_tuning[{GEMMA}]"]
    assert properties["file"] == f"{job.path.name}/test_tuning.py"
    lines = (job.path / "test_tuning.py").read_text().splitlines()
    assert lines[int(properties["line"]) - 1].startswith("@pytest.mark.parametrize")
    assert re.match(rf"{GEMMA} .*10\.0 %.*5\.17 s.*4\.70 s", message)
    assert annotations[f"test_tuning[{LLAMA_2}]"][1].startswith(f"{LLAMA_2} gave no measurement (measure in step 4): ")


def test_annotations_escape_what_would_end_them_and_nothing_is_annotated_elsewhere_or_twice(job, monkeypatch):
    job.write(test_odd=WITH_ODD_NAME)
    result = job.run("test_odd.py")
    ((properties, message),) = commands(result.stdout.lines)
    assert properties["title"] == f"test_odd[{ODD}]"
    assert message == "AssertionError: two"
    job.write(pytest_github_actions_annotate_failures="")
    assert commands(job.run("test_odd.py", "-p", "pytest_github_actions_annotate_failures").stdout.lines) == []
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert commands(job.run("test_odd.py").stdout.lines) == []


def test_of_more_than_ten_failures_the_tenth_line_tells_how_many(job):
    job.write(test_tuning=SUITE.replace('method=["lora"]', 'method=["lora"], batch_size=[1, 2, 4, 8]'))
    job.answer(recorded("crashed"))
    annotations = commands(job.run().stdout.lines)
    assert len(annotations) == github.MOST == 10
    assert annotations[-1] == (
        {"title": "gputrain"},
        "3 more tests failed; the summary of the step and the log have all",
    )


def test_the_step_summary_has_failures_first_and_every_case(job):
    _regress(job)
    step = job.path / "step.md"
    step.write_text("from another command\n")
    job.run().assert_outcomes(passed=1, failed=2)
    lines = step.read_text().splitlines()
    assert lines[:2] == ["from another command", f"## gputrain on {H100_FOLDER}: 1 regressed, 1 failed, 1 pass"]
    bullets = [line for line in lines if line.startswith("- **")]
    assert bullets[0].startswith(rf"- **test\_tuning\[{GEMMA}\]** {GEMMA} ")
    assert "10.0 %" in bullets[0]
    assert len(bullets) == 2
    rows = [line.split(" | ", 3) for line in lines if line.startswith("| ")]
    assert [row[:3] for row in rows[2:]] == [
        ["| regressed", "tuning", GEMMA],
        ["| failed", "tuning", LLAMA_2],
        ["| pass", "tuning", LLAMA],
    ]
    assert rows[2][3] == f"{H100_FOLDER} | 5.17 s | +10.0 % | 37.0 GiB | +5.7 % |"


def test_the_step_summary_stays_below_what_github_shows(job):
    step = job.path / "step.md"
    step.write_text("x" * (1024 * 1024 - 350) + "\n")
    job.run().assert_outcomes(passed=3)
    text = step.read_text()
    assert len(text.encode()) <= 1024 * 1024
    assert f"## gputrain on {H100_FOLDER}: 3 new" in text
    assert text.endswith("Cut here, because GitHub shows 1 MiB of a step at most. The report of `--gpu-json` has all.\n")
    job.run().assert_outcomes(passed=3)
    assert len(step.read_text().encode()) <= 1024 * 1024


def test_more_than_three_notes_are_folded_until_a_cut():
    assert "<details>" not in "".join(summary.lines([], [], ["a note"] * 3))
    noted = summary.lines([], [], ["a note"] * 400)
    assert (noted.index("<details><summary>400 notes</summary>"), noted[-2]) == (2, "</details>")
    cut = summary.fitted(noted, 900)
    assert 800 < len(cut) <= 900
    assert re.search(r"- a note\n\n</details>\n\nCut here", cut)


def test_figures_are_to_accept_if_a_case_or_the_suite_fails():
    failing = [
        "## gputrain on a CPU: 1 new, 2 pass",
        "## gputrain on a CPU: 1 over-limit",
        "## gputrain: 3 pass\n\n- **suite** is slower",
        "another page",
    ]
    assert [*map(summary.is_to_accept, [*failing, "## gputrain on h100-new: 2 improved, 1 pass\n\n- a note"])] == [
        True
    ] * 4 + [False]


def test_a_summary_can_go_to_a_file_of_its_own_which_holds_the_last_run_or_fails_it(job):
    for _ in range(2):
        job.run("--gpu-summary=deep/own.md", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    assert (job.path / "deep" / "own.md").read_text().count(f"## gputrain on {H100_FOLDER}: 1 new") == 1
    assert not (job.path / "step.md").exists()
    (job.path / "deep" / "own.md").unlink()
    job.write(test_vanish=FOLDER_VANISHES)
    result = job.run("--gpu-summary=deep/own.md")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["the summary cannot be written: *"])


def test_no_summary_is_written_elsewhere_or_of_runs_without_cases(project, monkeypatch):
    project.write(test_plain="def test_plain():\n    pass\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "step.md"))
    project.run().assert_outcomes(passed=1)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    project.machine(None)
    project.write(test_tuning=SUITE)
    project.run().assert_outcomes(passed=4)
    assert list(project.path.glob("*.md")) == []


@pytest.mark.slow
def test_junit_has_the_figures_of_every_case_under_xdist_too(gated):
    gated.answer(recorded(slower=1.1), to=GEMMA)
    gated.spawn("-n2", "--junitxml=junit.xml").assert_outcomes(passed=2, failed=1)
    properties = junit_properties(gated.junit()[f"test_tuning[{GEMMA}]"])
    assert (properties["gputrain.case"], properties["gputrain.verdict"]) == (GEMMA, "regressed")
    assert properties["gputrain.device"] == H100_FOLDER
    assert float(properties["gputrain.median_step_seconds"]) == pytest.approx(5.17)
    assert properties["gputrain.baseline.step_seconds"] == "4.7"
    assert float(properties["gputrain.step_seconds"]) == pytest.approx(5.17)
    assert properties["gputrain.peak_allocated_bytes"] == str(35 * GiB)
