"""Workers forked from a process that has imported their libraries: what a case finds and measures is as in a fresh one.

How the parent asks for a fork, and what it does where none comes, `tests/unit/test_fork_server.py` tests.
"""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
from leftovers import has_ended, wait_until
from several_processes import CLICKS, PRELOADED
from several_processes import run as run_zoo
from zoo_examples import task_of

from pytest_gputrain import Case
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.records import Crashed, Measurement
from pytest_gputrain.worker import preload

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


def tell(setup):
    Path("found.txt").write_text(repr(FOUND))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)).to(setup.device)
    batch = torch.randn(4, 32, device=setup.device)
    kept = torch.zeros(numpy.random.randint(1, 10**6), device=setup.device)
    optimizer = torch.optim.AdamW(model.parameters())
    setup.watch(model)
    while True:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


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


def leaves(setup):
    atexit.register(Path("atexit.txt").write_text, "called")
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path("marked.txt").write_text(os.environ["GPUTRAIN_CASE_FOLDER"])
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
"""


@pytest.fixture(scope="module")
def preloaded():
    PRELOADED.close()  # tests here count this process's children
    source = ForkServer()
    yield source
    source.close()


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """Makes the task to run a function of the program."""
    (tmp_path / "code.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)

    def make(name, **fields):
        case = Case(model=name, method="custom", precision="fp32", steps=2, warmup=1, code=f"code.py::{name}")
        return task_of(case, root=str(tmp_path), **fields)

    return make


def run(task, source):
    return launcher.in_process(task, gpus=(), timeout_seconds=120, fork_server=source)


# What a case finds and measures

LLAMA = Case(model="llama-3.1-8b", method="lora", precision="bf16", batch_size=2, sequence_length=32, steps=2, warmup=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        LLAMA,
        Case(model="flux.1-dev", method="lora", precision="bf16", resolution="512x512", steps=2, warmup=1),
        LLAMA.replace(method="full", parallel="ddp", gpus=2),
    ],
    ids=str,
)
def test_figures_are_those_of_a_fresh_interpreter(preloaded, case):
    fresh, *forked = (run(task_of(case), source) for source in (None, preloaded, preloaded))
    for reply in forked:
        assert isinstance(reply, Measurement), reply
        for figure in ("peak_allocated_bytes", "flops_per_step", "losses", "environment"):
            assert getattr(reply, figure) == getattr(fresh, figure), figure


@pytest.mark.slow
def test_own_code_finds_and_measures_what_it_would_in_a_fresh_interpreter_whatever_another_left(
    own_task, preloaded, tmp_path
):
    fresh, found = run(own_task("tell"), None), (tmp_path / "found.txt").read_text()
    assert "'variable': None" in found
    for _ in range(2):
        (tmp_path / "found.txt").unlink()
        forked = run(own_task("tell"), preloaded)
        assert isinstance(forked, Measurement), forked
        assert (tmp_path / "found.txt").read_text() == found
        for figure in ("phase_peak_bytes", "peak_allocated_bytes", "largest", "flops_per_step", "losses", "environment"):
            assert getattr(forked, figure) == getattr(fresh, figure), figure
        run(own_task("litter"), preloaded)


# How it ends


def sources():
    """The processes that forks come from, without those that other tests of this process have left (torch's, or zombies)."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            found += [child] if "pytest_gputrain.worker.preload" in child.cmdline() else []
    return found


def test_libraries_are_imported_once(preloaded):
    preloaded.close()
    wait_until(lambda: not sources())
    run(task_of(CLICKS), preloaded)
    (source,) = sources()
    imported_seconds = source.cpu_times().user
    for _ in range(2):
        assert isinstance(run(task_of(CLICKS), preloaded), Measurement)
    assert sources() == [source]
    assert source.cpu_times().user - imported_seconds < imported_seconds / 4


@pytest.mark.parametrize("dies", ["worker", "source"])
def test_a_death_is_told_and_the_next_case_runs(preloaded, dies):
    killed = []

    def kill(event):
        if event.phase == "measure" and event.step and not killed:
            (source,) = (source for source in sources() if source.children())
            (worker,) = source.children()
            killed.append(worker)
            (worker if dies == "worker" else source).send_signal(signal.SIGKILL)

    reply = run_zoo(CLICKS.replace(steps=1_000_000), watch=kill, preloaded=preloaded)
    assert isinstance(reply, Crashed), reply
    assert "by SIGKILL" in reply.sentence
    assert isinstance(run(task_of(CLICKS), preloaded), Measurement)
    wait_until(lambda: has_ended(killed[0]))


def test_a_case_ends_as_an_interpreter_does_with_all_that_it_left_running(own_task, preloaded, tmp_path):
    run(own_task("leaves"), preloaded)
    assert (tmp_path / "atexit.txt").read_text() == "called"
    wait_until(lambda: has_ended(int((tmp_path / "orphan.txt").read_text())))
    mark = os.fsencode((tmp_path / "marked.txt").read_text())
    assert mark
    assert not any(mark in _environment_of(process) for process in psutil.process_iter())


def _environment_of(process):
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as variables:
            return variables.read()
    except OSError:
        return b""


@pytest.mark.parametrize(("file", "asked"), [("/dev/nvidiactl", True), ("/dev/kfd", True), ("/dev/null", False)])
def test_a_process_that_asked_a_driver_is_not_forked(monkeypatch, file, asked):
    monkeypatch.setattr(preload.os, "readlink", lambda descriptor: file)
    assert preload._holds_gpu() is asked


@pytest.mark.slow
def test_imports_start_no_thread_and_ask_no_driver():
    code = (
        "import os; from pytest_gputrain import Case; from pytest_gputrain.worker.libraries import load; "
        "from pytest_gputrain.worker.preload import _holds_gpu; "
        "load(Case(model='mine', method='custom', code='mine.py::build')); "
        "import torch; assert not torch.cuda.is_initialized(); "
        "assert not _holds_gpu(); assert len(os.listdir('/proc/self/task')) == 1"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
