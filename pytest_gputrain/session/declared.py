"""Remembers which case goes by which id, and refuses two cases that would share a baseline."""

from __future__ import annotations

from pathlib import Path

from pytest_gputrain.cases.identity import same_id, suite_of
from pytest_gputrain.records import Case
from pytest_gputrain.utils.errors import BadCase


class DeclaredCases:
    """The cases of one pytest process by suite and id.

    Args:
        root: folder that the addresses of own code are relative to.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cases: dict[tuple[str, str], Case] = {}

    def declare(self, suite: str, case: Case) -> Case:
        """Register ``case`` under its id in ``suite``, and return the first case with this id."""
        return self._cases.setdefault((suite, str(case)), case)

    def refuse_same_id(self, suite: str, case: Case) -> None:
        """Refuse a case whose id is another case's.

        Raises:
            BadCase: the id is another case's.
        """
        first = self.declare(suite, case)
        if first.identity() != case.identity():
            raise BadCase(same_id(suite, first, case))

    def refuse_namesake(self, suite: str, case: Case, baseline_case: Case | None) -> None:
        """Refuse files of one name in two folders, which would replace each other's baselines.

        Args:
            baseline_case: the case whose baseline there is.

        Raises:
            BadCase: that one is another file's, which is still there.
        """
        theirs, ours = (
            "" if owner is None else owner.code.partition("::")[0].removeprefix("inline:") for owner in (baseline_case, case)
        )
        # The code of a case may move to another module that tests import. Two test files of the same name, however, would
        # share a baseline.
        are_tests = suite_of(Path(theirs)) == suite == suite_of(Path(ours))
        if are_tests and theirs != ours and (self._root / theirs).is_file():
            raise BadCase(
                f"{case} of {ours} would share its baseline with that of {theirs}: both are the suite {suite}; rename a file"
            )
