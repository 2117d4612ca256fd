"""Follows what becomes of the tests with cases: why they were skipped, and of which files none was left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from pytest_gputrain.gate.messages import count
from pytest_gputrain.plugin.items import has_cases, may_have_cases, on_controller

Outcome = Literal["passed", "failed", "xfailed", "marked", "left out", "platform", "unfit", "skipped"]
"""``marked``: skipped by a mark, which is somebody's decision. ``left out``: skipped by ``gpu_only_on``, which is somebody's
decision, too. ``platform`` and ``unfit``: skipped by this package, because of the machine's platform, or because it lacks
something else. ``skipped``: by anybody else, as by another plugin."""

SKIPPED: Final[frozenset[Outcome]] = frozenset({"marked", "left out", "platform", "unfit", "skipped"})
_FILES: Final = "gputrain_files"
"""The key of what a worker of xdist sends of its files."""
_MISSED: Final[frozenset[Outcome]] = frozenset({"platform", "unfit", "skipped"})
"""Skipped without anybody's decision."""


def skipped(reason: str, outcome: Outcome = "unfit") -> BaseException:
    """Return the exception that skips a test whose case cannot or should not run here."""
    error = pytest.skip.Exception(reason, _use_item_location=True)
    error.gputrain = outcome  # type: ignore[attr-defined]
    return error


def outcome_of_skip(item: pytest.Item, error: BaseException | None) -> Outcome:
    """Say why a test with cases was skipped."""
    outcome: Outcome = getattr(error, "gputrain", "marked" if _is_marked(item) else "skipped")
    return outcome


def _is_marked(item: pytest.Item) -> bool:
    """Tell whether a mark in the code skips the test. A plugin or a conftest may add such a mark for an option, which does
    not count."""
    written = [
        *getattr(getattr(item, "obj", None), "pytestmark", ()),
        *getattr(getattr(item, "callspec", None), "marks", ()),
    ]
    marks = ((node, mark) for node, mark in item.iter_markers_with_node() if mark.name in ("skip", "skipif"))
    return any(node is not item or mark in written for node, mark in marks)


class CaseTests:
    """The outcomes of the tests with cases, from pytest's reports."""

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
        """Record a report of a phase of a test with cases."""
        if report.when == "setup" and report.passed:
            return  # if the run ends now, this test has no outcome
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

    def note_endings(self, nodeid: str, endings: Sequence[Sequence[str]]) -> None:
        """Record the failures and skips that the fixture ``gputrain`` raised and the test caught."""
        outcome = self.outcomes.get(nodeid, "passed")
        sentences = self.expected if outcome == "xfailed" else self.caught
        sentences += [f"{nodeid}: {sentence}" for sentence, kind in endings if kind == "failure" or outcome == "passed"]

    @property
    def number_left_out(self) -> int:
        return sum(outcome == "left out" for outcome in self.outcomes.values())

    @property
    def number_skipped(self) -> int:
        return sum(outcome in SKIPPED for outcome in self.outcomes.values()) - self.number_left_out

    @property
    def are_all_missed(self) -> bool:
        """Tell whether there were tests and all were skipped, at least one of them not by a mark."""
        found = set(self.outcomes.values())
        return bool(found & _MISSED) and found <= {*SKIPPED, "xfailed"}

    @property
    def are_skipped_by_others(self) -> bool:
        """Tell whether a test was skipped by something other than this package and marks."""
        return "skipped" in self.outcomes.values()

    def why_missed(self) -> str:
        """Return the most frequent reason, with the number of other reasons."""
        reasons = [reason for reason, _ in self._reasons.most_common()]
        more = f", and {count(len(reasons) - 1, 'other reason')}" if len(reasons) > 1 else ""
        return f"{reasons[0]}{more}" if reasons else "-rs tells why"

    def counted(self) -> str:
        """Return the number of tests by outcome, such as "2 failed, 1 skipped"."""
        numbers = Counter("skipped" if outcome in SKIPPED else outcome for outcome in self.outcomes.values())
        return ", ".join(f"{number} {outcome}" for outcome, number in sorted(numbers.items()))


