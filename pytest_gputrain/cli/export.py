"""Runs the command ``gputrain export``, which prints reports and published tables, or writes them for another tool."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gputrain.gate.messages import count
from pytest_gputrain.records import Report
from pytest_gputrain.report.export import published
from pytest_gputrain.report.export.formats import FORMATS
from pytest_gputrain.report.export.points import left_out, points
from pytest_gputrain.report.html import page
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.history import HistoryError
from pytest_gputrain.storage.published import PublishedStore, PublishedTable
from pytest_gputrain.storage.reports import read_report
from pytest_gputrain.utils import console
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.suggest import did_you_mean


def add_to(commands: Any) -> None:
    formats = "\n".join(f"  {name:<24} {format_.reads}" for name, format_ in FORMATS.items())
    formats += f"\n  {'html':<24} browsers: a page with everything inside, also of histories or published tables"
    export = commands.add_parser(
        "export",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="print reports and published tables, or write them in the format of another tool",
        description="Print reports of --gpu-json and published tables, or write them in the format of another tool.",
        epilog=f"formats:\n{formats}",
    )
    export.add_argument("reports", nargs="*", type=Path, metavar="REPORT", help="a report of --gpu-json")
    export.add_argument(
        "--format",
        default="terminal",
        choices=[*dict.fromkeys((*FORMATS, *published.FORMATS))],
        metavar="FORMAT",
        help="the format (default: terminal)",
    )
    export.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write, or the folder if a format has several files (default: print)",
    )
    export.add_argument(
        "--published",
        nargs="*",
        metavar="TABLE",
        help=f"show these published tables (default: all) beside the figures of the reports; formats: "
        f"{', '.join(published.FORMATS)}",
    )
    export.add_argument(
        "--history",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="draw the trends of this history of --gpu-history, in the format html; may be repeated",
    )
    export.add_argument(
        "--baseline-dir",
        type=Path,
        default=Path("baselines"),
        metavar="DIR",
        help="the folder of baselines (default: baselines)",
    )


def main(options: argparse.Namespace) -> int:
    """Write the export. Return 0, or 2 for bad input."""
    try:
        notes = _export(options)
    except (BaselineError, HistoryError, ValueError) as error:
        console.say(error)
        return 2
    except OSError as error:
        console.say(f"{options.output} cannot be written: {error.strerror}")
        return 2
    for note in notes:
        console.say(note)
    return 0


def _export(options: argparse.Namespace) -> list[str]:
    """Write the export, and return sentences for what it lacks.

    Raises:
        BaselineError: a report or a table cannot be read.
        HistoryError: a history cannot be read.
        ValueError: the arguments do not fit together, or there is nothing to write.
        OSError: the output cannot be written.
    """
    if options.format == "terminal" and options.output is not None:
        raise ValueError(f"the format terminal is only printed; give another --format for {options.output}")
    if options.history and (options.format != "html" or options.published is not None):
        raise ValueError("--history is drawn in the format html alone; give --format html, and not --published")
    if options.published is None:
        written, notes = _of_reports(options)
    else:
        written, notes = _of_published_tables(options)
    if isinstance(written, Mapping):
        _write_folder(options, written)
    elif options.output is None:
        console.put(written, end="")
    else:
        write_atomically(options.output, written.encode())
    return notes


def _of_reports(options: argparse.Namespace) -> tuple[str | Mapping[str, str], list[str]]:
    if not options.reports and not options.history:
        raise ValueError("nothing to export; give a report of --gpu-json, or --published")
    if options.format == "html":
        return _page(options), []
    format_ = FORMATS[options.format]
    if len(options.reports) > 1 and not format_.many:
        raise ValueError(f"{options.format} holds one run, and {count(len(options.reports), 'report')} were given; give one")
    reports = _read(options)
    if format_.complete:
        return format_.export(reports), []
    if not any(points(report.results, timed=format_.timed) for report in reports):
        raise ValueError(f"{', '.join(map(str, options.reports))} has no case with figures for {options.format}")
    notes = [sentence for report in reports for sentence in left_out(report.results, timed=format_.timed)]
    return format_.export(reports), notes


def _page(options: argparse.Namespace) -> str:
    if lacking := page.missing():
        raise ValueError(lacking)
    reports = _read(options)
    history_trends = page.read_trends(options.history, console.say) if options.history else None
    return page.page(reports, history_trends, baseline_dir=options.baseline_dir)


def _of_published_tables(options: argparse.Namespace) -> tuple[str, list[str]]:
    if options.format not in published.FORMATS:
        raise ValueError(f"{options.format} cannot show published tables; give one of {', '.join(published.FORMATS)}")
    tables = _chosen(PublishedStore.beside(options.baseline_dir.absolute()).tables, options.published)
    reports = _read(options)
    results = [result for report in reports for result in report.results]
    notes = [
        sentence
        for path, report in zip(options.reports, reports, strict=True)
        for sentence in published.left_out(path, report.results, tables)
    ]
    return published.FORMATS[options.format](tables, results), notes


def _read(options: argparse.Namespace) -> list[Report]:
    return [read_report(path) for path in options.reports]


def _chosen(tables: Sequence[PublishedTable], names: Sequence[str]) -> Sequence[PublishedTable]:
    """Return the tables that the user has named."""
    tables_by_name = {table.name: table for table in tables}
    for name in names:
        if name not in tables_by_name:
            raise ValueError(
                f"there is no published table {name!r}{did_you_mean(name, tables_by_name)}; known: "
                f"{', '.join(tables_by_name)} (write reports before --published)"
            )
    return [tables_by_name[name] for name in dict.fromkeys(names)] or tables


def _write_folder(options: argparse.Namespace, texts: Mapping[str, str]) -> None:
    folder: Path | None = options.output
    if folder is None:
        raise ValueError(f"{options.format} writes several files; give a folder for them with -o")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{options.format} writes several files, and {folder} is not a folder; give one with -o")
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
