"""Finds the baselines that were raised, removed or changed in kind since a commit, for ``check-baselines --since``."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pytest_gputrain.gate.baseline_changes import Loosened, loosened
from pytest_gputrain.storage import emulated, published
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore, SuiteStore
from pytest_gputrain.utils import git


class Changed(NamedTuple):
    """An entry that lets more pass than before."""

    name: str
    """Its file below the folder of baselines, and its key; of a file that cannot be compared, the file."""
    what: Loosened

    def __str__(self) -> str:
        return f"{self.name}: {', '.join((*self.what.lost, *self.what.raised))}"


def since(reference: str, folder: Path) -> Iterator[Changed]:
    """Yield the entries in the folder that let more pass than at a commit.

    Raises:
        ValueError: there is no such commit, or no repository.
    """
    with tempfile.TemporaryDirectory(prefix="gputrain-since-") as name:
        before = Path(name)
        archive = git.archive(folder, reference)
        if archive:
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(before, filter="data")
        for store_type in (BaselineStore, emulated.EmulationStore):
            yield from _of_store(store_type(before), store_type(folder))
        yield from _of_tables(before / published.FOLDER, folder / published.FOLDER)


def _of_store(before: SuiteStore[Any, Any], now: SuiteStore[Any, Any]) -> Iterator[Changed]:
    for path in sorted(before.folder.glob("*/*.json")):
        device, suite = path.parent.name, path.stem
        if not before.parent and device in (emulated.EMULATED, published.FOLDER):
            continue
        file = "/".join((*before.parent, device, f"{suite}.json"))
        try:
            entries_before = before.suite(device, suite)
        except BaselineError as error:
            yield Changed(file, Loosened((), (f"not compared, because the earlier file {error.without_path}",)))
            continue
        try:
            entries = now.suite(device, suite)
        except BaselineError as error:
            yield Changed(file, Loosened((), (f"not compared, because the file {error.without_path}",)))
            continue
        for key, entry in entries_before.items():
            what = loosened(entry, entries.get(key))
            if what.raised or what.lost:
                yield Changed(f"{file} {key}", what)


def _of_tables(before: Path, now: Path) -> Iterator[Changed]:
    """Return the changes of published tables. Every change of a row is named, because its figures are copied from a
    document."""
    for path in sorted(before.glob("*.json")):
        file = f"{published.FOLDER}/{path.name}"
        try:
            rows_before = {(row.platform, row.suite, str(row.case)): row for row in published.load(path).published()}
            present = published.load(now / path.name).published() if (now / path.name).exists() else ()
        except BaselineError as error:
            yield Changed(file, Loosened((), (f"not compared: {error.without_path}",)))
            continue
        rows = {(row.platform, row.suite, str(row.case)): row for row in present}
        for key, row in rows_before.items():
            name = f"{file} {' '.join(key)}"
            if key not in rows:
                yield Changed(name, Loosened((), ("removed",)))
            elif (rows[key].figures, rows[key].outcome, rows[key].time_not_judged) != (
                row.figures,
                row.outcome,
                row.time_not_judged,
            ):
                yield Changed(name, Loosened((), ("other figures than before",)))
