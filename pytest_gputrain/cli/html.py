"""Runs the command ``gputrain html``, which writes reports and histories as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pytest_gputrain.report.html import page
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.history import HistoryError
from pytest_gputrain.storage.reports import read_report
from pytest_gputrain.utils import console


def add_to(commands: Any) -> None:
    html = commands.add_parser(
        "html",
        help="write reports and histories as one HTML file",
        description="Write reports of --gpu-json and histories of --gpu-history as one HTML file, with everything inside.",
    )
    html.add_argument(
        "reports", nargs="*", type=Path, metavar="REPORT", help="a report of --gpu-json; several reports make one page"
    )
    html.add_argument(
        "--history",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a history of --gpu-history; may be repeated",
    )
    html.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the file to write (default: report.html)",
    )
    html.add_argument(
        "--baseline-dir",
        type=Path,
        default=Path("baselines"),
        metavar="DIR",
        help="the folder of the published tables (default: baselines)",
    )


def main(options: argparse.Namespace) -> int:
    """Write the page; 0, or 2 for bad input."""
    if not (options.reports or options.history):
        return _refused("nothing to show; give a report of --gpu-json, or a history with --history")
    if sentence := page.missing():
        return _refused(sentence)
    try:
        reports = [read_report(path) for path in options.reports]
        history_trends = page.read_trends(options.history, console.say) if options.history else None
        page.write(options.output, reports, history_trends, baseline_dir=options.baseline_dir)
    except (BaselineError, HistoryError) as error:
        return _refused(str(error))
    except OSError as error:
        return _refused(f"{options.output} cannot be written: {error.strerror}")
    return 0


def _refused(sentence: str) -> int:
    console.say(sentence)
    return 2
