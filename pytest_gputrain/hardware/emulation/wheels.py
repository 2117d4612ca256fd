"""Knows the wheels of torch's CUDA builds by their hashes, and unpacks a wheel without running any of its code."""

from __future__ import annotations

import base64
import calendar
import csv
import functools
import hashlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple, NoReturn

from pytest_gputrain.utils.errors import CannotEmulate

if TYPE_CHECKING:
    from packaging.tags import Tag

_TABLE: Final = Path(__file__).with_name("wheels.txt")
"""A line for each wheel: its sha256, its bytes and its name, as the index publishes them (tools/record_wheels.py)."""

PACKAGES: Final = {
    "torch": ("torch", "torchgen", "functorch"),
    "torchvision": ("torchvision",),
    "torchaudio": ("torchaudio",),
    "triton": ("triton",),
}
"""The projects that are taken, each with the packages that its wheel may have. Others would shadow the user's."""

_CHUNK: Final = 1 << 20
_UNHASHED: Final = re.compile(r"[^/]+\.dist-info/RECORD(\.jws|\.p7s)?")
"""The files of a wheel that its RECORD has no hash of."""


class Wheel(NamedTuple):
    """A wheel on the index."""

    project: str
    version: str
    sha256: str = ""
    """Empty if the user gave the hashes; the wheel must then have one of them."""
    filename: str = ""
    """The name of the file; empty if the user gave the hashes."""
    size: int = 0
    """The size of the file in bytes; 0 if it is not known."""

    @property
    def name(self) -> str:
        """The name of the wheel in messages."""
        return self.filename or f"{self.project} {self.version}"


def known(project: str, version: str) -> Wheel | None:
    """Return the wheel of this version for this Python and machine from the table; None if the table has none."""
    from packaging.tags import sys_tags

    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    fitting = []
    for wheel in _table():
        if (wheel.project, wheel.version) == (project, version):
            _, _, build, tags = parse_name(wheel.filename)
            fitting += [(ranks[tag], -build, wheel) for tag in tags if tag in ranks]
    return min(fitting)[2] if fitting else None


@functools.cache
def _table() -> tuple[Wheel, ...]:
    wheels = []
    for line in _TABLE.read_text().splitlines():
        sha256, size, filename = line.split()
        project, version, _, _ = parse_name(filename)
        wheels.append(Wheel(project, version, sha256, filename, int(size)))
    return tuple(wheels)


def parse_name(filename: str) -> tuple[str, str, int, frozenset[Tag]]:
    """Return the project, version, build number and tags in a wheel's name.

    Raises:
        CannotEmulate: it is no name of a wheel.
    """
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        project, version, build, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename as error:
        raise CannotEmulate(f"{filename} is not the name of a wheel: {error}") from None
    return project, str(version), build[0] if build else 0, frozenset(tags)


class Unpacked(NamedTuple):
    """The properties of an unpacked file."""

    size: int
    modified: int
    """The time of its last change, in seconds since 1970, which is that in the wheel."""
    sha256: str


class Unpacker:
    """An open wheel. All its names are checked before any file is written.

    Args:
        path: the file.
        project, version: what it must be.

    Raises:
        CannotEmulate: it is another wheel, is damaged, or has a file that must not be unpacked.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, project: str, version: str) -> None:
        self._name = path.name
        if parse_name(path.name)[:2] != (project, version):
            raise CannotEmulate(f"{path.name} is not {project} {version} as the index has it, so nothing of it was unpacked")
        try:
            self._archive = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise CannotEmulate(f"{path.name} is no whole wheel ({error}), so nothing of it was unpacked") from None
        self._metadata = f"{project}-{version}.dist-info"
        allowed = {*PACKAGES[project], f"{project}.libs", self._metadata}
        self._files = [info for info in self._archive.infolist() if not info.is_dir()]
        self._hashes = self._read_record()
        names: set[str] = set()
        for info in self._archive.infolist():
            if fault := _fault(info, allowed):
                self._refuse(f"{info.filename} {fault}")
            if info.filename in names:
                self._refuse(f"{info.filename} is in it twice")
            names.add(info.filename)
        for info in self._files:
            if info.filename not in self._hashes and not _UNHASHED.fullmatch(info.filename):
                self._refuse(f"{info.filename} is not in its RECORD")
        if absent := sorted(self._hashes.keys() - names):
            self._refuse(f"{absent[0]} is in its RECORD alone")

    def close(self) -> None:
        """Close the file."""
        self._archive.close()

    @property
    def size(self) -> int:
        """The number of bytes of all files once unpacked."""
        return sum(info.file_size for info in self._files)

    def requirements(self) -> list[str]:
        """Return the requirements of the wheel, one in each line."""
        text = self._read(f"{self._metadata}/METADATA").decode()
        return re.findall(r"^Requires-Dist: *(.+)$", text.partition("\n\n")[0], re.MULTILINE)

    def unpack(self, folder: Path) -> Iterator[tuple[str, Unpacked]]:
        """Unpack all files. Yield the name and the properties of each.

        Raises:
            CannotEmulate: a file is not the one of the RECORD.
            OSError: the folder cannot be written.
        """
        for info in self._files:
            target = folder / info.filename
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            digest = hashlib.sha256()
            # A file that exists already is never written to.
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as written, self._open(info.filename) as packed:
                try:
                    while part := packed.read(_CHUNK):
                        digest.update(part)
                        written.write(part)
                except (zipfile.BadZipFile, EOFError) as error:
                    self._refuse(f"{info.filename} cannot be unpacked: {error}")
            if self._hashes.get(info.filename, digest.digest()) != digest.digest():
                self._refuse(f"{info.filename} is not the file of its RECORD")
            if (info.external_attr >> 16) & 0o111:
                target.chmod(0o700)
            # Archives keep whole seconds. So the times stay equal if the folder is packed and moved.
            modified = calendar.timegm((*info.date_time, 0, 0, 0))
            os.utime(target, (modified, modified))
            yield info.filename, Unpacked(info.file_size, modified, digest.hexdigest())

    def _read_record(self) -> dict[str, bytes]:
        """Return the sha256 of each file that has one in RECORD."""
        hashes = {}
        for row in csv.reader(io.StringIO(self._read(f"{self._metadata}/RECORD").decode())):
            if len(row) == 3 and row[1]:
                algorithm, _, digest = row[1].partition("=")
                if algorithm != "sha256":
                    self._refuse(f"its RECORD has a {algorithm} of {row[0]} and no sha256")
                hashes[row[0]] = base64.urlsafe_b64decode(f"{digest}==")
        return hashes

    def _read(self, name: str) -> bytes:
        with self._open(name) as file:
            return file.read()

    def _open(self, name: str) -> IO[bytes]:
        try:
            return self._archive.open(name)
        except (KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            self._refuse(f"{name} cannot be read from it: {error}")

    def _refuse(self, why: str) -> NoReturn:
        raise CannotEmulate(f"{self._name} is refused: {why}")


def _fault(info: zipfile.ZipInfo, allowed: set[str]) -> str:
    """Say why a file must not be unpacked; empty if it may be."""
    name = info.filename
    parts = name.removesuffix("/").split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        return "is no name below the folder"
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is neither a file nor a folder"
    if parts[0] not in allowed:
        return "belongs to no package that is taken"
    return ""
