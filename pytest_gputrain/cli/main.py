"""Runs the command ``gputrain``: parses its arguments and calls the subcommand, most of which have their own modules.

The subcommands ``table`` and ``node`` are here.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pytest_gputrain.cli import ab, check_baselines, compare, devices, export, html, trend
from pytest_gputrain.records import Result
from pytest_gputrain.report import terminal
from pytest_gputrain.report.tables import Format, measured_text_table, published_text_table, render
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.published import PublishedStore, PublishedTable
from pytest_gputrain.storage.reports import read_report
from pytest_gputrain.utils import console
from pytest_gputrain.utils.sanitize import shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 for a regression, or 2 for bad input."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "ab":
        return ab.main(options, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    handlers = {
        "check-baselines": check_baselines.main,
        "compare": compare.main,
        "devices": devices.main,
        "export": export.main,
        "html": html.main,
        "node": _serve,
        "table": _print_table,
        "trend": trend.main,
    }
    return handlers[options.command](options)


def _serve(options: argparse.Namespace) -> int:
    from pytest_gputrain.execution.launch.node_service import serve

    with contextlib.suppress(KeyboardInterrupt):
        serve(options.shared.absolute(), options.host, lambda line: console.put(f"gputrain: {shown(line)}"))
    return 0


def _print_table(options: argparse.Namespace) -> int:
    try:
        text, notes = _table(options)
    except (BaselineError, ValueError) as error:
        console.say(error)
        return 2
    console.put(text)
    for note in notes:
        console.say(note)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gputrain", description="Published tables and reports of pytest-gputrain.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    table = commands.add_parser("table", help="print a report, or published tables with a report's figures beside them")
    table.add_argument("measured", nargs="?", type=Path, metavar="REPORT", help="report of --gpu-json to print")
    table.add_argument(
        "--published", nargs="*", metavar="TABLE", help="print these published tables (default: all) in their columns"
    )
    table.add_argument("--report", type=Path, metavar="REPORT", help="report whose figures to put beside the published ones")
    table.add_argument("--format", choices=get_args(Format), default="terminal", help="default: terminal")
    table.add_argument("--baseline-dir", type=Path, default=Path("baselines"), metavar="DIR", help="default: baselines")
    for command in (ab, check_baselines, compare, devices, export, html, trend):
        command.add_to(commands)
    node = commands.add_parser("node", help="run this machine's part of cases that pytest spreads over several nodes")
    node.add_argument("shared", type=Path, metavar="DIR", help="folder that all nodes share: pytest's gpu_shared")
    node.add_argument(
        "--host",
        default=socket.gethostname(),
        metavar="HOST",
        help="name or address that the other nodes reach this one by (default: its name)",
    )
    return parser


def _table(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Return what to print, and sentences to print beside it.

    Raises:
        BaselineError: a file cannot be read.
        ValueError: the arguments do not fit together.
    """
    if options.measured and options.report:
        raise ValueError(f"two reports were given, {options.measured} and {options.report}; give one")
    path: Path | None = options.report or options.measured
    report = read_report(path) if path else None
    results: tuple[Result, ...] = report.results if report else ()
    width, colour = console.standard_output()
    if options.published is None:
        if report is None:
            raise ValueError("nothing to print; give a report, or --published")
        if options.format == "terminal":
            return terminal.render(results, width=width, colour=colour), []
        return render([measured_text_table(results)], options.format, width=width, colour=False), []
    tables = _chosen(PublishedStore.beside(options.baseline_dir.absolute()), options.published)
    text_tables = [
        published_text_table(table, platform, _measured(results, platform))
        for table in tables
        for platform in table.platforms
    ]
    return render(text_tables, options.format, width=width, colour=colour), _left_out(results, tables, path)


def _chosen(store: PublishedStore, names: Sequence[str]) -> tuple[PublishedTable, ...]:
    """Raises:
    ValueError: a table is not known.
    """
    tables_by_name = {table.name: table for table in store.tables}
    for name in names:
        if name not in tables_by_name:
            raise ValueError(
                f"there is no published table {name!r}; known: {', '.join(tables_by_name)} (a report is given by --report)"
            )
    return tuple(tables_by_name[name] for name in dict.fromkeys(names)) or store.tables


def _measured(results: Sequence[Result], platform: str) -> dict[tuple[str, str], Result]:
    """What was measured on a platform, by suite and key, which is another one at tiny scale; of several times the last."""
    return {(result.suite, result.key): result for result in results if result.platform == platform}


def _left_out(results: Sequence[Result], tables: Sequence[PublishedTable], path: Path | None) -> list[str]:
    """Sentences for results that no table shows."""
    rows = {(row.platform, row.suite, str(row.case)): row for table in tables for row in table.published()}
    platforms = {platform for table in tables for platform in table.platforms}
    counts_by_reason: Counter[str] = Counter()
    for result in results:
        row = rows.get((result.platform, result.suite, result.key))
        if result.scale == "tiny":
            counts_by_reason["measured at tiny scale, which has nothing to do with published figures"] += 1
        elif result.platform not in platforms:
            counts_by_reason[f"measured on {result.platform}, for which the tables have nothing"] += 1
        elif row is None:
            counts_by_reason[f"of {result.platform} without a row in the tables"] += 1
    return [f"{count} result{'s' if count > 1 else ''} of {path} {reason}" for reason, count in counts_by_reason.items()]


if __name__ == "__main__":
    sys.exit(main())
