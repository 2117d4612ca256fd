"""Compares the memory of emulated GPUs with published figures, for the rows of a single GPU that print any.

    python tools/compare_published.py --results FILE [TABLE ...] [--platform MARKER] [--only TEXT] [--markdown]

Each row runs at full size on an emulated GPU, in half a minute, by a program that trains as the published one did
(published_llm.py, published_pangu.py). FILE keeps the figures, so that a run that was ended goes on where it was. Figures
of other conditions are replaced. Delete FILE if this package has changed.

One set of conditions holds for all rows of a table, and is printed with them; nothing is tuned for a row. The libraries are
a part of the conditions. Exits with 1 where the goals are missed: a median error of 1.5 %, a worst one of 3.6 %, and every
call of fits or out of memory right.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.cases.libraries import versions
from pytest_gputrain.execution.emulated import EmulatingExecutor
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.hardware.emulation import boards
from pytest_gputrain.hardware.emulation.boards import CONTEXT_BYTES
from pytest_gputrain.records import Case, EmulatedRun, Limit, Published, Task
from pytest_gputrain.session.tasks import full_size_task
from pytest_gputrain.storage.published import GATED, load
from pytest_gputrain.utils.errors import BadCase, CannotEmulate
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.markdown import table
from pytest_gputrain.utils.reading import UNREADABLE
from pytest_gputrain.utils.units import GiB, MiB, format_percent

MEDIAN_GOAL: Final = 0.015
WORST_GOAL: Final = 0.036

TOOLS: Final = Path(__file__).resolve().parent
TABLES: Final = TOOLS.parent / "baselines" / "published"


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that a document leaves out, but that follow from its program or its other figures;
    docs/how-true.md has the evidence."""

    read_as: str
    """The unit of the printed figures."""
    context_bytes: int
    """The memory that the driver takes for itself."""
    packages: dict[str, str]
    """The versions of libraries that must be installed."""
    accumulation: int
    """The most micro-batches of an update. A row that has more runs with so many, which takes less time."""
    updates: int
    """The updates of a row that accumulates so many, after a first one."""
    variables: dict[str, str] = {}
    """Environment variables that the program sets."""
    program: str
    """The file beside this one whose function ``train`` trains as the published program did."""

    def __str__(self) -> str:
        parts = (
            f"figures read as {self.read_as}",
            f"context of {self.context_bytes // MiB} MiB counted",
            *(f"{name} {version}" for name, version in self.packages.items()),
            *(f"{name}={value}" for name, value in self.variables.items()),
            self.program,
        )
        return ", ".join(parts)


