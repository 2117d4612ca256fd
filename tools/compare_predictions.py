"""Predicted against published memory, for the single-GPU rows of the published tables that print any.

    python tools/compare_predictions.py [TABLE ...] [--platform MARKER] [--only TEXT] [--markdown]

One set of conditions holds for all rows of a table, and is printed with them; nothing is tuned for a row. Exits with 1 where
the goals are missed: a median error of 3 %, a worst one of 8 %, and every call of fits or out of memory right.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.hardware.targets import target_of
from pytest_gputrain.records import Case, Crashed, Prediction, Target, Task
from pytest_gputrain.storage.published import GATED, PublishedTable
from pytest_gputrain.utils.units import GiB, MiB

MEDIAN_GOAL: Final = 0.03
WORST_GOAL: Final = 0.08

TABLES: Final = Path(__file__).resolve().parent.parent / "baselines" / "published"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions that a document leaves out, but that follow from its program or its other figures;
    docs/prediction-accuracy.md has the evidence."""

    read_as: str
    context_bytes: int
    target: dict[str, Any]
    """Fields of `Target` in which the libraries of that time differ from those of today."""

    def __str__(self) -> str:
        fields = [f"{name} {value}" for name, value in self.target.items()]
        return (
            f"figures read as {self.read_as}, context of {self.context_bytes // MiB} MiB counted, {', '.join(fields)}, "
            "loss in the type of the logits, native allocator"
        )


CONDITIONS: Final = {
    "llm-trainer": Conditions(
        read_as="thousands of MiB, printed as GiB",
        context_bytes=600 * MiB,
        target={"workspace_bytes": 32 * MiB, "equal_blocks": "lower_address"},
    ),
    "pangu-deepspeed": Conditions(
        read_as="MiB, printed as MB",
        context_bytes=1343 * MiB,
        target={"attention": "unfused", "lists": False, "equal_blocks": "lower_address"},
    ),
}
"""The conditions of the tables that print the memory of a single GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure and its prediction, both in bytes as nvidia-smi would show them."""

    table: str
    platform: str
    case: Case
    published: float | None
    """The published figure; None if it ran out of memory."""
    predicted: float
    fits: bool
    seconds: float
    """The prediction took."""
    notes: str

    @property
    def right(self) -> bool:
        return self.fits == (self.published is not None)

    @property
    def error(self) -> float | None:
        return self.predicted / self.published - 1 if self.published and self.fits else None

    @property
    def call(self) -> str:
        return ("fits" if self.fits else "out of memory") + ("" if self.right else " (WRONG)")

    @property
    def sizes(self) -> str:
        """Predicted / published, in GiB."""
        published = "out of memory" if self.published is None else f"{self.published / GiB:.1f}"
        return f"{self.predicted / GiB:.1f} / {published}"

    @property
    def error_text(self) -> str:
        return "" if self.error is None else f"{100 * self.error:+.1f} %"

    def __str__(self) -> str:
        figures = f"{PLATFORMS[self.platform].title:12} {self.case!s:44} {self.sizes:21} {self.error_text:>8}"
        return f"{figures}  {self.call:20} {self.notes} [{self.seconds:.0f} s]"


def markdown(rows: list[Row]) -> str:
    """Return a Markdown table: a line for each case, a column for each platform."""
    platforms = list(dict.fromkeys(row.platform for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        verdict = row.error_text if row.right and row.error_text else row.call
        cells.setdefault(str(row.case), {})[row.platform] = f"{row.sizes}: {verdict}"
    titles = [PLATFORMS[platform].title for platform in platforms]
    lines = [["predicted / published, GiB", *titles], ["---"] * (len(titles) + 1)]
    lines += [[case, *(of.get(platform, "") for platform in platforms)] for case, of in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(table: PublishedTable, platform: str, only: str) -> Iterator[Row]:
    """Raises:
    SystemExit: a case could not be predicted.
    """
    conditions = CONDITIONS[table.name]
    for row in table.rows:
        if row.case.parallel != "single" or only not in str(row.case) or platform not in ("", row.platform):
            continue
        figures = row.figures.get(GATED)
        figure = figures and figures.device_used_bytes
        if figure is None and row.outcome != "out_of_memory":
            continue
        target = predicted_for(row.platform, conditions)
        task = Task(case=row.case, scale="full", device_type="cpu", root=".", target=target)
        start = time.perf_counter()
        reply = launcher.predict(task, timeout_seconds=600)
        if not isinstance(reply, Prediction):
            raise SystemExit(f"{row.case}: {reply.sentence if isinstance(reply, Crashed) else reply}")
        assert reply.peak_reserved_bytes is not None
        yield Row(
            table=table.name,
            platform=row.platform,
            case=row.case,
            published=None if figure is None else figure.low,
            predicted=reply.peak_reserved_bytes + conditions.context_bytes,
            fits=reply.fits is True,
            seconds=time.perf_counter() - start,
            notes=notes_of(reply, figures),
        )


def predicted_for(platform: str, conditions: Conditions) -> Target:
    """The device under the table's conditions."""
    return msgspec.structs.replace(target_of(platform), context_bytes=conditions.context_bytes, **conditions.target)


def notes_of(reply: Prediction, figures: Any) -> str:
    """Return model memory and time beside the published figures: information, not judged."""
    notes = [f"model {reply.model_bytes / 1e9:.1f} GB"] if reply.model_bytes else []
    if figures and figures.model_bytes:
        notes[-1] += f" (published {figures.model_bytes.low / 1e9:.1f})"
    if figures and figures.step_seconds and reply.roofline_seconds:
        notes.append(f"roofline {reply.roofline_seconds:.2f} s (published {figures.step_seconds.low})")
    return ", ".join(notes)


def summary(rows: list[Row]) -> tuple[str, bool]:
    """Return one line, and whether the goals are reached."""
    errors = [abs(row.error) for row in rows if row.error is not None]
    wrong = sum(not row.right for row in rows)
    calls = f"{len(rows) - wrong} of {len(rows)} calls of fits or out of memory right"
    if not errors:
        return calls, not wrong
    median, mean, worst = statistics.median(errors), statistics.mean(errors), max(errors)
    text = f"{len(errors)} figures: median error {median:.1%}, mean {mean:.1%}, worst {worst:.1%}; {calls}"
    return text, median <= MEDIAN_GOAL and worst <= WORST_GOAL and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(CONDITIONS), metavar="TABLE", help=f"of {', '.join(CONDITIONS)}")
    parser.add_argument("--platform", default="", help="rows of one platform only")
    parser.add_argument("--only", default="", help="rows whose id has this in it")
    parser.add_argument("--markdown", action="store_true", help="as in docs/prediction-accuracy.md")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.tables if name not in CONDITIONS]
    if unknown:
        parser.error(f"no table {unknown[0]} prints the memory of a single GPU; choose of {', '.join(CONDITIONS)}")
    rows: list[Row] = []
    for name in arguments.tables:
        table = msgspec.json.decode((TABLES / f"{name}.json").read_bytes(), type=PublishedTable)
        print(f"{table.title}: {CONDITIONS[name]}.\n")
        of_table = []
        for row in rows_of(table, arguments.platform, arguments.only):
            of_table.append(row)
            if not arguments.markdown:
                print(row, flush=True)
        if arguments.markdown:
            print(markdown(of_table))
        print(f"\n{summary(of_table)[0]}.\n")
        rows += of_table
    if not rows:
        parser.error("no row of these tables is of that --platform and has --only in its id; leave one out")
    text, reached = summary(rows)
    print(f"All tables: {text}. The goals are {'reached' if reached else 'MISSED'}.")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
