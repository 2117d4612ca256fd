"""Notes the tests with cases that ``-m`` deselects because they have no platform's marker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from pytest_gputrain.plugin.items import file_of, has_cases

_OUTPUT: Final = "gputrain_left_out"
_MOST_FILES: Final = 3


class DeselectedTests:
    """Finds tests that a marker left out, in files of which no test with cases is selected.

    Args:
        expression: the expression of ``-m``; empty for none.
    """

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._platforms: dict[str, str] = {}
        """The platform whose marker would have selected a test, by file."""

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        with_cases = [item for item in items if has_cases(item)] if self._expression else []
        if with_cases:
            # The import takes time, and only tests with cases need this module.
            from pytest_gputrain.session.selection import platforms_missed

            for item in with_cases:
                for platform in platforms_missed(self._expression, {mark.name for mark in item.iter_markers()})[:1]:
                    self._platforms[file_of(item)] = platform

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        selected = {file_of(item) for item in session.items if has_cases(item)}
        if selected and session.config.getoption("keyword", ""):
            selected |= self._platforms.keys()  # `-k`, and not the marker, may have left these tests out.
        for file in selected:
            self._platforms.pop(file, None)
        if hasattr(session.config, "workeroutput"):  # This is a worker of xdist.
            session.config.workeroutput[_OUTPUT] = self._platforms

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._platforms |= getattr(node, "workeroutput", {}).get(_OUTPUT, {})

    def notes(self) -> list[str]:
        """Return one sentence on these tests; nothing if there are none."""
        if not self._platforms:
            return []
        files, platform = sorted(self._platforms), next(iter(self._platforms.values()))
        more = f" and {len(files) - _MOST_FILES} more" if len(files) > _MOST_FILES else ""
        return [
            f"-m {self._expression!r} left out the tests in {', '.join(files[:_MOST_FILES])}{more}, which carry no "
            f"platform's marker: mark them with @pytest.mark.{platform}, or give --gpu-platform={platform} instead of -m"
        ]
