#!/usr/bin/env python3
"""Writes the hashes of the wheels that ``gputrain emulate --install`` downloads, as pip's own index publishes them.

    tools/record_wheels.py

Run it after each release of torch. It asks the index for one page of each project, over TLS, by pip's own session.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

FILE: Final = Path(__file__).parents[1] / "pytest_gputrain" / "hardware" / "emulation" / "wheels.txt"

OLDEST: Final = {
    "torch": Version("2.9"),
    "torchaudio": Version("2.9"),
    "torchvision": Version("0.24"),
    "triton": Version("3.5"),
}
"""Those of torch 2.9, the oldest that a GPU is emulated for."""

_OLDEST_PYTHON: Final = 11
_FIRST_ON_ARM: Final = Version("2.11")
"""The first torch whose wheels for aarch64 are CUDA builds."""


def lines(files: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each wheel that is taken: its sha256, bytes and name."""
    for file in files:
        if file["yanked"] or not file["filename"].endswith(".whl"):
            continue
        try:
            project, version, _, tags = parse_wheel_filename(file["filename"])
        except InvalidWheelFilename:
            continue
        tag = next(iter(tags))
        if version.local or version < OLDEST[project] or "linux" not in tag.platform:
            continue
        if not tag.interpreter.startswith("cp3") or int(tag.interpreter[3:]) < _OLDEST_PYTHON:
            continue
        if project == "torch" and tag.platform.endswith("aarch64") and version < _FIRST_ON_ARM:
            continue
        yield f"{file['hashes']['sha256']} {file['size']} {file['filename']}\n"


def main() -> int:
    from pip._internal.models.index import PyPI
    from pip._internal.network.session import PipSession

    session = PipSession()
    found: list[str] = []
    for project in OLDEST:
        page = session.get(f"{PyPI.simple_url}/{project}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        page.raise_for_status()
        found += lines(page.json()["files"])
    FILE.write_text("".join(sorted(found, key=lambda line: line.split()[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
