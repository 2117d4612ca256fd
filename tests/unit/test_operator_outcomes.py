"""The table of torch's databases on an emulated GPU."""

import pytest
from operator_outcomes import AGREES, ASSUMED, CRASHED, LEFT_OUT, RAISED, WRONG, Outcome, difference, share, table

VERDICTS = (AGREES, ASSUMED, RAISED, WRONG, CRASHED, LEFT_OUT)


def test_what_is_left_out_is_no_part_of_a_share():
    assert share(Outcome("known", "add", verdict) for verdict in VERDICTS) == (2, 5)


def test_a_share_is_not_rounded_up():
    outcomes = [Outcome("known", "add", AGREES)] * 99_999 + [Outcome("known", "add", WRONG, "zero")]
    assert "| 99.99 % | 100,000 |" in table(outcomes)


def test_what_does_not_agree_is_named_once_for_each_reason():
    outcomes = [Outcome("known", "add", verdict, f"a | {verdict}", number) for verdict in VERDICTS for number in range(3)]
    named = [line for line in table(outcomes).splitlines() if line.startswith("| known | add")]
    assert named == [f"| known | add | 3 | a \\| {verdict} |" for verdict in (CRASHED, RAISED, WRONG)]


FLOATS = ["torch.float32", [2, 3], "torch.strided", [3, 1]]


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        (FLOATS, ["torch.int64", [2, 3], "torch.strided", [3, 1]], "torch.float32 in place of torch.int64"),
        (FLOATS, ["torch.float32", [2, 4], "torch.strided", [4, 1]], "[2, 3] in place of [2, 4]"),
        (FLOATS, ["torch.float32", [2, 3], "torch.strided", [1, 2]], "[3, 1] in place of [1, 2]"),
        ([FLOATS], [FLOATS, FLOATS], "1 elements in place of 2"),
        ({"step": FLOATS}, {"step": "float"}, f"step: {FLOATS} in place of float"),
        ({}, {"step": "float"}, "step: None in place of float"),
    ],
)
def test_the_first_difference_is_named(found, expected, text):
    assert difference([found], [expected]) == text
