"""What docs/ci.md and docs/exchange.md print to be copied is what GitHub, pre-commit and the commands take."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_gputrain import cli
from pytest_gputrain.exchange.formats import FORMATS
from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.options import OPTIONS

ROOT = Path(__file__).parents[2]
CI, EXCHANGE = ((ROOT / "docs" / name).read_text() for name in ("ci.md", "exchange.md"))
FLAGS = {option.flag: option for option in OPTIONS}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


WORKFLOWS = [found for found in map(yaml.safe_load, blocks(CI, "yaml")) if "jobs" in found]


def steps() -> Iterator[dict[str, Any]]:
    for workflow in WORKFLOWS:
        for job in workflow["jobs"].values():
            yield from job["steps"]


def commands() -> Iterator[list[str]]:
    """Every command of the workflows and of the pages' consoles, in words."""
    scripts = [step["run"] for step in steps() if "run" in step]
    for script in [*scripts, *blocks(CI, "console"), *blocks(EXCHANGE, "console")]:
        for line in script.splitlines():
            yield shlex.split(line, comments=True)


def commands_of(program: str) -> list[list[str]]:
    return [words[1:] for words in commands() if words and Path(words[0]).name == program]


def test_there_is_a_workflow_with_a_gpu_and_one_without() -> None:
    assert [sorted(workflow["jobs"]) for workflow in WORKFLOWS] == [["cpu"], ["h100"]]
    without, with_one = WORKFLOWS
    assert without["jobs"]["cpu"]["runs-on"] == "ubuntu-latest"
    assert "self-hosted" in with_one["jobs"]["h100"]["runs-on"]
    assert "head.repo.full_name == github.repository" in with_one["jobs"]["h100"]["if"], "a fork must not get the runner"


def test_every_step_runs_something_that_github_takes() -> None:
    assert len(list(steps())) > 10
    for step in steps():
        assert ("run" in step) != ("uses" in step)
        assert set(step) <= {"name", "run", "uses", "with", "if", "env"}
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
    for workflow in WORKFLOWS:
        assert workflow[True], "the key `on`, which YAML 1.1 reads as true"
        assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}


def test_the_commands_of_pytest_have_options_that_exist() -> None:
    assert len(commands_of("pytest")) >= 6
    for words in commands_of("pytest"):
        for word in words:
            flag, _, value = word.partition("=")
            if flag.startswith("--gpu"):
                assert flag in FLAGS
                assert value or FLAGS[flag].switch
                FLAGS[flag].parse(value or "true")
        assert all(words[at + 1] in MARKERS for at, word in enumerate(words) if word == "-m")


def test_the_commands_of_gputrain_parse() -> None:
    found = [cli._parser().parse_args(words) for words in commands_of("gputrain") if "--help" not in words]
    assert {options.command for options in found} == {"export", "check-baselines"}


def test_every_format_is_explained() -> None:
    table = re.findall(r"^\| `([\w-]+)` \|", EXCHANGE, re.MULTILINE)
    assert table == list(FORMATS)


def hooks() -> list[dict[str, Any]]:
    shipped = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    shown = [found for found in map(yaml.safe_load, blocks(CI, "yaml")) if "repos" in found]
    return [*shipped, *(hook for config in shown for repo in config["repos"] for hook in repo["hooks"])]


def test_hooks_have_what_pre_commit_requires() -> None:
    assert [hook["language"] for hook in hooks()] == ["python", "system"]
    for hook in hooks():
        assert {"id", "name", "entry", "language"} <= set(hook)
        assert hook["pass_filenames"] is False
        assert re.search(hook["files"], "baselines/cpu/llm.json")
        assert re.search(hook["files"], "deep/baselines/dry-run/h100/llm.json")
        assert not re.search(hook["files"], "src/baselines.py")


@pytest.mark.parametrize("damaged", [False, True])
def test_the_hook_passes_what_is_committed_and_fails_what_is_damaged(tmp_path: Path, damaged: bool) -> None:
    entry = hooks()[0]["entry"].split()
    assert entry[0] == "gputrain"
    (tmp_path / "baselines" / "cpu").mkdir(parents=True)
    source = (ROOT / "baselines" / "cpu" / "collective.json").read_text()
    (tmp_path / "baselines" / "cpu" / "collective.json").write_text(source.replace('"tiny"', '"full"', int(damaged)))
    code = f"import sys; from pytest_gputrain.cli import main; sys.exit(main({entry[1:]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (int(damaged), "")
    assert done.stdout.startswith("baselines/cpu/collective.json:") is damaged
