"""Reads and writes baselines, as the only module: ``<dir>/<device>/<suite>.json``, reviewed in git.

A file holds its cases sorted by key, each with its entries: the raw runs of a measured case, or its runs on emulated GPUs
(see `pytest_gputrain.storage.emulated`). What many entries share, such as their environment, is stored once, by a short
hash, so that new numbers show as nothing else. Keys of the tiny scale end in ``@tiny``. Files are replaced whole, under a
lock, by atomic rename, and an update keeps the entries of cases that did not run. Fields that this version does not know are
kept, too, as long as what they stand in is kept: a newer version has written them.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import math
import re
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from pytest_gputrain.records import FORMAT, MAX_RUNS, Baseline, BaselineRun, Case, Environment, Recorded, Scale
from pytest_gputrain.utils import json_text
from pytest_gputrain.utils.bounds import LEAST_RUNS_ON_A_CPU
from pytest_gputrain.utils.files import conflicts, locked, sweep, within, write_atomically
from pytest_gputrain.utils.reading import UNREADABLE, read_whole
from pytest_gputrain.utils.sanitize import OneLineError

_RESTORE: Final = "restore it from git, or delete it and record again"
_RESTORE_ENTRY: Final = "restore it from git, or delete the entry and record it again"
_RECORD_ENTRY: Final = "delete the entry and record it again"
NEWER: Final = "update pytest-gputrain if a newer version wrote it"
_MOST_LINES_SHOWN: Final = 6
_BYTE_ORDER_MARKS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""The bytes that editors of Windows put before the text."""

_Type = TypeVar("_Type")
_Record = TypeVar("_Record", bound=Baseline | Recorded)
_Entry = TypeVar("_Entry", bound=Struct)


class BaselineError(OneLineError):
    """A baseline file, a published table or a report cannot be read or written. The message is one sentence with the
    remedy."""

    def __init__(self, problem: str, remedy: str = "", *, path: Path | None = None, place: str | int | None = None) -> None:
        """
        Args:
            problem: what is wrong; with a path, what follows the path in the sentence.
            remedy: what to do; empty if the problem says it.
            place: where it is in the file: the name of an entry, or an offset in bytes; None for the file as a whole.
        """
        sentence = f"{problem}; {remedy}" if remedy else problem
        self.without_path = " ".join(sentence.splitlines())
        self.path = path
        self.place = place
        super().__init__(f"{path} {sentence}" if path else sentence)


class _AsRead(NamedTuple):
    """An entry of a file that has fields which this version does not know."""

    entry: Struct
    own: dict[str, Any]
    """The fields of the entry."""
    shared: dict[str, Any]
    """The fields that it shares with others."""


