"""Provides a project in which the tested pytest runs, and recorded replies of devices that this machine lacks."""

import dataclasses
import json
import os
import re
import subprocess
import textwrap
import uuid
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parent.parent
RECORDED = Path(__file__).parent / "replies"

H100 = "NVIDIA H100 80GB HBM3"
H100_FOLDER = "nvidia-h100-80gb-hbm3"
LLAMA, GEMMA, LLAMA_2 = "llama-3.1-8b-lora-bf16", "gemma-7b-lora-bf16", "llama-2-13b-lora-bf16"
ANY = "*"

SUITE = """
import pytest
from pytest_gputrain import Case, grid

CASES = grid(Case(batch_size=2, sequence_length=8192), model=["llama-3.1-8b", "gemma-7b", "llama-2-13b"], method=["lora"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tuning(gputrain, case):
    gputrain.check(case)
"""

BUILD = """
def build(setup):
    import torch

    weight = torch.zeros(64, 64, requires_grad=True)

    def step():
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    return step
"""

FOLDER_VANISHES = """
from pathlib import Path


def test_zz_folder_becomes_a_file():
    Path("deep").rmdir()
    Path("deep").write_text("")
"""

# Undone with the run: the next one in the same process must find the real functions.
_STAND_IN = """
import contextlib
import json
from pathlib import Path

import msgspec
import pytest
from pytest_gputrain.execution import local
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.hardware import drivers
from pytest_gputrain.hardware.devices import Gpu, Occupancy
from pytest_gputrain.execution.launch.environment import worker_environment
from pytest_gputrain.records import Holder, Reply

HERE = Path(__file__).parent


def paths(gpus):
    if len(gpus) < 2:
        return ()
    return tuple(tuple("X" if gpu is other else "NV18" for other in gpus) for gpu in gpus)


def occupancy(gpus, own):
    state = HERE / "occupancy.json"
    if not state.exists():
        return Occupancy(None, None)
    free_bytes, processes = json.loads(state.read_text())
    return Occupancy(free_bytes, tuple(Holder(pid=4711 + at, gpu=0, name="python", bytes=2**30) for at in range(processes)))


def pytest_configure(config):
    gpus = tuple(Gpu(**gpu) for gpu in json.loads((HERE / "gpus.json").read_text()))
    asked = {}

    def in_process(task, *, gpus, timeout_seconds, watch=None, fork_server=None, cluster=None, environ=None):
        name = str(task.case)
        launched = {
            "id": name,
            "scale": task.scale,
            "gpus": [gpu.uuid for gpu in gpus],
            "processes": task.processes,
            "servers": task.servers,
            "nodes": cluster.nodes if cluster else 1,
            "steps": task.case.steps,
            "warmup": task.case.warmup,
            "timeout_seconds": timeout_seconds,
            "variables": task.variables,
            "flag": worker_environment(task, gpus, environ).get("FLAG"),
        }
        with open(HERE / "launches.jsonl", "a") as log:
            print(json.dumps(launched), file=log)
        replies = json.loads((HERE / "replies.json").read_text())
        mine = replies[name] if name in replies else replies["*"]
        asked[name] = asked.get(name, 0) + 1
        return msgspec.convert(mine[min(asked[name], len(mine)) - 1], Reply)

    patch = pytest.MonkeyPatch()
    patch.setattr(drivers, "gpus", lambda: gpus)
    patch.setattr(drivers, "occupancy", occupancy)
    patch.setattr(drivers, "paths", paths)
    patch.setattr(drivers, "driver", lambda vendor: contextlib.nullcontext())
    patch.setattr(local, "_SETTLING_SECONDS", 0)
    patch.setattr(launcher, "in_process", in_process)
    patch.setattr(local, "on_nodes", in_process)
    config.add_cleanup(patch.undo)
"""


