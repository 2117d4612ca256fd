"""Tests ``gputrain ab``: it runs two versions of the code, each in its own folder, and leaves no file and no worktree."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from plugin_project import GEMMA, LLAMA, LLAMA_2, SUITE, recorded
from test_emulating import CONFTEST, EMULATE, RUN, WAITS, counted

from pytest_gputrain.cli.ab_sides import open_side, with_more_at_once
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
def test_a_slower_head_fails_by_its_sentence_and_only_cases_in_doubt_have_all_rounds(repository, ab, capsys):
    repository.answer(recorded(slower=1.5), to=GEMMA)
    repository.answer(recorded(slower=1.04), to=LLAMA_2)
    assert ab("--base", "fast", "--rounds=3", "--json=ab.json") == 1
    captured = capsys.readouterr()
    assert re.search(rf"\n{GEMMA} .*50\.0 %", captured.out)
    assert re.search(rf"Llama 3.1 8B .* {re.escape('pass')}", captured.out)
    assert re.findall("round . of 3: (base|head)", captured.err) == ["base", "head", "head", "base", "base", "head"]
    assert re.search("round 3 of 3: base.*; at most about [0-9]+ (s|min) left", captured.err)
    assert _only_worktree(repository)
    report = json.loads((repository.path / "ab.json").read_text())
    assert report["exit_status"] == 1
    assert report["settings"]["base"].startswith("fast (")
    assert {result["key"]: (result["verdict"]["status"], len(result["replies"])) for result in report["results"]} == {
        GEMMA: ("regressed", 2),
        LLAMA: ("pass", 2),
        LLAMA_2: ("regressed", 3),
    }
    launched = [launch["id"] for launch in repository.launches]
    assert {case: launched.count(case) for case in launched} == {GEMMA: 2, LLAMA: 2, LLAMA_2: 3}


def _ab_report(project):
    report = json.loads((project.path / "ab.json").read_text())
    return report, {result["key"]: result["verdict"]["status"] for result in report["results"]}


def test_on_a_cpu_one_run_of_each_side_judges_memory_and_not_time(cpu, ab, capsys, monkeypatch):
    def reading(reads):
        counts = {"on_cpu": True, "steps": [0], "kinds": [{"operators": 9, "reads": reads}]}
        return recorded("cpu_measured", slower=3) | {"counts": counts}

    cpu.write(test_tuning=SUITE)
    cpu.git("init", "-q", "-b", "trunk")
    cpu.answer(reading(0), to=LLAMA)
    _commit(cpu, "small")
    cpu.answer(recorded("cpu_measured", slower=3, bigger=1 << 30), to=GEMMA)
    cpu.answer(reading(1), reading(0), to=LLAMA)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(cpu.path / "summary.md"))
    monkeypatch.setenv("CI", "true")
    assert ab("--base", "small", "--json=ab.json", "-n0") == 1
    captured = capsys.readouterr()
    assert re.search(rf"\n{GEMMA} .*1\.00 GiB .*\(base\)", captured.out)
    report, verdicts = _ab_report(cpu)
    assert verdicts == {f"{GEMMA}@tiny": "regressed", f"{LLAMA}@tiny": "inconclusive", f"{LLAMA_2}@tiny": "pass"}
    assert (report["exit_status"], report["settings"]["rounds"]) == (1, 1)
    # Memory is exact, and a second process has not confirmed the counts.
    assert sorted(launch["id"] for launch in cpu.launches) == sorted([GEMMA, LLAMA, LLAMA, LLAMA_2])
    summary = (cpu.path / "summary.md").read_text()
    assert summary.count("## gputrain on a CPU: 1 regressed, 1 inconclusive, 1 pass") == 1
    assert summary.count("## ") == 1, "the runs of the sides write none"


def test_an_emulated_gpu_is_compared_by_one_run_of_each_side_and_counts_are_confirmed(project, ab, capsys):
    (project.path / "conftest.py").write_text(CONFTEST)
    project.write(test_tuning=SUITE)
    project.answer(counted())
    project.git("init", "-q", "-b", "trunk")
    _commit(project, "plain")
    project.answer(counted(waits=1), to=GEMMA)
    project.answer(counted(waits=1), counted(), to=LLAMA)
    project.answer({**counted(), "peak_allocated_bytes": RUN["peak_allocated_bytes"] + 512}, to=LLAMA_2)
    assert ab("--base", "plain", "--json=ab.json", "-n0", *EMULATE) == 1
    captured = capsys.readouterr()
    assert f"\n{GEMMA} {WAITS}\n" in captured.out
    assert re.search(rf"\n{LLAMA_2} .*\b512 bytes ", captured.out)
    assert "record" not in captured.out
    assert _ab_report(project)[1] == {GEMMA: "regressed", LLAMA: "inconclusive", LLAMA_2: "regressed"}
    launched = [launch["id"] for launch in project.launches]
    assert {case: launched.count(case) for case in launched} == {GEMMA: 2, LLAMA: 2, LLAMA_2: 1}
    test = project.path / "test_tuning.py"
    test.write_text(test.read_text() + "\n\n@pytest.mark.h100\ndef test_more(gputrain):\n    raise ValueError\n")
    project.answer(counted(), to=GEMMA)
    project.answer(counted(), to=LLAMA_2)
    project.answer(counted(), to=LLAMA)
    assert ab("--base", "plain", "-n0", *EMULATE, "-k", "llama-2 or more") == 1
    assert " fail by something else than a verdict, and those of plain (" in capsys.readouterr().out


def test_exact_cases_run_two_at_a_time_where_xdist_is_installed(repository, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    with open_side("head", ".", tmp_path) as side:
        assert with_more_at_once(side, ["-k", "gemma"]) == ["-n", "2", "-k", "gemma"]
        for own in ("-n4", "--numprocesses=3", "--dist=loadfile", "--pdb", "-pno:xdist"):
            assert with_more_at_once(side, [own]) == [own]
        assert with_more_at_once(side, ["-p", "no:xdist"]) == ["-p", "no:xdist"]
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
        assert with_more_at_once(side, []) == []
        (repository.path / "xdist.py").write_text("raise ImportError")
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
        assert with_more_at_once(side, []) == []


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
    assert re.search(rf"{GEMMA}: \. .*has no such case", output)


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


HANGS = """
with open({count!r}, "a+") as count:
    print(file=count)
    launches = count.tell()
