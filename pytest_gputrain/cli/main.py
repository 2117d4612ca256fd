"""Runs the command ``gputrain``: parses its arguments and calls the module of the subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from pytest_gputrain.cli import ab, check_baselines, comment, compare, doctor, emulate, export, node, predict, trend

COMMANDS: Final = {
    "ab": ab,
    "check-baselines": check_baselines,
    "comment": comment,
    "compare": compare,
    "doctor": doctor,
    "emulate": emulate,
    "export": export,
    "node": node,
    "predict": predict,
    "trend": trend,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; see the epilog of `command_parser`."""
    parser = command_parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "ab":
        return ab.main(options, rest)
    if rest and options.command == "predict" and not rest[0].startswith("-"):
        parser.error(f"gputrain predict takes one model: run it again for {rest[0]}")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    status: int = COMMANDS[options.command].main(options)
    return status


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command and its subcommands."""
    parser = argparse.ArgumentParser(
        prog="gputrain",
        description="Predict and emulate training on GPUs, and use the reports, histories and baselines of pytest-gputrain.",
        epilog="The exit status is 0 if all is well, 1 for a finding, and 2 for bad input. A finding is a verdict of "
        "--fail-on (by default a regression), a damaged baseline, or a problem of this host. emulate ends with the status "
        "of its program, or with 1 if the program ended well, but not as --must-fit asks.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS.values():
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
