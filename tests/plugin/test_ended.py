"""Tests runs that are ended from outside or find a full disk: measured figures are saved, and no process is left."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from leftovers import Leftovers, wait_for
from plugin_project import BUILD, GEMMA, LLAMA, LLAMA_2, failures

SUITE = """
from pytest_gputrain import Case

LLAMA = Case(model="llama-3.1-8b", method="lora", sequence_length=64)


def test_first(gputrain):
    gputrain.check(LLAMA)


def test_two(gputrain):
    gputrain.measure(LLAMA.replace(model="gemma-7b"))
    gputrain.check(LLAMA.replace(model="llama-2-13b"))


def test_never(gputrain):
    gputrain.check(LLAMA.replace(model="llama-3-8b"))
"""
OPTIONS = ("--gpu-json=report.json", "--gpu-history=history.jsonl")


def _ended(project, *arguments, by, group=False, when=("hangs",), then=lambda run: None):
    """How a pytest ends that is sent signals when its case hangs, for longer than it may take, and what it says.

    Args:
        group: all processes of the terminal get them.
        when: the signals are sent when these files exist.
        then: called when they are sent.
    """
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *OPTIONS, *arguments],
        cwd=project.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads are here
    )
    try:
        wait_for(*(project.path / name for name in when), seconds=600)
        for number in by:
            (os.killpg if group else os.kill)(run.pid, number)
            time.sleep(0.02)
        then(run)
        output, _ = run.communicate(timeout=600)
        return run.returncode, output
    finally:
        run.kill()
        run.wait()


def _assert_kept(project, ended, *keys):
    """The report and the history have these cases, and pytest was interrupted without an error."""
    status, output = ended
    assert status == project.report()["exit_status"] == pytest.ExitCode.INTERRUPTED, output
    assert "Traceback" not in output
    assert "INTERNALERROR" not in output
    lines = map(json.loads, (project.path / "history.jsonl").read_text().splitlines())
    assert {line["key"] for line in lines} == {result["key"] for result in project.report()["results"]} == {*keys}


@pytest.fixture
def hanging(h100):
    h100.write(test_tuning=SUITE)
    h100.when_launched("Path('hangs').touch()\n__import__('time').sleep(600)", of=f"name == {LLAMA_2!r}")
    return h100


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGINT,) * 3, (signal.SIGTERM,) * 3], ids=str
)
def test_what_ends_a_run_ends_it_at_once_with_all_that_was_measured(hanging, signals):
    status, output = _ended(hanging, by=signals)
    _assert_kept(hanging, (status, output), LLAMA, GEMMA)
    if len(signals) == 1:
        assert f"ended by {signal.Signals(signals[0]).name}" in output
        assert "2 lines appended to" in output


ENDING = """

def pytest_terminal_summary():
    Path("ending").touch()
    while not Path("sent").exists():
        __import__("time").sleep(0.01)


def pytest_unconfigure():
    Path("unconfigured").touch()
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_during_the_end_of_a_run_changes_nothing(hanging, first):
    conftest = hanging.path / "conftest.py"
    conftest.write_text(conftest.read_text() + ENDING)

    def again(run):
        wait_for(hanging.path / "ending", seconds=30)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            run.send_signal(number)
            time.sleep(0.02)
        (hanging.path / "sent").touch()

    _assert_kept(hanging, _ended(hanging, by=(first,), then=again), LLAMA, GEMMA)
    assert (hanging.path / "unconfigured").exists()


# What the made-up cases take is less than xdist's workers may take to send a report.
HEARD = """

def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ and report.when == "teardown":
        Path("heard").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["Ctrl-C", "SIGTERM"])
def test_under_two_workers_the_tests_that_were_over_are_kept(hanging, number, group):
    pytest.importorskip("xdist")
    conftest = hanging.path / "conftest.py"
    conftest.write_text(f"import os\n{conftest.read_text()}{HEARD}")
    ended = _ended(hanging, "-n2", "--dist=loadfile", by=(number,), group=group, when=("hangs", "heard"))
    _assert_kept(hanging, ended, LLAMA)


# A full disk

FILLING = f"""{BUILD}
import tempfile
from pathlib import Path

def fill(path):
    with open(path, "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass


def filling(setup):
    made = build(setup)
    (of_the_case,) = Path(tempfile.gettempdir()).glob("gputrain-*/case.json")
    fill(of_the_case.with_name("full"))
    return made


def test_full_in_the_worker(gputrain):
    gputrain.check(filling, precision="fp32", steps=2)


def test_room_again(gputrain):
    gputrain.check(build, precision="fp32", steps=2)


def test_full_before_the_worker(gputrain):
    fill(Path(tempfile.gettempdir(), "full"))
    gputrain.check(build, precision="fp32", steps=2, model="other")
"""


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A folder for temporary files on a disk of its own."""
    leftovers = Leftovers(tmp_path, monkeypatch)
    disk = Path(tempfile.gettempdir())
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield disk
        assert leftovers.all() == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_the_next_case_has_room(project, small_disk):
    project.write(test_filling=FILLING)
    result = project.run(*OPTIONS)
    (small_disk / "full").unlink()
    result.assert_outcomes(passed=1, failed=2)
    sentences = {name: text.strip() for name, text in failures(result).items()}
    without = r"filling-fp32 gave no measurement \(\w+\): the worker ended with exit code 1 without a reply; 0 B is free in "
    assert re.fullmatch(without + str(small_disk), sentences["test_full_in_the_worker"]), sentences
    not_started = r"other-fp32 was not measured, because its process could not be started: \[Errno 28\] No space.*TMPDIR.*"
    assert re.fullmatch(not_started, sentences["test_full_before_the_worker"])
    assert project.verdicts() == {"filling-fp32@tiny": "failed", "build-fp32@tiny": "new"}
    assert len((project.path / "history.jsonl").read_text().splitlines()) == 2


def test_where_no_disk_has_room_that_is_told(suite, small_disk):
    """Neither for the report, nor for what is kept aside."""
    suite.run().assert_outcomes(passed=3)
    suite.write(
        test_zz=f"from pathlib import Path\n\n\ndef test_zz():\n    Path({str(small_disk)!r}, 'x').write_bytes(b'x' * 10**6)"
    )
    result = suite.run(f"--gpu-json={small_disk}/report.json")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["the report *report.json cannot be written: No space *; nor could the figures be kept in *: No space*"]
    )
    assert [path.name for path in small_disk.iterdir() if "report" in path.name or path.suffix == ".part"] == []
    (small_disk / "x").unlink()
