"""Follows what becomes of the tests with cases: why they were skipped, and of which files none was left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import pytest

from pytest_gputrain.gate.messages import count
from pytest_gputrain.records import FAILING, Result

Outcome = Literal["passed", "failed", "xfailed", "marked", "platform", "unfit", "skipped"]
"""``marked``: skipped by a mark, which is somebody's decision. ``platform`` and ``unfit``: skipped by this package, because
of the machine's platform, or because it lacks something else. ``skipped``: by anybody else, as by another plugin."""

SKIPPED: Final[frozenset[Outcome]] = frozenset({"marked", "platform", "unfit", "skipped"})
_MISSED: Final[frozenset[Outcome]] = frozenset({"platform", "unfit", "skipped"})
"""Skipped without anybody's decision."""


def skipped(reason: str, *, of_platform: bool = False) -> BaseException:
    """Return the exception that skips a test whose case cannot run here."""
    error = pytest.skip.Exception(reason, _use_item_location=True)
    error.gputrain = "platform" if of_platform else "unfit"  # type: ignore[attr-defined]
    return error


def outcome_of_skip(item: pytest.Item, error: BaseException | None) -> Outcome:
    """Say why a test with cases was skipped."""
    outcome: Outcome = getattr(error, "gputrain", "marked" if _is_marked(item) else "skipped")
    return outcome


def _is_marked(item: pytest.Item) -> bool:
    """Tell whether a mark in the code skips the test, rather than one that a plugin or a conftest adds for an option."""
    written = [
        *getattr(getattr(item, "obj", None), "pytestmark", ()),
        *getattr(getattr(item, "callspec", None), "marks", ()),
    ]
    marks = ((node, mark) for node, mark in item.iter_markers_with_node() if mark.name in ("skip", "skipif"))
    return any(node is not item or mark in written for node, mark in marks)


class CaseTests:
    """The outcomes of the tests with cases, from their reports."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        """The outcomes by the ids of tests that are over."""
        self.caught: list[str] = []
        """Sentences of failures that did not fail their tests."""
        self.expected: list[str] = []
        """The sentences of failures in tests that a mark expects to fail."""
        self._reasons: Counter[str] = Counter()
        """Why tests were skipped without anybody's decision."""

    def note(self, report: pytest.TestReport) -> None:
        """Take in a report of a phase of a test with cases."""
        if report.when == "setup" and report.passed:
            return  # a run that is ended now has no outcome of this test
        before = self.outcomes.get(report.nodeid, "passed")
        outcome = before
        if report.failed:
            outcome = "failed"
        elif hasattr(report, "wasxfail"):
            outcome = "xfailed"
        elif report.skipped:
            outcome = getattr(report, "gputrain_skip", "skipped")
            if outcome in _MISSED and isinstance(report.longrepr, tuple):
                self._reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
        self.outcomes[report.nodeid] = before if before == "failed" else outcome

    def note_passed(self, result: Result) -> None:
        """Take in a result of a test that did not fail."""
        if result.verdict is not None and result.verdict.status in FAILING:
            is_expected = self.outcomes.get(result.nodeid) == "xfailed"
            (self.expected if is_expected else self.caught).append(result.verdict.sentence)

    @property
    def number_skipped(self) -> int:
        return sum(outcome in SKIPPED for outcome in self.outcomes.values())

    @property
    def are_all_missed(self) -> bool:
        """Whether there were tests, and all were skipped, not each by a mark."""
        found = set(self.outcomes.values())
        return bool(found & _MISSED) and found <= {*SKIPPED, "xfailed"}

    @property
    def are_skipped_by_others(self) -> bool:
        """Whether something else than this package and marks has skipped a test."""
        return "skipped" in self.outcomes.values()

    def why_missed(self) -> str:
        """Return the most frequent reason, and how many others there are."""
        reasons = [reason for reason, _ in self._reasons.most_common()]
        more = f", and {count(len(reasons) - 1, 'other reason')}" if len(reasons) > 1 else ""
        return f"{reasons[0]}{more}" if reasons else "-rs tells why"

    def counted(self) -> str:
        """Return the outcomes with their numbers, such as "2 failed, 1 skipped"."""
        numbers = Counter("skipped" if outcome in SKIPPED else outcome for outcome in self.outcomes.values())
        return ", ".join(f"{number} {outcome}" for outcome, number in sorted(numbers.items()))


class WholeFiles:
    """Hooks that find the files of which this run has seen every test to its end, so that it knows all of their cases."""

    def __init__(self) -> None:
        self._tests: defaultdict[Path, set[str]] = defaultdict(set)
        self._collected: defaultdict[Path, set[str]] = defaultdict(set)
        self._partial: dict[Path, str] = {}
        """Why not every test of a file was seen."""
        self._ended: dict[str, str] = {}
        """The outcomes of tests, by id."""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._collected[item.path].add(item.nodeid)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._partial[item.path] = "tests of it were deselected"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        chosen = any("::" in argument for argument in session.config.args) or session.config.getoption("lf", False)
        for item in session.items:
            self._tests[item.path].add(item.nodeid)
            if chosen:
                self._partial.setdefault(item.path, "only some of its tests were chosen")
        for path, collected in self._collected.items():
            if collected - self._tests.get(path, set()):  # a conftest need not tell what it takes out
                self._partial.setdefault(path, "tests of it were left out")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._ended.get(report.nodeid, "passed")
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        is_of_platform = getattr(report, "gputrain_skip", "") == "platform"
        self._ended[report.nodeid] = outcome if outcome != "passed" and not is_of_platform else before

    def why_partial(self, path: Path) -> str:
        """Say why the run does not know all cases of a file; empty where it does."""
        if path not in self._tests:
            return "it was not run"
        ends = Counter(self._ended.get(nodeid, "not run") for nodeid in self._tests[path])
        del ends["passed"]
        return self._partial.get(path) or ", ".join(f"{number} of its tests {end}" for end, number in sorted(ends.items()))

    @property
    def paths(self) -> Sequence[Path]:
        """The files that were collected."""
        return tuple(self._tests)
