"""The lines of the user's own files, found from inside of torch."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pytest_gputrain
from pytest_gputrain.worker.emulated_values.program_lines import is_ours
from pytest_gputrain.worker.own_lines import OwnLines

HERE = Path(__file__)


class Watched(TorchDispatchMode):
    """Notes the line of each operator."""

    def __init__(self, lines):
        super().__init__()
        self.lines = lines
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.setdefault(str(func), self.lines.current())
        return func(*args, **(kwargs or {}))


CALL = "def call(function):\n    return function()\n"


def imported(path, text=CALL):
    """What the file would define, which is not written."""
    names = {}
    exec(compile(text, str(path), "exec"), names)
    return names


def test_a_line_is_found_through_torch_s_own_files(tmp_path):
    own = imported(tmp_path / "test_own.py", "def train(model, x):\n    y = model(x)\n    y.sum().backward()\n")
    with Watched(OwnLines([tmp_path])) as watched:
        own["train"](torch.nn.Linear(4, 4), torch.ones(2, 4))
    assert watched.seen["aten.addmm.default"] == "test_own.py:2"
    assert watched.seen["aten.mm.default"] == "test_own.py:3", "of the backward pass"


def test_a_path_begins_at_the_first_folder_that_has_the_file_and_other_files_are_not_the_user_s(tmp_path):
    assert OwnLines([HERE.parents[1], HERE.parent]).current().startswith("worker/test_own_lines.py:")
    assert OwnLines([HERE.parent / "zoo", HERE.parent]).current().startswith("test_own_lines.py:")
    assert OwnLines([tmp_path]).current() == ""
    # As where Python is installed below a home folder, which is the root.
    of_python = (torch.__file__, sys.modules["threading"].__file__, "<string>")
    assert list(map(OwnLines([Path("/")]).name_of, of_python)) == ["", "", ""]


def test_a_folder_that_pip_installed_into_is_not_the_user_s_wherever_it_lies(tmp_path, monkeypatch):
    packages = tmp_path / "vendored"
    (packages / "their-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = OwnLines([tmp_path])
    assert lines.name_of(str(packages / "their.py")) == ""
    assert lines.name_of(str(tmp_path / "own.py")) == "own.py"


@pytest.mark.parametrize("place", ["lib/python3.11/site-packages/their.py", "dist-packages/their.py"])
def test_what_is_installed_below_the_root_is_not_the_user_s(tmp_path, place):
    theirs = imported(tmp_path / place)
    own = imported(tmp_path / "test_own.py", "\n\ndef call(function):\n    return function()\n")
    lines = OwnLines([tmp_path])
    assert theirs["call"](lines.current) == ""
    assert own["call"](lambda: theirs["call"](lines.current)) == "test_own.py:4"


def test_what_this_package_calls_is_not_told_by_who_called_the_package(tmp_path):
    """A run inside of pytest's process has the test itself further out."""
    ours = imported(Path(pytest_gputrain.__file__).parent / "worker" / "run.py")
    own = imported(tmp_path / "test_own.py")
    lines = OwnLines([tmp_path])

    def operator():
        return ours["call"](lines.current)

    assert own["call"](operator) == "test_own.py:2"
    assert own["call"](lambda: ours["call"](operator)) == ""
    assert own["call"](lambda: ours["call"](lambda: own["call"](operator))) == "test_own.py:2"


def test_a_line_of_this_package_is_no_line_of_the_program_by_any_path_that_leads_to_it():
    ours = Path(pytest_gputrain.__file__).parent
    assert is_ours(str(ours / "worker" / "flops.py"))
    assert is_ours(str(ours.parent / "other" / ".." / ours.name / "worker" / "flops.py")), "as PYTHONPATH=../here makes it"
    assert not is_ours(__file__)
