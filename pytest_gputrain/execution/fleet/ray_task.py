"""Defines the tasks that Ray runs on a node: each starts the command that every scheduler starts, in a process of its
own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pytest_gputrain.execution.fleet.scheduler import DELIVERY, ORDER, OUTPUT
from pytest_gputrain.utils.reading import read_message, tail

_LOOK_SECONDS: Final = 0.1
_END_SECONDS: Final = 20.0
"""The time in which a process has to end after its signal."""


def do(python: str, order: bytes, shared: str) -> Iterator[str | bytes]:
    """Run an order in a process on this node.

    Args:
        shared: folder of the order on all nodes that it takes; empty for one on this node alone.

    Yields:
        The id of the node and its name, as soon as it has begun; then the delivery, empty for none; how the process ended,
        empty for well; the end of what it printed.
    """
    import ray

    yield f"{ray.get_runtime_context().get_node_id()} {socket.gethostname()}"
    folder = Path(shared or tempfile.mkdtemp(prefix="gputrain-"))
    try:
        (folder / ORDER).write_bytes(order)
        with open(folder / OUTPUT, "wb") as output:
            process = _start(python, [str(folder), _address()], output.fileno())
            _wait(process, lambda: False)
        delivery = folder / DELIVERY
        yield read_message(delivery) if delivery.exists() else b""
        yield f"exit code {process.returncode}" if process.returncode else ""
        yield tail(folder / OUTPUT).encode()
    finally:
        if not shared:
            shutil.rmtree(folder, ignore_errors=True)


def serve_node(python: str, shared: str) -> None:
    """Take part in the order in ``shared`` as one of its further nodes, until it is delivered."""
    process = _start(python, [shared, _address(), "node"], subprocess.DEVNULL)
    _wait(process, lambda: not Path(shared).exists() or Path(shared, DELIVERY).exists())


def _start(python: str, arguments: list[str], output: int) -> subprocess.Popen[bytes]:
    # Ray tells its tasks how many threads to compute with, but a case must compute as in a local run.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS" and name[:4] != "RAY_"}
    return subprocess.Popen(
        [python, "-P", "-m", "pytest_gputrain.execution.fleet.job", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


def _wait(process: subprocess.Popen[bytes], over: object) -> None:
    """Wait until the process ends or ``over`` returns true. If Ray cancels this task, the process is ended."""
    assert callable(over)
    try:
        # Ray cancels a task by an exception in this thread, which Python raises only between system calls. So no system call
        # here may take long.
        while process.poll() is None and not over():
            time.sleep(_LOOK_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _address() -> str:
    """Return the address of this node, as Ray's other nodes reach it."""
    import ray

    return str(ray.util.get_node_ip_address())
