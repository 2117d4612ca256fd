"""Reads published tables, as the only module: ``<baseline-dir>/published/<table>.json``, or those that come with the
package.

A file holds one document's table: where it is from, what it was made with on each platform, and every row with its cells as
printed. The figures of a row are those of its cells, in numbers with their rounding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from pytest_gputrain.records import Case, Published
from pytest_gputrain.records.published import Figure, Figures
from pytest_gputrain.storage.baselines import BaselineError, decode

FOLDER: Final = "published"
GATED: Final = "pytorch"
"""The framework whose figures are the gate: what this package trains with."""

_SHIPPED: Final = Path(__file__).with_name("published_tables")
_CLONE: Final = Path(__file__).parents[2] / "baselines" / FOLDER
_REMEDY: Final = "restore it from git"


class Column(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A column of a table."""

    header: str
    english: str = ""
    """Translation, where the header is not English."""

    @property
    def title(self) -> str:
        return self.english or self.header


class Source(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document in which a table was published."""

    document: str
    repository: str
    url: str


class Setup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The software and hardware of the rows of one platform, as far as the document names them."""

    hardware: str
    software: dict[str, str]
    """Version by name."""
    conditions: tuple[str, ...] = ()
    topology: tuple[str, ...] = ()
    """Lines of ``nvidia-smi topo -m``."""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.software.items() if name != "os")
        return f"{versions} on {self.hardware}" if versions else self.hardware


class Epoch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of whole epochs in a table."""

    samples: int
    """The samples of one epoch, over all GPUs."""
    column: str
    """Header of the column that has its time."""


class _Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    suite: str
    platform: str
    case: Case
    cells: dict[str, str]
    outcome: Literal["measured", "out_of_memory", "error"]
    figures: dict[Literal["pytorch", "paddle"], Figures]
    time_not_judged: str = ""
    memory_not_judged: str = ""


class PublishedTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures that one document has published."""

    format: int
    name: str
    title: str
    source: Source
    memory: str
    """The kind of memory that is printed, and the figure that is compared with it."""
    notes: tuple[str, ...]
    columns: tuple[Column, ...]
    platforms: dict[str, Setup]
    """The platforms by catalog marker."""
    epoch: Epoch | None = None
    """The epoch; None if the table prints no time of an epoch."""
    rows: tuple[_Row, ...]

    def published(self, platform: str | None = None) -> tuple[Published, ...]:
        """Return the rows, or those of one platform, in the order of the document."""
        return tuple(
            Published(
                table=self.name,
                suite=row.suite,
                platform=row.platform,
                case=row.case,
                outcome=row.outcome,
                cells=row.cells,
                figures={str(framework): figures for framework, figures in row.figures.items()},
                made_with=str(self.platforms[row.platform]),
                time_not_judged=row.time_not_judged,
                memory_not_judged=row.memory_not_judged,
            )
            for row in self.rows
            if platform in (None, row.platform)
        )


class PublishedStore:
    """All published tables of a folder."""

    def __init__(self, folder: Path) -> None:
        """Load the tables.

        Raises:
            BaselineError: a table is damaged, or there is none.
        """
        self.folder = folder
        self.tables = tuple(load(path) for path in sorted(folder.glob("*.json")))
        if not self.tables:
            raise BaselineError(f"there is no published table in {folder}", "restore the folder from git")
        self._rows: dict[tuple[str, str, str], Published] = {}
        for table in self.tables:
            for row in table.published():
                row_key = (row.platform, row.suite, str(row.case))
                other = self._rows.setdefault(row_key, row)
                if other is not row:
                    problem = f"has {row.case} on {row.platform}, which {other.table} has before it"
                    raise BaselineError(
                        problem, "delete one of them", path=folder / f"{table.name}.json", place=row.platform
                    )

    @classmethod
    def beside(cls, baseline_dir: Path) -> PublishedStore:
        """Return the tables in ``baseline_dir``, or those of this package if it has none.

        Raises:
            BaselineError: as above.
        """
        folders = (baseline_dir / FOLDER, _SHIPPED, _CLONE)
        return cls(next((folder for folder in folders if os.path.isdir(folder)), folders[0]))

    def get(self, platform: str, suite: str, key: str) -> Published | None:
        """Return what was published for a case; None if nothing was."""
        return self._rows.get((platform, suite, key))

    def platforms_of(self, suite: str, key: str) -> list[str]:
        """Return the platforms for which a case was published."""
        return sorted(platform for platform, *suite_and_key in self._rows if suite_and_key == [suite, key])


def load(path: Path) -> PublishedTable:
    """Load the table in a file.

    Raises:
        BaselineError: it is no sound table.
    """
    table = decode(path, PublishedTable, "a published table", _REMEDY)
    if table.name != path.stem:
        raise BaselineError(f"says that it is {table.name}", _REMEDY, path=path)
    headers = [column.header for column in table.columns]
    if table.epoch is not None and (table.epoch.samples < 1 or table.epoch.column not in headers):
        raise BaselineError("has no such epoch or no column for its time", _REMEDY, path=path)
    for row in table.rows:
        if trouble := _trouble(row, f"{row.case} on {row.platform}", headers, table.platforms):
            raise BaselineError(trouble, _REMEDY, path=path, place=row.platform)
    return table


def _trouble(row: _Row, name: str, headers: Sequence[str], platforms: Container[str]) -> str:
    if row.platform not in platforms:
        return f"has {name}, of which it says nothing else"
    if list(row.cells) != headers:
        return f"has {name} in other columns than its own"
    if not all(_is_sound(figure) for figures in row.figures.values() for figure in _figures(figures)):
        return f"holds impossible figures for {name}"
    return ""


def _figures(figures: Figures) -> list[Figure]:
    values: list[Any] = [getattr(figures, name) for name in figures.__struct_fields__]
    return [value for value in values if value is not None]


def _is_sound(figure: Figure) -> bool:
    return figure.least > 0 and figure.low <= figure.high < math.inf and figure.rounding > 0