if launches > {after}:
    Path({reached!r}).touch()
    __import__("time").sleep(60)
"""


def _interrupted(project, tmp_path, after, *arguments):
    """What ``gputrain ab`` gives that SIGTERM ends when so many processes have ended and one more has begun."""
    names = {name: str(tmp_path / name) for name in ("count", "reached")}
    project.when_launched(HANGS.format(after=after, **names))
    _commit(project, "hanging")
    project.answer(recorded("h100_measured" if "--rounds=3" in arguments else "cpu_measured", slower=1.5, bigger=1 << 30))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", "import sys; from pytest_gputrain.cli.main import main; sys.exit(main())"]
    child = subprocess.Popen(
        [*command, "ab", "--base=hanging", *arguments],
        cwd=project.path,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "reached").exists() and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    output, errors = child.communicate(timeout=600)
    assert _only_worktree(project)
    assert list(scratch.glob("gputrain-ab-*")) == []
    return child.returncode, output, errors


@pytest.mark.parametrize(
    ("after", "status", "sentence"),
    [
        (0, 130, "gputrain: interrupted; nothing was judged"),
        (2, 1, "interrupted after 1 of 3 rounds; what there was until then is judged"),
    ],
)
def test_an_interrupted_comparison_judges_its_complete_rounds_and_leaves_nothing(
    repository, tmp_path, after, status, sentence
):
    (repository.path / "replies.json").write_text(json.dumps({"*": [recorded()]}))
    ended, output, errors = _interrupted(repository, tmp_path, after, "--rounds=3", "-k", "gemma")
    assert ended == status, errors
    assert (output or errors).endswith(f"{sentence}\n")
    assert bool(re.search(rf"\n{GEMMA} .*50\.0 %", output)) == (after > 0)


def test_an_interrupted_exact_comparison_judges_the_cases_that_both_sides_have(cpu, tmp_path):
    cpu.write(test_tuning=SUITE)
    cpu.git("init", "-q", "-b", "trunk")
    ended, output, errors = _interrupted(cpu, tmp_path, 4, "-n0")
    assert ended == 1, errors
    assert re.search(rf"\n{LLAMA} .*\b1\.00 GiB ", output)
    assert output.endswith("interrupted after 1 of 3 cases of base; what there was until then is judged\n")
