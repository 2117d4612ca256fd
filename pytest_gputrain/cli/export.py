"""Runs the command ``gputrain export``, which writes reports in the format of another tool."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gputrain.gate.messages import count
from pytest_gputrain.report.export.formats import FORMATS
from pytest_gputrain.report.export.points import left_out, points
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.reports import read_report
from pytest_gputrain.utils import console
from pytest_gputrain.utils.files import write_atomically


def add_to(commands: Any) -> None:
    formats = "\n".join(f"  {name:<24} {format_.reads}" for name, format_ in FORMATS.items())
    export = commands.add_parser(
        "export",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="write a report in the format of another tool",
        description="Write a report of --gpu-json in the format of another tool.",
        epilog=f"formats:\n{formats}",
    )
    export.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="report of --gpu-json")
    export.add_argument("--format", required=True, choices=FORMATS, metavar="FORMAT", help="one of those below")
    export.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file, or folder of a format with several (default: print it)"
    )


def main(options: argparse.Namespace) -> int:
    """Write the export; 0, or 2 for bad input."""
    try:
        notes = _export(options)
    except (BaselineError, ValueError) as error:
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
        BaselineError: a report cannot be read.
        ValueError: the arguments do not fit together, or there is nothing to write.
        OSError: the output cannot be written.
    """
    format_ = FORMATS[options.format]
    if len(options.reports) > 1 and not format_.many:
        raise ValueError(f"{options.format} holds one run, and {count(len(options.reports), 'report')} were given; give one")
    reports = [read_report(path) for path in options.reports]
    notes: list[str] = []
    if not format_.complete:
        if not any(points(report.results, timed=format_.timed) for report in reports):
            raise ValueError(f"{', '.join(map(str, options.reports))} has no case with figures for {options.format}")
        notes = [sentence for report in reports for sentence in left_out(report.results, timed=format_.timed)]
    written = format_.export(reports)
    if isinstance(written, Mapping):
        _write_folder(options, written)
    elif options.output is None:
        console.put(written, end="")
    else:
        write_atomically(options.output, written.encode())
    return notes


def _write_folder(options: argparse.Namespace, texts: Mapping[str, str]) -> None:
    folder: Path | None = options.output
    if folder is None:
        raise ValueError(f"{options.format} is several files; give a folder for them with -o")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{options.format} is several files, and {folder} is no folder; give one with -o")
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
