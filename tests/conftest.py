"""Fixtures and settings for all tests."""

import contextlib
import random
import signal

# pytester forgets what was imported in its runs: libraries of which it forgets only parts break, and others are read again.
import filelock  # noqa: F401
import psutil  # noqa: F401
import pynvml  # noqa: F401
import rich.console
import rich.table  # noqa: F401

with contextlib.suppress(ImportError):
    import jinja2  # noqa: F401
    import matplotlib.backends.backend_svg
    import matplotlib.dates
    import matplotlib.figure
    import matplotlib.ticker  # noqa: F401

# What a shell starts in the background ignores Ctrl-C, and below nohup SIGHUP; so would what tests start and end by them.
for number, default in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


def pytest_addoption(parser):
    parser.addoption(
        "--random-order", type=int, metavar="SEED", help="run the files, and the tests of each, in another order"
    )


def pytest_collection_modifyitems(config, items):
    """Shuffle files and tests in them, so that what a file sets up is set up once; workers of xdist have the same order."""
    if (seed := config.getoption("--random-order")) is not None:
        order = random.Random(seed)
        files = {item.path: order.random() for item in sorted(items, key=lambda item: item.path)}
        items.sort(key=lambda item: (files[item.path], order.random()))
