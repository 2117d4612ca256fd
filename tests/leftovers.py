"""Own code that fails in every way, and what a case leaves behind: processes, shared memory, temporary files, locks."""

import fcntl
import os
import tempfile
import time
import uuid

import psutil

from pytest_gputrain import Case
from pytest_gputrain.records import Crashed, OutOfMemory, TimedOut

FAULTS = """
import os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist

def _step(setup, fault):
    Path(__file__).with_name(f"started{setup.rank}").touch()
    def step():
        if setup.rank == 1:
            fault()
        total = torch.ones(1)
        dist.all_reduce(total)  # the other rank waits here for ever
        return float(total)
    return step

def sound(setup):
    def look():
        import psutil
        own = psutil.Process()
        sockets = own.net_connections("inet") if hasattr(own, "net_connections") else own.connections("inet")
        addresses = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
        Path(__file__).with_name("listening").write_text("\\n".join(addresses))
    return _step(setup, look)

def raises(setup):
    def fault():
        raise ValueError("a bad day")
    return _step(setup, fault)

def killed(setup):
    return _step(setup, lambda: os.kill(os.getpid(), signal.SIGKILL))

def memory(setup):
    def fault():
        raise MemoryError("no room")
    return _step(setup, fault)

def straggles(setup):
    def step():
        time.sleep(0.12 if setup.rank == 1 else 0.02)
        setup.own_work_done()
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)
    return step

def hangs(setup):
    return _step(setup, lambda: time.sleep(600))
"""


def own_case(name):
    """Two processes of a function of `FAULTS`, in ``code.py``."""
    return Case(
        model=name, method="custom", precision="fp32", parallel="ddp", gpus=2, code=f"code.py::{name}", steps=2, warmup=0
    )


REASONS = {"raises": "ValueError: a bad day", "killed": "ended by SIGKILL", "memory": "no room"}
"""What is told of the ends of faults."""


def assert_told(reply, fault):
    """Assert that the case ended by this fault of its second process."""
    assert isinstance(reply, OutOfMemory if fault == "memory" else Crashed), reply
    assert reply.rank == 1
    assert REASONS[fault] in (reply.sentence if isinstance(reply, Crashed) else reply.message)


def assert_hung(reply):
    """Assert that the first process is told to wait for the second, and the second to be in its own code."""
    assert isinstance(reply, TimedOut), reply
    first, second = reply.detail.split("rank 1:")
    assert "all_reduce" in first
    assert "code.py" in second
    assert "all_reduce" not in second


def wait_for(*paths, seconds=200):
    """Until the files are there."""
    wait_until(lambda: all(path.exists() for path in paths), seconds)


def wait_until(condition, seconds=60):
    """Until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.05)


def has_ended(process):
    """Whether a process, or the one of this id, has ended: a zombie has, which nobody has waited for yet."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


class Leftovers:
    """What is there now and was not before, of all that processes started from here do."""

    def __init__(self, folder, monkeypatch):
        self._mark = uuid.uuid4().hex
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._extensions = folder / "extensions"
        self._shared_memory = set(os.listdir("/dev/shm"))
        monkeypatch.setenv("LEFTOVERS_OF", self._mark)
        monkeypatch.setenv("TMPDIR", str(self._temporary))
        # A cache that torch makes once for all runs.
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(self._extensions))
        monkeypatch.setattr(tempfile, "tempdir", str(self._temporary))

    def processes(self, but=()):
        """Command lines of those that have not ended."""
        command_lines = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("LEFTOVERS_OF") == self._mark
                if mine and process.pid not in but and not has_ended(process):
                    command_lines.append(f"{process.pid}: {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return command_lines

    def all(self, but=(), seconds=3):
        """Everything, once ``seconds`` have not been enough for it to go.

        Args:
            but: ids of processes that may stay.
        """
        deadline = time.monotonic() + seconds
        while (left := self._now(but)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _now(self, but):
        memory = [name for name in os.listdir("/dev/shm") if name not in self._shared_memory]
        leases = self._temporary / "gputrain-leases"  # its files stay for the next run; held they must not be
        stay = (leases.name, f"gputrain-locks-{os.getuid()}")
        temporary = [str(path) for path in self._temporary.iterdir() if path.name not in stay]
        held = [str(path) for path in leases.glob("*.lock") if _is_held(path)]
        # DeepSpeed's next build would wait for the lock of one that was killed.
        locks = [str(path) for path in self._extensions.rglob("*lock*")]
        return self.processes(but) + memory + temporary + held + locks


def _is_held(path):
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