class WholeFiles:
    """Finds the files of which this run has seen every test with cases to its end, so that all their cases are known.

    A worker of xdist sends what it has collected to the controller, which has the reports.
    """

    def __init__(self) -> None:
        self._tests: defaultdict[Path, set[str]] = defaultdict(set)
        self._collected: defaultdict[Path, set[str]] = defaultdict(set)
        self.with_cases: set[Path] = set()
        """The files that have a test which asks for `gputrain` as an argument."""
        self._partial: dict[Path, str] = {}
        """Why not every test of a file was to run."""
        self._cases: dict[str, tuple[str, ...]] = {}
        """The ids of the cases that tests are parametrized with."""
        self._ended: dict[str, str] = {}
        """The outcomes of tests, by id."""
        self._for_others: set[str] = set()
        """The ids of tests that were skipped because their cases are for other machines or kinds of runs."""

    def note_collected(self, item: pytest.Item, cases: Sequence[str]) -> None:
        """Record a collected test with cases, and the ids of the cases that it is parametrized with."""
        self._collected[item.path].add(item.nodeid)
        if cases:
            self._cases[item.nodeid] = tuple(cases)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._partial[item.path] = "tests of it were deselected"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        chosen = any("::" in argument for argument in session.config.args) or session.config.getoption("lf", False)
        for item in filter(may_have_cases, session.items):
            self._tests[item.path].add(item.nodeid)
            self.with_cases |= {item.path} if has_cases(item) else set()
            if chosen:
                self._partial.setdefault(item.path, "only some of its tests were chosen")
        for path, collected in self._collected.items():
            if collected - self._tests.get(path, set()):  # A conftest may take tests out without telling pytest.
                self._partial.setdefault(path, "tests of it were left out")
        if not on_controller(session.config):
            session.config.workeroutput[_FILES] = {  # type: ignore[attr-defined]
                str(path): [
                    path in self.with_cases,
                    self._partial.get(path, ""),
                    {test: self._cases.get(test, ()) for test in sorted(tests)},
                ]
                for path, tests in self._tests.items()
            }

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, (with_cases, partial, tests) in getattr(node, "workeroutput", {}).get(_FILES, {}).items():
            path = Path(name)
            self._tests[path].update(tests)
            self.with_cases |= {path} if with_cases else set()
            self._cases |= {test: tuple(cases) for test, cases in tests.items() if cases}
            if partial:
                self._partial[path] = partial

    def note(self, report: pytest.TestReport) -> None:
        """Record a report of a phase of a test."""
        before = self._ended.get(report.nodeid, "passed")
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        asks_elsewhere = getattr(report, "gputrain_skip", "") in ("platform", "left out")
        self._ended[report.nodeid] = outcome if outcome != "passed" and not asks_elsewhere else before
        self._for_others |= {report.nodeid} if asks_elsewhere else set()

    def is_for_others(self, path: Path) -> bool:
        """Tell whether a test of a file has cases for other machines or kinds of runs."""
        return not self._for_others.isdisjoint(self._tests[path])

    def is_a_part(self, path: Path) -> bool:
        """Tell whether the run has left out tests of a file."""
        return path not in self._tests or path in self._partial

    def not_passed(self, path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the outcome of each test of a file that did not pass, with the ids of its parametrized cases."""
        for nodeid in sorted(self._tests[path]):
            end = self._ended.get(nodeid, "not run")
            if end != "passed":
                yield end, self._cases.get(nodeid, ())

    def why_partial(self, path: Path) -> str:
        """Say why the run does not know all cases of a file; empty if it does."""
        if path not in self._tests:
            return "it was not run"
        return self._partial.get(path) or with_numbers(end for end, _ in self.not_passed(path))

    @property
    def paths(self) -> Sequence[Path]:
        """The files that have tests with cases."""
        return tuple(self._tests)


def with_numbers(ends: Iterable[str]) -> str:
    """Return texts with their numbers, "1 of its tests failed, 2 of its tests skipped"."""
    return ", ".join(f"{number} of its tests {end}" for end, number in sorted(Counter(ends).items()))
