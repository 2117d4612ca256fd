"""Runs the command ``gputrain check-baselines``, which checks a committed folder of baselines without running a case.

It finds what merges and editors do to JSON: markers of a conflict, names twice, entries that are half of one
run and half of another, in another order or form than an update writes, and files where no run looks for them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_gputrain.cases.identity import suite_of
from pytest_gputrain.cli import baseline_changes
from pytest_gputrain.gate.messages import count
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.records import Baseline, Case, knob_text
from pytest_gputrain.storage import emulated, published
from pytest_gputrain.storage.baselines import NEWER, BaselineError, BaselineStore, SuiteStore
from pytest_gputrain.utils import console, markdown
from pytest_gputrain.utils.files import conflicts
from pytest_gputrain.utils.git import files_of_repository, in_ci
from pytest_gputrain.utils.json_text import repeated_names
from pytest_gputrain.utils.reading import read_whole
from pytest_gputrain.utils.sanitize import shown


class Problem(NamedTuple):
    """A problem in a file, with its line."""

    path: Path
    line: int
    sentence: str
    error: bool = True

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {'' if self.error else 'warning: '}{self.sentence}"


def add_to(commands: Any) -> None:
    check = commands.add_parser(
        "check-baselines",
        help="check the files of a folder of baselines",
        description="Check the files of a folder of baselines, and print a line for each problem. The exit status is 1 "
        "if there "
        "is one.",
    )
    check.add_argument(
        "folder", nargs="?", type=Path, default=Path("baselines"), metavar="DIR", help="the folder (default: baselines)"
    )
    check.add_argument(
        "--since",
        metavar="COMMIT",
        help="also list every baseline that was raised or removed, or became another outcome, since this commit",
    )
    check.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="exit with status 1 if a baseline was removed or became another outcome since then (default: if CI is set)",
    )
    check.add_argument(
        "--format", choices=("terminal", "markdown"), default="terminal", help="the format of that list (default: terminal)"
    )


def main(options: argparse.Namespace) -> int:
    """Print the problems. Return 0, 1 if there is one, or 2 if there is no such folder."""
    folder: Path = options.folder
    if not folder.is_dir():
        console.say(f"there is no folder {folder}: record one with `pytest benchmarks --gpu-baseline-update`, or name yours")
        return 2
    problems = [*check(folder), *_without_tests(folder)]
    for problem in problems:
        console.put(shown(str(problem)))
    lost = False
    if options.since is not None:
        try:
            lost = _list_changes(options)
        except ValueError as error:
            console.say(error)
            return 2
    strict = in_ci() if options.strict is None else options.strict
    return int(any(problem.error for problem in problems) or (strict and lost))


def _list_changes(options: argparse.Namespace) -> bool:
    """Print what has changed since a commit. Return whether something was removed or changed its kind.

    Raises:
        ValueError: there is no such commit.
    """
    changes = list(baseline_changes.since(options.since, options.folder))
    lost = sum(bool(change.what.lost) for change in changes)
    summary = f"since {options.since}: {count(lost, 'baseline')} removed or changed in kind, {len(changes) - lost} raised"
    lines = [summary, *map(str, changes)] if changes else [f"since {options.since}: no baseline lets more pass"]
    if options.format == "markdown":
        lines = [f"## {markdown.escaped(lines[0])}", "", *(f"- {markdown.escaped(line)}" for line in lines[1:])]
    for line in lines:
        console.put(shown(line))
    return bool(lost)


def check(folder: Path) -> Iterator[Problem]:
    """Yield the problems of the files below ``folder``, in the order of the files."""
    tables_are_sound = True
    unreadable: list[OSError] = []
    for path in _files(folder, unreadable):
        folders = path.relative_to(folder).parts[:-1]
        try:
            problems = _damage(path) or list(_of_kind(folder, path, folders))
        except OSError as error:
            problems = [Problem(path, 1, f"it cannot be read: {error.strerror}")]
        except BaselineError as error:
            problems = [_refused(path, error)]
        tables_are_sound = tables_are_sound and not (problems and folders == (published.FOLDER,))
        yield from problems
    yield from (Problem(Path(error.filename), 1, f"it cannot be read: {error.strerror}") for error in unreadable)
    tables = folder / published.FOLDER
    if tables_are_sound and any(tables.glob("*.json")):
        try:
            published.PublishedStore(tables)
        except BaselineError as error:  # One table contradicts another one.
            yield _refused(tables, error)


def _files(folder: Path, unreadable: list[OSError]) -> list[Path]:
    """Return all paths below the folder that may be files. Errors of unreadable folders are added to ``unreadable``."""
    walked = os.walk(folder, onerror=unreadable.append)
    return sorted(Path(at, name) for at, folders, names in walked for name in folders + names if name.endswith(".json"))


def _without_tests(folder: Path) -> Iterator[Problem]:
    """Yield the files of suites without a test file in the repository; none if no suite has one."""
    tests = {suite_of(path) for path in files_of_repository(folder) if path.suffix == ".py"}
    files = [path for path in _files(folder, []) if path.parent.name != published.FOLDER]
    if tests.isdisjoint(path.stem for path in files):
        return
    for path in files:
        if path.stem not in tests:
            sentence = (
                f"no test asks for these any more: there is no test_{path.stem}.py; delete the file, or restore the test"
            )
            yield Problem(path, 1, sentence)


def _of_kind(folder: Path, path: Path, folders: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of a file of measured baselines, emulated runs or published figures, whichever its folder is
    for."""
    match folders:
        case [published.FOLDER]:
            published.load(path)
        case [device] if device != emulated.EMULATED:
            measured = BaselineStore(folder)
            yield from _entries(path, measured, device)
            yield from _sessions(path, device, list(measured.suite(device, path.stem).values()))
        case [emulated.EMULATED, platform]:
            yield from _entries(path, emulated.EmulationStore(folder), platform)
        case _:
            yield Problem(path, 1, _MISPLACED)


