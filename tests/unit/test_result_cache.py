"""Runs on emulated GPUs that are remembered: for which task, for how long, and what makes them be made again."""

import os
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from unit_examples import CASE, emulated_run

from pytest_gputrain.records import Case, Limit, Task
from pytest_gputrain.storage import result_cache as cache_module
from pytest_gputrain.storage.result_cache import ResultCache

TASK = Task(case=CASE, scale="full", device_type="gpu", root=".", emulated="h100", limit=Limit(bytes=0))


def test_a_run_is_found_again_for_the_same_task_and_stand_ins_only(tmp_path):
    ResultCache(tmp_path, "these").put(TASK, emulated_run())
    replace = msgspec.structs.replace
    for same in (TASK, replace(TASK, case=CASE.replace(steps=99))):
        assert ResultCache(tmp_path, "these").get(same) == emulated_run()
    for other in (
        replace(TASK, case=CASE.replace(batch_size=4)),
        replace(TASK, scale="tiny"),
        replace(TASK, processes=8),
        replace(TASK, variables={"FLAG": "1"}),
        replace(TASK, emulated="h200"),
        replace(TASK, limit=None),
        replace(TASK, limit=Limit(bytes=5)),
        replace(TASK, limit=Limit(bytes=0, of_steps=True)),
    ):
        assert ResultCache(tmp_path, "these").get(other) is None
    assert ResultCache(tmp_path, "others").get(TASK) is None
    for file in tmp_path.iterdir():
        file.write_bytes(b"{")
    assert ResultCache(tmp_path, "these").get(TASK) is None, "nor in a broken cache"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("library_versions", lambda case: {"torch": "9"}),
        ("_files", lambda name: "others"),
        ("_own_code", lambda: "changed"),
        ("_is_local", lambda name: True),
    ],
)
def test_other_code_is_answered_anew(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(cache_module, "library_versions", lambda case: {"torch": "2.13.0"})
    monkeypatch.setattr(cache_module, "_is_local", lambda name: False)
    monkeypatch.setattr(cache_module, "_files", lambda name: "these")
    ResultCache(tmp_path, "these").put(TASK, emulated_run())
    assert ResultCache(tmp_path, "these").get(TASK) is not None
    monkeypatch.setattr(cache_module, name, value)
    assert ResultCache(tmp_path, "these").get(TASK) is None


def test_another_workspace_of_cublas_is_answered_anew(tmp_path, monkeypatch):
    ResultCache(tmp_path, "these").put(TASK, emulated_run())
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert ResultCache(tmp_path, "these").get(TASK) is None


def test_own_code_is_never_remembered(tmp_path):
    task = msgspec.structs.replace(TASK, case=Case(model="mine", method="custom", code="test_it.py::mine"))
    ResultCache(tmp_path, "these").put(task, emulated_run())
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_asked_for_in_a_month_is_forgotten(tmp_path):
    asked, forgotten, new = (msgspec.structs.replace(TASK, case=CASE.replace(batch_size=size)) for size in (2, 4, 8))
    for task in (asked, forgotten):
        ResultCache(tmp_path, "these").put(task, emulated_run())
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))
    assert ResultCache(tmp_path, "these").get(asked) is not None
    ResultCache(tmp_path, "these").put(new, emulated_run())
    assert [ResultCache(tmp_path, "these").get(task) is not None for task in (asked, forgotten, new)] == [
        True,
        False,
        True,
    ]


def test_the_cache_depends_on_this_package_and_on_nothing_beside_it():
    read = []
    package = Path(cache_module.__file__).parents[1]
    with mock.patch.object(Path, "read_bytes", lambda path: read.append(path) or b""):
        cache_module._own_code.__wrapped__()
    assert package / "worker" / "emulated.py" in read
    assert [path for path in read if not path.is_relative_to(package)] == []
