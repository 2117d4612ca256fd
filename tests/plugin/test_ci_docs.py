"""Tests that GitHub and pre-commit accept what docs/ci.md shows; test_documented_commands.py runs its commands."""

import re
import subprocess
import sys

import pytest
import yaml
from documents import PAGES, ROOT, blocks, workflow_steps

from pytest_gputrain.report.export.formats import FORMATS

PAGES_OF_CI = ("docs/ci.md", "docs/ci-gpu.md")
WORKFLOWS = [
    workflow for page in PAGES_OF_CI for workflow in map(yaml.safe_load, blocks(page, "yaml")) if "jobs" in workflow
]
STEPS = [step for page in PAGES_OF_CI for step in workflow_steps(page)]


def test_there_is_a_workflow_with_a_gpu_and_one_without():
    assert [sorted(workflow["jobs"]) for workflow in WORKFLOWS] == [["cpu"], ["charts", "h100"]]
    without, with_one = WORKFLOWS
    assert without["jobs"]["cpu"]["runs-on"] == "ubuntu-latest"
    assert "self-hosted" in with_one["jobs"]["h100"]["runs-on"]
    assert "head.repo.full_name == github.repository" in with_one["jobs"]["h100"]["if"], "a fork must not get the runner"


def test_no_job_that_runs_a_pull_request_may_write_or_keeps_a_token():
    """As docs/security.md says."""
    for workflow in WORKFLOWS:
        assert workflow["permissions"] == {"contents": "read"}
        assert "pull_request_target" not in workflow[True]
        for name, job in workflow["jobs"].items():
            text = yaml.safe_dump(job)
            if name == "charts":
                assert "refs/heads/main" in job["if"]
                assert "pytest " not in text.replace("tool: pytest ", "")
                continue
            assert "secrets." not in text
            assert "permissions" not in job
            (checkout,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout")]
            assert checkout["with"]["persist-credentials"] is False


def test_every_step_runs_something_that_github_takes():
    assert len(STEPS) > 10
    for step in STEPS:
        assert ("run" in step) != ("uses" in step)
        assert set(step) <= {"name", "run", "uses", "with", "if", "env"}
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
    for workflow in WORKFLOWS:
        assert workflow[True], "the key `on`, which YAML 1.1 reads as true"
        assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}


def test_own_workflows_pin_actions_and_may_only_read():
    own = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    assert len(own) == 3
    for workflow in own:
        assert workflow["permissions"] == {"contents": "read"}
        assert "pull_request_target" not in workflow[True]
        for job in workflow["jobs"].values():
            assert "permissions" not in job
            assert job.get("uses") == "./.github/workflows/parts.yml" or job["timeout-minutes"]
            for step in job.get("steps", ()):
                assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step.get("uses", f"actions/a@{'0' * 40}"))
                assert "${{" not in step.get("run", ""), "a value that is put into a script may be a command"
                if step.get("uses", "").startswith("actions/checkout"):
                    assert step["with"]["persist-credentials"] is False


def test_every_format_is_explained():
    assert re.findall(r"^\| `([\w-]+)` \|", PAGES["docs/trends.md"], re.MULTILINE) == list(FORMATS)


def hooks():
    shipped = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    shown = [hooks for hooks in map(yaml.safe_load, blocks("docs/ci.md", "yaml")) if "repos" in hooks]
    return [*shipped, *(hook for config in shown for repo in config["repos"] for hook in repo["hooks"])]


def test_hooks_have_what_pre_commit_requires():
    assert [hook["language"] for hook in hooks()] == ["python", "system"]
    for hook in hooks():
        assert {"id", "name", "entry", "language"} <= set(hook)
        assert hook["pass_filenames"] is False
        assert re.search(hook["files"], "baselines/cpu/llm.json")
        assert re.search(hook["files"], "deep/baselines/emulated/h100/llm.json")
        assert not re.search(hook["files"], "src/baselines.py")


@pytest.mark.parametrize("damaged", [False, True])
def test_the_hook_passes_what_is_committed_and_fails_what_is_damaged(tmp_path, damaged):
    entry = hooks()[0]["entry"].split()
    assert entry[0] == "gputrain"
    (tmp_path / "baselines" / "cpu").mkdir(parents=True)
    source = (ROOT / "baselines" / "cpu" / "collective.json").read_text()
    (tmp_path / "baselines" / "cpu" / "collective.json").write_text(source.replace('"tiny"', '"full"', int(damaged)))
    code = f"import sys; from pytest_gputrain.cli.main import main; sys.exit(main({entry[1:]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (int(damaged), "")
    assert done.stdout.startswith("baselines/cpu/collective.json:") is damaged
