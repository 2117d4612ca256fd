"""Tests that GitHub and pre-commit accept what docs/ci.md shows; test_documented_commands.py runs its commands."""

import os
import re
import shutil
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


ACTIONS = {path.parent.name: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "ci").glob("*/action.yml"))}
MAY_WRITE = {"charts": "contents", "comment": "pull-requests", "accept": "contents"}


def test_there_is_a_workflow_with_a_gpu_and_one_without():
    assert [sorted(workflow["jobs"]) for workflow in WORKFLOWS] == [["accept", "comment", "cpu"], ["charts", "h100"]]
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
            if name in MAY_WRITE:
                assert "pytest " not in text.replace("tool: pytest ", "")
                continue
            assert "secrets." not in text
            assert "permissions" not in job
            (checkout,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout")]
            assert checkout["with"]["persist-credentials"] is False
    jobs = WORKFLOWS[0]["jobs"]
    assert "refs/heads/main" in WORKFLOWS[1]["jobs"]["charts"]["if"]
    started = "github.event_name == 'workflow_dispatch'"  # who starts it may push, unlike a fork
    assert jobs["accept"]["if"] == f"{started} && github.ref_name != github.event.repository.default_branch"
    assert {name: job["permissions"] for name, job in jobs.items() if name in MAY_WRITE} == {
        name: {what: "write"} for name, what in MAY_WRITE.items() if name in jobs
    }


def test_every_step_runs_something_that_github_takes():
    assert len(STEPS) > 10
    for step in STEPS:
        assert ("run" in step) != ("uses" in step)
        assert set(step) <= {"name", "run", "uses", "with", "if", "env"}
        own = re.fullmatch(r"OWNER/pytest-gputrain/ci/(\w+)@v[\d.]+", step.get("uses", ""))
        assert own or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
        if own:
            assert set(step.get("with", ())) <= set(ACTIONS[own[1]]["inputs"])
    for workflow in WORKFLOWS:
        assert workflow[True], "the key `on`, which YAML 1.1 reads as true"
        assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}


def test_actions_pin_others_and_put_no_input_into_a_script():
    assert set(ACTIONS) == {"gate", "comment", "accept"}
    for action in ACTIONS.values():
        assert action["runs"]["using"] == "composite"
        for step in action["runs"]["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert step.get("shell") == ("bash" if "run" in step else None)
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step.get("uses", f"actions/a@{'0' * 40}"))
            assert "${{" not in step.get("run", ""), "a value that is put into a script may be a command"
            named = [step.get("with", {}).get("name")] if "-artifact@" in step.get("uses", "") else []
            assert named in ([], ["${{ inputs.name }}"]), "several uses in one workflow have artifacts of their own"


RECORDS = """#!/bin/sh
echo "$@" >> arguments
case "$*" in *=cpu*) echo "## 1 regressed" > gputrain-out/cpu.md;; esac
[ -z "$WRITES_NOTHING" ] || exit 3
mkdir -p suite/baselines/cpu
echo '{}' > suite/baselines/cpu/llm.json
echo changed > code.py
exit 1
"""


def test_figures_of_a_branch_are_judged_or_committed_to_it(tmp_path, monkeypatch):
    """The first job runs pytest, and the last one commits baselines alone, whatever the first job has changed."""
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for variable in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{variable}_NAME", "tester")
        monkeypatch.setenv(f"GIT_{variable}_EMAIL", "tester@localhost")

    def run(folder, *command, **variables):
        return subprocess.run(
            command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=60
        )

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pytest").write_text(RECORDS)
    (tmp_path / "bin" / "pytest").chmod(0o755)
    first, last = tmp_path / "first", tmp_path / "last"
    run(tmp_path, "git", "init", "--quiet", "--bare", "--initial-branch=main", "origin")
    run(tmp_path, "git", "clone", "--quiet", "origin", "first")
    (first / "code.py").write_text("before\n")
    run(first, "git", "add", "code.py")
    run(first, "git", "commit", "--quiet", "-m", "before")
    run(first, "git", "push", "--quiet", "origin", "HEAD:main")
    given = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TESTS": "suite", "ARGUMENTS": "-k 'a b'"}
    given |= {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "BASELINES": "baselines"}
    gate = ("bash", str(ROOT / "ci" / "gate.sh"))
    assert run(first, *gate, "cpu", **given, RECORD="false").returncode == 1
    assert (tmp_path / "summary.md").read_text() == "## 1 regressed\n"
    assert run(first, *gate, "h100", **given, RECORD="true", WRITES_NOTHING="1").returncode == 3
    assert "the run ended before it could write a summary" in (first / "gputrain-out" / "h100.md").read_text()
    assert run(first, *gate, "h100", **given, RECORD="true").returncode == 1
    judged, _, recorded = (first / "arguments").read_text().splitlines()
    assert judged.startswith("suite -n 2 --gpu-platform=cpu --gpu-json=gputrain-out/cpu.json")
    assert "--gpu-emulate --gpu-baseline-update" in recorded
    assert "update" not in judged
    run(tmp_path, "git", "clone", "--quiet", "origin", "last")
    shutil.copytree(first / "gputrain-out", last / "gputrain-out")
    commit = ACTIONS["accept"]["runs"]["steps"][-1]["run"]
    done = run(last, "bash", "-e", "-c", commit, MESSAGE="accepted; $(false)", BASELINES="baselines")
    assert done.returncode == 0, done.stderr
    told = run(tmp_path / "origin", "git", "show", "--stat", "--format=%s", "main").stdout
    assert told.splitlines()[0] == "accepted; $(false)"
    assert re.findall(r"^ (\S+) +\|", told, re.MULTILINE) == ["suite/baselines/cpu/llm.json"]
    (last / "gputrain-out" / "recorded.patch").write_text("")
    assert "the figures are those of the baselines" in run(last, "bash", "-e", "-c", commit, MESSAGE="again").stdout


def test_gitlab_pushes_to_no_branch_for_a_fork():
    jobs = yaml.safe_load((ROOT / "ci" / "gitlab.yml").read_text())
    for name in ("gputrain-record", "gputrain-accept"):
        (rule,) = jobs[name]["rules"]
        assert rule["if"].endswith(" && $CI_MERGE_REQUEST_SOURCE_PROJECT_ID == $CI_PROJECT_ID")


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
