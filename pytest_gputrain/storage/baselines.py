"""Reads and writes baselines, as the only module: ``<dir>/<device>/<suite>.json``, reviewed in git.

A file holds its cases sorted by key, each with its raw runs. Environments are stored once, by a short hash, so that new
numbers show as nothing else. Keys of the tiny scale end in ``@tiny``. Files are replaced whole, under a lock, by atomic
rename, and an update keeps the entries of cases that did not run.
"""

from __future__ import annotations

import glob
import hashlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from pytest_gputrain.cases.validation import renamed
from pytest_gputrain.records import (
    FORMAT,
    MAX_RUNS,
    Baseline,
    BaselineRun,
    Case,
    Environment,
    Scale,
)
from pytest_gputrain.utils import json_text
from pytest_gputrain.utils.files import UNREADABLE, conflicts, locked, sweep, within, write_atomically
from pytest_gputrain.utils.sanitize import OneLineError
from pytest_gputrain.utils.spill import SpilledDict

RESTORE: Final = "restore it from git, or delete it and record again"
_NEWER: Final = "update pytest-gputrain, should a newer version have written it"
_MOST_LINES_SHOWN: Final = 6
RECORD_ENTRY: Final = "delete the entry and record it again"
_RESTORE_ENTRY: Final = "restore it from git, or delete the entry and record it again"


_Record = TypeVar("_Record")


class BaselineError(OneLineError):
    """A baseline file that cannot be read or written; one sentence with the remedy."""


class _StoredCase(Struct, kw_only=True, forbid_unknown_fields=True):
    case: Case
    scale: Scale
    runs: tuple[dict[str, Any], ...]
    """Fields of `BaselineRun`, its environment by reference."""


class _File(Struct, kw_only=True, forbid_unknown_fields=True):
    format: int
    device: str
    suite: str
    environments: dict[str, dict[str, Any]]
    """Fields of `Environment`."""
    cases: dict[str, msgspec.Raw]
    """Each a `_StoredCase`; in this form they need the least memory until they are looked at."""


class BaselineStore:
    """Baselines in a folder, one file per device and suite, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[tuple[str, str], SpilledDict[str, Baseline]] = {}

    def path(self, device: str, suite: str) -> Path:
        """Raises:
        BaselineError: no place in the folder.
        """
        return path_in(self.folder, device, suite)

    def has_device(self, device: str) -> bool:
        """Whether this device has baselines of any suite."""
        return any((self.folder / device).glob("*.json"))

    def get(self, device: str, suite: str, key: str) -> Baseline | None:
        """The baseline of one case, None where there is none.

        Raises:
            BaselineError: the file is there but cannot be read.
        """
        return self.suite(device, suite).get(key)

    def suite(self, device: str, suite: str) -> Mapping[str, Baseline]:
        """All baselines of a suite by key.

        Raises:
            BaselineError: as of `get`.
        """
        if (device, suite) not in self._files:
            self._files[device, suite] = _load(self.path(device, suite), device)
        return self._files[device, suite]

    def other_devices(self, device: str, suite: str) -> list[str]:
        """Other devices that have baselines of the suite."""
        files = self.folder.glob(f"*/{glob.escape(suite)}.json")
        return sorted(path.parent.name for path in files if path.parent.name != device)

    def check_writable(self) -> None:
        """Raises:
        BaselineError: nothing can be written below the folder. Better told before hours of measuring than after.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise BaselineError(
                f"baselines cannot be written to {self.folder} ({error.strerror}); make it writable or choose another "
                "--gpu-baseline-dir"
            ) from error

    def update(self, device: str, suite: str, entries: Mapping[str, Baseline]) -> Path:
        """Replace ``entries`` in their file, keep all others, and return the file.

        Raises:
            BaselineError: the present file cannot be read, or the new one cannot be written; nothing has changed then.
        """
        path = self.path(device, suite)
        try:
            with locked(path):
                merged = _load(path, device)
                merged.update(entries)
                sweep(path)
                write_atomically(path, _encode(device, suite, merged))
        except OSError as error:
            raise BaselineError(f"the baseline file {path} cannot be written: {error.strerror or error}") from error
        self._files[device, suite] = merged
        return path


