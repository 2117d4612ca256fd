"""Own code forked from a process that has imported torch: each case finds what it would find in a fresh interpreter."""

import os
import subprocess
import sys

import psutil
import pytest
from leftovers import wait_until
from preloaded_worker import PRELOADED

from pytest_gputrain import Case
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.hardware.targets import target_of
from pytest_gputrain.records import Measurement, Prediction, Task

PROGRAM = """
import atexit, os, random, signal, subprocess, sys
from pathlib import Path

import numpy, torch
from torch import nn
from torch.nn import functional

FOUND = {
    "modules": sorted(name for name in sys.modules if name.partition(".")[0] in ("transformers", "deepspeed", "wave")),
    "variable": os.environ.get("LEFT_BEHIND"),
    "default": str(torch.get_default_dtype()),
    "threads": torch.get_num_threads(),
    "drawn": [random.random(), float(numpy.random.rand()), float(torch.rand(1))],
    "hash": hash("text"),
    "directory": os.getcwd(),
    "path": [path for path in sys.path if "site-packages" not in path],
    "softmax": functional.softmax.__name__,
    "frozen": torch.is_grad_enabled(),
    "session": os.getsid(0) == os.getpid(),
    "standard_input": os.readlink("/proc/self/fd/0"),
}


def build(setup):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)).to(setup.device)
    batch = torch.randn(setup.case.batch_size, 32, device=setup.device)
    optimizer = torch.optim.AdamW(model.parameters())
    setup.watch(model)

    def step():
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def tell(setup):
    Path("found.txt").write_text(repr(FOUND))
    return build(setup)


def litter(setup):
    import wave  # noqa: F401

    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/nowhere")
    functional.softmax = print
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_grad_enabled(True)
    return lambda: 1.0


def orphan(setup):
    # No fresh interpreter, so its environment does not name the case; in a session of its own; its parent has ended.
    if not os.fork():
        os.setsid()
        if not os.fork():
            Path("orphan.txt").write_text(str(os.getpid()))
            signal.pause()
        os._exit(0)
    os.wait()
    while not Path("orphan.txt").exists() or not Path("orphan.txt").read_text():
        pass
    return lambda: 1.0


def last_words(setup):
    atexit.register(Path("atexit.txt").write_text, "called")
    return lambda: 1.0


def marked(setup):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path("marked.txt").write_text(os.environ["GPUTRAIN_CASE_FOLDER"])
    return lambda: 1.0
"""
MINE = Case(model="build", method="custom", precision="fp32", batch_size=4, steps=2, warmup=1, code="code.py::build")


@pytest.fixture(scope="module")
def preloaded():
    source = ForkServer()
    yield source
    source.close()


@pytest.fixture
def run(tmp_path, monkeypatch, preloaded):
    """Runs a function of the program in a process: forked, unless it is to be fresh."""
    PRELOADED.close()
    (tmp_path / "code.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)

    def measure(name, *, fresh=False, **knobs):
        case = MINE.replace(model=name, code=f"code.py::{name}", **knobs)
        task = Task(case=case, scale="tiny", device_type="cpu", processes=case.gpus, root=str(tmp_path))
        return launcher.in_process(task, gpus=(), timeout_seconds=120, fork_server=None if fresh else preloaded)

    return measure


@pytest.mark.slow
def test_a_case_finds_and_measures_what_it_would_in_a_fresh_interpreter_whatever_another_left(run, tmp_path):
    fresh, found = run("tell", fresh=True), (tmp_path / "found.txt").read_text()
    assert "'variable': None" in found
    for before in ("build", "litter"):
        run(before)
        (tmp_path / "found.txt").unlink()
        forked = run("tell")
        assert isinstance(forked, Measurement), forked
        assert (tmp_path / "found.txt").read_text() == found
        for figure in ("phase_peak_bytes", "peak_allocated_bytes", "largest", "flops_per_step", "losses", "environment"):
            assert getattr(forked, figure) == getattr(fresh, figure), figure


@pytest.mark.slow
def test_several_processes_have_the_figures_of_fresh_interpreters(run):
    fresh, forked = (run("build", fresh=fresh, gpus=2, parallel="ddp") for fresh in (True, False))
    assert forked.phase_peak_bytes == fresh.phase_peak_bytes
    assert forked.losses == fresh.losses


@pytest.mark.slow
def test_a_prediction_is_that_of_a_fresh_interpreter(run, preloaded, tmp_path):
    task = Task(case=MINE, scale="full", device_type="cpu", root=str(tmp_path), target=target_of("h100"))
    fresh, first, second = (
        launcher.predict(task, timeout_seconds=120, fork_server=server) for server in (None, preloaded, preloaded)
    )
    assert isinstance(fresh, Prediction), fresh
    assert first == second == fresh


def test_what_a_case_leaves_running_is_ended(run, tmp_path):
    run("orphan")
    wait_until(lambda: not psutil.pid_exists(int((tmp_path / "orphan.txt").read_text())))
    run("marked")
    mark = os.fsencode((tmp_path / "marked.txt").read_text())
    assert mark
    assert not any(mark in _environment_of(process) for process in psutil.process_iter())
    assert isinstance(run("build"), Measurement)


def _environment_of(process):
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as variables:
            return variables.read()
    except OSError:
        return b""


def test_a_case_ends_as_an_interpreter_does(run, tmp_path):
    run("last_words")
    assert (tmp_path / "atexit.txt").read_text() == "called"


@pytest.mark.parametrize(("file", "asked"), [("/dev/nvidiactl", True), ("/dev/kfd", True), ("/dev/null", False)])
def test_a_process_that_asked_a_driver_is_not_forked(monkeypatch, file, asked):
    from pytest_gputrain.worker import preload

    monkeypatch.setattr(preload.os, "readlink", lambda descriptor: file)
    assert preload._holds_gpu() is asked


@pytest.mark.slow
def test_imports_start_no_thread_and_ask_no_driver():
    code = (
        "import os; from pytest_gputrain import Case; from pytest_gputrain.worker.libraries import load; "
        "from pytest_gputrain.worker.preload import _holds_gpu; "
        "load(Case(model='mine', method='custom', code='mine.py::build'), counted=True); "
        "import torch; assert not torch.cuda.is_initialized(); "
        "assert not _holds_gpu(); assert len(os.listdir('/proc/self/task')) == 1"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
