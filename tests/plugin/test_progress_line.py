"""Tests the progress line on a real terminal: what is on the screen while a case runs, and afterwards."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from plugin_project import Project

WIDTH = 100
TOKEN = re.compile(r"\x1b(?:\[([0-9;?]*)([A-Za-z])|([78D]))|([\r\n\b])|([^\x1b\r\n\b])", re.DOTALL)

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


class Screen:
    """As much of a VT100 as pytest and the live line use."""

    def __init__(self, height: int) -> None:
        self.rows = [""] * height
        self.row = self.column = 0
        self._saved = (0, 0)

    def feed(self, text: str) -> None:
        for match in TOKEN.finditer(text):
            parameters, final, escape, control, character = match.groups()
            if character:
                self._put(character)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self._index()
                self.column = 0
            elif control == "\b":
                self.column = max(0, self.column - 1)
            elif escape == "D":
                self._index()
            elif escape == "7":
                self._saved = (self.row, self.column)
            elif escape == "8":
                self.row, self.column = self._saved
            elif final == "A":
                self.row = max(0, self.row - int(parameters or 1))
            elif final == "B":
                self.row = min(len(self.rows) - 1, self.row + int(parameters or 1))
            elif final == "K":
                assert parameters == "2"
                self.rows[self.row] = ""
            else:
                assert final in "mhl", match[0]

    def _index(self) -> None:
        if self.row == len(self.rows) - 1:
            self.rows = [*self.rows[1:], ""]
        else:
            self.row += 1

    def _put(self, character: str) -> None:
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1


def _run_on_terminal(project: Project, height: int, *arguments: str, status: int = 0) -> list[list[str]]:
    """The screen after every piece of what was written."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", height, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(WIDTH), "LINES": str(height)}
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=project.path,
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment,
    )
    os.close(child)
    screen, screens, written = Screen(height), [], ""
    deadline = time.monotonic() + 90
    try:
        while time.monotonic() < deadline:
            if not select.select([parent], [], [], 1)[0]:
                continue
            try:
                data = os.read(parent, 65536)
            except OSError:
                break
            if not data:
                break
            text = data.decode(errors="replace")
            written += text
            screen.feed(text)
            screens.append([row.rstrip() for row in screen.rows])
        assert run.wait(timeout=30) == status, written
    finally:
        run.kill()
        run.wait()
        os.close(parent)
    return screens


def _steps_shown(screens: list[list[str]]) -> list[str]:
    return [row for rows in screens for row in rows if re.search(r"slow-fp32  step \d/8", row)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("height", "arguments"),
    [(60, ()), (8, ("-v",)), (60, ("-s",))],
    ids=["room-below", "verbose-at-the-bottom", "uncaptured"],
)
def test_the_step_is_shown_on_a_line_of_its_own_and_gone_at_the_end(
    project: Project, height: int, arguments: tuple[str, ...]
) -> None:
    project.write(test_slow_code=SLOW)
    screens = _run_on_terminal(project, height, *arguments)
    shown = _steps_shown(screens)
    assert shown
    assert all(re.match(r"slow-fp32  step \d/8  \S+ m?s/step", row) for row in shown)
    assert _steps_shown([screens[-1]]) == []
    assert any("32 passed" in row for row in screens[-1])


@pytest.mark.slow
def test_pytests_own_lines_stay_whole_around_the_live_line_which_a_failure_takes_away(project: Project) -> None:
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
