"""Emulates public memory figures of many families of models, and writes the table of docs/public-figures.md.

    python tools/public_figures.py [--only NAME ...]
    python tools/public_figures.py --write

A row of ``tests/emulated/public/figures.json`` is a figure that somebody published, with its conditions, and a program of
that folder that trains under them with random weights. Each program runs on an emulated GPU, and the row keeps the bytes
and the versions that made them. ``--write`` writes the page alone, which needs no torch. The programs need the packages of
``tests/emulated/public/requirements.txt``. Nothing is tuned for a row, and rows that are off stay.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from program_table import with_part

from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.records.emulation import BESIDE_TORCH, Emulation
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.units import GiB, MiB, format_percent

ROOT: Final = Path(__file__).resolve().parents[1]
PROGRAMS: Final = ROOT / "tests" / "emulated" / "public"
ROWS: Final = PROGRAMS / "figures.json"
PAGE: Final = ROOT / "docs" / "public-figures.md"
UNITS: Final = {"GiB": GiB, "GB": 10**9, "MiB": MiB, "MB": 10**6}
BESIDE: Final = (BESIDE_TORCH, "NCCL's buffers")
"""What is not known, and that torch's allocator never has."""
UNEXPLAINED: Final = "not explained"
EXPLAINED_FROM: Final = 0.01
"""From this error on a row says its cause, or that there is none."""
SAME_PARAMETERS: Final = 0.005
"""The most by which a program's parameters may differ from those that the source prints, rounded."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The conditions of a figure, in the words of its source."""

    model: str
    batch: str
    shape: str
    precision: str
    optimizer: str
    checkpointing: str
    gpu: str


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A public figure, and what its program takes on an emulated GPU."""

    name: str
    family: str
    title: str
    """The program and its conditions in a few words, for the table."""
    source: str
    """The address of the page that has it."""
    versions: str
    """Those of torch and libraries, as the source says."""
    conditions: Conditions
    gpu: str
    """The marker of its GPU."""
    published: float
    unit: Literal["GiB", "GB", "MiB", "MB"]
    """The unit in which the source computes it, whatever it calls it."""
    unit_known_by: str
    figure: Literal["allocated", "reserved", "device used"]
    program: str
    """The file and its arguments."""
    parameters: float | None = None
    """The millions of parameters that the source prints."""
    emulated: int | None = None
    """Bytes."""
    uncounted: tuple[str, ...] = ()
    """The memory that the emulated GPU does not know, so that its figure is the least."""
    made_with: dict[str, str] = {}
    cause: str = ""
    """One sentence, if it is off by more than 1 %."""

    @property
    def published_bytes(self) -> float:
        return self.published * UNITS[self.unit]

    @property
    def error(self) -> float | None:
        return None if self.emulated is None else self.emulated / self.published_bytes - 1

    @property
    def file(self) -> Path:
        return PROGRAMS / self.program.split()[0]

    def cells(self) -> Iterator[str]:
        """Yield the cells of its line."""
        yield self.family
        yield f"[{self.title}]({self.source})"
        yield self.gpu
        yield f"{self.published:g} {self.unit}"
        if self.emulated is None or self.error is None:
            yield from ("not run", "", "")
            return
        yield f"{'≥' * bool(self.uncounted)}{self.emulated / UNITS[self.unit]:.{2 if 'G' in self.unit else 0}f}"
        yield f"{round(100 * self.error, 1) + 0.0:+.1f} %"
        yield self.cause


def read() -> list[Row]:
    """Return all rows.

    Raises:
        msgspec.ValidationError: a row lacks a field, or has another one.
    """
    return msgspec.json.decode(ROWS.read_bytes(), type=list[Row])


def keep(row: Row) -> None:
    """Write a row in the place of the one of its name. Others may have been written since it was read."""
    rows = [*(other for other in read() if other.name != row.name), row]
    rows.sort(key=lambda row: (row.family, row.name))
    write_atomically(ROWS, msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def faults(row: Row) -> Iterator[str]:
    """Yield what is wrong in a row, apart from its types."""
    if not row.file.is_file():
        yield f"{row.name} has no program {row.file.name}"
    if row.gpu not in PLATFORMS:
        yield f"{row.name} names the GPU {row.gpu}, which is not in the catalog"
    if row.error is not None and abs(row.error) > EXPLAINED_FROM and not row.cause:
        yield f"{row.name} is off by {format_percent(row.error)}; write its cause, or '{UNEXPLAINED}'"


def packages_of(program: Path) -> dict[str, str]:
    """Return the versions of the packages that a program imports, anywhere in it."""
    imported = re.findall(r"^\s*(?:import|from) (\w+)", program.read_text(), re.MULTILINE)
    found = importlib.metadata.packages_distributions()
    names = {found[module][0] for module in imported if module in found} | {"torch"}
    return {name: importlib.metadata.version(name) for name in sorted(names)}


class Measured(msgspec.Struct, frozen=True):
    """The figures of a program on an emulated GPU."""

    emulated: int
    uncounted: tuple[str, ...]


def measure(row: Row) -> Measured:
    """Run the program of a row on its emulated GPU, and return its figure in bytes, and what is not counted in it.

    Raises:
        RuntimeError: it did not end well, or its model is another one; one sentence.
    """
    emulation, out = emulated(row.name, row.gpu, row.file, *shlex.split(row.program)[1:])
    printed = {what: int(number) for what, number in re.findall(r"^(\w[\w ]*) (\d+)$", out, re.MULTILINE)}
    if row.parameters is not None and abs(printed["parameters"] / 1e6 / row.parameters - 1) > SAME_PARAMETERS:
        raise RuntimeError(f"{row.name} has {printed['parameters']:,} parameters, and the source {row.parameters} million")
    unknown = {
        what
        for process in emulation.processes
        for what in process.unknown
        if row.figure == "device used" or what not in BESIDE
    }
    used = max((use.peak_bytes for use in emulation.use), default=0)
    return Measured(used if row.figure == "device used" else printed[f"peak {row.figure}"], tuple(sorted(unknown)))


def emulated(name: str, gpu: str, program: Path, *arguments: str) -> tuple[Emulation, str]:
    """Run the program of a published figure on an emulated GPU, and return the report and what the program printed.

    Raises:
        RuntimeError: it did not end well; one sentence with the name of the figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        emulate = [sys.executable, "-m", "pytest_gputrain.cli.main", "emulate", "--gpu", gpu, "--json", str(report), "--"]
        command = [*emulate, sys.executable, str(program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not report.exists():
            raise RuntimeError(f"{name} has no figure: {done.stderr[-2000:]}")
        return msgspec.json.decode(report.read_bytes(), type=Emulation), done.stdout


def page(text: str, rows: Sequence[Row]) -> str:
    """Return the text of the page with the table of the rows."""
    return with_part(text, "rows", table(rows))


def table(rows: Sequence[Row]) -> str:
    """Return the table of the rows, and how far its figures are off."""
    headers = ["family", "program", "GPU", "published", "emulated", "error", "cause"]
    lines = [" | ".join(headers), "|".join(["---"] * len(headers))]
    lines += [" | ".join(row.cells()).rstrip(" |") for row in rows]
    errors = [abs(row.error) for row in rows if row.error is not None]
    within = {limit: sum(error <= limit for error in errors) for limit in (0.01, 0.05)}
    least = sum(bool(row.uncounted) and abs(row.error or 0.0) <= 0.01 for row in rows)
    met = f"{within[0.01]} are met within 1 % ({least} of them with ≥), and {within[0.05]} within 5 %"
    lines += ["", f"Of {len(errors)} figures {met}."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="the rows of these names (default: all)")
    parser.add_argument("--write", action="store_true", help="write the page, and run nothing")
    asked = parser.parse_args(arguments)
    rows = read()
    if unknown := sorted(set(asked.only) - {row.name for row in rows}):
        parser.error(f"{ROWS.name} has no row {', '.join(unknown)}; its rows are {', '.join(row.name for row in rows)}")
    status = 0
    for row in [] if asked.write else rows:
        if asked.only and row.name not in asked.only:
            continue
        try:
            measured = measure(row)
        except RuntimeError as error:
            print(error, flush=True)
            status = 1
            continue
        made = msgspec.structs.replace(row, made_with=packages_of(row.file), **msgspec.structs.asdict(measured))
        keep(made)
        print(*made.cells(), *made.uncounted, sep=" | ", flush=True)
    rows = read()
    PAGE.write_text(page(PAGE.read_text(), rows))
    for fault in (fault for row in rows for fault in faults(row)):
        print(fault)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
