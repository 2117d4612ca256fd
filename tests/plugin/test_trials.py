"""Trials by hostile files and machines: what is damaged, poisoned or short ends in one sentence, and destroys nothing."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plugin_project import BUILD, GEMMA, Project, assert_refused, recorded

from pytest_gputrain.cli.main import main
from pytest_gputrain.execution.fleet.job import deliver
from pytest_gputrain.execution.fleet.scheduler import ORDER
from pytest_gputrain.plugin.options import OPTIONS
from pytest_gputrain.records import Case, Conditions, Order, Task

WRONG = {option.ini: "\x00" if option.metavar in ("DIR", "FILE", "REPORT") else "'no such value" for option in OPTIONS}
WRONG |= {
    "gpu_baseline": "gone.json",
    "gpu_resume": "gone.json",
    "gpu_summary": "x" * 300,
    "gpu_platform": "h10",
    "gpu_ids": "0,0",
}


def _damages(text: str) -> dict[str, bytes]:
    document = json.loads(text)
    first = document["results"][0] if "results" in document else document
    return {
        "empty": b"",
        "binary": bytes(range(256)),
        "truncated": text.encode()[: len(text) // 2] + b"\n",
        "deep": b"[" * 100_000,
        "other": b'{"format": 2, "results": "none"}\n',
        "newer": json.dumps({**document, "format": 99}).encode() + b"\n",
        "list": b"[1, 2]\n",
        "types": json.dumps({**document, "results": [{**first, "key": 7}], "key": 7, "suite": None}).encode() + b"\n",
    }


def test_every_subcommand_refuses_damaged_reports_and_histories_in_one_sentence(
    suite: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    suite.run("--gpu-json=report.json", "--gpu-history=history.jsonl").assert_outcomes(passed=3)
    report, history = (suite.path / "report.json").read_text(), (suite.path / "history.jsonl").read_text().splitlines()[0]
    report_commands: list[list[str]] = [
        *(
            [
                ["export", "bad", f"--format={name}"]
                for name in ("terminal", "markdown", "csv", "bencher", "pytest-benchmark")
            ]
        ),
        ["export", "bad", "--format=otava", "-o", "out"],
        ["html", "bad", "-o", "out"],
        ["compare", "bad", "report.json"],
        ["compare", "report.json", "bad"],
    ]
    history_commands = [["trend", "bad"], ["trend", "bad", "--html", "out"], ["html", "--history", "bad", "-o", "out"]]
    for commands, text in ((report_commands, report), (history_commands, history)):
        for name, data in _damages(text).items():
            (suite.path / "bad").write_bytes(data)
            for words in commands:
                capsys.readouterr()
                assert main(words) == 2, (words, name)
                said = capsys.readouterr()
                assert said.out == "", (words, name)
                lines = said.err.splitlines()
                assert 1 <= len(lines) <= 2, (words, name, said.err)
                assert all(line.startswith("gputrain: ") for line in lines), (words, name, said.err)
                assert not (suite.path / "out").exists(), (words, name)


@pytest.mark.parametrize("name", [name for name in WRONG if name != "gpu_shared"])  # every text is a path
def test_a_wrong_value_in_the_ini_file_is_one_sentence_that_names_it(suite: Project, name: str) -> None:
    shown = name if name != "gpu_resume" else "--gpu-resume"
    suite.ini(f"{name} = {WRONG[name]}")
    assert_refused(suite, f"{shown}: *")


def _poisoned(project: Project, poison: Callable[[dict[str, Any]], object]) -> None:
    project.run("--gpu-json=earlier.json").assert_outcomes(passed=3)
    (project.path / "launches.jsonl").unlink()
    document = project.report("earlier.json")
    poison(document)
    (project.path / "earlier.json").write_text(json.dumps(document).replace('"Infinity"', "1e999"))


@pytest.mark.parametrize("seconds", [-4.7, 0, "Infinity"])
@pytest.mark.parametrize("option", ["--gpu-resume=earlier.json", "--gpu-baseline=earlier.json"])
def test_a_report_with_times_that_cannot_be_is_refused(suite: Project, seconds: object, option: str) -> None:
    suite.answer(recorded(python=platform.python_version(), packages={}))
    _poisoned(suite, lambda document: document["results"][0]["replies"][0]["step_seconds"].__setitem__(0, seconds))
    assert_refused(
        suite, "*earlier.json is not a report of --gpu-json: * at `$.results[[]0].replies[[]0].step_seconds[[]0]`*", option
    )


def test_a_poisoned_report_neither_runs_nor_writes_anything_else(suite: Project) -> None:
    """What it names is looked up, never imported or opened."""
    suite.answer(recorded(python=platform.python_version(), packages={}))

    def poison(document: dict[str, Any]) -> None:
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


# Orders of a fleet


@pytest.mark.slow
@pytest.mark.parametrize("code", ["/etc/evil.py::build", "../evil.py::build", "link.py::build", "evil.py::a.b"])
def test_a_tampered_order_of_a_fleet_runs_no_code_from_elsewhere(project: Project, tmp_path: Path, code: str) -> None:
    outside = tmp_path / "evil.py"
    outside.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n{BUILD}")
    (project.path / "link.py").symlink_to(outside)
    case = Case(model="evil", method="custom", precision="fp32", code=code)
    task = Task(case=case, scale="tiny", device_type="cpu", root=str(project.path))
    conditions = Conditions(platform="cpu", timeout_seconds=60.0, foreign="ignore", shared=str(project.path))
    order = Order(task=task, gpus=0, cpus=1, conditions=conditions)
    (project.path / ORDER).write_bytes(msgspec.json.encode(order))
    deliver(project.path)
    delivery = json.loads((project.path / "delivery.json").read_text())
    assert delivery.get("reply", {}).get("outcome", "refused") in ("crashed", "refused"), delivery
    assert not (tmp_path / "ran").exists()


def test_a_cut_order_of_a_fleet_is_refused(project: Project) -> None:
    (project.path / ORDER).write_text('{"task": {"case": ')
    with pytest.raises(msgspec.DecodeError):
        deliver(project.path)


# Little memory


GREEDY = f"""{BUILD}

def greedy(setup):
    return bytearray(4 * 2**30) and build(setup)


def test_greedy(gputrain):
    gputrain.check(greedy, precision="fp32", steps=2, warmup=1)


def test_next(gputrain):
    gputrain.check(build, precision="fp32", steps=2, warmup=1)
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group whose processes have 1.5 GiB together."""
    parent = Path("/sys/fs/cgroup/memory")
    group = parent / f"gputrain-trial-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(3 << 29))
    except OSError:
        pytest.skip("only root can make a control group of version 1")
    try:
        yield group
    finally:
        group.rmdir()


@pytest.mark.slow
def test_a_case_over_the_memory_of_its_control_group_is_told_and_the_next_one_runs(
    project: Project, small_group: Path
) -> None:
    project.write(test_greedy=GREEDY)
    command = f"echo $$ > {small_group}/cgroup.procs && exec {sys.executable} -m pytest --gpu-json=report.json"
    run = subprocess.run(["sh", "-c", command], cwd=project.path, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 1, run.stdout
    outcomes = {result["case"]["model"]: result["replies"][0] for result in project.report()["results"]}
    assert outcomes["build"]["outcome"] == "measured"
    assert (outcomes["greedy"]["outcome"], outcomes["greedy"]["where"]) == ("out_of_memory", "host")
    assert GEMMA not in run.stdout
