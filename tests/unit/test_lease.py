"""Leases of GPUs and cores, between processes that know of each other by the lock files only."""

import select
import subprocess
import sys

import psutil
import pytest

from pytest_gputrain.hardware.devices import Gpu, HardwareError
from pytest_gputrain.hardware.lease import lease
from pytest_gputrain.utils.host import usable_cores

PRELUDE = """
import os, sys, time
from pathlib import Path
from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.hardware.lease import held_locks, lease, lease_cores
folder = Path(sys.argv[1])
gpus = [Gpu(index=i, uuid=f"GPU-{i}", name="NVIDIA H200", memory_bytes=1, driver="1") for i in range(int(sys.argv[2]))]
def say(*words):
    print(*words, flush=True)
"""

HOLD = """
say("asking")
with lease(gpus, int(sys.argv[3]), folder) as held:
    say("held", *(gpu.index for gpu in held))
    sys.stdin.readline()
say("let go")
sys.stdin.readline()
"""


class Process:
    """A Python process that leases and tells."""

    def __init__(self, code, folder, gpus, count):
        command = [sys.executable, "-c", PRELUDE + code, str(folder), str(gpus), str(count)]
        # Without buffers: what a buffer holds, select does not see.
        self.process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def says_nothing(self, seconds):
        return not select.select([self.stdout], [], [], seconds)[0]

    def line(self):
        """The next line; fails where none comes, so that a deadlock does not hang the tests."""
        text = b""
        while not text.endswith(b"\n"):
            assert not self.says_nothing(30), f"nothing more after {text!r}"
            byte = self.stdout.read(1)
            assert byte, f"ended after {text!r}"
            text += byte
        return text.decode().strip()

    def go_on(self):
        self.stdin.write(b"\n")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.stdout.close()
        self.stdin.close()


@pytest.fixture
def start(tmp_path):
    """Starts processes that share one folder of locks; ends them with the test."""
    started = []

    def begin(code, *, gpus, count=1):
        started.append(Process(code, tmp_path, gpus, count))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def test_two_processes_hold_two_devices_at_once_and_two_of_two_wait_for_the_one_that_is_held(start):
    holders = [start(HOLD, gpus=2) for _ in range(2)]
    assert [holder.line() for holder in holders] == ["asking"] * 2
    held = {holder.line(): holder for holder in holders}
    assert sorted(held) == ["held 0", "held 1"]
    taker = start(HOLD, gpus=2, count=2)
    assert taker.line() == "asking"
    for device in sorted(held):
        assert taker.says_nothing(0.25)
        held[device].go_on()
        assert held[device].line() == "let go"
    assert sorted(taker.line().split()) == ["0", "1", "held"]


def test_a_holder_that_was_killed_frees_its_device(start):
    holder = start(HOLD, gpus=1)
    assert [holder.line(), holder.line()] == ["asking", "held 0"]
    holder.kill()
    other = start(HOLD, gpus=1)
    assert [other.line(), other.line()] == ["asking", "held 0"]


GPUS = [Gpu(index=i, uuid=f"GPU-{i}", name="NVIDIA H200", memory_bytes=1, driver="1") for i in range(3)]


def test_as_many_as_asked_for_are_lent_each_once_until_an_error_inside_and_more_is_refused(tmp_path):
    with lease([], 0, tmp_path / "locks") as none:
        assert none == ()
    assert not (tmp_path / "locks").exists()
    with lease(GPUS, 2, tmp_path) as held:
        assert len(set(held)) == 2
        assert set(held) <= set(GPUS)
    with pytest.raises(ValueError, match="inside"), lease(GPUS[:1], 1, tmp_path):
        raise ValueError("inside")
    with lease(GPUS[:1], 1, tmp_path) as held:
        assert held == (GPUS[0],)
    with pytest.raises(HardwareError, match="2 GPUs cannot be lent: there are 1"), lease(GPUS[:1], 2, tmp_path):
        pass
    with lease(GPUS[:2], 1, tmp_path), pytest.raises(HardwareError, match="holds 1 already"), lease(GPUS[:2], 2, tmp_path):
        pass


AGAIN = """
with lease(gpus, 1, folder) as (first,):
    say("held")
    sys.stdin.readline()
    with lease(gpus, 1, folder) as (second,):
        say("again" if second == first else "another")
"""


def test_a_process_is_lent_what_it_holds_while_another_waits(start):
    holder = start(AGAIN, gpus=1, count=1)
    assert holder.line() == "held"
    waiter = start(HOLD, gpus=1, count=1)
    assert waiter.line() == "asking"
    assert waiter.says_nothing(0.5)
    holder.go_on()
    assert holder.line() == "again"
    assert waiter.line() == "held 0"


PASSED_ON = """
import subprocess
with lease(gpus, 1, folder):
    worker = subprocess.Popen(["sleep", "60"], pass_fds=held_locks())
    say(worker.pid)
    sys.stdin.readline()
"""


def test_a_worker_that_outlives_its_killed_parent_keeps_the_device(start):
    holder = start(PASSED_ON, gpus=1)
    worker = psutil.Process(int(holder.line()))
    try:
        holder.kill()
        other = start(HOLD, gpus=1)
        assert other.line() == "asking"
        assert other.says_nothing(0.5)
    finally:
        worker.kill()
    assert other.line() == "held 0"


CORES = """
say("asking")
with lease_cores(int(sys.argv[3]), folder):
    say("held")
    with lease_cores(1, folder):
        say("held again")
    sys.stdin.readline()
"""


def test_cores_are_lent_in_turn(start):
    everything = 10_000  # more than any machine has: all there are
    holder = start(CORES, gpus=0, count=everything)
    assert [holder.line(), holder.line(), holder.line()] == ["asking", "held", "held again"]
    waiter = start(CORES, gpus=0)
    assert waiter.line() == "asking"
    assert waiter.says_nothing(0.5)
    holder.go_on()
    assert waiter.line() == "held"


def test_as_many_cases_as_cores_run_at_once(start):
    holders = [start(CORES, gpus=0) for _ in usable_cores()]
    assert [(holder.line(), holder.line()) for holder in holders] == [("asking", "held")] * len(holders)
