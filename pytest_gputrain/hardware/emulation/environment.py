"""Makes the environment in which a program, and whatever it starts, finds emulated GPUs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pytest_gputrain.hardware.emulation.build import CORE, StandIns
from pytest_gputrain.hardware.emulation.installed import this_python
from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.files import make_own
from pytest_gputrain.utils.torch_beside import ORIGIN_VARIABLE, PYTHON_VARIABLE, SITE_VARIABLE

DEVICE: Final = "GPUTRAIN_EMULATED_DEVICE"
"""Environment variable with the description of the GPUs for the stand-ins."""

STATE: Final = "GPUTRAIN_EMULATED_STATE"
"""Environment variable: the folder in which each process that uses an emulated GPU leaves what it took of it."""

TORCH: Final = "GPUTRAIN_EMULATED_TORCH"
"""Environment variable: the folder of the torch whose libraries have stand-ins."""

RATES: Final = "GPUTRAIN_EMULATED_RATES"
"""Environment variable: what the GPU sustains, as JSON, if a program is asked how long its steps take."""

STARTUP: Final = Path(__file__).parents[2] / "worker" / "startup"
"""The folder on a program's PYTHONPATH with a ``sitecustomize`` that has torch record its memory."""

_PRELOAD: Final = "LD_PRELOAD"
_MODULES: Final = "PYTHONPATH"
_COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
_APART: Final = "emulated"
_KERNELS: Final = "TRITON_CACHE_DIR"
_KEPT_KERNELS: Final = f"/{_APART}/triton"
_OF_REAL_GPUS: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def emulated_environment(
    environ: Mapping[str, str], libraries: StandIns, description: str, *, state: Path | None = None
) -> dict[str, str]:
    """Return a copy of this environment with emulated GPUs in place of real ones, or in place of the GPUs that it emulates.

    Args:
        description: of the GPUs, by `boards.describe`.

    Raises:
        CannotEmulate: the loader cannot take the path of the stand-ins, or no folder for compiled code belongs to this user.
    """
    paths = [str(path) for path in libraries.libraries]
    if any(character in str(libraries.folder) for character in " :"):
        raise CannotEmulate(
            f"the loader takes no path with a space or a colon, and the stand-ins lie in {libraries.folder}; "
            "set XDG_CACHE_HOME to a folder without them"
        )
    environ = _without_emulation(environ)
    emulated = {name: value for name, value in environ.items() if name not in _OF_REAL_GPUS}
    emulated[DEVICE] = description
    if state is not None:
        emulated[STATE] = str(state)
    # The paths are absolute, because torch looks into the nvidia-* packages before LD_LIBRARY_PATH.
    emulated[_PRELOAD] = ":".join([*paths, *environ.get(_PRELOAD, "").split(":")]).rstrip(":")
    emulated["TRITON_LIBCUDA_PATH"] = str(libraries.folder)
    # Kernels are chosen here without measuring, and a real GPU must not use these choices. So the emulation has a folder of
    # its own.
    compiled = Path(environ.get(_COMPILED) or _own_compiled()) / _APART
    # Compiling allocates on the GPU, and loading compiled code does not. So each run starts with an empty folder, and all
    # runs allocate the same.
    emulated[_COMPILED] = str(compiled if state is None else state / "compiled")
    # Kernels are kept, because making them takes most of the time and does not allocate.
    emulated.setdefault(_KERNELS, f"{compiled.parent}{_KEPT_KERNELS}")
    # Otherwise Inductor would choose fused kernels by their times, which mean nothing here.
    emulated["TORCHINDUCTOR_BENCHMARK_EPILOGUE_FUSION"] = "0"
    torch = libraries.torch
    if torch is not None and torch.environment is not None:
        emulated |= {SITE_VARIABLE: str(torch.site), PYTHON_VARIABLE: this_environment(), ORIGIN_VARIABLE: torch.origin}
        emulated[_MODULES] = with_startup(environ)
    return emulated


def _own_compiled() -> Path:
    """Return a folder for compiled code to which no other user can write."""
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.geteuid()}"
    try:
        make_own(folder)
    except OSError as error:
        raise CannotEmulate(
            f"compiled code cannot be kept in {folder} ({error.strerror}); or set {_COMPILED} to a folder of yours"
        ) from None
    return folder


def this_environment() -> str:
    """Return the ABI of this Python and its environment, in the form that ``sitecustomize`` uses."""
    return f"{this_python()} {sys.prefix}"


def with_startup(environ: Mapping[str, str]) -> str:
    """Return PYTHONPATH with the folder of ``sitecustomize`` in the first place."""
    others = (path for path in environ.get(_MODULES, "").split(os.pathsep) if path and path != str(STARTUP))
    return os.pathsep.join([str(STARTUP), *others])


def _without_emulation(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that `emulated_environment` and ``gputrain emulate`` have set."""
    if DEVICE not in environ:
        return dict(environ)
    preloaded, modules = environ.get(_PRELOAD, "").split(":"), environ.get(_MODULES, "").split(os.pathsep)
    kernels = environ.get(_KERNELS, "")
    before = kernels.removesuffix(_KEPT_KERNELS)
    folders = {os.path.dirname(path) for path in preloaded if os.path.basename(path) == CORE}
    bare = {
        **environ,
        **dict.fromkeys((DEVICE, STATE, TORCH, RATES, SITE_VARIABLE, PYTHON_VARIABLE, ORIGIN_VARIABLE), ""),
        _PRELOAD: ":".join(path for path in preloaded if os.path.dirname(path) not in folders),
        _MODULES: os.pathsep.join(path for path in modules if path != str(STARTUP)),
        _COMPILED: before if before != kernels else environ.get(_COMPILED, ""),
        _KERNELS: "" if before != kernels else kernels,
    }
    return {name: value for name, value in bare.items() if value or environ.get(name) == ""}
