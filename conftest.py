"""For the project's own tests. Only this file may name plugins for the session: pytester runs pytest inside of them."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

# Before pytester runs pytest in this process: it forgets what such a run imports, and the next would mix two of each class.
import pytest_gputrain.plugin.case_session  # noqa: F401

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked as slow, too")
    parser.addoption("--one-of-alike", action="store_true", help="run only cases with a value that no other has")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    if not config.getoption("--slow"):
        _leave_out(config, items, {item for item in items if item.get_closest_marker("slow")})
    yield
    if config.getoption("--one-of-alike"):  # of those that -m and -k leave
        _leave_out(config, items, set(_alike(items)))


def _leave_out(config: pytest.Config, items: list[pytest.Item], those: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=list(those))
    items[:] = [item for item in items if item not in those]


def _alike(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield those whose cases have no value that those before them lack, of each test function."""
    from alike import one_of_alike

    by_function: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_function[item.nodeid.partition("[")[0]].append(item)
    for alike in by_function.values():
        kept = one_of_alike(next(iter(item.callspec.params.values())) for item in alike)
        yield from (item for item, keep in zip(alike, kept, strict=True) if not keep)
