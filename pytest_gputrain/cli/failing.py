"""Holds ``--fail-on``, which all subcommands that judge have: the option, and the exit status that verdicts make."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Final

from pytest_gputrain.records import FAILING, STRICTLY_FAILING, Status
from pytest_gputrain.utils.suggest import did_you_mean

VERDICTS: Final[tuple[Status, ...]] = (*FAILING, *STRICTLY_FAILING, "improved")
NEVER: Final = "never"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fail-on",
        type=_verdicts,
        default=FAILING,
        metavar="VERDICT,...",
        help=f"the verdicts that make the exit status 1: {', '.join(VERDICTS)}; or {NEVER} (default: {','.join(FAILING)})",
    )


def _verdicts(text: str) -> tuple[str, ...]:
    if text == NEVER:
        return ()
    named = tuple(part.strip() for part in text.split(","))
    for name in named:
        if name not in VERDICTS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not a verdict{did_you_mean(name, VERDICTS)}; give some of {', '.join(VERDICTS)}, or "
                f"{NEVER} alone"
            )
    return named


def exit_status(options: argparse.Namespace, verdicts: Iterable[Status]) -> int:
    """Return 1 if one of the verdicts is one of ``--fail-on``; otherwise 0."""
    return int(not set(verdicts).isdisjoint(options.fail_on))