CONDITIONS: Final = {
    "llm-trainer": Conditions(
        read_as="thousands of MiB, printed as GiB",
        context_bytes=600 * MiB,
        packages={"torch": "2.11.0", "transformers": "4.49.0", "peft": "0.14.0", "bitsandbytes": "0.50.2"},
        variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        program="published_llm.py",
        accumulation=4,
        updates=1,
    ),
    "pangu-deepspeed": Conditions(
        read_as="MiB, printed as MB",
        context_bytes=1343 * MiB,
        packages={"torch": "2.11.0"},
        program="published_pangu.py",
        accumulation=8,
        updates=2,
    ),
}
"""The conditions of the tables that print the memory of a single GPU.

The allocator of torch 2.11 is the newest that takes the lower of two free blocks of one
size, as those of the documents did."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a row on an emulated GPU, as the file of results keeps them."""

    table: str
    platform: str
    case: str
    conditions: Conditions
    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure, and the one of an emulated GPU, both in bytes as nvidia-smi would show them."""

    platform: str
    case: Case
    published: float | None
    """The published figure; None if it ran out of memory."""
    emulated: float = 0.0
    fits: bool | None = None
    """Whether it fits the emulated GPU; None if there is no figure."""
    failure: str = ""
    """Why there is no figure."""

    @property
    def right(self) -> bool:
        return self.fits is not None and self.fits == (self.published is not None)

    @property
    def error(self) -> float | None:
        return self.emulated / self.published - 1 if self.published and self.fits else None

    @property
    def call(self) -> str:
        if self.fits is None:
            return f"NO FIGURE: {self.failure}"
        return ("fits" if self.fits else "out of memory") + ("" if self.right else " (WRONG)")

    @property
    def cell(self) -> str:
        """Emulated / published, in GiB, and what follows from them."""
        published = "out of memory" if self.published is None else f"{self.published / GiB:.1f}"
        emulated = f"{self.emulated / GiB:.1f}" if self.fits else "out of memory" if self.fits is False else "none"
        verdict = self.call if self.error is None else format_percent(self.error)
        return f"{emulated} / {published}: {verdict}"

    def __str__(self) -> str:
        return f"{PLATFORMS[self.platform].title:12} {self.case!s:44} {self.cell}"


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown table: a line for each case, a column for each platform."""
    platforms = list(dict.fromkeys(row.platform for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(str(row.case), {})[row.platform] = row.cell
    headers = ["emulated / published, GiB", *(PLATFORMS[platform].title for platform in platforms)]
    return table(headers, [[case, *(of.get(platform, "") for platform in platforms)] for case, of in cells.items()])


def published_rows(name: str, platform: str, only: str) -> Iterator[Published]:
    """Yield the rows of a table that have the memory of one GPU, or ran out of it."""
    for row in load(TABLES / f"{name}.json").published(platform or None):
        figures = row.figures.get(GATED)
        has_memory = figures is not None and figures.device_used_bytes is not None
        if row.case.parallel == "single" and only in str(row.case) and (has_memory or row.outcome == "out_of_memory"):
            yield row


def task_of(row: Published, conditions: Conditions) -> Task:
    """Make the task of a row under the conditions of its table."""
    published = row.case
    case = Case(
        model="train",
        method="custom",
        code=f"{conditions.program}::train",
        args=msgspec.json.encode({"size": published.model, "method": published.method}).decode(),
        precision=published.precision,
        batch_size=published.batch_size,
        sequence_length=published.sequence_length,
        gradient_accumulation=min(published.gradient_accumulation, conditions.accumulation),
        tf32=published.tf32,
        warmup=1,
        steps=conditions.accumulation * conditions.updates,
    )
    board = boards.board(row.platform)
    return msgspec.structs.replace(
        full_size_task(case, TOOLS, emulated=row.platform),
        counts=False,
        memory_only=True,
        # The emulated driver takes its own context from this, where the published one took less or more.
        limit=Limit(bytes=board.memory_bytes + CONTEXT_BYTES - conditions.context_bytes),
    )


class Emulations:
    """The figures of rows on emulated GPUs, which a file keeps.

    Args:
        file: of the results. It need not be there.

    Raises:
        OSError, ValueError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        kept = msgspec.json.decode(file.read_bytes(), type=list[Outcome]) if file.exists() else []
        self._kept = {(outcome.table, outcome.platform, outcome.case): outcome for outcome in kept}

    def outcome(self, row: Published, conditions: Conditions) -> Outcome:
        """Return the figures of a row.

        Raises:
            BadCase, CannotEmulate: there are none; one sentence.
        """
        key = (row.table, row.platform, str(row.case))
        if key not in self._kept or self._kept[key].conditions != conditions:
            self._kept[key] = self._run(row, conditions)
            write_atomically(self._file, msgspec.json.format(msgspec.json.encode([*self._kept.values()]), indent=1))
        return self._kept[key]

    @staticmethod
    def _run(row: Published, conditions: Conditions) -> Outcome:
        executor = EmulatingExecutor(row.platform, 900, {**os.environ, **conditions.variables}, ForkServer())
        try:
            reply = executor.run(task_of(row, conditions), watch=lambda event: None)
        finally:
            executor.close()
        if not isinstance(reply, EmulatedRun):
            raise BadCase(f"{row.case} {describe_failure(reply, 'figures on an emulated GPU')}")
        return Outcome(
            table=row.table,
            platform=row.platform,
            case=str(row.case),
            conditions=conditions,
            fits=reply.fits,
            peak_allocated_bytes=reply.peak_allocated_bytes,
            peak_reserved_bytes=reply.peak_reserved_bytes,
        )


def compared(row: Published, conditions: Conditions, emulations: Emulations) -> Row:
    """Compare a row with its figures on an emulated GPU."""
    figures = row.figures.get(GATED)
    figure = figures.device_used_bytes if figures else None
    here = Row(platform=row.platform, case=row.case, published=None if figure is None else figure.low)
    try:
        outcome = emulations.outcome(row, conditions)
    except (BadCase, CannotEmulate) as error:
        return dataclasses.replace(here, failure=str(error))
    return dataclasses.replace(here, emulated=outcome.peak_reserved_bytes + conditions.context_bytes, fits=outcome.fits)


def summary(rows: Sequence[Row]) -> tuple[str, bool]:
    """Return one line, and whether the goals are reached."""
    errors = [abs(row.error) for row in rows if row.error is not None]
    wrong = sum(not row.right for row in rows)
    calls = f"{len(rows) - wrong} of {len(rows)} calls of fits or out of memory right"
    if not errors:
        return calls, not wrong
    median, mean, worst = statistics.median(errors), statistics.mean(errors), max(errors)
    text = f"{len(errors)} figures: median error {median:.2%}, mean {mean:.2%}, worst {worst:.2%}; {calls}"
    return text, median <= MEDIAN_GOAL and worst <= WORST_GOAL and not wrong


def lacking(packages: dict[str, str]) -> list[str]:
    """Find the libraries that are not installed in these versions, as pip names them."""
    installed = versions()
    return [f"{name}=={version}" for name, version in packages.items() if installed.get(name) != version]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(CONDITIONS), metavar="TABLE", help=f"of {', '.join(CONDITIONS)}")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="keeps the figures")
    parser.add_argument("--platform", default="", help="rows of one platform only")
    parser.add_argument("--only", default="", help="rows whose id has this in it")
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown for each document")
    given = parser.parse_args(arguments)
    for name in given.tables:
        if name not in CONDITIONS:
            parser.error(f"no table {name} prints the memory of a single GPU; choose of {', '.join(CONDITIONS)}")
        if wanted := lacking(CONDITIONS[name].packages):
            parser.error(f"{name} is compared with other libraries than are installed; install {' '.join(wanted)}")
    try:
        emulations = Emulations(given.results)
    except (OSError, *UNREADABLE) as error:
        parser.error(f"{given.results} holds no results of this tool ({error}); name another file")
    rows: list[Row] = []
    for name in given.tables:
        of_table = []
        print(f"{name}: {CONDITIONS[name]}.\n")
        for published in published_rows(name, given.platform, given.only):
            of_table.append(compared(published, CONDITIONS[name], emulations))
            if not given.markdown:
                print(of_table[-1], flush=True)
        if given.markdown:
            print("\n".join(markdown(of_table)))
        print(f"\n{summary(of_table)[0]}.\n")
        rows += of_table
    if not rows:
        parser.error("no row of these tables is of that --platform and has --only in its id; leave one out")
    text, reached = summary(rows)
    print(f"All tables: {text}. The goals are {'reached' if reached else 'MISSED'}.")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