def path_in(folder: Path, *names: str) -> Path:
    """The file of these names below a folder of baselines; the last is the suite's.

    Raises:
        BaselineError: no place in the folder, or none that the suite is found in again.
    """
    try:
        path = within(folder, *names[:-1], f"{names[-1]}.json")
    except ValueError as error:
        raise BaselineError(f"baselines stay in {folder}: {error}; rename the test file, or remove the link") from None
    if path.stem != names[-1]:
        raise BaselineError(f"baselines are kept by the names of test files, and test_{names[-1]}.py has none; rename it")
    return path


def rewritten(path: Path) -> bytes:
    """A baseline file as `BaselineStore.update` would write it again.

    Raises:
        BaselineError: it cannot be read.
    """
    device = path.parent.name
    return b"".join(_encode(device, path.stem, _load(path, device)))


def _load(path: Path, device: str) -> SpilledDict[str, Baseline]:
    baselines: SpilledDict[str, Baseline] = SpilledDict(Baseline)
    if not path.exists():
        return baselines
    file = decode(path, _File, "a baseline file")
    if (file.device, file.suite) != (device, path.stem):
        raise BaselineError(
            f"the baseline file {path} says that it holds {file.suite} of {file.device}; move it to where it belongs, or "
            "record again"
        )
    for digest, fields in file.environments.items():
        sound = _convert(path, f"environment {digest}", fields, Environment)
        refuse_unknown(path, f"the environment {digest}", fields, sound)
    for key, raw in file.cases.items():
        try:
            stored = msgspec.json.decode(raw, type=_StoredCase)
        except UNREADABLE as error:
            raise BaselineError(f"{path} is not a baseline file: {error} in {key}; {_remedy(error, RESTORE)}") from None
        refuse_renamed(path, key, stored.case.precision, RECORD_ENTRY)
        runs = [_run(path, key, fields, file.environments) for fields in stored.runs]
        _check_figures(path, key, runs)
        if key.endswith("@tiny") != (stored.scale == "tiny"):
            raise BaselineError(f"the baseline file {path} gives {key} the scale {stored.scale}; {_RESTORE_ENTRY}")
        baselines[key] = Baseline(device=device, case=stored.case, scale=stored.scale, runs=tuple(runs))
    return baselines


def _run(path: Path, key: str, fields: Mapping[str, Any], environments: Mapping[str, Any]) -> BaselineRun:
    reference = fields.get("environment")
    if not isinstance(reference, str) or reference not in environments:
        raise BaselineError(
            f"the baseline file {path} refers to the environment {reference!r} in {key}, which it does not hold; {RESTORE}"
        )
    return _convert(path, f"run for {key}", {**fields, "environment": environments[reference]}, BaselineRun)


def _convert(path: Path, what: str, fields: Mapping[str, Any], type_: type[_Record]) -> _Record:
    try:
        return msgspec.convert(fields, type_)
    except msgspec.ValidationError as error:
        raise BaselineError(f"the baseline file {path} holds no sound {what}: {error}; {_remedy(error, RESTORE)}") from None


def refuse_unknown(path: Path, where: str, fields: Any, record: Any) -> None:
    """Raises:
    BaselineError: ``fields`` hold more than ``record``, which was made of them: writing it again would lose that.
    """
    if name := _lost(fields, msgspec.to_builtins(record)):
        raise BaselineError(f"the baseline file {path} holds an unknown {name!r} in {where}; {_NEWER}, or {RESTORE}")


def refuse_renamed(path: Path, where: str, precision: str, remedy: str) -> None:
    """Raises:
    BaselineError: ``precision`` is no name of one. No case has such a name, so what was recorded under it would be left out.
    """
    if name := renamed("precision", precision):
        raise BaselineError(f"{path} names in {where} {name}; {remedy}")


