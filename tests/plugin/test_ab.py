"""Tests ``gputrain ab``: it runs two versions of the code, each in its own folder, and leaves no file and no worktree."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from plugin_project import GEMMA, LLAMA, recorded

from pytest_gputrain.cli.main import main


def _commit(project, tag):
    project.git("add", ".")
    project.git("commit", "--allow-empty", "-qm", tag)
    project.git("tag", tag)


@pytest.fixture
def ab(monkeypatch, tmp_path_factory):
    """The command, in this folder and with a temporary folder of its own, which it leaves empty."""
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))

    def run(*arguments):
        status = main(["ab", *arguments])
        assert [path.name for path in scratch.iterdir() if path.name.startswith("gputrain-ab-")] == []
        return status

    return run


@pytest.fixture
def repository(suite):
    """Two commits: under ``slow`` a case takes 6 % longer than under ``main``."""
    (suite.path / ".gitignore").write_text("launches.jsonl\n__pycache__\n.pytest_cache\n")
    suite.git("init", "-q", "-b", "trunk")
    _commit(suite, "fast")
    suite.answer(recorded(slower=1.06), to=GEMMA)
    _commit(suite, "slow")
    return suite


def _only_worktree(project):
    return len(project.git("worktree", "list").splitlines()) == 1


@pytest.mark.slow
def test_a_slower_head_fails_by_its_sentence_and_leaves_no_worktree(repository, ab, capsys):
    assert ab("--base", "fast", "--head", "slow", "--rounds=2", "--json=ab.json", "-k", "gemma or llama-3") == 1
    captured = capsys.readouterr()
    assert f"\n{GEMMA} is 6.0 % slower: " in captured.out
    assert re.search(rf"Llama 3.1 8B .* {re.escape('pass')}", captured.out)
    assert re.findall("round . of 2: (base|head)", captured.err) == ["base", "head", "head", "base"]
    assert _only_worktree(repository)
    report = json.loads((repository.path / "ab.json").read_text())
    assert report["exit_status"] == 1
    assert report["settings"]["base"].startswith("fast (")
    assert {result["key"]: (result["verdict"]["status"], len(result["replies"])) for result in report["results"]} == {
        GEMMA: ("regressed", 2),
        LLAMA: ("pass", 2),
    }


@pytest.mark.slow
def test_the_working_tree_counts_as_it_is(repository, ab, capsys):
    repository.answer(recorded(slower=2), to=GEMMA)
    assert ab("--base", "slow", "--rounds=1", "-k", "gemma") == 1
    captured = capsys.readouterr()
    assert "head, . (with uncommitted changes)" in captured.err
    assert ab("--base", "fast", "--head", "fast", "--rounds=1", "-k", "gemma") == 0
    assert "files here differ from the last commit; neither side has these changes" in capsys.readouterr().err


@pytest.mark.slow
def test_a_case_that_base_does_not_have_is_told_and_fails_where_it_is_to(repository, ab, capsys):
    test = repository.path / "test_tuning.py"
    test.write_text(test.read_text().replace('"gemma-7b"', '"gemma-2-9b"'))
    assert ab("--base", "fast", "--rounds=1", "-k", "gemma") == 0
    assert ab("--base", "fast", "--rounds=1", "-k", "gemma", "--fail-on=new") == 1
    assert ab("--base", "fast", "--rounds=1", "-k", "gemma", "--fail-on=not-comparable") == 1
    output = capsys.readouterr().out
    assert re.search(r"gemma-2-9b-lora-bf16: fast \(\w+\) has no such case", output)
    assert re.search(rf"{GEMMA}: \. .*has it in 0 of 1 rounds, fast \(\w+\) in more", output)


def test_an_environment_runs_by_its_own_python(repository, ab, capsys):
    python = repository.path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho run >> {repository.path}/calls.txt\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert ab("--base", "venv", "--rounds=1", "-k", "gemma") == 0
    assert (repository.path / "calls.txt").read_text() == "run\n" * 2  # once to ask what it has
    python.write_text("#!/bin/sh\nexit 1\n")
    assert ab("--base", "venv") == 2
    assert capsys.readouterr().err.endswith("gputrain: --base: venv has no pytest-gputrain; install it there\n")


UNRUNNABLE = {
    "--base=gone": "--base: 'gone' is neither a folder, a virtual environment nor a revision of a git repository here",
    "--base=fast --head=gone": "--head: 'gone' is neither a folder, a virtual environment nor a revision of *",
    "--base=fast --rounds=1 -k nothing": "fast (*) has no test that -k nothing selects",
    "--base=fast --rounds=1 -m a100": "no test of fast (*) measured a case:*3 skipped*",
    "--base=fast --rounds=1 --nonsense": "pytest of fast (*) ended with status 4 *unrecognized*--nonsense*",
}


def test_what_cannot_be_run_is_told(repository, ab, capsys):
    for arguments, sentence in UNRUNNABLE.items():
        assert ab(*arguments.split()) == 2
        text = " ".join(capsys.readouterr().err.split())
        pytest.LineMatcher([text]).fnmatch_lines([f"*gputrain: {sentence}"])
        assert _only_worktree(repository)
    with pytest.raises(SystemExit) as exit_info:
        ab("--base=fast", "--rounds=0")
    assert exit_info.value.code == 2
    assert "'0' is not a whole number from 1 to 20" in capsys.readouterr().err


def test_an_interrupted_comparison_leaves_nothing(repository, tmp_path):
    repository.when_launched(f"Path({str(tmp_path / 'reached')!r}).touch()\n__import__('time').sleep(60)")
    _commit(repository, "hanging")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", "import sys; from pytest_gputrain.cli.main import main; sys.exit(main())"]
    child = subprocess.Popen(
        [*command, "ab", "--base=hanging", "--head=fast"],
        cwd=repository.path,
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "reached").exists() and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=600)
    assert child.returncode == 130, errors
    assert errors.endswith("gputrain: interrupted; nothing was judged\n")
    assert _only_worktree(repository)
    assert list(scratch.glob("gputrain-ab-*")) == []
