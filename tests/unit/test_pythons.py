"""Tests where an interpreter of a version of Python is looked for. What Debian has is unpacked by `.ci/run`."""

import sys

import pytest
import pythons

VERSION = "{}.{}".format(*sys.version_info)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Returns a function that makes a program the only one on the path, by its lines of shell."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(pythons, "UNPACKED", tmp_path / "pythons")

    def make(name, lines):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)

    return make


@pytest.mark.parametrize(
    "lines",
    ['exec {python} "$@"', '[ "$PYENV_VERSION" = {version} ] && exec {python} "$@"; echo no such version >&2; exit 127'],
    ids=["a program", "pyenv"],
)
def test_the_interpreter_behind_a_program_is_found(program, lines):
    program(f"python{VERSION}", lines.format(python=sys.executable, version=VERSION))
    assert pythons.find(VERSION, sys.executable).samefile(sys.executable)


@pytest.mark.parametrize("lines", ["exit 127", "echo 3 7 /usr/bin/python3.7", "true"])
def test_a_program_of_another_version_is_passed_over(program, lines):
    program("python3.99", lines)
    with pytest.raises(pythons.NotFound, match=r"^there is no python3\.99, and no apt-get for Debian's$"):
        pythons.find("3.99", sys.executable)


def test_nothing_is_fetched_without_keys_and_a_mirror(program, tmp_path, monkeypatch):
    program("dpkg-deb", "exit 1")
    program("apt-get", "echo https://mirror.example/ubuntu/")
    keys = tmp_path / "keys.gpg"
    monkeypatch.setattr(pythons, "KEYS", keys)
    with pytest.raises(pythons.NotFound, match=rf"and no {keys} for Debian's$"):
        pythons.find("3.99", sys.executable)
    keys.touch()
    with pytest.raises(pythons.NotFound, match=r"apt-get knows no mirror of Debian$"):
        pythons.find("3.99", sys.executable)


def test_what_debian_cannot_give_is_told(program, tmp_path, monkeypatch):
    monkeypatch.setattr(pythons, "KEYS", tmp_path / "bin" / "dpkg-deb")
    program("dpkg-deb", "exit 1")
    program(
        "apt-get",
        '[ "$1" = indextargets ] && echo https://mirror.example/debian/ && exit; echo E: no such package; exit 100',
    )
    with pytest.raises(pythons.NotFound, match=r"and Debian's cannot be had: E: no such package$"):
        pythons.find("3.99", sys.executable)
    assert not any((tmp_path / "pythons").iterdir())