def gpu_uuid(index, machine=""):
    """The id of a GPU of a machine, the same in all tests of this process: those of others need not wait for it."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{os.getpid()} {machine} {index}')}"


def recorded(name="h100_measured", *, slower=1.0, bigger=0, **environment):
    """A reply of ``replies/``, with its figures and its environment changed."""
    reply = json.loads((RECORDED / f"{name}.json").read_text())
    if "step_seconds" in reply:
        reply["step_seconds"] = [seconds * slower for seconds in reply["step_seconds"]]
        reply["peak_allocated_bytes"] += bigger
    if environment:
        reply["environment"] |= environment
    return reply


@dataclasses.dataclass
class Project:
    """The folder of the tested pytest."""

    pytester: pytest.Pytester

    @property
    def path(self):
        return self.pytester.path

    def write(self, **files):
        """Python files by stem: none of a module of these tests, which may be imported already."""
        assert (taken := files.keys() & {path.stem for path in TESTS.rglob("*.py")} - {"conftest"}) == set(), taken
        self.pytester.makepyfile(**files)

    def ini(self, *lines):
        (self.path / "tox.ini").write_text("\n".join(["[pytest]", *lines, ""]))

    def machine(self, device_name, *, gpus=1, power_limit_watts=None, name=""):
        """Find ``gpus`` devices of this name, or none, and answer every case with the figures recorded for one.

        Args:
            name: machines of another name have other GPUs.
        """
        (self.path / "conftest.py").write_text(_STAND_IN)
        gpu = {
            "name": device_name,
            "memory_bytes": 85_029_158_912,
            "driver": "570.86.10",
            "power_limit_watts": power_limit_watts,
        }
        devices = [{"index": at, "uuid": gpu_uuid(at, name), **gpu} for at in range(gpus if device_name else 0)]
        (self.path / "gpus.json").write_text(json.dumps(devices))
        self.answer(recorded("h100_measured", device_name=device_name) if device_name else recorded("cpu_measured"))

    def answer(self, *replies, to=ANY):
        """From now on, the processes of the case ``to`` give these replies, the last one again and again."""
        file = self.path / "replies.json"
        replies_by_key = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(replies_by_key | {to: replies}))

    def when_launched(self, code, of="True"):
        """From now on, a launch of which the expression ``of`` holds does this first; `machine` undoes it.

        An expression may use ``name``, the id of the case, and ``before``, the number of launches of this run until then.
        """
        conftest, anchor = self.path / "conftest.py", "        name = str(task.case)\n"
        text = conftest.read_text()
        assert anchor in text
        body = textwrap.indent(f"before = sum(asked.values())\nif {of}:\n{textwrap.indent(code, '    ')}\n", " " * 8)
        conftest.write_text(text.replace(anchor, anchor + body))

    def git(self, *arguments):
        """What git says in the project, with the name of an author."""
        command = ["git", "-C", str(self.path), "-c", "user.name=x", "-c", "user.email=x@example.com", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def junit(self):
        """The cases of ``--junitxml=junit.xml`` by name, and the properties of the suite beside them as ``""``."""
        (suite,) = ElementTree.parse(self.path / "junit.xml").getroot()
        return {"": suite, **{str(case.get("name")): case for case in suite}}

    def occupied(self, *, free_bytes, processes=0):
        """From now on, this is what is on the GPUs before a case starts."""
        (self.path / "occupancy.json").write_text(json.dumps([free_bytes, processes]))

    @property
    def launches(self):
        """What was launched so far, where `machine` gives the answers."""
        log = self.path / "launches.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def run(self, *arguments):
        """In this process: quick, and shows every report."""
        return self.pytester.runpytest_inprocess(*arguments)

    def spawn(self, *arguments):
        """In a process of its own."""
        return self.pytester.runpytest_subprocess(*arguments, timeout=600)

    def without_configuration(self):
        """Move everything into the folder ``benchmarks``, and leave no configuration file; return the folder."""
        (self.path / "tox.ini").unlink()
        files = [path for path in self.path.iterdir() if path.is_file()]
        below = self.pytester.mkdir("benchmarks")
        for file in files:
            file.rename(below / file.name)
        return below

    def baseline_file(self, suite, device="cpu"):
        return self.path / "baselines" / device / f"{suite}.json"

    def baselines(self, suite, device="cpu"):
        """Entries of a baseline file by key."""
        return json.loads(self.baseline_file(suite, device).read_text())["cases"]

    def report(self, name="report.json"):
        """What ``--gpu-json=report.json`` wrote."""
        return json.loads((self.path / name).read_text())

    def verdicts(self, name="report.json"):
        """Verdict by key in a report."""
        return {result["key"]: result["verdict"]["status"] for result in self.report(name)["results"]}


def failures(result):
    """Text of every failure of an in-process run, by name of the test."""
    return {name: report.longreprtext for name, report in _reports(result) if report.failed}


def skips(result):
    """Reason of every skip of an in-process run, by name of the test."""
    return {name: report.longrepr[2].removeprefix("Skipped: ") for name, report in _reports(result) if report.skipped}


def _reports(result):
    for report in result.reprec.getreports("pytest_runtest_logreport"):
        yield report.nodeid.partition("::")[2], report


def junit_properties(case):
    """Of a case of `Project.junit`."""
    return {entry.get("name"): str(entry.get("value")) for entry in case.iter("property")}


def assert_refused(project, sentence, *arguments, launched=0):
    """pytest with ``arguments`` ends in a usage error of this one sentence, with no launch beside earlier ones."""
    result = project.run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.stderr.lines if line]
    assert len(errors) == 1
    pytest.LineMatcher(errors).fnmatch_lines([f"ERROR: {sentence}"])
    assert len(project.launches) == launched


def only_sentence(result, test):
    """The one line that ``test`` failed with, nothing else having failed."""
    assert list(failures(result)) == [test]
    (line,) = failures(result)[test].strip().splitlines()
    return line


def table_rows(text):
    """Rows of the gputrain table, blanks squeezed: figures and verdicts, without titles and rules."""
    section = text.partition("= gputrain =")[2]
    rows = [re.sub(r"\s{2,}", " | ", line.strip()) for line in section.splitlines()]
    return [row for row in rows if row.count(" | ") >= 3 and not row.startswith("Model")]
