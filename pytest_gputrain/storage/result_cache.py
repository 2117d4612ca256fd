"""Caches runs on emulated GPUs in a folder, named by all that they depend on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.cases.libraries import library_versions
from pytest_gputrain.records import Case, EmulatedRun, Task
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.reading import UNREADABLE, read_message

KEPT_SECONDS: Final = 30 * 24 * 3600.0
"""The time after which a run that nobody asked for is removed."""

_READ_BY_LIBRARIES: Final = (
    *("TORCH", "PYTORCH_", "CUBLAS", "DISABLE_ADDMM_CUDA_LT", "TRITON_"),  # torch itself reads cuBLAS's variables
    *("TRANSFORMERS_", "DIFFUSERS_", "HF_", "PEFT_", "BNB_", "DS_"),
)
"""The beginnings of environment variables that change libraries."""


class ResultCache:
    """A file for each run. Its name is made of all that the run depends on: the task, this package's code, the libraries,
    and their environment variables.

    Args:
        folder: None to remember nothing.
        beside: names what else they depend on.
    """

    def __init__(self, folder: Path | None, beside: str) -> None:
        self._folder, self._beside = folder, beside

    def get(self, task: Task) -> EmulatedRun | None:
        """Return the run of ``task``; None if there is none, or if it cannot be read."""
        path = self._path(task)
        if path is None:
            return None
        try:
            run = msgspec.json.decode(read_message(path), type=EmulatedRun)
            os.utime(path)
        except (OSError, *UNREADABLE):
            return None
        return run

    def put(self, task: Task, run: EmulatedRun) -> None:
        path = self._path(task)
        if path is not None:
            with contextlib.suppress(OSError):  # Without the file the next run is only slower.
                write_atomically(path, msgspec.json.encode(run))
                self._forget_old(path.parent)

    @staticmethod
    def _forget_old(folder: Path) -> None:
        """Delete runs of code and libraries that are gone."""
        now = time.time()  # noqa: TID251 - as the files' dates
        for path in folder.glob("*.json"):
            if now - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()

    def _path(self, task: Task) -> Path | None:
        if self._folder is None or task.case.code or not _are_released(task.case):
            return None
        depends = (
            task.case.identity(),
            (task.scale, task.processes, task.servers),
            (task.emulated, task.limit, task.memory_only, task.counts, task.deepspeed, task.model_config, self._beside),
            {name: (version, _files(name)) for name, version in library_versions(task.case).items()},
            {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_LIBRARIES)},
            task.variables,
            platform.python_version(),
            _own_code(),
        )
        return self._folder / f"{hashlib.sha256(msgspec.json.encode(depends, order='sorted')).hexdigest()[:32]}.json"


def _are_released(case: Case) -> bool:
    """Tell whether the versions of the case's libraries identify their code. A folder, a commit, or a file that somebody
    built has no such version."""
    return not any(_is_local(name) for name in library_versions(case))


@functools.cache
def _is_local(name: str) -> bool:
    # pip writes this file only for a package from a path or a URL, see
    # https://packaging.python.org/en/latest/specifications/direct-url/.
    origin = metadata.distribution(name).read_text("direct_url.json")
    return origin is not None


@functools.cache
def _files(name: str) -> str:
    """Return a digest of the hashes of a library's files, because a wheel that is built again may keep its version."""
    listed = metadata.distribution(name).read_text("RECORD") or ""
    return hashlib.sha256(listed.encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Return the hash of this package's files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(file for kind in ("*.py", "*.json", "*.toml", "*.c", "*.h") for file in root.rglob(kind)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
