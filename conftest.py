"""For the project's own tests. Only this file may name plugins for the session: pytester runs pytest inside of them."""

import pytest

# Before pytester runs pytest in this process: it forgets what such a run imports, and the next would mix two of each class.
import pytest_gputrain.plugin.case_session  # noqa: F401

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked as slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = {item for item in items if item.get_closest_marker("slow")}
    config.hook.pytest_deselected(items=list(slow))
    items[:] = [item for item in items if item not in slow]
