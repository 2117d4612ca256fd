"""Lints docker/*.Dockerfile: what they start from and install is pinned as in constraints.txt, and they run without root."""

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pytest_gputrain.hardware.catalog import MARKERS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(name): version
    for name, separator, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    if separator
}


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction and its arguments, with the lines that it continues on."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in kept.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, arguments = line.strip().partition(" ")
            yield name, arguments.strip()


def requirements(run: str) -> Iterator[Requirement]:
    """What the pip of a RUN installs, the extras of this project by what is in them."""
    lexer = shlex.shlex(run, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    words = [*lexer, "&&"]
    while words:
        end = words.index("&&")
        command, words = words[:end], words[end + 1 :]
        if command[:2] == ["pip", "install"]:
            options = ["", *command[2:]]
            for option, word in itertools.pairwise(options):
                if extras := re.fullmatch(r"\.\[([\w,]+)\]", word):
                    yield from map(Requirement, PROJECT["dependencies"])
                    for extra in extras[1].split(","):
                        yield from map(Requirement, PROJECT["optional-dependencies"][extra])
                elif not word.startswith("-") and option not in ("--constraint", "--index-url"):
                    yield Requirement(word)


def faults(text: str) -> list[str]:
    """What a reviewer would refuse, a sentence each."""
    of_file = list(instructions(text))
    found = [
        f"the base image {arguments} has no pinned tag"
        for name, arguments in of_file
        if name == "FROM" and not re.fullmatch(r"[\w/.-]+:(?!latest)[\w.-]*\d+\.\d+[\w.-]*", arguments)
    ]
    installed = [requirement for name, arguments in of_file if name == "RUN" for requirement in requirements(arguments)]
    for requirement in installed:
        wanted = PINS.get(canonicalize_name(requirement.name))
        if wanted is None:
            found.append(f"{requirement.name} is not pinned by constraints.txt")
        elif str(requirement.specifier) != f"=={wanted}" and "--constraint constraints.txt" not in text:
            found.append(f"{requirement.name} is installed without the constraints")
        elif str(requirement.specifier).startswith("==") and str(requirement.specifier) != f"=={wanted}":
            found.append(f"{requirement} is not {wanted} as in constraints.txt")
    of_torch = re.search(r"pytorch_release_([\d.]+)|torch==([\d.]+)", text)
    if of_torch is None or PINS["torch"] not in of_torch.groups():
        found.append(f"torch is {of_torch[0] if of_torch else 'not pinned'}, not {PINS['torch']}")
    users = [arguments for name, arguments in of_file if name == "USER"]
    if not users or not users[-1].isdecimal() or users[-1] == "0":
        found.append("it runs as root")
    if any("://" in arguments for _, arguments in of_file):
        found.append("a host is named")
    return found


def test_there_is_a_file_for_each_vendor() -> None:
    assert [path.name for path in FILES] == ["cuda.Dockerfile", "rocm.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_everything_is_pinned_as_in_the_constraints(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_it_runs_is_there(path: Path) -> None:
    of_file = list(instructions(path.read_text()))
    (command,) = (json.loads(arguments) for name, arguments in of_file if name == "CMD")
    program, folder, flag, marker = command
    assert (program, flag) == ("pytest", "-m")
    assert (ROOT / folder).is_dir()
    assert marker in MARKERS
    assert ("ENV", "HF_HUB_OFFLINE=1") in of_file
    assert any("pytest-xdist" in arguments for name, arguments in of_file if name == "RUN")


def test_the_binding_of_amdsmi_is_of_the_python_of_the_base() -> None:
    text = (ROOT / "docker" / "rocm.Dockerfile").read_text()
    in_tag, in_path = re.findall(r"_py(\d\.\d+)_", text), re.findall(r"lib/python(\d\.\d+)/", text)
    assert len(in_tag) == 1
    assert in_tag == in_path
