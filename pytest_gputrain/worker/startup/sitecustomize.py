"""Makes torch record its memory in every Python process of a program that `gputrain emulate` or a test of a script runs.

Python imports this module when it starts, before the program. It then imports the module of the same name that it hides, and
does nothing else until the program imports torch. It runs in the program's environment, which may lack this package's
dependencies.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _TorchFinder:
    """Finds torch as Python would, and has the recorder start when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        expected = os.environ.get("GPUTRAIN_EMULATED_TORCH")
        found = os.path.dirname(spec.origin or "")
        if expected and os.path.realpath(found) != os.path.realpath(expected):
            raise ImportError(
                f"gputrain emulates a GPU for the torch in {expected}, and this program imports the one in {found}; "
                "run the gputrain that is installed beside it"
            )
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_record(module: ModuleType) -> None:
            execute(module)
            memory_recorder = _load("memory_recorder")
            if "GPUTRAIN_SCRIPT_STATE" in os.environ:
                _load("script_recorder").install(module, memory_recorder)
            else:
                memory_recorder.install(module)

        loader.exec_module = execute_and_record
        return spec


def _load(name: str) -> Any:
    path = os.path.join(os.path.dirname(_FOLDER), f"{name}.py")
    spec: Any = importlib.util.spec_from_file_location(f"_gputrain_{name}", path)
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


sys.meta_path.insert(0, _TorchFinder())
_import_hidden()
