"""Runs the command ``gputrain ab``: rounds of pytest that alternate between two sides, and a verdict for each case."""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_gputrain.cli import failing
from pytest_gputrain.cli.ab_sides import Side, SideError, open_side, run
from pytest_gputrain.cli.comparison_output import print_comparison, verdicts
from pytest_gputrain.gate.ab import compare, missing
from pytest_gputrain.records import MAX_RUNS, Report
from pytest_gputrain.report import json_report
from pytest_gputrain.utils import console
from pytest_gputrain.utils.git import uncommitted

_INTERRUPTED = 130


def add_to(commands: Any) -> None:
    ab = commands.add_parser(
        "ab",
        allow_abbrev=False,
        help="compare two versions of the code by alternating runs on this machine",
        usage="%(prog)s --base REV|ENV|DIR [options] [PYTEST ARGUMENTS]",
        description="Compare two versions of the code by alternating runs on this machine: each case runs twice as often as "
        "there are rounds. All other arguments are passed to pytest. Example: gputrain ab --base main benchmarks -k lora",
    )
    metavar = "REV|ENV|DIR"
    ab.add_argument(
        "--base", required=True, metavar=metavar, help="the git revision, virtual environment or folder to compare with"
    )
    ab.add_argument("--head", default=".", metavar=metavar, help="the version to judge (default: this folder as it is)")
    ab.add_argument(
        "--rounds", type=_rounds, default=5, metavar="N", help="fresh processes of each case on each side (default: 5)"
    )
    failing.add_option(ab)
    ab.add_argument("--json", type=Path, metavar="FILE", help="write the figures and verdicts of head to this report")


def _rounds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_RUNS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MAX_RUNS}")
    return int(text)


def main(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run both sides and print; 0, 1 where a verdict is one of ``--fail-on``, 2 for nothing to judge, 130 on Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that worktrees go
    try:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gputrain-ab-")))
            base, head = (stack.enter_context(open_side(name, getattr(options, name), scratch)) for name in ("base", "head"))
            reports = _alternate(base, head, arguments, options.rounds, scratch)
        return _conclude(options, base, head, reports, arguments)
    except SideError as error:
        console.say(error)
        return 2
    except KeyboardInterrupt:
        console.say("interrupted; nothing was judged")
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _alternate(base: Side, head: Side, arguments: Sequence[str], rounds: int, scratch: Path) -> dict[str, list[Report]]:
    if uncommitted(Path.cwd()) and base.folder != Path.cwd() != head.folder:
        console.say("files here differ from the last commit; neither side has these changes")
    console.say(f"each case runs {rounds} times on each side, {2 * rounds} times in all")
    reports: dict[str, list[Report]] = {"base": [], "head": []}
    for number in range(rounds):
        # Base first, then head first: a machine that gets slower all the time is so for both.
        for side in (base, head) if number % 2 == 0 else (head, base):
            console.say(f"round {number + 1} of {rounds}: {side.name}, {side.label}")
            reports[side.name].append(run(side, arguments, scratch))
    return reports


def _conclude(
    options: argparse.Namespace, base: Side, head: Side, reports: dict[str, list[Report]], arguments: Sequence[str]
) -> int:
    results = compare(reports["base"], reports["head"], base.label)
    missing_cases = missing(reports["base"], reports["head"])
    ending = f"of {options.rounds} rounds, {base.label} in more"
    notes = print_comparison(results, [f"{key}: {head.label} has it in {rounds} {ending}" for key, rounds in missing_cases])
    status = failing.exit_status(options, verdicts(results, missing_cases))
    if options.json is not None:
        last = reports["head"][-1]
        settings = {**last.settings, "base": base.label, "head": head.label, "rounds": options.rounds}
        report = msgspec.structs.replace(
            last,
            arguments=("ab", *arguments),
            settings=settings,
            exit_status=status,
            notes=notes,
            results=tuple(results),
        )
        try:
            json_report.write(report, options.json)
        except OSError as error:
            console.say(f"the report {options.json} cannot be written: {error.strerror}")
            return 2
    return status
