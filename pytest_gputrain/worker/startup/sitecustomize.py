"""Makes torch record its memory in every Python process of a program that `gputrain emulate` or a test of a script runs.

Where a CUDA build of torch was installed beside the user's, it also has workers and programs find that build, if they run in
the Python that it was installed for.

Python imports this module when it starts, before the program. It then imports the module of the same name that it hides, and
does nothing else until the program imports torch. It runs in the program's environment, which may lack this package's
dependencies.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib import machinery
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _check(torch: ModuleType) -> None:
    """Raise an error if torch is not the one whose libraries have stand-ins."""
    expected = os.environ.get("GPUTRAIN_EMULATED_TORCH") or (_SITE and os.path.join(_SITE, "torch"))
    found = os.path.dirname(torch.__file__ or "")
    if expected and os.path.realpath(found) != os.path.realpath(expected):
        raise ImportError(
            f"gputrain emulates a GPU for the torch in {expected}, and this program imports the one in {found}; "
            "run the gputrain that is installed beside it"
        )


def _add(site: str) -> None:
    """Make this process find the packages of that folder first, and keep the folder from being removed while the process
    lives."""
    import fcntl

    try:
        lock = os.open(os.path.join(os.path.dirname(site), "in-use.lock"), os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH)  # The lock is held until this process and those forked from it have ended.
    except OSError:
        return  # The build was removed, and importing another torch reports this.
    sys.path.insert(0, site)


def _record(torch: ModuleType) -> None:
    memory_recorder = _load("memory_recorder")
    if "GPUTRAIN_SCRIPT_STATE" in os.environ:
        _load("script_recorder").install(torch, memory_recorder)
    else:
        memory_recorder.install(torch)


def _load(name: str) -> Any:
    path = os.path.join(os.path.dirname(_FOLDER), f"{name}.py")
    spec: Any = importlib.util.spec_from_file_location(f"_gputrain_{os.path.basename(name)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _import_hidden() -> None:
    """Import the ``sitecustomize`` that Python would have imported without this one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


_SITE = os.environ.get("GPUTRAIN_EMULATED_SITE", "")
if _SITE and os.environ.get("GPUTRAIN_EMULATED_PYTHON") == f"{machinery.EXTENSION_SUFFIXES[0]} {sys.prefix}":
    _add(_SITE)
# A worker records by its own code, so only other programs record here.
if "GPUTRAIN_EMULATED_TORCH" in os.environ or "GPUTRAIN_SCRIPT_STATE" in os.environ:
    _load("emulated_values/after_import").after_import("torch", _record, before=_check)
_import_hidden()