class SuiteStore(ABC, Generic[_Record, _Entry]):
    """The records of cases in a folder of baselines, with a file for each device and suite. Each file is read once.

    A subclass says what a record is, and how its entries stand in the file.
    """

    parent: ClassVar[tuple[str, ...]] = ()
    """The folder of the devices' folders, below that of the baselines."""
    what: ClassVar[str]
    """The kind of file in a sentence, such as "a baseline file"."""
    entry: ClassVar[str]
    """An entry in a sentence, such as "run"."""
    shared: ClassVar[str]
    """The name of the part that entries share, in a sentence."""
    file_type: ClassVar[type[Struct]]
    """The record of a file, with five fields: format, device, suite, what entries share by reference, and each case in the
    least memory."""
    case_type: ClassVar[type[Struct]]
    """The record of a case, with three fields: case, scale and entries."""
    entry_type: type[_Entry]
    shared_type: ClassVar[type[Struct]]

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: of the baselines.
        """
        self._root = folder
        self.folder = folder.joinpath(*self.parent)
        self._files: dict[tuple[str, str], dict[str, _Record]] = {}
        self.unchanged: Counter[Path] = Counter()
        """The number of records in each file whose judged figures were the same, so that an update did not change them."""
        self.unknown: dict[Path, set[str]] = {}
        """Names of fields that this version does not know, in the files that were read."""
        self._as_read: dict[int, _AsRead] = {}
        """Entries as they were read, by `id`. It stays theirs because they are held here."""
        self._beside: dict[tuple[Path, str], dict[str, Any]] = {}
        """Unknown fields beside those of a file, or of the case of a key in it."""

    def path(self, device: str, suite: str) -> Path:
        """Return the path of a suite's file in the folder.

        Raises:
            BaselineError: no place in the folder, or none that the suite is found in again.
        """
        try:
            path = within(self._root, *self.parent, device, f"{suite}.json")
        except ValueError as error:
            raise BaselineError(
                f"baselines stay in {self._root}: {error}", "rename the test file, or remove the link"
            ) from None
        if path.stem != suite:
            raise BaselineError(f"baselines are kept by the names of test files, and test_{suite}.py has none", "rename it")
        return path

    def get(self, device: str, suite: str, key: str) -> _Record | None:
        """Return the record of one case, None if there is none.

        Raises:
            BaselineError: the file is there but cannot be read.
        """
        return self.suite(device, suite).get(key)

    def suite(self, device: str, suite: str) -> Mapping[str, _Record]:
        """Return all records of a suite by key.

        Raises:
            BaselineError: as of `get`.
        """
        if (device, suite) not in self._files:
            self._files[device, suite] = self._load(self.path(device, suite), device)
        return self._files[device, suite]

    def other_devices(self, device: str, suite: str) -> list[str]:
        """Return other devices that have baselines of the suite."""
        files = self.folder.glob(f"*/{glob.escape(suite)}.json")
        return sorted(path.parent.name for path in files if path.parent.name != device)

    def check_writable(self) -> None:
        """Check before any measurement that baselines can be written below the folder.

        Raises:
            BaselineError: nothing can be written below the folder.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise BaselineError(
                f"baselines cannot be written to {self.folder} ({error.strerror})",
                "make it writable or choose another --gpu-baseline-dir",
            ) from error

    def update(self, device: str, suite: str, records: Mapping[str, _Record]) -> Path:
        """Merge ``records`` into their file, keep all others, and return the file.

        Raises:
            BaselineError: the present file cannot be read, or the new one cannot be written; nothing has changed then.
        """
        path = self.path(device, suite)
        try:
            with locked(path):
                before = self._load(path, device)
                updated = {key: self._merged(before.get(key), record) for key, record in records.items()}
                merged = {**before, **updated}
                self._forget(path, (key for key, record in updated.items() if record is not before.get(key)))
                sweep(path)
                write_atomically(path, self._encode(device, suite, merged))
        except OSError as error:
            raise BaselineError(f"cannot be written: {error.strerror or error}", path=path) from error
        self._files[device, suite] = merged
        self.unchanged[path] += sum(before.get(key) is record for key, record in updated.items())
        return path

    def remove(self, device: str, suite: str, keys: Iterable[str]) -> Path:
        """Remove records from their file, and the file with its last record. Return the file.

        Raises:
            BaselineError: as of `update`.
        """
        path = self.path(device, suite)
        try:
            with locked(path):
                gone = set(keys)
                kept = {key: record for key, record in self._load(path, device).items() if key not in gone}
                self._forget(path, gone)
                if kept:
                    write_atomically(path, self._encode(device, suite, kept))
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise BaselineError(f"cannot be written: {error.strerror or error}", path=path) from error
        self._files[device, suite] = kept
        return path

    def _forget(self, path: Path, keys: Iterable[str]) -> None:
        """Drop fields of a newer version for cases whose runs are replaced."""
        for key in keys:
            self._beside.pop((path, key), None)

    def rewritten(self, device: str, suite: str) -> bytes:
        """Return a file as `update` would write it again.

        Raises:
            BaselineError: it cannot be read.
        """
        return b"".join(self._encode(device, suite, self.suite(device, suite)))

    @abstractmethod
    def _record(self, device: str, case: Case, scale: Scale, entries: tuple[_Entry, ...]) -> _Record: ...
    @abstractmethod
    def _entries(self, record: _Record) -> tuple[_Entry, ...]:
        """Return the entries of a record that are kept."""

    @abstractmethod
    def _shared(self, entry: _Entry) -> Struct:
        """Return the part of an entry that it shares with others."""

    @abstractmethod
    def _own(self, entry: _Entry) -> dict[str, Any]:
        """Return the fields of an entry in the file, which may lack the part that it shares."""

    @abstractmethod
    def _stored(self, entries: Iterable[tuple[str, dict[str, Any]]]) -> Any:
        """Return the entries in the form of the file: each refers to what it shares, which comes before it."""

    @abstractmethod
    def _references(self, stored: Any) -> Iterable[tuple[Any, dict[str, Any]]]:
        """Return the entries from which `_stored` was made."""

    @abstractmethod
    def _joined(self, own: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
        """Return all fields of an entry, with those that it shares."""

    @abstractmethod
    def _is_possible(self, entry: _Entry) -> bool:
        """Tell whether the figures are possible. Counts below zero are found without this."""

    def _merged(self, before: _Record | None, new: _Record) -> _Record:
        """Return the new record merged into the old one. The old one stays as it is if no judged figure differs."""
        return new

    def _load(self, path: Path, device: str) -> dict[str, _Record]:
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError:
            pass  # the next line raises for a folder that may not be entered
        beside = self._beside[path, ""] = {}
        file = decode(path, self.file_type, self.what, unknown=beside)
        self.unknown[path] = set(beside)
        _, in_device, in_suite, shared, cases = msgspec.structs.astuple(file)
        if (in_device, in_suite) != (device, path.stem):
            remedy = "move it to where it belongs, or record again"
            raise BaselineError(f"says that it holds {in_suite} of {in_device}", remedy, path=path)
        for reference, fields in shared.items():
            refusal = partial(BaselineError, path=path, place=reference)
            _sound(fields, self.shared_type, f"{self.shared} {reference}", refusal)
        return {key: self._loaded(path, device, key, raw, shared) for key, raw in cases.items()}

    def _loaded(self, path: Path, device: str, key: str, raw: msgspec.Raw, shared: Mapping[str, Any]) -> _Record:
        refusal = partial(BaselineError, path=path, place=key)
        try:
            case, scale, stored = msgspec.structs.astuple(msgspec.json.decode(raw, type=self.case_type))
        except UNREADABLE as error:
            raise refusal(f"is not {self.what}: {error} in {key}", _remedy(error, _RESTORE)) from None

        def find(reference: Any) -> dict[str, Any]:
            if not isinstance(reference, str) or reference not in shared:
                raise refusal(f"refers to the {self.shared} {reference!r} in {key}, which it does not hold", _RESTORE)
            fields: dict[str, Any] = shared[reference]
            return fields

        what = f"{self.entry} for {key}"
        self._beside[path, key] = _unknown(raw, self.case_type)
        self.unknown[path] |= self._beside[path, key].keys()

        def entry_of(reference: Any, own: dict[str, Any]) -> _Entry:
            fields = self._joined(own, find(reference))
            entry = _sound(fields, self.entry_type, what, refusal)
            if lost := set(_lost(fields, entry)):
                self._as_read[id(entry)] = _AsRead(entry, own, find(reference))
                self.unknown[path] |= lost
            return entry

        entries = tuple(entry_of(reference, own) for reference, own in self._references(stored))
        if not entries:
            raise refusal(f"holds no {what}", _RECORD_ENTRY)
        if not all(self._is_possible(entry) and not _has_negative(msgspec.to_builtins(entry)) for entry in entries):
            raise refusal(f"holds impossible figures for {key}", _RESTORE_ENTRY)
        if key.endswith("@tiny") != (scale == "tiny"):
            raise refusal(f"gives {key} the scale {scale}", _RESTORE_ENTRY)
        return self._record(device, case, scale, entries)

    def _encode(self, device: str, suite: str, records: Mapping[str, _Record]) -> Iterator[bytes]:
        """Yield the text of the file in parts, so that memory holds the text of one case at a time."""
        path = self.path(device, suite)
        shared = {_digest(part): part for record in records.values() for part in map(self._part, self._entries(record))}
        frame = msgspec.structs.asdict(self.file_type(FORMAT, device, suite, dict(sorted(shared.items())), {}))
        *_, cases_name = frame
        frame |= {**self._beside.get((path, ""), {}), cases_name: frame.pop(cases_name)}  # The cases stay the last key.
        stored = ({**self._stored_case(records[key]), **self._beside.get((path, key), {})} for key in sorted(records))
        cases = map(json_text.item, stored, sorted(records))
        return (json_text.short_rows(json_text.short_lists(part)) for part in json_text.document(frame, cases))

    def _part(self, entry: _Entry) -> Struct | dict[str, Any]:
        """Return the part of an entry that it shares with others, with fields that a newer version has added."""
        as_read = self._as_read.get(id(entry))
        return as_read.shared if as_read else self._shared(entry)

    def _stored_case(self, record: _Record) -> dict[str, Any]:
        entries = []
        for entry in self._entries(record):
            as_read = self._as_read.get(id(entry))
            entries.append((_digest(self._part(entry)), as_read.own if as_read else self._own(entry)))
        return msgspec.structs.asdict(self.case_type(record.case, record.scale, self._stored(entries)))


class _StoredCase(Struct):
    case: Case
    scale: Scale
    runs: list[dict[str, Any]]
    """Fields of `BaselineRun`, its environment by reference."""


class _File(Struct):
    format: int
    device: str
    suite: str
    environments: dict[str, Any]
    """Fields of `Environment`."""
    cases: dict[str, msgspec.Raw]
    """Each a `_StoredCase`; in this form they need the least memory until they are looked at."""


class BaselineStore(SuiteStore[Baseline, BaselineRun]):
    """The measured baselines. An update replaces all runs of a case if a judged figure differs."""

    what = "a baseline file"
    entry = "run"
    shared = "environment"
    file_type = _File
    case_type = _StoredCase
    entry_type = BaselineRun
    shared_type = Environment

    def _record(self, device: str, case: Case, scale: Scale, entries: tuple[BaselineRun, ...]) -> Baseline:
        return Baseline(device=device, case=case, scale=scale, runs=entries)

    def _entries(self, record: Baseline) -> tuple[BaselineRun, ...]:
        return record.runs[-MAX_RUNS:]

    def _shared(self, entry: BaselineRun) -> Environment:
        return entry.environment

    def _own(self, entry: BaselineRun) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(entry)
        return fields

    def _stored(self, entries: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        return [{**own, "environment": reference} for reference, own in entries]

    def _references(self, stored: list[dict[str, Any]]) -> Iterable[tuple[Any, dict[str, Any]]]:
        return ((own.get("environment"), own) for own in stored)

    def _joined(self, own: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
        return {**own, "environment": shared}

    def _merged(self, before: Baseline | None, new: Baseline) -> Baseline:
        return before if before is not None and _judged(before) == _judged(new) else new

    def _is_possible(self, entry: BaselineRun) -> bool:
        times = entry.step_seconds if entry.one_worker_seconds is None else (*entry.step_seconds, entry.one_worker_seconds)
        is_whole = bool(entry.step_seconds) and entry.peak_allocated_bytes is not None
        is_share = entry.core_wait_share is None or entry.core_wait_share <= 1
        return is_share and all(0 < seconds < math.inf for seconds in times) and (is_whole or entry.outcome != "measured")


def _judged(baseline: Baseline) -> tuple[object, ...]:
    """Return the fields of a baseline that the gate judges or reports. Seconds on a CPU count only with enough runs."""
    on_cpu = all(run.environment.device_type == "cpu" for run in baseline.runs)
    left_out = {"peak_host_bytes", "free_bytes", "date", "session", "commit", "core_wait_share"}
    # Memory on a CPU does not depend on the host. On a GPU a verdict names what has changed on the host.
    left_out |= {"environment"} if on_cpu else set()
    left_out |= (
        {"step_seconds", "one_worker_seconds", "warmup"} if on_cpu and len(baseline.runs) < LEAST_RUNS_ON_A_CPU else set()
    )
    kept = [name for name in BaselineRun.__struct_fields__ if name not in left_out]
    runs = [
        (run.environment.device_type, run.environment.device_count, *(getattr(run, name) for name in kept))
        for run in baseline.runs[-MAX_RUNS:]
    ]
    return baseline.case, baseline.scale, runs


def decode(
    path: Path,
    type_: type[_Type],
    what: str,
    remedy: str = _RESTORE,
    *,
    edited: bool = True,
    unknown: dict[str, Any] | None = None,
) -> _Type:
    """Return the record of ``type_`` in a file.

    Args:
        what: the kind of file, in a sentence.
        edited: whether people edit and merge such files, so that names may stand twice. What only a program writes may be
            large, and come from a pipe.
        unknown: a dictionary to which the fields of the file are added that ``type_`` does not have.

    Raises:
        BaselineError: the file is not ``what``. The message names the place of the error.
    """
    refusal = partial(BaselineError, path=path)
    try:
        data = read_whole(path, pipe=not edited)
    except OSError as error:
        raise refusal(f"cannot be read: {error.strerror}") from error
    if markers := conflicts(data):
        lines = ", ".join(map(str, markers[:_MOST_LINES_SHOWN])) + (", ..." if len(markers) > _MOST_LINES_SHOWN else "")
        raise refusal(f"holds merge-conflict markers (lines {lines})", "resolve them, or take one side and record again")
    if data.startswith(_BYTE_ORDER_MARKS):
        raise refusal("begins with a byte-order mark", f"save it as UTF-8 without one, or {remedy}")
    try:
        version = msgspec.json.decode(data, type=_Versioned).format
        if edited and (repeated := json_text.repeated_names(data)):
            raise refusal(f"has {repeated[0]} twice in one object", "delete one of them", place=repeated[0])
        if version == FORMAT:
            if unknown is not None:
                unknown |= _unknown(data, type_)
            return msgspec.json.decode(data, type=type_)
    except UNREADABLE as error:
        offset = re.search(r"(?:\(byte|in position) (\d+)", str(error))
        place = int(offset[1]) if offset else None
        raise refusal(f"is not {what}: {error}", _remedy(error, remedy), place=place) from None
    remedy = f"{NEWER}, or {remedy}" if version > FORMAT else remedy
    raise refusal(f"has format {version}, this version reads format {FORMAT}", remedy)


class _Versioned(Struct):
    format: int


def _remedy(error: Exception, remedy: str) -> str:
    return f"{NEWER}, or {remedy}" if "unknown field" in str(error) else remedy


def _sound(fields: Any, type_: type[_Type], what: str, refusal: Callable[..., BaselineError]) -> _Type:
    """Check that the fields make a record, which need not have all fields."""
    try:
        return msgspec.convert(fields, type_)
    except msgspec.ValidationError as error:
        raise refusal(f"is not valid in the {what}: {error}", _RESTORE) from None


def _unknown(data: bytes | msgspec.Raw, type_: Any) -> dict[str, Any]:
    """Return the fields of a JSON object that a record of ``type_`` lacks."""
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    return {name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in type_.__struct_fields__}


def _lost(before: Any, after: Any) -> Iterator[str]:
    """Yield the names in JSON that the record made from it does not have as fields."""
    if isinstance(after, Struct):
        config = type(after).__struct_config__
        named: dict[str, Any] = {**msgspec.structs.asdict(after), str(config.tag_field): config.tag}
        after = msgspec.structs.astuple(after) if config.array_like else named
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            if name in after:
                yield from _lost(value, after[name])
            else:
                yield name
    elif isinstance(before, list) and isinstance(after, list | tuple):
        for value, made in zip(before, after, strict=False):
            yield from _lost(value, made)


def _has_negative(value: Any) -> bool:
    """Tell whether a value contains a count below zero."""
    if isinstance(value, dict):
        return any(map(_has_negative, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_negative, value))
    return isinstance(value, int) and value < 0


def _digest(part: Struct | dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(part, order="sorted")).hexdigest()[:8]
