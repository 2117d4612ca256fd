"""Lints docker/*.Dockerfile: what they start from and install is pinned as in constraints.txt, and they run without root."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pytest_gputrain.hardware.catalog import MARKERS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PINS = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def instructions(path):
    """The file without comments, each instruction in one line."""
    return re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")


def test_there_is_a_file_for_each_vendor():
    assert [path.name for path in FILES] == ["cuda.Dockerfile", "rocm.Dockerfile"]


@each_file
def test_everything_is_pinned_as_in_the_constraints_and_nothing_runs_as_root(path):
    text = instructions(path)
    assert re.search(r"^FROM [\w/.-]+:(?!latest)[\w.-]*\d+\.\d+[\w.-]*$", text, re.MULTILINE), "a pinned tag"
    assert dict(re.findall(r"([\w-]+)==([\w.]+)", text)).items() <= PINS.items()
    assert PINS["torch"] in re.findall(r"(?:torch==|pytorch_release_)([\d.]+)", text)
    for command in re.findall(r"pip install ([^&]*)", text):
        unpinned = [word for word in command.split() if not word.startswith("-") and "==" not in word]
        assert not unpinned or "--constraint constraints.txt" in command, unpinned
    *_, user = re.findall(r"^USER (.*)$", text, re.MULTILINE)
    assert int(user) > 0
    assert "://" not in text, "no host is named"


def test_the_constraints_pin_what_is_installed_with_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {Requirement(text).name for text in (*project["dependencies"], *extras["suite"], *extras["report"])}
    assert needed <= PINS.keys()


@each_file
def test_what_it_runs_is_there(path):
    text = instructions(path)
    (command,) = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    program, folder, flag, marker = json.loads(command)
    assert (program, flag) == ("pytest", "-m")
    assert (ROOT / folder).is_dir()
    assert marker in MARKERS
    assert "ENV HF_HUB_OFFLINE=1\n" in text
    assert "pytest-xdist" in text


def test_the_binding_of_amdsmi_is_of_the_python_of_the_base():
    text = (ROOT / "docker" / "rocm.Dockerfile").read_text()
    in_tag, in_path = re.findall(r"_py(\d\.\d+)_", text), re.findall(r"lib/python(\d\.\d+)/", text)
    assert len(in_tag) == 1
    assert in_tag == in_path
