"""Finds test files that have no test with cases any more, but may have baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from pytest_gputrain.plugin.items import file_of, has_cases, may_have_cases

_OUTPUT: Final = "gputrain_without_cases"


class FilesWithoutCases:
    """Finds the files that were collected completely and have no test with cases. A file that skips itself does not count.

    Args:
        folder: the folder of baselines. Only test files of suites with a file there are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._collected: set[str] = set()
        self._paths: dict[str, Path] = {}
        """The files by their ids, which do not lead to a file outside of the root."""
        self._with_cases: set[str] = set()
        self._undecided: dict[str, str] = {}
        """The files of tests that may ask for a case while they run, by the ids of the tests."""
        self.paths: set[Path] = set()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if has_cases(item):
            self._with_cases.add(file_of(item))
        elif may_have_cases(item):
            self._undecided[item.nodeid] = file_of(item)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        if isinstance(collector, pytest.File) and collector.path.suffix == ".py":
            self._paths[collector.nodeid] = collector.path

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed and report.nodeid in self._paths:
            self._collected.add(report.nodeid)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        suites = {path.stem for depth in ("*", "*/*") for path in self._folder.glob(f"{depth}/*.json")}
        chosen = any("::" in argument for argument in session.config.args) or session.config.getoption("lf", False)
        if suites and not chosen:
            from pytest_gputrain.cases.identity import suite_of

            selected = {item.nodeid for item in session.items}
            deselected = {file for nodeid, file in self._undecided.items() if nodeid not in selected}
            found = {self._paths[file] for file in self._collected - self._with_cases - deselected}
            self.paths = {path for path in found if suite_of(path) in suites}
        if hasattr(session.config, "workeroutput"):  # This is a worker of xdist.
            session.config.workeroutput[_OUTPUT] = [str(path) for path in self.paths]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.paths.update(map(Path, getattr(node, "workeroutput", {}).get(_OUTPUT, ())))