_MISPLACED: Final = (
    "no run looks for a baseline here, but in <device>/, emulated/<platform>/ and published/; move it, or delete it"
)
_RECORD_AGAIN: Final = "record again, or restore it from git"


def _damage(path: Path) -> list[Problem]:
    """Return problems after which other checks mean nothing: markers of a merge, and names that occur twice in one
    object."""
    data = read_whole(path)
    if markers := conflicts(data):
        return [Problem(path, line, "a merge-conflict marker; take one side, or record again") for line in markers]
    try:
        repeated = repeated_names(data)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return [Problem(path, line, f"it is not UTF-8 ({error.reason}: {data[error.start]:#x}); {_RECORD_AGAIN}")]
    except json.JSONDecodeError as error:
        return [Problem(path, error.lineno, f"not JSON: {error.msg} in column {error.colno}; {_RECORD_AGAIN}")]
    # A number of thousands of digits raises ValueError, and deeply nested lists raise RecursionError.
    except (ValueError, RecursionError) as error:
        return [Problem(path, 1, f"JSON that cannot be read: {error}; {_RECORD_AGAIN}")]
    return [
        Problem(path, _line_of_name(data, name, last=True), f"{name} occurs here a second time; delete one of them")
        for name in repeated
    ]


def _entries(path: Path, store: SuiteStore[Any, Any], device: str) -> Iterator[Problem]:
    """Yield a problem for each key that is not the id of its case, for each unknown field, and for text that no update
    writes."""
    data = read_whole(path)
    for key, record in store.suite(device, path.stem).items():
        if not _is_name(key.removesuffix("@tiny") if record.scale == "tiny" else key, record.case):
            sentence = f"{key} is not the name of the case in it, {record.case}, so no run finds it; {_RECORD_AGAIN}"
            yield Problem(path, _line_of_name(data, key), sentence)
    for name in sorted(store.unknown[store.path(device, path.stem)]):
        sentence = f"{name!r} is unknown to this version, which ignores and keeps it; {NEWER}, or take it out"
        yield Problem(path, _line_of_name(data, name), sentence, error=False)
    yield from _form(path, store.rewritten(device, path.stem))


def _is_name(key: str, case: Case) -> bool:
    """Tell whether ``key`` is an id of ``case``. An id may contain any of its knobs.

    How many steps were run may be in the id, but is not kept with the case.
    """
    rest = key.removeprefix(str(case)) if key.startswith(str(case)) else "?"
    while rest:
        match = re.match(r"-(\w+)=", rest)
        if match is None or match[1] not in Case.__struct_fields__:
            return False
        value = knob_text(getattr(case, match[1]))
        named = re.match(rf"-{match[1]}=" + (r"\d+" if match[1] in ("steps", "warmup") else re.escape(value)), rest)
        if named is None:
            return False
        rest = rest[named.end() :]
    return True


def _form(path: Path, expected: bytes) -> Iterator[Problem]:
    """Compare a file with what an update would write."""
    present = read_whole(path)
    if present == expected:
        return
    lines, wanted = present.splitlines(), expected.splitlines()
    first_difference = next(
        (index for index, (line, wanted_line) in enumerate(zip(lines, wanted, strict=False)) if line != wanted_line), None
    )
    index = min(len(lines), len(wanted)) if first_difference is None else first_difference
    instead = wanted[index].decode().strip() if index < len(wanted) else "the end of the file"
    yield Problem(path, index + 1, f"not as an update writes it, which has {instead} here: was it edited? {_RECORD_AGAIN}")


def _sessions(path: Path, device: str, stored: Sequence[Baseline]) -> Iterator[Problem]:
    """Warn of cases whose runs all come from one session, which does not show how much days differ.

    A CPU gets no warning: its memory is exact, and its time is not judged.
    """
    alone = [entry for entry in stored if len(entry.runs) > 1 and len({run.session for run in entry.runs}) == 1]
    if alone and device != CPU:
        sentence = (
            f"all runs of {count(len(alone), 'case')} come from one session each, so they do not show how much days differ"
        )
        yield Problem(path, 1, sentence, error=False)


def _line_of_name(data: bytes, name: str, *, last: bool = False) -> int:
    """Return the number of the first line, or of the ``last``, that has ``name`` as a key of JSON; 1 if none has."""
    quoted = re.escape(json.dumps(name, ensure_ascii=False).encode(errors="backslashreplace"))
    offsets = [match.start() for match in re.finditer(quoted + rb"\s*:", data)]
    return data.count(b"\n", 0, offsets[-1 if last else 0]) + 1 if offsets else 1


def _refused(path: Path, error: BaselineError) -> Problem:
    """Return why a store refuses a file, with the line. ``path`` is shown if the store names no file."""
    file, line = error.path or path, 1
    if isinstance(error.place, int):
        line += read_whole(file).count(b"\n", 0, error.place)
    elif error.place is not None:
        line = _line_of_name(read_whole(file), error.place)
    return Problem(file, line, error.without_path)
