"""How workers are started: fresh, or forked from a process that stands in here for the one with the libraries."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from leftovers import has_ended
from test_launching import PROGRESS, answering
from unit_examples import CASE, crashed, emulated_run, measurement

from pytest_gputrain.execution.launch import fork_server, launcher, processes
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.execution.launch.processes import CASE_FOLDER
from pytest_gputrain.hardware.emulation.environment import DEVICE
from pytest_gputrain.records import Task
from pytest_gputrain.utils import linux
from pytest_gputrain.utils.linux import Child

TASK = Task(case=CASE, scale="tiny", device_type="cpu", root=".")

SOURCE = """#!{python} -S
import json, os, sys, time

assert sys.argv[1:] == ["-P", "-m", "pytest_gputrain.worker.preload"]


def say(**what):
    print(json.dumps(what), flush=True)


for line in sys.stdin:
    rank = json.loads(line)["rank"]
    with open({log!r}, "a") as log:
        log.write(line)
    if os.path.exists({log!r} + ".said"):  # by somebody else who writes into the pipe
        with open({log!r} + ".said", "rb") as said:
            os.write(1, said.read())
    if rank == {refuses}:
        say(forked=0)
        continue
    if rank == {dies}:
        sys.exit(3)
    if rank == {hangs}:
        time.sleep(600)
    pid = os.fork()
    if not pid:
        time.sleep(600 if rank == {stays} else 0)
        os._exit(5)
    say(forked=pid)
    if rank != {stays}:
        os.waitpid(pid, 0)
        say(ended=pid, exit_code=5)
"""
STAYS, REFUSES, DIES, HANGS = 1, 2, 3, 4


@pytest.fixture
def wishes(tmp_path, monkeypatch):
    """What the stand-in was asked for, a line each."""
    log, program = tmp_path / "wishes.jsonl", tmp_path / "source"
    numbers = {"stays": STAYS, "refuses": REFUSES, "dies": DIES, "hangs": HANGS}
    program.write_text(SOURCE.format(python=sys.executable, log=str(log), **numbers))
    program.chmod(0o755)
    monkeypatch.setattr(fork_server.sys, "executable", str(program))
    return log


@pytest.fixture
def source():
    made = ForkServer()
    yield made
    made.close()


def _fork(source, rank=0, seconds=30, task=TASK, **environment):
    return source.fork(task, Path("case"), rank, environment, seconds)


@pytest.fixture
def children():
    """Those of the test that live: sources of other tests may live on, and who is process 1 inherits orphans."""
    before = set(psutil.Process().children())
    return lambda: [child.pid for child in psutil.Process().children() if child not in before and not has_ended(child)]


def test_a_worker_is_forked_as_wished_and_its_end_is_told_apart(wishes, source):
    first, second = _fork(source), _fork(source, STAYS)
    first.wait()
    wish = json.loads(wishes.read_text().splitlines()[0])
    assert wish == {"folder": "case", "rank": 0, "cwd": os.getcwd(), "variables": {CASE_FOLDER: "case"}}
    assert (first.poll(), second.poll()) == (5, None)
    assert first.pid != second.pid
    os.kill(second.pid, signal.SIGKILL)


def _serving(source, **fields):
    """Fork a worker, and return the id of its parent."""
    worker = _fork(source, STAYS, **fields)
    parent = psutil.Process(worker.pid).ppid()
    os.kill(worker.pid, signal.SIGKILL)
    return parent


def test_a_source_serves_as_long_as_it_lives(wishes, source, children):
    first = _serving(source)
    assert _serving(source) == first
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert _serving(source) != first
    assert first not in children()


def test_each_environment_and_own_code_have_a_source_of_their_own_and_few_are_kept(wishes, source, children):
    def after(**fields):
        _fork(source, **fields).wait()
        return children()

    (first,) = after(A="1")
    _, second = after(A="2")
    *_, third = after(A="2", task=OWN)
    assert after(A="1") == [first, second, third]
    *_, fourth = after(A="4")
    assert children() == [first, third, fourth], "the one that was not used for longest has ended"


def test_a_source_is_kept_while_a_worker_of_it_runs(wishes, source, children):
    busy = _serving(source, A="0")
    for number in "123":
        _fork(source, A=number).wait()
    assert busy in children()
    assert _fork(source, REFUSES, A="0") is None
    assert busy in children()


H100 = "devices=1,memory=5,major=9,minor=0,kernels=90,uuid=01,name=NVIDIA H100"
H200 = "devices=1,memory=6,major=9,minor=0,kernels=90,uuid=02,name=NVIDIA H200"
A100 = "devices=1,memory=5,major=8,minor=0,kernels=80,uuid=03,name=NVIDIA A100"


def test_emulated_gpus_of_one_capability_have_one_source_and_each_worker_is_told_of_its_own(wishes, source, children):
    emulated = msgspec.structs.replace(TASK, device_type="gpu", emulated="any")
    for described in (H100, H200, A100):
        _fork(source, task=emulated, **{DEVICE: described}).wait()
    told = [json.loads(line)["variables"][DEVICE] for line in wishes.read_text().splitlines()]
    assert told == [H100, H200, A100]
    assert len(children()) == 2


OWN = msgspec.structs.replace(TASK, case=CASE.replace(code="a.py::b", method="custom"))


def test_a_source_has_the_limits_and_the_cores_of_the_test(wishes, source, monkeypatch):
    first = _serving(source)
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (2**22, hard))
    try:
        assert _serving(source) != first
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    monkeypatch.setattr(fork_server.os, "sched_getaffinity", lambda pid: {7})
    assert _serving(source) != first


def test_what_must_not_be_forked_gets_a_fresh_interpreter(wishes, source, children):
    for task in (TASK, OWN):
        assert _fork(source, task=msgspec.structs.replace(task, device_type="cuda")) is None
    assert children() == []


@pytest.mark.parametrize(("rank", "seconds"), [(DIES, 30), (HANGS, 0.3)])
def test_a_source_that_does_not_fork_is_given_up(wishes, source, rank, seconds, children):
    before = os.listdir("/proc/self/fd")
    assert _fork(source, rank, seconds) is None
    assert children() == []
    assert os.listdir("/proc/self/fd") == before
    assert _fork(source) is not None, "the next gets another"


def test_libraries_after_which_a_source_refuses_are_not_imported_again(wishes, source, children):
    before = os.listdir("/proc/self/fd")
    assert _fork(source, REFUSES) is None
    assert _fork(source) is None
    assert children() == []
    assert os.listdir("/proc/self/fd") == before
    assert len(wishes.read_text().splitlines()) == 1
    other = msgspec.structs.replace(TASK, case=CASE.replace(method="full"))
    assert _fork(source, task=other) is not None


def test_a_worker_ends_with_its_source(wishes, source, children):
    worker = _fork(source, STAYS)
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    worker.wait()
    assert worker.poll() == -signal.SIGKILL
    os.kill(worker.pid, signal.SIGKILL)


@pytest.fixture
def bystander():
    """A process that no worker is, in a group of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", ["1", "-1", "true", '"x"', "1e3", "null", "BYSTANDER", "PARENT", "9" * 20])
