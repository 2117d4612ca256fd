"""The stand-ins that tests of this folder run on, and programs and tests on an emulated GPU."""

import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pytest_gputrain
from pytest_gputrain.hardware.emulation import build, libraries
from pytest_gputrain.utils.errors import CannotEmulate

ROOT = Path(pytest_gputrain.__file__).parents[1]


@pytest.fixture(scope="session")
def torch():
    """The CUDA build of torch that is here."""
    try:
        return libraries.find_torch()
    except CannotEmulate as error:
        pytest.skip(f"needs a CUDA build of torch: {error}")


@pytest.fixture(scope="session")
def stand_ins(torch):
    try:
        return build.stand_ins(torch)
    except CannotEmulate as error:
        pytest.skip(str(error))


def _run(folder, command, variables, text=None):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "GPUTRAIN_PARENT")}
    environ |= {"PYTHONPATH": path, "COLUMNS": "400", **variables}
    return subprocess.run(
        command, cwd=folder, env=environ, input=text, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.fixture
def emulate(stand_ins, tmp_path):
    """Run a program on an emulated GPU: its completed process, and the report."""

    def run(code, *arguments, gpu="h100", gpus=1, options=(), **variables):
        script, report = tmp_path / "train.py", tmp_path / "report.json"
        script.write_text(textwrap.dedent(code))
        command = [sys.executable, "-m", "pytest_gputrain.cli.main", "emulate", "--gpu", gpu, f"--gpus={gpus}", *options]
        program = ["--json", str(report), "--", sys.executable, script.name, *arguments]
        done = _run(tmp_path, [*command, *program], variables)
        return done, json.loads(report.read_bytes()) if report.exists() else None

    return run


@pytest.fixture
def emulate_parts(emulate):
    """Run a program on an emulated H100: what it printed, what was told at the end, and the report of its process."""

    def run(*parts):
        done, report = emulate("\n".join(textwrap.dedent(part) for part in parts))
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr, report["processes"][0]

    return run


@pytest.fixture(scope="session")
def run_tests_in(stand_ins):
    """Run pytest in a folder on an emulated H100: its completed process, and the results of its report by test."""

    def run(folder, *arguments, emulated=True, below=(), **variables):
        (folder / "tox.ini").write_text("[pytest]\n")
        options = ["-q", "-p", "no:cacheprovider", "--rootdir=.", "--gpu-json=report.json"]
        options += ["--gpu-platform=h100", "--gpu-emulate"] if emulated else []
        done = _run(folder, [*below, sys.executable, "-m", "pytest", *options, *arguments], variables)
        report = folder / "report.json"
        results = json.loads(report.read_bytes())["results"] if report.exists() else []
        return done, {result["nodeid"].partition("::")[2]: result for result in results}

    return run


@pytest.fixture
def run_tests(run_tests_in, tmp_path):
    """Run pytest in the test's own folder."""
    return functools.partial(run_tests_in, tmp_path)


@pytest.fixture
def emulate_text(stand_ins, tmp_path):
    """Run a program that Python is given as text, by ``-c`` or on standard input, on an emulated H100: what is printed."""

    def run(how, text):
        program = [sys.executable, "-c", text] if how == "-c" else [sys.executable, "-"]
        command = [sys.executable, "-m", "pytest_gputrain.cli.main", "emulate", "--gpu", "h100", "--", *program]
        done = _run(tmp_path, command, {}, text if how == "-" else None)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run
