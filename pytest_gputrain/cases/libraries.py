"""Names the training libraries that a case uses, and their installed versions."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.validation import EIGHT_BIT
from pytest_gputrain.records import Case
from pytest_gputrain.records.case import ADAPTING

LIBRARIES: Final = ("torch", "transformers", "diffusers", "peft", "accelerate", "bitsandbytes", "deepspeed", "triton")
"""The libraries that train."""


def libraries(case: Case) -> tuple[str, ...]:
    """Return the training libraries whose code decides what the case allocates and computes. For own code these are all,
    because nothing is known of it."""
    if case.code:
        return LIBRARIES
    used = {"torch", *(part.library for part in architectures()[case.model].parts.values())}
    used |= {"peft"} if case.method in ADAPTING else set()
    used |= {"bitsandbytes"} if case.method == "qlora" or case.optimizer in EIGHT_BIT else set()
    used |= {"transformers"} if case.optimizer == "adafactor" else set()
    used |= {"deepspeed"} if case.parallel.startswith("zero") else set()
    return tuple(name for name in LIBRARIES if name in used)


def missing(cases: Iterable[Case]) -> tuple[str, ...]:
    """Return the training libraries that some of the cases need and that are not installed; nothing is imported."""
    needed = {name for case in cases if not case.code for name in libraries(case)}
    return tuple(name for name in LIBRARIES if name in needed and importlib.util.find_spec(name) is None)


def how_to_install(names: Sequence[str]) -> str:
    """Return the end of a sentence on missing libraries, with the command that installs them."""
    return f"install {'it' if len(names) == 1 else 'them'} with: pip install {' '.join(names)} (or pytest-gputrain[suite])"


def versions() -> dict[str, str]:
    """Return the versions of the installed training libraries. Which of them a case imports depends on how its process was
    started."""
    from importlib import metadata

    installed = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def library_versions(case: Case) -> dict[str, str]:
    """Return the version of each installed library of the case, without its local label (``+cu130``), which names the
    hardware."""
    installed = {name: _installed(name) for name in libraries(case)}
    return {name: version for name, version in installed.items() if version is not None}


def packages_of(case: Case) -> dict[str, str]:
    """Return the versions of the libraries that decided what the case did in this process. For own code these are the
    imported ones, without libraries of kernels."""
    return {
        name: version
        for name, version in library_versions(case).items()
        if not case.code or (name in sys.modules and name != "triton")
    }


@functools.cache
def _installed(name: str) -> str | None:
    """Return a package's version. It is cached, because reading one takes 7 ms and a run asks several times for each
    case."""
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name).partition("+")[0]
    return None
