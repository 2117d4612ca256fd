"""Tests the progress line on a real terminal: what is on the screen while a case runs, and afterwards."""

import contextlib
import os
import re
import sys

import pytest

WIDTH = 100

SLOW = """
import pytest


def slow(setup):
    import time

    return lambda: time.sleep(0.15)


@pytest.mark.parametrize("number", range(30))
def test_before(number):
    pass


def test_slow(gputrain):
    gputrain.measure(slow, precision="fp32", steps=8, warmup=1)


def test_after():
    pass
"""


def _run_on_terminal(project, height, *arguments, status=0):
    """The screen after every piece of what was written."""
    pexpect, pyte = (pytest.importorskip(name) for name in ("pexpect", "pyte"))
    size = {"COLUMNS": str(WIDTH), "LINES": str(height)}
    run = pexpect.spawn(
        sys.executable,
        ["-m", "pytest", *arguments],
        cwd=str(project.path),
        env={**os.environ, "TERM": "xterm", **size},
        dimensions=(height, WIDTH),
        encoding="utf-8",
        timeout=600,
    )
    screen, screens = pyte.Screen(WIDTH, height), []
    stream = pyte.Stream(screen)
    with contextlib.closing(run), contextlib.suppress(pexpect.EOF):
        while True:
            stream.feed(run.read_nonblocking(65536, timeout=600))
            screens.append([row.rstrip() for row in screen.display])
    assert run.exitstatus == status, screens[-1]
    return screens


def _steps_shown(screens):
    return [row for rows in screens for row in rows if re.search(r"slow-fp32  step \d/8", row)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("height", "arguments"),
    [(60, ()), (8, ("-v",)), (60, ("-s",))],
    ids=["room-below", "verbose-at-the-bottom", "uncaptured"],
)
def test_the_step_is_shown_on_a_line_of_its_own_and_gone_at_the_end(project, height, arguments):
    project.write(test_slow_code=SLOW)
    screens = _run_on_terminal(project, height, *arguments)
    shown = _steps_shown(screens)
    assert shown
    assert all(re.match(r"slow-fp32  step \d/8  \S+ m?s/step", row) for row in shown)
    assert _steps_shown([screens[-1]]) == []
    assert any("32 passed" in row for row in screens[-1])


@pytest.mark.slow
def test_pytests_own_lines_stay_whole_around_the_live_line_which_a_failure_takes_away(project):
    failing = "def failing(setup):\n    import time\n\n    return lambda: time.sleep(0.15) or 1 / 0"
    test = "def test_failing(gputrain):\n    gputrain.measure(failing, precision='fp32', steps=8)"
    project.write(test_slow_code=f"{SLOW}\n\n{failing}\n\n\n{test}\n")
    screens = _run_on_terminal(project, 24, "-v", status=1)
    running = next(rows for rows in screens if _steps_shown([rows]))
    name = next(row for row in running if "test_slow_code.py::test_slow " in f"{row} ")
    assert name.rstrip() == "test_slow_code.py::test_slow"
    assert any(re.fullmatch(r"test_slow_code.py::test_before\[29\] PASSED +\[ *\d+%\]", row) for row in running)
    done = next(rows for rows in screens if any(row.startswith("test_slow_code.py::test_after PASSED") for row in rows))
    assert any(re.fullmatch(r"test_slow_code.py::test_slow PASSED +\[ *\d+%\]", row) for row in done)
    assert _steps_shown([done]) == []
    assert any("failing-fp32  " in row for rows in screens for row in rows)
    assert [row for row in screens[-1] if row.startswith("failing-fp32  ")] == []
