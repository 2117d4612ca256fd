"""Runs the command ``gputrain ab``: one run of each of two sides where figures are exact, and else rounds that alternate."""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from pytest_gputrain.cli import failing
from pytest_gputrain.cli.ab_sides import (
    Side,
    SideError,
    measures_time,
    open_side,
    report_of,
    run,
    with_more_at_once,
    written,
)
from pytest_gputrain.cli.comparison_output import print_comparison, verdicts
from pytest_gputrain.gate.ab import JudgedCase, by_case, compare, missing
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.records import FAILING, MAX_RUNS, Emulated, Report, Result
from pytest_gputrain.report import github, json_report, summary
from pytest_gputrain.report.github import Failure
from pytest_gputrain.utils import console
from pytest_gputrain.utils.bounds import LEAST_RUNS_ON_A_CPU, MOST_RUNS
from pytest_gputrain.utils.git import uncommitted

_INTERRUPTED: Final = 130
_TESTS_FAILED: Final = 1
"""pytest's exit status."""
_TELL_EVERY_SECONDS: Final = 15.0
_IN_MINUTES: Final = 100
"""The number of seconds from which on a time is printed in minutes."""


def add_to(commands: Any) -> None:
    ab = commands.add_parser(
        "ab",
        allow_abbrev=False,
        help="compare two versions of the code on this machine, without a stored baseline",
        usage="%(prog)s --base REV|ENV|DIR [options] [PYTEST ARGUMENTS]",
        description="Compare two versions of the code on this machine. Each side runs once on a CPU or an emulated GPU, "
        "whose figures are exact, and in alternating rounds on a GPU, whose times are noisy. All other arguments are passed "
        "to pytest. Example: gputrain ab --base main benchmarks -k lora",
    )
    metavar = "REV|ENV|DIR"
    ab.add_argument(
        "--base", required=True, metavar=metavar, help="the git revision, virtual environment or folder to compare with"
    )
    ab.add_argument("--head", default=".", metavar=metavar, help="the version to judge (default: this folder as it is)")
    ab.add_argument(
        "--rounds",
        type=_rounds,
        metavar="N",
        help="the most rounds, each with a fresh process of each case on each side (default: "
        f"{MOST_RUNS} on a GPU, one exact run on a CPU, where {LEAST_RUNS_ON_A_CPU} or more rounds judge time, too)",
    )
    failing.add_option(ab)
    ab.add_argument("--json", type=Path, metavar="FILE", help="write the figures and verdicts of head to this report")


def _rounds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_RUNS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MAX_RUNS}")
    return int(text)


class _Comparison(NamedTuple):
    """The results of head against base, and how the comparison ended."""

    head: Report
    """The last report of head."""
    results: Sequence[Result]
    rounds: int
    """The number of complete rounds."""
    missing: Sequence[tuple[str, int]] = ()
    """See `pytest_gputrain.gate.ab.missing`."""
    interrupted: str = ""
    """The point at which Ctrl-C or SIGTERM came, as the end of a sentence; empty if neither came."""
    fails: bool = False
    """Whether tests of head fail and those of base do not, be it by a verdict or otherwise."""


class _Progress:
    """Prints how far a comparison is, and how long the rest takes at most.

    Args:
        runs: the most runs of pytest that there may be.
    """

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self._ended = 0
        self._began = self._told = time.monotonic()

    def begin(self, what: str, share: float = 0.0) -> None:
        console.say(f"{what}{self._left(share)}")
        self._told = time.monotonic()

    def watch(self, share: float) -> None:
        """Note the share of its tests that a run has finished, and print it from time to time."""
        if share and time.monotonic() - self._told >= _TELL_EVERY_SECONDS:
            self.begin(f"{share:.0%} of the tests have ended", share)

    def end(self) -> None:
        """Note that a run has ended."""
        self._ended += 1

    def _left(self, share: float) -> str:
        done = (self._ended + share) / self.runs
        if not done:
            return ""
        seconds = (time.monotonic() - self._began) / done * (1 - done)
        return f"; at most about {f'{seconds:.0f} s' if seconds < _IN_MINUTES else f'{seconds / 60:.0f} min'} left"