def test_what_is_said_of_a_process_that_is_no_child_of_the_source_is_not_believed(
    number, wishes, source, bystander, monkeypatch
):
    """As root, a signal to the group of process 1 would end everything."""
    signalled = []
    number = {"BYSTANDER": str(bystander.pid), "PARENT": str(os.getpid())}.get(number, number)
    said = f'{{"forked": {number}}}\n{{"ended": {number}, "exit_code": 0}}\nno JSON\n[1]\n{{"other": 1}}\n'
    wishes.with_suffix(".jsonl.said").write_bytes(said.encode() + b"\xff\n" + 70_000 * b"x" + b"\n")
    worker = _fork(source, STAYS)
    assert psutil.Process(worker.pid).cmdline()[1:3] == ["-S", str(wishes.with_name("source"))], "the real one"
    with monkeypatch.context() as patched:
        for name in ("kill", "killpg"):
            patched.setattr(processes.os, name, lambda pid, number: signalled.append(pid))
        patched.setattr(fork_server, "_TOLD_SECONDS", 0.1)  # the stand-in does not tell the end of a worker that stays
        worker.ask_for_stacks()
        worker.end()
    assert has_ended(worker.pid)
    assert set(signalled) <= {worker.pid}
    assert bystander.poll() is None


def test_no_worker_ends_by_what_another_one_says_of_it(wishes, source, monkeypatch):
    worker = _fork(source, STAYS)
    wishes.with_suffix(".jsonl.said").write_text(f'{{"ended": {worker.pid}, "exit_code": 0}}\n')
    _fork(source).wait()
    assert worker.poll() is None
    monkeypatch.setattr(fork_server, "_TOLD_SECONDS", 0.1)
    worker.end()


def test_a_number_that_an_ended_worker_had_can_be_that_of_another_one(wishes, source):
    """In a long run Linux gives numbers again."""
    first = _fork(source)
    first.wait()
    forking = first._source
    forking._hear(fork_server._Said(forked=first.pid))
    second = fork_server.ForkedProcess(forking, forking._forked.pop())
    forking._hear(fork_server._Said(ended=first.pid, exit_code=7))
    assert (first.poll(), second.poll()) == (5, 7)


