"""Tests ``--fail-on``, which is one option in all subcommands that judge, and the exit status of each of them."""

from typing import get_args

import pytest

from pytest_gputrain.cli import failing, main
from pytest_gputrain.records import Status

ARGUMENTS = {"ab": ["--base=main"], "compare": ["a.json", "b.json"], "trend": ["history.jsonl"]}
"""What each subcommand that judges cannot do without."""
OTHERS = {
    "check-baselines": [],
    "comment": ["cpu.md"],
    "doctor": [],
    "emulate": ["--gpu=h100"],
    "export": ["report.json"],
    "node": ["folder"],
    "predict": ["llama-3.1-8b", "--gpu=h100"],
}

judging = pytest.mark.parametrize("command", ARGUMENTS)


def parsed(command, *arguments):
    return main.command_parser().parse_args([command, *ARGUMENTS[command], *arguments])


def test_every_subcommand_is_known_to_judge_or_not_to():
    assert {*ARGUMENTS, *OTHERS} == set(main.COMMANDS)
    for command, arguments in OTHERS.items():
        _, rest = main.command_parser().parse_known_args([command, *arguments, "--fail-on=new"])
        assert rest == ["--fail-on=new"]


@judging
@pytest.mark.parametrize(
    ("options", "fails"),
    [
        ([], ["regressed", "over-limit", "failed"]),
        (["--fail-on=never"], []),
        *((["--fail-on", verdict], [verdict]) for verdict in failing.VERDICTS),
        (["--fail-on", "improved, new"], ["improved", "new"]),
    ],
)
def test_what_fails_is_a_regression_or_what_is_asked_for(command, options, fails):
    given = parsed(command, *options)
    statuses = get_args(Status)
    assert sorted(status for status in statuses if failing.exit_status(given, ["pass", status])) == sorted(fails)
    assert (failing.exit_status(given, statuses), failing.exit_status(given, [])) == (int(bool(fails)), 0)


@judging
@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("regresed", "'regresed' is not a verdict (did you mean 'regressed'?); give some of regressed, over-limit, "),
        ("regressed,not comparable", "'not comparable' is not a verdict (did you mean 'not-comparable'?); give some of "),
        ("slower", "'slower' is not a verdict; give some of regressed, "),
        ("pass", "'pass' is not a verdict"),
        ("new,never", "'never' is not a verdict"),
        ("", "'' is not a verdict"),
    ],
)
def test_another_word_is_refused_in_one_sentence_with_the_nearest(command, text, start, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(command, f"--fail-on={text}")
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"gputrain {command}: error: argument --fail-on: {start}")
    assert last.endswith("improved, or never alone")
