"""Tests what the README and docs/options.md declare; test_documented_commands.py runs their commands and programs."""

import re
import tomllib
from pathlib import Path

from documents import PAGES, blocks

README = PAGES["README.md"]


def test_the_readme_is_short():
    assert README.count("\n") <= 120


def test_the_readme_says_what_an_installation_needs_and_what_each_kind_of_run_sees():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [torch] = (it for it in project["optional-dependencies"]["suite"] if re.match("torch[^a-z]", it))
    python, torch = (requirement.partition(">=")[2] for requirement in (project["requires-python"], torch))
    assert f"You need Linux, Python {python} or newer and torch {torch} or newer" in README
    table = next(part for part in README.split("\n\n") if part.startswith("| "))
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    assert header == ["a run on", "memory", "counts of a step", "time", "not seen"]
    kinds = [re.sub(r"\[|\]\(.*?\)", "", row[0]) for row in rows]
    assert kinds == ["CPU", "emulated GPU", "GPU"]


def test_the_readme_says_what_its_program_takes_and_how_its_broken_program_fails(project):
    (program,) = blocks("README.md", "python")
    project.write(test_training=program)
    recorded = project.spawn("--gpu-baseline-update", "--gpu-platform=cpu")
    recorded.assert_outcomes(passed=1)
    assert "\x1b" not in recorded.stdout.str(), "what is no terminal has no line of progress"
    (shown,) = re.findall(r"^train  .* recorded$", README, re.MULTILINE)
    time = re.compile(r"\d+(\.\d+)? m?s")
    rows = [" ".join(time.sub("", row).split()) for row in recorded.outlines if row.startswith("train ")]
    assert rows == [" ".join(time.sub("", shown).split())]

    broken = program.replace("(model(batch) - batch)", "(model(batch) - batch).double()")
    assert broken != program
    project.write(test_training=broken)
    failed = project.spawn("--gpu-platform=cpu")
    failed.assert_outcomes(failed=1)
    (sentence,) = blocks("README.md", "text")
    told = " ".join(sentence.split()).replace("benchmarks/", "")
    assert any(told in line for line in failed.outlines), failed.stdout.str()


def test_the_page_lists_exactly_the_options_and_settings():
    from pytest_gputrain.execution.settings import OPTIONS

    listed = re.findall(r"^- `((?:--)?gpu[\w-]+)", PAGES["docs/options.md"], re.MULTILINE)
    assert sorted(listed) == sorted(option.ini if option.ini_only else option.flag for option in OPTIONS)
