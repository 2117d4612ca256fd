"""Makes torch's CUDA build importable where NVIDIA's libraries are missing, in a process that uses no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from pytest_gputrain.hardware.emulation.build import CORE, stand_ins
from pytest_gputrain.hardware.emulation.environment import DEVICE
from pytest_gputrain.hardware.emulation.libraries import Torch, is_nvidias

_DRIVER: Final = "libcuda.so.1"
_MANAGEMENT: Final = "libnvidia-ml.so.1"
"""The library that reads real GPUs without torch. Importing torch does not need it."""

_NOT_FOUND: Final = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)


def make_importable(torch: Torch) -> None:
    """Load stand-ins into this process if torch could not be imported otherwise, because NVIDIA's libraries are missing.

    They stand in for a machine without a GPU, whatever the environment says: ``torch.cuda.is_available()`` is false. Only
    torch is meant to use them, and finds them by their names. A process that has loaded the real driver is left as
    it is.

    Raises:
        CannotEmulate: they are needed and cannot be built.
    """
    if "torch" in sys.modules or not _missing(torch) or _is_loaded(_DRIVER):
        return
    paths = {path.name: path for path in stand_ins(torch).libraries if path.name != _MANAGEMENT}
    # All other libraries need the core and the driver, so these two are loaded first, by their paths. By its name the loader
    # would find a real driver in LD_LIBRARY_PATH.
    core = ctypes.CDLL(str(paths.pop(CORE)))
    described = os.environ.pop(DEVICE, None)
    # The library reads GPUTRAIN_EMULATED_DEVICE only once. It must find none, so that this process has no GPUs.
    core.gputrain_gpu()
    if described is not None:
        os.environ[DEVICE] = described
    for path in (paths.pop(_DRIVER), *paths.values()):
        ctypes.CDLL(str(path))


def _missing(torch: Torch) -> list[str]:
    """Return the libraries of NVIDIA's that torch needs and that neither the loader nor torch would find."""
    command = ["ldd", str(torch.folder / "lib" / "libtorch_python.so")]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [
        name
        for name in _NOT_FOUND.findall(listed)
        if is_nvidias(name) and not any(any(Path(entry).glob(f"nvidia/*/lib/{name}")) for entry in sys.path)
    ]


def _is_loaded(name: str) -> bool:
    with contextlib.suppress(OSError):
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        return True
    return False