def test_a_worker_that_ends_while_its_source_is_stopped_is_not_waited_for_for_ever(wishes, source, monkeypatch):
    monkeypatch.setattr(fork_server, "_TOLD_SECONDS", 0.1)
    worker = _fork(source, STAYS)
    os.kill(psutil.Process(worker.pid).ppid(), signal.SIGSTOP)
    worker.end()
    assert has_ended(worker.pid)


@pytest.mark.parametrize("by_descriptor", [True, False])
def test_a_number_that_another_process_has_got_gets_no_signal(by_descriptor, bystander, monkeypatch):
    if not by_descriptor:  # an old kernel
        monkeypatch.delattr(linux.os, "pidfd_open")
    with pytest.raises(ValueError, match="is not a child of 1"):
        Child(bystander.pid, 1)
    child = Child(bystander.pid, os.getpid())
    assert child.is_running()
    child.send(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not child.is_running()
    signalled = []
    monkeypatch.setattr(linux.os, "kill", lambda pid, number: signalled.append(pid))
    child.send(signal.SIGKILL)
    assert signalled == []


def test_a_fresh_worker_leaves_what_it_prints_in_its_folder(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@" "$A"; cat; echo told >&2; exit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(program))
    own = tmp_path / "rank7"
    own.mkdir()
    (own / "stdout.txt").write_text("before\n")
    worker = processes.start(tmp_path, 7, {"A": "alpha", "PATH": os.environ["PATH"]})
    assert os.getsid(worker.pid) == worker.pid
    worker.wait()
    assert worker.poll() == 3
    assert (own / "stdout.txt").read_text() == f"before\n-P -m pytest_gputrain.worker {tmp_path} 7 alpha\n"
    assert (own / "stderr.txt").read_text() == "told\n"


class Started:
    """What stands in for processes: each has replied and ended."""

    def __init__(self, monkeypatch, reply, case=CASE):
        self.folders = []
        self.environments = []
        self.ended = 0
        self.reply, self.case = reply, case
        monkeypatch.setattr(launcher, "start", self.start)

    def start(self, folder, rank, environment):
        self.folders.append(folder)
        self.environments.append(environment)
        assert msgspec.json.decode((folder / "case.json").read_bytes(), type=Task).case == self.case
        (folder / f"rank{rank}" / "reply.json").write_bytes(msgspec.json.encode(self.reply))
        (folder / f"rank{rank}" / "progress.jsonl").write_bytes(PROGRESS)
        process = answering(0, polls=0)
        process.end = self.end
        return process

    def end(self):
        self.ended += 1


def test_a_case_has_a_process_for_each_rank_and_server(monkeypatch):
    started = Started(monkeypatch, measurement())
    events = []
    task = msgspec.structs.replace(TASK, processes=2, servers=1)
    reply = launcher.in_process(task, gpus=(), timeout_seconds=60, watch=events.append)
    assert len(reply.ranks) == len(started.folders) == started.ended == 3
    assert [event.phase for event in events] == ["build", "measure"]
    folder = started.folders[0]
    assert not folder.exists()
    for environment in started.environments:
        assert environment[CASE_FOLDER] == str(folder)
        assert environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("code", "processes"), [("", 1), ("test_it.py::build", 3)])
def test_the_first_process_stands_for_all_on_an_emulated_gpu_but_for_own_code(monkeypatch, code, processes):
    case = CASE.replace(code=code)
    started = Started(monkeypatch, emulated_run(), case)
    task = msgspec.structs.replace(TASK, case=case, processes=3, emulated="h100")
    assert launcher.emulate(task, timeout_seconds=60, environ={}).fits
    assert len(started.folders) == processes


@pytest.mark.parametrize("forked", [True, False])
def test_a_fresh_process_is_started_where_none_can_be_forked(forked, monkeypatch):
    started = Started(monkeypatch, crashed())
    asked = []

    class Source(ForkServer):
        def fork(self, task, folder, rank, environment, timeout_seconds):
            asked.append((task, rank, environment.get(CASE_FOLDER), timeout_seconds))
            return started.start(folder, rank, environment) if forked else None

    for run, fields, task in (
        (launcher.in_process, {"gpus": ()}, TASK),
        (launcher.emulate, {"environ": {}}, msgspec.structs.replace(TASK, emulated="h100")),
    ):
        assert run(task, timeout_seconds=60, fork_server=Source(), **fields) == crashed()
        assert asked.pop() == (task, 0, None, 60)
        assert CASE_FOLDER in started.environments.pop() or forked
        assert not started.environments
