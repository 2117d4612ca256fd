"""Workers forked from a process that has imported their libraries: the same figures as fresh ones, and the same ends."""

import contextlib
import os
import signal

import psutil
import pytest
from leftovers import wait_until
from preloaded_worker import PRELOADED

from pytest_gputrain import Case
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.records import Crashed, Measurement, Task, TimedOut

CLICKS = Case(model="ctr-dnn", precision="fp32", batch_size=50, optimizer="adam", steps=2, warmup=1)
"""Imports torch alone."""
LLAMA = Case(model="llama-3.1-8b", method="lora", precision="bf16", batch_size=2, sequence_length=32, steps=2, warmup=1)


@pytest.fixture(scope="module")
def preloaded():
    PRELOADED.close()  # tests here count this process's children
    source = ForkServer()
    yield source
    source.close()


def run(case, preloaded, *, timeout_seconds=120.0, watch=lambda event: None, root="."):
    task = Task(case=case, scale="tiny", device_type="cpu", processes=case.gpus, root=str(root))
    return launcher.in_process(task, gpus=(), timeout_seconds=timeout_seconds, watch=watch, fork_server=preloaded)


def children():
    """The processes of the source, without those that other tests of this process have left (torch's, or zombies)."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [child] if "pytest_gputrain.worker.preload" in child.cmdline() else []
    return found


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
    fresh, first, second = run(case, None), run(case, preloaded), run(case, preloaded)
    for forked in (first, second):
        assert isinstance(forked, Measurement), forked
        assert forked.peak_allocated_bytes == fresh.peak_allocated_bytes
        assert forked.flops_per_step == fresh.flops_per_step
        assert forked.losses == fresh.losses
        assert forked.environment == fresh.environment


def test_libraries_are_imported_once(preloaded):
    run(CLICKS, preloaded)
    (source,) = children()
    imported_seconds = source.cpu_times().user
    for _ in range(2):
        assert isinstance(run(CLICKS, preloaded), Measurement)
    assert children() == [source]
    assert source.cpu_times().user - imported_seconds < imported_seconds / 4


@pytest.mark.slow
def test_each_environment_of_tasks_gets_a_source_and_closing_leaves_none(monkeypatch, preloaded):
    preloaded.close()
    wait_until(lambda: not children())
    began = dict(os.environ)
    monkeypatch.setenv("OF_ANOTHER_TEST", "1")
    for variables in ({"OMP_PLACES": "cores"}, {}):
        before = {source.pid for source in children()}
        task = Task(case=CLICKS, scale="tiny", device_type="cpu", root=".", variables=variables)
        reply = launcher.in_process(task, gpus=(), timeout_seconds=120, fork_server=preloaded, environ=began)
        assert isinstance(reply, Measurement)
        (source,) = (source for source in children() if source.pid not in before)
        assert source.environ().get("OMP_PLACES") == variables.get("OMP_PLACES")
        assert "OF_ANOTHER_TEST" not in source.environ()
    assert len(children()) == 2
    preloaded.close()
    wait_until(lambda: not children())


class Killing:
    """Kills a worker of the source with a signal when it has timed its first step."""

    def __init__(self, number):
        self.number = number
        self.killed = []

    def __call__(self, event):
        if event.phase == "measure" and event.step and not self.killed:
            (source,) = children_of_this()
            (worker,) = source.children()
            self.killed.append(worker.pid)
            worker.send_signal(self.number)


def children_of_this():
    return [child for child in children() if child.ppid() == os.getpid()]


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "by SIGKILL"), (signal.SIGSEGV, "by SIGSEGV")])
def test_a_worker_s_death_is_told_and_the_next_case_runs(preloaded, number, said):
    killing = Killing(number)
    reply = run(CLICKS.replace(steps=1_000_000), preloaded, watch=killing)
    assert isinstance(reply, Crashed), reply
    assert said in reply.sentence
    assert isinstance(run(CLICKS, preloaded), Measurement)
    assert not psutil.pid_exists(killing.killed[0])


@pytest.mark.slow
def test_a_worker_that_does_not_end_is_ended_with_its_stacks(preloaded):
    run(CLICKS, preloaded)  # the imports are not what is waited for
    reply = run(CLICKS.replace(steps=1_000_000), preloaded, timeout_seconds=6)
    assert isinstance(reply, TimedOut), reply
    assert "worker/training.py" in reply.detail
    (source,) = children()
    assert source.children() == []


def test_the_source_s_death_ends_its_worker(preloaded):
    def kill_source(event):
        if event.phase == "measure" and event.step and (sources := children_of_this()):
            sources[0].kill()

    reply = run(CLICKS.replace(steps=1_000_000), preloaded, watch=kill_source)
    assert isinstance(reply, Crashed), reply
    assert "SIGKILL" in reply.sentence
    assert isinstance(run(CLICKS, preloaded), Measurement)


def test_a_fresh_interpreter_serves_where_imports_take_too_long(preloaded, tmp_path):
    preloaded.close()
    task = Task(case=CLICKS, scale="tiny", device_type="cpu", root=".")
    assert preloaded.fork(task, tmp_path, 0, dict(os.environ), 0.0) is None
    wait_until(lambda: not children())