def main(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run both sides and print the comparison. Return 0, 1 if a verdict is one of ``--fail-on``, 2 if there is nothing to
    judge, or 130 if Ctrl-C or SIGTERM came before there was."""
    # SIGTERM must act like Ctrl-C, so that worktrees are removed.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gputrain-ab-")))
            base, head = (stack.enter_context(open_side(name, getattr(options, name), scratch)) for name in ("base", "head"))
            comparison = _compare(base, head, arguments, options.rounds, scratch)
        return _conclude(options, base, head, comparison, arguments)
    except SideError as error:
        console.say(error)
        return 2
    except KeyboardInterrupt:
        console.say("interrupted; nothing was judged")
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _compare(base: Side, head: Side, arguments: Sequence[str], rounds: int | None, scratch: Path) -> _Comparison:
    if uncommitted(Path.cwd()) and base.folder != Path.cwd() != head.folder:
        console.say("files here differ from the last commit; neither side has these changes")
    several = rounds is not None or measures_time(arguments)
    progress = _Progress(2 * (rounds or MOST_RUNS) if several else 2)
    progress.begin(_now(base, 1, rounds))
    first = run(base, arguments if several else with_more_at_once(base, arguments), scratch, progress.watch)
    progress.end()
    on_cpu = rounds is None and all(result.device == CPU for result in first.results)
    if on_cpu or all(isinstance(result, Emulated) for result in first.results):
        progress.runs = 2
        return _compare_exactly(first, base, head, arguments, scratch, progress)
    return _alternate(first, base, head, arguments, rounds or MOST_RUNS, scratch, progress)


def _now(side: Side, number: int = 1, rounds: int | None = None) -> str:
    """Return which side runs, and in which round if that is known."""
    return f"{f'round {number} of {rounds}: ' if rounds else ''}{side.name}, {side.label}"


def _compare_exactly(
    before: Report, base: Side, head: Side, arguments: Sequence[str], scratch: Path, progress: _Progress
) -> _Comparison:
    """Run head once, against the report of base in place of stored baselines. Further processes confirm what may be
    noise."""
    on_cpu = any(result.device == CPU for result in before.results)
    time_too = f"; time is not judged without --rounds {LEAST_RUNS_ON_A_CPU} or more" if on_cpu else ""
    console.say(f"these figures are exact, so one run of each side is enough{time_too}")
    progress.begin(_now(head))
    try:
        arguments = arguments if measures_time(arguments) else with_more_at_once(head, arguments)
        after = run(head, arguments, scratch, progress.watch, against=report_of(base, scratch))
    except KeyboardInterrupt:
        with contextlib.suppress(SideError):
            after = written(head, scratch)
            if judged := [result for result in after.results if result.verdict]:
                done = f"{len(by_case(after))} of {len(by_case(before))} cases of base"
                return _Comparison(after, judged, 1, interrupted=done)
        raise
    fails = after.exit_status == _TESTS_FAILED != before.exit_status
    return _Comparison(after, after.results, 1, missing([before], [after]), fails=fails)


def _alternate(
    first: Report, base: Side, head: Side, arguments: Sequence[str], rounds: int, scratch: Path, progress: _Progress
) -> _Comparison:
    """Run rounds of both sides until no further round could change a verdict. The first run of base is given."""
    progress.runs = 2 * rounds
    console.say(f"each case runs at most {rounds} times on each side, {2 * rounds} times in all")
    reports: dict[str, list[Report]] = {"base": [first], "head": []}
    settled: dict[tuple[str, str], JudgedCase] = {}
    complete, interrupted = 0, ""
    try:
        for number in range(rounds):
            # Each round swaps which branch runs first, so a machine that slows down over time slows both branches equally.
            for side in (base, head) if number % 2 == 0 else (head, base):
                if len(reports[side.name]) > number:
                    continue
                progress.begin(_now(side, number + 1, rounds))
                left_out = [] if number == 0 else _left_out(reports[side.name], settled)
                reports[side.name].append(run(side, [*arguments, *left_out], scratch, progress.watch))
                progress.end()
            complete = number + 1
            judged = compare(reports["base"], reports["head"], base.label, rounds)
            settled = {key: one for key, one in judged.items() if one.settled} | settled
            if len(settled) == len(judged):
                break
    except KeyboardInterrupt:
        if not complete:
            raise
        interrupted = f"{complete} of {rounds} rounds"
    before, after = reports["base"][:complete], reports["head"][:complete]
    judged = compare(before, after, base.label) | settled
    return _Comparison(after[-1], [one.result for one in judged.values()], complete, missing(before, after), interrupted)


def _left_out(reports: Sequence[Report], settled: Container[tuple[str, str]]) -> list[str]:
    """Return the options of pytest that leave out tests whose cases are all settled."""
    open_tests: set[str] = set()
    closed_tests: set[str] = set()
    for result in (result for report in reports for result in report.results):
        is_settled = (result.suite, result.key) in settled
        (closed_tests if is_settled else open_tests).add(result.nodeid)
    # `--deselect` leaves out every test whose id begins with its value. So a test is not named if an open test begins with
    # its id.
    return [
        f"--deselect={nodeid}"
        for nodeid in sorted(closed_tests)
        if not any(other.startswith(nodeid) for other in open_tests)
    ]


def _conclude(options: argparse.Namespace, base: Side, head: Side, comparison: _Comparison, arguments: Sequence[str]) -> int:
    results, ending = comparison.results, f"of {comparison.rounds} rounds, {base.label} in more"
    notes = [
        f"{key}: {head.label} {f'has it in {rounds} {ending}' if rounds else 'has no such case'}"
        for key, rounds in comparison.missing
    ]
    if comparison.interrupted:
        notes.append(f"interrupted after {comparison.interrupted}; what there was until then is judged")
    found = verdicts(results, comparison.missing)
    if comparison.fails and found.isdisjoint(FAILING):
        notes.append(f"tests of {head.label} fail by something else than a verdict, and those of {base.label} do not")
        found.add("failed")
    all_notes = print_comparison(results, notes)
    status = failing.exit_status(options, found)
    settings = {**comparison.head.settings, "base": base.label, "head": head.label, "rounds": comparison.rounds}
    report = msgspec.structs.replace(
        comparison.head,
        arguments=("ab", *arguments),
        settings=settings,
        exit_status=status,
        notes=all_notes,
        results=tuple(results),
    )
    return status if _publish(report, options.json) else 2


def _publish(report: Report, path: Path | None) -> bool:
    """Write the summary and the annotations of a job of GitHub, and the report if an option asks for it. Return whether that
    was possible."""
    failures = [
        Failure(_file_of(result.nodeid), None, result.key, result.verdict.sentence)
        for result in report.results
        if result.verdict and result.verdict.status in FAILING
    ]
    for command in github.commands(failures) if github.wanted() else ():
        console.put(command)
    what = "summary"
    try:
        summary.write("auto", report.results, failures, report.notes)
        if path is not None:
            what = f"report {path}"
            json_report.write(report, path)
    except OSError as error:
        console.say(f"the {what} cannot be written: {error.strerror}")
        return False
    return True


def _file_of(nodeid: str) -> Path | None:
    """Return the file of a test; empty if it cannot be found from here."""
    path = Path(nodeid.partition("::")[0]).absolute()
    return path if path.is_file() else None
