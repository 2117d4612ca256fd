"""Tests the exit status of every subcommand: 0 where all is well, 1 for a finding, 2 for bad input."""

import contextlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_ab_gate import _round
from test_compare import BASE, measured
from test_trend import slower
from unit_examples import SETTINGS, emulated_run, report

from pytest_gputrain.cli import ab, doctor
from pytest_gputrain.cli.ab_sides import Side, SideError
from pytest_gputrain.cli.main import COMMANDS, main
from pytest_gputrain.execution.launch import node_service
from pytest_gputrain.hardware.emulation import installed
from pytest_gputrain.report import json_report
from pytest_gputrain.storage.history import append

RECORDING = Path(__file__).parent / "recordings" / "nvidia-h100-x2.json"

STATUSES = {
    "ab": ("ab --base=same", "ab --base=faster", "ab --base=none"),
    "check-baselines": ("check-baselines sound", "check-baselines damaged", "check-baselines gone"),
    "comment": ("comment report.json", None, "comment report.json --name=a/b"),
    "compare": ("compare report.json report.json", "compare report.json slower.json", "compare report.json gone.json"),
    "doctor": ("doctor --replay driver.json", "doctor --replay failing.json", "doctor --replay gone.json"),
    "emulate": ("emulate --list", "emulate --verify", "emulate --gpu=h101 -- python"),
    "export": ("export report.json", None, "export gone.json"),
    "node": ("node shared", None, "node report.json"),
    "predict": ("predict llama-3.1-8b --gpu=h100", None, "predict llama-3.1-8b --gpu=h101"),
    "trend": ("trend flat.jsonl", "trend worse.jsonl", "trend gone.jsonl"),
}
"""Of each subcommand: what ends well, what finds something (None where nothing can be found), and what is bad input.

A program ends `gputrain emulate` with a status of its own: tests/emulated/test_emulate_command.py runs some.
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files of all commands, in the current folder."""
    monkeypatch.chdir(tmp_path)
    slow = measured(1.3, 1.301, 1.3)
    for name, one in (("report", BASE), ("slower", slow)):
        json_report.write(report(one, settings=SETTINGS), Path(f"{name}.json"))
    for name, lines in (("flat", slower(40, 40)), ("worse", slower(40, 20, by=1.3))):
        append(Path(f"{name}.jsonl"), lines)
    for folder in ("sound", "damaged"):
        Path(folder).mkdir()
    Path("damaged/h100").mkdir()
    Path("damaged/h100/llm.json").write_text("{")
    driver = json.loads(RECORDING.read_text())
    Path("driver.json").write_text(json.dumps(driver))
    driver["calls"]["nvmlInit()"] = [{"error": 18, "says": "Driver/library version mismatch"}]
    Path("failing.json").write_text(json.dumps(driver))
    # A job of GitLab's without a merge request.
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("CI_MERGE_REQUEST_IID", raising=False)
    monkeypatch.setenv("GITLAB_CI", "true")


class DamagedBuild:
    """Stands in for a build of torch in the cache, which takes gigabytes."""

    folder = Path("build")

    def damage(self, *, digests):
        return "a file is missing"


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Stand-ins for what takes long: pytest on two sides, the emulated GPUs of predict, a node that waits for cases."""

    @contextlib.contextmanager
    def side(name, source, scratch):
        if source == "none":
            raise SideError("--base: none is neither a folder nor a revision")
        yield Side(name=name, label=source, python="python", folder=tmp_path, environ={})

    def run(side, arguments, scratch, watch, **selected):
        return _round(0.7 if side.label == "faster" else 1.0)

    class Cells:
        about = ()

        def __init__(self, gpus, *others):
            self.titles = {gpu: gpu for gpu in gpus}

        def figures(self, *asked, **how):
            return emulated_run()

        def close(self):
            pass

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(ab, "open_side", side)
    monkeypatch.setattr(ab, "run", run)
    monkeypatch.setattr(ab, "with_more_at_once", lambda side, arguments: arguments)
    monkeypatch.setattr("pytest_gputrain.cli.predict.EmulatedCells", Cells)
    monkeypatch.setattr(node_service, "time", SimpleNamespace(sleep=interrupted))
    monkeypatch.setattr(installed, "builds", lambda: iter([DamagedBuild()]))
    monkeypatch.setattr("pytest_gputrain.cli.emulate_install._described", str)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_with_0_or_1_for_a_finding_or_2_for_bad_input(command, files, engines, capsys):
    if command == "predict" and importlib.util.find_spec("torch") is None:
        pytest.skip("predict needs the libraries of the suite")
    for status, words in enumerate(STATUSES[command]):
        if words is not None:
            assert main(words.split()) == status, (words, capsys.readouterr())
    capsys.readouterr()
    assert main(STATUSES[command][2].split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("gputrain: "), err.count("\n")) == ("", True, 1)


@pytest.mark.parametrize("command", [*(name for name in COMMANDS if name != "ab"), ""])
def test_an_unknown_option_is_bad_input(command, files, engines, capsys):
    words = (STATUSES[command][0] if command else "").split()
    with pytest.raises(SystemExit) as ended:
        main([*words[:1], "--no-such-option", *words[1:]])
    assert ended.value.code == 2
    assert "usage: gputrain" in capsys.readouterr().err


def test_a_problem_of_this_host_is_a_finding(monkeypatch, capsys, tmp_path):
    """Each kind of output, and a file that cannot be written."""
    for status, found in ((0, "warning"), (1, "problem")):
        monkeypatch.setattr(doctor, "examine", lambda found=found: [doctor.Check("torch", found, "it is old")])
        for words in ("doctor", "doctor --json", f"doctor --record {tmp_path / 'driver.json'}"):
            assert main(words.split()) == status
    assert main(["doctor", "--record", str(tmp_path / "driver.json" / "file")]) == 2
