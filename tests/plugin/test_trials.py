"""Trials by hostile files and machines: what is damaged, poisoned or short ends in one sentence, and destroys nothing."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from plugin_project import BUILD, assert_refused, recorded

from pytest_gputrain.cli.main import main
from pytest_gputrain.execution.fleet.job import deliver
from pytest_gputrain.execution.fleet.scheduler import ORDER
from pytest_gputrain.execution.settings import OPTIONS

WRONG = {option.ini: "\x00" if option.metavar in ("DIR", "FILE", "REPORT") else "'no such value" for option in OPTIONS}
WRONG |= dict.fromkeys(["gpu_baseline", "gpu_resume"], "gone.json")
WRONG |= {"gpu_summary": "x" * 300, "gpu_platform": "h10", "gpu_ids": "0,0"}
del WRONG["gpu_shared"]  # every text is a path


def _damages(text):
    document = json.loads(text)
    first = document["results"][0] if "results" in document else document
    return {
        "binary": bytes(range(256)),
        "truncated": text.encode()[: len(text) // 2] + b"\n",
        "deep": b"[" * 100_000,
        "newer": json.dumps({**document, "format": 99}).encode() + b"\n",
        "types": json.dumps({**document, "results": [{**first, "key": 7}], "key": 7, "suite": None}).encode() + b"\n",
    }


def test_every_subcommand_refuses_damaged_reports_and_histories_in_one_sentence(suite, capsys):
    suite.run("--gpu-json=report.json", "--gpu-history=history.jsonl").assert_outcomes(passed=3)
    report, history = (suite.path / "report.json").read_text(), (suite.path / "history.jsonl").read_text().splitlines()[0]
    formats = ("terminal", "markdown", "csv", "bencher", "pytest-benchmark")
    report_commands = [
        *(["export", "bad", f"--format={name}"] for name in formats),
        ["export", "bad", "--format=otava", "-o", "out"],
        ["export", "bad", "--format=html", "-o", "out"],
        ["compare", "bad", "report.json"],
        ["compare", "report.json", "bad"],
    ]
    history_commands = [
        ["trend", "bad"],
        ["trend", "bad", "--html", "out"],
        ["export", "--history", "bad", "--format=html", "-o", "out"],
    ]
    for commands, text in ((report_commands, report), (history_commands, history)):
        for name, data in _damages(text).items():
            (suite.path / "bad").write_bytes(data)
            for words in commands:
                capsys.readouterr()
                assert main(words) == 2, (words, name)
                out, err = capsys.readouterr()
                assert (out, err.count("\n") in (1, 2)) == ("", True), (words, name, err)
                assert all(line.startswith("gputrain: ") for line in err.splitlines()), (words, name, err)
                assert not (suite.path / "out").exists(), (words, name)


def test_a_wrong_value_in_the_ini_file_is_one_sentence_that_names_it(suite):
    for name, value in WRONG.items():
        suite.ini(f"{name} = {value}")
        assert_refused(suite, f"{'--gpu-resume' if name == 'gpu_resume' else name}: *")


def _poisoned(project, poison):
    project.run("--gpu-json=earlier.json").assert_outcomes(passed=3)
    (project.path / "launches.jsonl").unlink()
    document = project.report("earlier.json")
    poison(document)
    (project.path / "earlier.json").write_text(json.dumps(document).replace('"Infinity"', "1e999"))


@pytest.mark.parametrize("seconds", [-4.7, 0, "Infinity"])
def test_a_report_with_times_that_cannot_be_is_refused(suite, seconds):
    suite.answer(recorded(python=platform.python_version(), packages={}))
    _poisoned(suite, lambda document: document["results"][0]["replies"][0]["step_seconds"].__setitem__(0, seconds))
    place = "*earlier.json is not a report of --gpu-json: * at `$.results[[]0].replies[[]0].step_seconds[[]0]`*"
    for option in ("resume", "baseline"):
        assert_refused(suite, place, f"--gpu-{option}=earlier.json")


def test_a_poisoned_report_neither_runs_nor_writes_anything_else(suite):
    """What it names is looked up, never imported or opened."""
    suite.answer(recorded(python=platform.python_version(), packages={}))

    def poison(document):
        for result in document["results"]:
            result["nodeid"] = "../../evil.py::test_it"
            result["case"]["code"] = "../../evil.py::build"
            result["suite"] = "../../../evil"
        document["notes"] = ["::error::made up", "\x1b[2J"]

    _poisoned(suite, poison)
    before = sorted(suite.path.parent.rglob("*evil*"))
    result = suite.run("--gpu-resume=earlier.json", "--gpu-json=report.json", "--gpu-baseline-update")
    assert len(suite.launches) == 15, "five runs of each of the three cases: nothing of the report is theirs"
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.USAGE_ERROR)
    assert sorted(suite.path.parent.rglob("*evil*")) == before


def test_a_cut_order_of_a_fleet_is_refused(project):
    (project.path / ORDER).write_text('{"task": {"case": ')
    with pytest.raises(msgspec.DecodeError):
        deliver(project.path)


GREEDY = f"""{BUILD}

def greedy(setup):
    return bytearray(4 * 2**30) and build(setup)


def test_greedy(gputrain):
    gputrain.check(greedy, precision="fp32", steps=2, warmup=1)


def test_next(gputrain):
    gputrain.check(build, precision="fp32", steps=2, warmup=1)
"""


@pytest.mark.slow
def test_a_case_over_the_memory_of_its_control_group_is_told_and_the_next_one_runs(project):
    project.write(test_greedy=GREEDY)
    group = Path(f"/sys/fs/cgroup/memory/gputrain-trial-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(3 << 29))
    except OSError:
        pytest.skip("only root can make a control group of version 1")
    command = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m pytest --gpu-json=report.json"
    try:
        run = subprocess.run(
            ["sh", "-c", command], cwd=project.path, capture_output=True, text=True, timeout=200, check=False
        )
    finally:
        group.rmdir()
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    replies = {result["case"]["model"]: result["replies"][0] for result in project.report()["results"]}
    assert replies["build"]["outcome"] == "measured"
    assert (replies["greedy"]["outcome"], replies["greedy"]["where"]) == ("out_of_memory", "host")