def _lost(before: Any, after: Any) -> str:
    """A name that stands in the one and not in the other; empty for none."""
    if isinstance(before, dict) and isinstance(after, dict):
        if unknown := sorted(before.keys() - after.keys()):
            return str(unknown[0])
        return next(filter(None, (_lost(value, after[name]) for name, value in before.items())), "")
    if isinstance(before, list) and isinstance(after, list | tuple):
        return next(filter(None, map(_lost, before, after)), "")
    return ""


def _check_figures(path: Path, key: str, runs: list[BaselineRun]) -> None:
    for run in runs:
        counts = [value for value in msgspec.structs.asdict(run).values() if isinstance(value, int)]
        measured = run.outcome == "measured"
        peak = run.peak_allocated_bytes
        times = run.step_seconds if run.one_worker_seconds is None else (*run.step_seconds, run.one_worker_seconds)
        bad_time = any(not 0 < seconds < math.inf for seconds in times) or (measured and not run.step_seconds)
        if bad_time or (measured and peak is None) or any(value < 0 for value in counts):
            raise BaselineError(f"the baseline file {path} holds impossible figures for {key}; {_RESTORE_ENTRY}")
    if not runs:
        raise BaselineError(f"the baseline file {path} holds no run for {key}; {RECORD_ENTRY}")


def decode(path: Path, type_: type[_Record], what: str, remedy: str = RESTORE) -> _Record:
    """The record of ``type_`` in a file.

    Raises:
        BaselineError: not ``what``, told with the place where that shows.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BaselineError(f"{path} cannot be read: {error.strerror}") from error
    if markers := conflicts(data):
        lines = ", ".join(map(str, markers[:_MOST_LINES_SHOWN])) + (", ..." if len(markers) > _MOST_LINES_SHOWN else "")
        raise BaselineError(
            f"{path} holds merge-conflict markers (lines {lines}); resolve them, or take one side and record again"
        )
    try:
        version = msgspec.json.decode(data, type=_Versioned).format
    except UNREADABLE as error:
        raise BaselineError(f"{path} is not {what}: {error}; {remedy}") from None
    if version != FORMAT:
        newer = f"{_NEWER}, or " if version > FORMAT else ""
        raise BaselineError(f"{path} has format {version}, this version reads format {FORMAT}; {newer}{remedy}")
    try:
        return msgspec.json.decode(data, type=type_)
    except UNREADABLE as error:
        raise BaselineError(f"{path} is not {what}: {error}; {_remedy(error, remedy)}") from None


def _remedy(error: Exception, remedy: str) -> str:
    return f"{_NEWER}, or {remedy}" if "unknown field" in str(error) else remedy


class _Versioned(Struct):
    format: int


def _encode(device: str, suite: str, baselines: Mapping[str, Baseline]) -> Iterator[bytes]:
    """The file in parts, with one baseline in memory at a time."""
    environments: dict[str, Any] = {}
    for baseline in baselines.values():
        for run in baseline.runs[-MAX_RUNS:]:
            environments[_digest(run.environment)] = run.environment
    ordered = {digest: msgspec.to_builtins(environments[digest]) for digest in sorted(environments)}
    frame = _File(format=FORMAT, device=device, suite=suite, environments=ordered, cases={})
    cases = (json_text.item(_stored(baselines[key]), key) for key in sorted(baselines))
    return json_text.document(frame, (json_text.short_rows(json_text.short_lists(case)) for case in cases))


def _stored(baseline: Baseline) -> _StoredCase:
    runs = [{**msgspec.to_builtins(run), "environment": _digest(run.environment)} for run in baseline.runs[-MAX_RUNS:]]
    return _StoredCase(case=baseline.case, scale=baseline.scale, runs=tuple(runs))


def _digest(environment: Environment) -> str:
    fields = msgspec.json.encode(environment, order="sorted")
    return hashlib.sha256(fields).hexdigest()[:8]
