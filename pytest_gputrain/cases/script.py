"""Makes cases of scripts, which train as their command lines do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.records import Case
from pytest_gputrain.utils.errors import BadCase

_KNOBS: Final = ("model", "platforms", "warmup", "batch_size", "sequence_length")


class Script:
    """A training script, for `gputrain.check` and `gputrain.measure`: ``Script("train.py", "--max-steps=8")``.

    It runs as its command line does, in a process of its own and in the root of the project. This needs a real GPU or
    ``--gpu-emulate``. The test fails if the exit status of the script is not 0. Of the fields of a case, a test may set
    ``model`` for another name of the case, ``platforms``, and for the figures of time ``warmup``, ``batch_size`` and
    ``sequence_length`` of the script's steps.
    """

    path: str
    """The Python file, relative to the root of the project."""
    arguments: tuple[str, ...]
    """The arguments of the script, as text. They are part of the case's id."""

    def __init__(self, path: str | os.PathLike[str], *arguments: str) -> None:
        self.path = os.fspath(path)
        self.arguments = arguments

    def __str__(self) -> str:
        return " ".join(map(str, (self.path, *self.arguments)))


def case_of(script: Script, knobs: Mapping[str, Any], root: Path) -> Case:
    """Return the case of a script.

    Args:
        knobs: fields of the case to set.
        root: the folder of the project.

    Raises:
        BadCase: there is no such file in it, an argument is not text, or a knob is not one of a script.
    """
    if unknown := sorted(set(knobs) - set(_KNOBS)):
        raise BadCase(
            f"{unknown[0]} is not a field that a test may set for a script, which reads its settings from its own "
            f"arguments; known: {', '.join(_KNOBS)}"
        )
    root = root.resolve()
    path = (root / script.path).resolve()
    if path.suffix != ".py" or not path.is_file() or not path.is_relative_to(root):
        raise BadCase(f"{script.path} is not a Python file below {root}; give its path from there, as scripts/train.py")
    arguments: tuple[object, ...] = script.arguments  # Tests are seldom type-checked, so the arguments may have any type.
    for argument in arguments:
        if not isinstance(argument, str):
            raise BadCase(
                f"the argument {argument!r} of {script.path} is not text, as arguments of a command line are; write "
                f"{str(argument)!r}"
            )
    name = path.relative_to(root).as_posix()
    args = msgspec.json.encode(script.arguments).decode() if script.arguments else ""
    return Case(**{"model": name, "method": "script", "precision": "", "code": name, "args": args, **knobs})
