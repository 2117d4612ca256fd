"""Reads pytest's objects for the hooks and the fixtures. Imports nothing else: every project with the plugin has it."""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from pytest_gputrain.records import Result

RESULTS: Final[pytest.StashKey[list[Result]]] = pytest.StashKey()
"""The results of an item's test that no report has yet."""

ENDINGS: Final[pytest.StashKey[list[list[str]]]] = pytest.StashKey()
"""The requests of an item's test that have not given what it asked for: each a sentence, and ``skip`` or ``failure``."""

FORKED: Final[pytest.StashKey[mmap.mmap]] = pytest.StashKey()
"""A byte that an item's test shares with the processes that it forks: 1 if one of them has asked for something."""
ASKED_BY_A_CHILD: Final = (
    "gputrain was asked in a process that the test forked, whose answer nobody reads; ask in the test's own process"
)


def expression_of(config: pytest.Config) -> str:
    """Return the expression of ``-m``; empty without one, or without pytest's plugin for marks."""
    return str(config.getoption("markexpr", "") or "")


def on_controller(config: pytest.Config) -> bool:
    """Tell whether this is the only pytest process, or the controller of xdist."""
    return not hasattr(config, "workerinput")


def has_cases(item: pytest.Item) -> bool:
    """Tell whether a test asks for ``gputrain`` as an argument, directly or through another fixture."""
    return "gputrain" in getattr(item, "fixturenames", ())


def has_parameters(item: pytest.Item) -> bool:
    """Tell whether a test is parametrized with a case. No test is if no module has imported cases."""
    module, callspec = sys.modules.get("pytest_gputrain.records.case"), getattr(item, "callspec", None)
    return (
        module is not None and callspec is not None and any(isinstance(it, module.Case) for it in callspec.params.values())
    )


def may_have_cases(item: pytest.Item) -> bool:
    """Tell whether a test asks for ``gputrain``, or may do so while it runs, by ``request.getfixturevalue``."""
    return has_cases(item) or "request" in getattr(item, "fixturenames", ())


def file_of(item: pytest.Item) -> str:
    """Return the file of a test, in the form of its id."""
    return item.nodeid.partition("::")[0]
