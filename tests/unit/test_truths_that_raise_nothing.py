"""Which truth value keeps a program from raising, in the byte code of each version of Python."""

import contextlib
import operator
import sys
import textwrap

import pytest

from pytest_gputrain.worker.emulated_values.branches import truth_that_raises_nothing


class Unknown:
    """A truth value that is answered as an emulated GPU does."""

    def __init__(self):
        self.answers = []

    def __bool__(self):
        self.answers.append(truth_that_raises_nothing(sys._getframe(1)))
        return bool(self.answers[-1])


def answers_in(body):
    """Run a function from text, because pytest rewrites the assertions of this file."""
    value, names = Unknown(), {"not_": operator.not_}
    exec(f"def program(value):\n{textwrap.indent(body, ' ')}", names)
    with contextlib.suppress(StopIteration, SystemExit, TypeError):
        names["program"](value)
    return value.answers


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ("assert value, f'{value} is not {value!r}'", [True]),
        ("assert not value", [False]),
        ("assert value and not value", [True, False]),
        ("assert bool(value)", [True]),
        ("if value:\n text = 'a message'\n raise ValueError(text)", [False]),
        ("for _ in range(2):\n if not value:\n  raise ValueError(value)", [True, True]),
        ("if value:\n text = 1\nelse:\n raise ValueError\nreturn text", [True]),
    ],
)
def test_an_unknown_value_passes_a_check(body, answers):
    assert answers_in(body) == answers


@pytest.mark.parametrize(
    "body",
    [
        "return 1 if value else 2",
        "while value:\n return 1",
        "if not value:\n raise StopIteration",
        "if value:\n raise SystemExit(f'{value} is no Error')",
        "assert not_(bool(value))",
        "if value:\n raise ValueError\nraise TypeError",
        "if value:\n for _ in range(2):\n  pass\n raise ValueError",
    ],
)
def test_a_value_that_decides_something_else_is_left_open(body):
    assert answers_in(body) == [None]
