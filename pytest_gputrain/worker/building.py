"""Builds what a case steps: a model of the zoo, or what the user's own function makes, which it finds."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import msgspec
import torch

from pytest_gputrain.records import Task
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.group import ALONE, Group
from pytest_gputrain.worker.training import OwnCodeTraining, StepBuilder, Trainable, Training


def build(
    task: Task,
    device: torch.device,
    builder: StepBuilder | None = None,
    group: Group = ALONE,
    own_work_done: Callable[[], None] = lambda: None,
) -> Trainable:
    """Build the training of the task's case on ``device``."""
    case = task.case
    if not (case.code or builder):
        return Training(case, task.scale, device, group, own_work_done, task.deepspeed)
    builder = builder or load_builder(case.code, Path(task.root), task.module)
    if case.args:
        builder = functools.partial(builder, **msgspec.json.decode(case.args))
    return OwnCodeTraining(case, task.scale, device, builder, group, own_work_done)


def load_builder(code: str, root: Path, module_name: str = "") -> StepBuilder:
    """Return the function that ``path/to/file.py::name`` names, below the folder ``root``.

    Args:
        module_name: how the parent imported that file. Where the same name leads to it here, a file of a package finds its
            siblings.

    Raises:
        CheckFailed: the file has no such function, or is not below ``root``, whatever links lead to it.
    """
    file, _, name = code.partition("::")
    path = (root / file).resolve()
    if Path(file).is_absolute() or ".." in Path(file).parts or not path.is_relative_to(root.resolve()):
        raise CheckFailed(f"{file} does not lie below {root}, so the worker does not run it")
    if path.suffix != ".py" or not path.is_file() or not name.isidentifier():
        raise CheckFailed(f"{code} is not a function of a Python file, as tests/test_mine.py::my_step")
    builder = getattr(_imported(module_name, path) or _loaded(path), name, None)
    if not callable(builder):
        raise CheckFailed(f"{file} has no function {name!r} at module level")
    result: StepBuilder = builder
    return result


def _imported(module_name: str, path: Path) -> ModuleType | None:
    """Return the module of that name if it comes from the file at ``path``; else None."""
    top, *below = module_name.split(".")
    if not top or top == "__main__":
        return None
    try:
        # `find_spec` of a module imports its package. So first the package is looked for, and must have the file.
        package = importlib.util.find_spec(top) if below else None
        if below and not any(path.is_relative_to(Path(folder).resolve()) for folder in _module_folders(package)):
            return None
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != path:
        return None
    return importlib.import_module(module_name)


def _module_folders(package: ModuleSpec | None) -> list[str]:
    """Return the folders with the modules of a package."""
    return list((package and package.submodule_search_locations) or ())


def _loaded(path: Path) -> ModuleType:
    """Load the file as a module outside of any package."""
    module_name = f"gputrain_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise CheckFailed(f"{path} is not a Python file that can be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
