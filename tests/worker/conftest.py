import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from leftovers import FAULTS, Leftovers, wait_for
from several_processes import PRELOADED


@pytest.fixture(autouse=True, scope="session")
def _no_process_stays():
    yield
    PRELOADED.close()


@pytest.fixture(autouse=True)
def _one_thread():
    """As in a worker; more would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Other tests of this process were ranks of a group, by which accelerate would take it for one, and left its state as it
    was within an accumulation, where no optimizer steps."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def leftovers(tmp_path, monkeypatch):
    return Leftovers(tmp_path, monkeypatch)


PROJECT = """
from pytest_gputrain import Case
from code_of_mine import hangs

# Imports torch alone.
ZOO = Case(model="ctr-dnn", precision="fp32", batch_size=50, gpus=2, steps=1_000_000, warmup=0)


def test_hangs(gputrain):
    gputrain.measure(hangs, parallel="ddp", gpus=2, precision="fp32", steps=2, warmup=0)


def test_ddp(gputrain):
    gputrain.measure(ZOO, parallel="ddp")


def test_zero2(gputrain):
    gputrain.measure(ZOO, parallel="zero2")
"""


@pytest.fixture
def project(tmp_path, leftovers):
    """Starts a pytest over one test of a project and waits until its ranks are at their steps."""
    (tmp_path / "code_of_mine.py").write_text(FAULTS)
    (tmp_path / "test_project.py").write_text(PROJECT)
    (tmp_path / "tox.ini").write_text("[pytest]\n")
    started = []

    def start(name, *arguments):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
        process = subprocess.Popen(
            [*command, f"test_project.py::{name}", "--gpu-platform=cpu"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        at_steps = ("started0", "started1") if name == "test_hangs" else ()
        wait_for(*(tmp_path / file for file in at_steps))
        while not at_steps and not _measuring(tmp_path / "tmp"):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.1)
        assert len(leftovers.processes(but=[process.pid])) >= 2
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _measuring(temporary):
    """Whether both ranks of the only case have come to their timed steps."""
    files = [*temporary.glob("gputrain-*/rank*/progress.jsonl")]
    return len(files) == 2 and all('"measure"' in file.read_text() for file in files)
