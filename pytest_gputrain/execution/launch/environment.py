"""Builds the environment variables of the processes of a case, and notices what tests change in those of pytest."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gputrain.utils.linux import PARENT

if TYPE_CHECKING:  # pytest loads this module in every project, also in one without cases, so its import must be fast.
    from pytest_gputrain.hardware.devices import Gpu
    from pytest_gputrain.records import Task

CHOOSING: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Variables that choose which GPUs a process sees, for the vendors' runtimes."""

_OF_LAUNCHERS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Left over from a launcher that pytest itself runs under, they would confuse the ranks."""

_OF_PYTEST: Final = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION", "PYTEST_XDIST_")
"""The beginnings of the variables that pytest and xdist change themselves."""


class SessionEnvironment:
    """The environment variables that this process had when the session began, and their changes since then."""

    def __init__(self) -> None:
        self.began: dict[str, str] = {}
        self.begin()

    def begin(self) -> None:
        """Remember the variables of this moment as those of the session."""
        self.began.clear()
        self.began |= os.environ
        self._collected = dict(self.began)

    def collected(self, *, elsewhere: bool = False) -> None:
        """Remember the present variables as those that most tests will see.

        Variables that imports of test files and of frameworks have set do not count as changed by a test.

        Args:
            elsewhere: whether cases run on other machines, which know only the variables of the session's start and get
                all others by name.
        """
        if elsewhere:
            self._collected = dict(os.environ)
        else:
            self.begin()

    def changes(self, task: Task, *, inline: bool = False, prefetched: bool = False) -> dict[str, str | None]:
        """Return the variables that have changed since the session began, by name. A variable that was removed is None.

        Args:
            inline: the task runs in this process; a worker does not see what launching sets or drops.
            prefetched: no test has asked for the task yet, and the running one is none of its own.
        """
        now: Mapping[str, str] = self._collected if prefetched else os.environ
        own = () if inline else (*CHOOSING, PARENT, *_fixed(task))
        return {
            name: now.get(name)
            for name in sorted({*self.began, *now})
            if self.began.get(name) != now.get(name)
            and name not in own
            and not name.startswith(_OF_PYTEST)
            and (inline or not _is_dropped(name))
        }


def refuse_recursion() -> None:
    """Raise an error if this process is a worker, which must not start workers.

    Raises:
        RuntimeError: this process is itself a worker.
    """
    if PARENT in os.environ:
        raise RuntimeError("a worker of pytest-gputrain must not start workers: do not measure at a module's top level")


def worker_environment(task: Task, gpus: Sequence[Gpu], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of a worker: those of the task's test, with fixed values for some.

    Args:
        gpus: the only ones that the worker may see.
        environ: variables that the task's own changes add to; those of this process by default.
    """
    variables: dict[str, str | None] = {**(os.environ if environ is None else environ), **task.variables}
    environment = {name: value for name, value in variables.items() if value is not None and not _is_dropped(name)}
    environment |= {
        PARENT: str(os.getpid()),
        # Tools of the environment, such as ninja, lie beside the interpreter, also if the environment is not activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")]),
        **_fixed(task),
    }
    environment |= {} if task.emulated else _visible(gpus, environment)
    return environment


def _is_dropped(name: str) -> bool:
    # PYTEST_CURRENT_TEST changes with each test, and would give each test an environment of its own.
    return name in (*_OF_LAUNCHERS, "PYTEST_CURRENT_TEST") or name.startswith("TORCHELASTIC_")


def _fixed(task: Task) -> dict[str, str]:
    """Return the variables that every worker of the task gets, whatever a test sets."""
    fixed = {
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if task.nodes == 1 and (loopback := _loopback()):
        # Otherwise gloo listens at the address of the host's name, which other machines may reach.
        fixed["GLOO_SOCKET_IFNAME"] = loopback
    if not task.case.code:
        # Built-in models are never downloaded; trying to reach a hub would only take the time until it gives up.
        fixed["HF_HUB_OFFLINE"] = "1"
    if task.device_type == "cpu":
        fixed |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    elif task.emulated:
        fixed |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return fixed


@functools.cache
def _loopback() -> str:
    """Return the name of the network interface that only this machine reaches; empty if it is down or has another name."""
    import psutil

    found = psutil.net_if_stats().get("lo")
    return "lo" if found and found.isup else ""


def _visible(gpus: Sequence[Gpu], environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that show ``gpus`` to the vendor's runtime, and no other GPU to any runtime."""
    # CUDA accepts a UUID only if it begins like this, which the UUID of a Jetson does not.
    named = [gpu.uuid if gpu.vendor == "amd" or gpu.uuid.startswith(("GPU-", "MIG-")) else str(gpu.index) for gpu in gpus]
    names = ",".join(named)
    # HIP's variables choose among the GPUs that ROCm's variable has left, and number them anew. So they are removed. HIP
    # treats an empty variable as one that is not set.
    for name in CHOOSING:
        environment.pop(name, None)
    if any(gpu.vendor == "amd" for gpu in gpus):
        return {"ROCR_VISIBLE_DEVICES": names}
    return {"CUDA_VISIBLE_DEVICES": names, "ROCR_VISIBLE_DEVICES": ""}
