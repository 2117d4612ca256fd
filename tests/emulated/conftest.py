"""The stand-ins that tests of this folder run on, and programs on an emulated GPU."""

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


@pytest.fixture
def emulate(stand_ins, tmp_path):
    """Run a program on an emulated GPU: its completed process, and the report."""

    def run(code, *arguments, gpu="h100", gpus=1, **variables):
        script, report = tmp_path / "train.py", tmp_path / "report.json"
        script.write_text(textwrap.dedent(code))
        command = [sys.executable, "-m", "pytest_gputrain.cli.main", "emulate", "--gpu", gpu, f"--gpus={gpus}"]
        command += ["--json", str(report)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": path, **variables}
        program = [*command, "--", sys.executable, script.name, *arguments]
        done = subprocess.run(program, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=300)
        return done, json.loads(report.read_bytes()) if report.exists() else None

    return run
