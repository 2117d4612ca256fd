"""Which code a case file can name: functions of Python files below the root, and nothing else."""

import sys
from pathlib import Path

import pytest

from pytest_gputrain.worker.building import load_builder
from pytest_gputrain.worker.checks import CheckFailed

FILE = "def step(setup):\n    return 'here'\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project, beside it a file that is none of it, and links from the one to the other."""
    project = tmp_path / "project"
    (project / "tests").mkdir(parents=True)
    (project / "tests" / "test_mine.py").write_text(FILE)
    (project / "tests" / "notes.txt").write_text(FILE)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "test_other.py").write_text("raise SystemExit('it was run')")
    (project / "tests" / "test_link.py").symlink_to(tmp_path / "outside" / "test_other.py")
    (project / "linked").symlink_to(tmp_path / "outside")
    return project


@pytest.mark.parametrize(
    ("code", "why"),
    [
        *(
            (code, "does not lie below")
            for code in (
                "../outside/test_other.py::step",
                "tests/../../outside/test_other.py::step",
                "tests/../tests/test_mine.py::step",
                "{outside}/test_other.py::step",
                "{root}/tests/test_mine.py::step",
                "tests/test_link.py::step",
                "linked/test_other.py::step",
            )
        ),
        *(
            (code, "is not a function of a Python file")
            for code in ("tests/test_none.py::step", "tests/notes.txt::step", "tests::step", "", "::")
        ),
        ("tests/test_mine.py::__class__.x", "is not a function of a Python file"),
    ],
)
def test_no_code_but_a_function_below_the_root_is_run(root: Path, code: str, why: str) -> None:
    assert load_builder("tests/test_mine.py::step", root)(None) == "here"  # type: ignore[arg-type]
    with pytest.raises(CheckFailed, match=why):
        load_builder(code.format(root=root, outside=root.parent / "outside"), root)


def test_a_module_name_imports_no_package_that_the_file_is_not_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = root.parent / "outside" / "package_of_others"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was run')")
    monkeypatch.syspath_prepend(root.parent / "outside")
    assert load_builder("tests/test_mine.py::step", root, "package_of_others.test_mine")(None) == "here"  # type: ignore[arg-type]
    assert "package_of_others" not in sys.modules
