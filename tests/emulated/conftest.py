"""The stand-ins that tests of this folder run on, and programs and tests on an emulated GPU."""

import functools
import json
import os
import socket
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

import pytest_gputrain
from pytest_gputrain.hardware.emulation import boards, build, libraries
from pytest_gputrain.hardware.emulation.environment import emulated_environment
from pytest_gputrain.utils import linux
from pytest_gputrain.utils.errors import CannotEmulate

ROOT = Path(pytest_gputrain.__file__).parents[1]
PRELOADED = Path(__file__).parent / "preloaded"
READ_AT_START = ("CUDA", "GPUTRAIN", "HF_", "LD_", "NVIDIA", "OMP_", "PYTHON", "PYTORCH", "TORCH", "TRITON", "XDG")
"""Begin the names of variables that Python or a library may read when it is started or imported."""


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
        build.find_compiler()
    except CannotEmulate as error:
        pytest.skip(str(error))
    return build.stand_ins(torch)


def _environment(variables):
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, [str(ROOT), *given]))  # an empty entry would be the current folder
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "GPUTRAIN_PARENT")}
    return environ | {"PYTHONPATH": path, "COLUMNS": "400", **variables}


def _run(folder, command, variables, text=None):
    return subprocess.run(
        command,
        cwd=folder,
        env=_environment(variables),
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture(scope="session")
def preloaded(stand_ins, torch):
    """Add to variables those that have processes on an emulated GPU forked from one that has imported torch.

    Processes with variables that are read earlier start in interpreters of their own, as all do for a user.
    """
    address, board = uuid.uuid4().hex, boards.board("h100")
    environ = _environment({})
    environ["PYTHONPATH"] += f"{os.pathsep}{PRELOADED}"
    # Torch's own process that compiles would be forked as well, without the pipes that its parent gives it, and end at once.
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    description = boards.describe(board, kernels=boards.find_kernels(board, stand_ins.architectures, torch.version))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{address}")
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, PRELOADED / "preloaded.py", str(listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            env=emulated_environment(environ, stand_ins, description),
        )
    with process, pytest.MonkeyPatch.context() as patch:
        # As `forked_elsewhere` has it, for tests that start workers in this process.
        patch.setattr(linux, "_parent_of", lambda pid: None)
        forked = {"GPUTRAIN_TESTS_PRELOADED": address, "PYTHONPATH": environ["PYTHONPATH"]}
        yield lambda given: given if any(name.startswith(READ_AT_START) for name in given) else {**forked, **given}
        process.stdin.close()


@pytest.fixture
def emulate(preloaded, tmp_path):
    """Run a program on an emulated GPU: its completed process, and the report.

    Args:
        fresh: start it as a user does, by an interpreter of its own.
    """

    def run(code, *arguments, gpu="h100", gpus=1, options=(), fresh=False, **variables):
        variables = variables if fresh else preloaded(variables)
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
def run_tests_in(preloaded):
    """Run pytest in a folder on an emulated H100: its completed process, and the results of its report by test.

    Args:
        fresh: start its workers as a user does, by interpreters of their own.
    """

    def run(folder, *arguments, emulated=True, fresh=False, **variables):
        variables = variables if fresh else preloaded(variables)
        (folder / "tox.ini").write_text("[pytest]\n")
        options = ["-q", "-p", "no:cacheprovider", "--rootdir=.", "--gpu-json=report.json"]
        options += ["--gpu-platform=h100", "--gpu-emulate"] if emulated else []
        options += ["-p", "forked_elsewhere"] if "GPUTRAIN_TESTS_PRELOADED" in variables else []
        done = _run(folder, [sys.executable, "-m", "pytest", *options, *arguments], variables)
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
