"""Finds the test files that have no test with cases, of which baselines may be left."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from pytest_gputrain.plugin.items import has_cases

_OUTPUT: Final = "gputrain_without_cases"


class FilesWithoutCases:
    """Hooks that find those of the files that were collected as a whole. One that skips itself is not.

    Args:
        folder: that of the baselines: only files with the name of a suite there are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._collected: set[str] = set()
        self._with_cases: set[Path] = set()
        self.paths: set[Path] = set()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if has_cases(item):
            self._with_cases.add(item.path)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed and report.nodeid.endswith(".py"):
            self._collected.add(report.nodeid)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        suites = {path.stem for depth in ("*", "*/*") for path in self._folder.glob(f"{depth}/*.json")}
        if suites and not any("::" in argument for argument in session.config.args):
            from pytest_gputrain.cases.identity import suite_of

            found = {session.config.rootpath / name for name in self._collected} - self._with_cases
            self.paths = {path for path in found if suite_of(path) in suites}
        if hasattr(session.config, "workeroutput"):  # of xdist
            session.config.workeroutput[_OUTPUT] = [str(path) for path in self.paths]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.paths.update(map(Path, getattr(node, "workeroutput", {}).get(_OUTPUT, ())))
