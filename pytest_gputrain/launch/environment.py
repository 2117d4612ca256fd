"""Environment variables of the processes of a case."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.kernel import PARENT
from pytest_gputrain.records import Task

CHOOSING: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Which GPUs a process sees, for the vendors' runtimes."""

_OF_LAUNCHERS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Left over from a launcher that pytest itself runs under, they would confuse the ranks."""


def refuse_recursion() -> None:
    """Raises:
    RuntimeError: this process is itself a worker.
    """
    if PARENT in os.environ:
        raise RuntimeError("a worker of pytest-gputrain must not start workers: do not measure at a module's top level")


def worker_environment(task: Task, gpus: Sequence[Gpu]) -> dict[str, str]:
    """This process's environment, with what must not vary fixed.

    Args:
        gpus: the only ones that the worker may see.
    """
    # pytest's variable of the running test would make every environment another one.
    dropped = (*_OF_LAUNCHERS, "PYTEST_CURRENT_TEST")
    environment = {
        name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("TORCHELASTIC_")
    }
    environment |= {
        PARENT: str(os.getpid()),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        # The interpreter's folder holds the tools of its environment (ninja), whether or not that is activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")]),
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment |= _visible(gpus, environment)
    if not task.case.code:
        # The zoo's models are built, never fetched; an attempt to reach a hub would only cost its time-out.
        environment["HF_HUB_OFFLINE"] = "1"
    if task.device_type == "cpu" or task.target is not None:
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return environment


def _visible(gpus: Sequence[Gpu], environment: dict[str, str]) -> dict[str, str]:
    """The variables that show ``gpus`` to the vendor's runtime, and nothing else to any."""
    names = ",".join(gpu.uuid for gpu in gpus)
    # HIP's own choose among what ROCm's leaves, by numbers of another list; empty ones it takes for unset.
    for name in CHOOSING:
        environment.pop(name, None)
    if any(gpu.vendor == "amd" for gpu in gpus):
        return {"ROCR_VISIBLE_DEVICES": names}
    return {"CUDA_VISIBLE_DEVICES": names, "ROCR_VISIBLE_DEVICES": ""}
