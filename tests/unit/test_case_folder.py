"""Tests the folders of cases: gone with their case, and what a killed process left with the next one."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from unit_examples import CASE

from pytest_gputrain.execution.launch import case_folder
from pytest_gputrain.execution.launch.case_folder import folder_of
from pytest_gputrain.records import Task

TASK = Task(case=CASE, scale="tiny", device_type="cpu", processes=1, root=".")
HOLDING = """
import sys
from pytest_gputrain.execution.launch.case_folder import folder_of
from pytest_gputrain.records import Case, Task

with folder_of(Task(case=Case(model="held"), scale="tiny", device_type="cpu", processes=1, root=".")) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(temporary):
    """Another process in the middle of a case."""
    process = subprocess.Popen([sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def folder_held_by(holder):
    return Path(holder.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_by_the_next(temporary, holder):
    left = folder_held_by(holder)
    holder.kill()
    holder.wait()
    assert (left / "case.json").exists()
    with folder_of(TASK):
        assert not left.exists()


def test_the_folder_of_a_process_that_lives_stays(temporary, holder):
    held = folder_held_by(holder)
    with folder_of(TASK):
        assert (held / "case.json").exists()


def test_folders_of_others_stay(temporary, monkeypatch):
    """As of torch's compiler, which all runs of a user share; and one that was made a moment ago, and is not locked yet."""
    elsewhere = temporary / "elsewhere"
    for folder in (temporary / "torchinductor_root", temporary / "gputrain-new", temporary / "gputrain-locks-0", elsewhere):
        folder.mkdir()
        (folder / "kernel.py").touch()
    (temporary / "torchinductor_root" / "owner.lock").touch()
    (elsewhere / "owner.lock").touch()
    (temporary / "gputrain-link").symlink_to(elsewhere)
    before = sorted(temporary.rglob("*"))
    with folder_of(TASK):
        pass
    assert sorted(temporary.rglob("*")) == before
    # What another user left stays, too.
    (temporary / "gputrain-new" / "owner.lock").touch()
    user = os.geteuid()
    monkeypatch.setattr(case_folder.os, "geteuid", lambda: user + 1)
    with folder_of(TASK):
        assert (temporary / "gputrain-new").exists()
