"""Runs the command ``gputrain compare``, which judges one report against another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_gputrain.cli import failing
from pytest_gputrain.cli.comparison_output import print_comparison, verdicts
from pytest_gputrain.gate import emulation as emulation_gate
from pytest_gputrain.gate.ab import by_case, criteria_of, missing, tolerance_of, verdict_of
from pytest_gputrain.gate.messages import OtherSide, describe_failure
from pytest_gputrain.gate.regression import first_ratio
from pytest_gputrain.gate.suite_noise import SuiteNoise, prior_of, whole_suite
from pytest_gputrain.records import Emulated, EmulatedRun, Measured, Report, Result, Verdict
from pytest_gputrain.records.tolerance import Tolerance
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.reports import read_report, to_baseline, to_recorded
from pytest_gputrain.utils import console


def add_to(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="compare a report with an earlier one",
        description="Compare the cases of report B with those of report A, by the rule of the gate and with the tolerances "
        "of B.",
    )
    compare.add_argument("base", type=Path, metavar="A", help="the report of --gpu-json to compare with")
    compare.add_argument("head", type=Path, metavar="B", help="the report of --gpu-json to judge")
    failing.add_option(compare)


def main(options: argparse.Namespace) -> int:
    """Print the comparison. Return 0, 1 if a verdict is one of ``--fail-on``, or 2 for bad input."""
    try:
        base, head = (read_report(path) for path in (options.base, options.head))
        tolerance = _tolerance(options.head, head)
    except BaselineError as error:
        console.say(error)
        return 2
    results = compare(base, head, options.base.name, tolerance)
    if not results:
        console.say(f"{options.head} has no case to compare")
        return 2
    all_slower, sentence = whole_suite(results, tolerance.time)
    missing_cases = missing([base], [head])
    only = [f"{key}: only {options.base.name} has it" for key, _ in missing_cases]
    print_comparison(results, [*only, *filter(None, [sentence])])
    return failing.exit_status(options, verdicts(results, missing_cases) | ({"regressed"} if all_slower else set()))


def _tolerance(path: Path, report: Report) -> Tolerance:
    """Return the tolerance that a report's settings set."""
    try:
        return tolerance_of(report.settings)
    except (KeyError, TypeError, ValueError):
        raise BaselineError(f"{path} has no tolerances in its settings; give the file that --gpu-json wrote") from None


def compare(base: Report, head: Report, base_name: str, tolerance: Tolerance) -> Sequence[Result]:
    """Return the results of ``head``, each with its verdict against ``base``.

    Args:
        base_name: how sentences name ``base``.
    """
    before, after = by_case(base), by_case(head)
    baselines = {
        key: to_baseline(result, date=base.created, session=base.session, commit=base.commit)
        for key, result in before.items()
    }
    noise = SuiteNoise()
    priors = {
        suite: prior_of(baseline for (of, _), baseline in baselines.items() if of == suite and baseline.runs)
        for suite in {suite for suite, _ in after}
    }
    criteria = {
        (suite, key): criteria_of(result, baselines.get((suite, key)), tolerance, priors[suite])
        for (suite, key), result in after.items()
    }
    for (suite, key), result in after.items():
        noise.add(suite, key, first_ratio(criteria[suite, key], result.replies))
    results = []
    for (suite, key), result in after.items():
        if isinstance(result, Emulated):
            verdict = _judge_emulated(result, before.get((suite, key)), base_name)
        else:
            verdict = verdict_of(criteria[suite, key], result.replies, base_name, noise.shift).verdict
        judged = msgspec.structs.replace(result, verdict=verdict)
        results.append(msgspec.structs.replace(judged, published=None) if isinstance(judged, Measured) else judged)
    return results


def _judge_emulated(result: Emulated, before: Result | None, base_name: str) -> Verdict:
    if not isinstance(result.reply, EmulatedRun):
        return Verdict(status="failed", sentence=f"{result.case} {describe_failure(result.reply, 'figures')}")
    if before is None:
        return Verdict(status="new", sentence=f"{result.case}: {base_name} has no such case")
    if not isinstance(before, Emulated) or (recorded := to_recorded(before)) is None:
        return Verdict(status="not-comparable", sentence=f"{result.case}: {base_name} has no emulated run of it")
    return emulation_gate.judge(result.case, result.reply, recorded, result.platform, side=OtherSide.base())
