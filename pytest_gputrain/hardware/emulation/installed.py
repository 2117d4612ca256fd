"""Finds CUDA builds of torch that ``gputrain emulate --install`` has put into the user's cache, beside a build for the CPU.

A build is a folder ``torch-<version>-<key>`` with three parts: ``site-packages`` has the packages, ``manifest.json`` names
all of their files, and ``in-use.lock`` is locked by every process that may import them. It exists once it has a manifest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import shutil
import stat
from collections.abc import Iterator, Mapping
from importlib import machinery, metadata
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.files import cache_folder
from pytest_gputrain.utils.reading import UNREADABLE, read_message
from pytest_gputrain.utils.torch_beside import LOCK, SITE

MANIFEST: Final = "manifest.json"
PART: Final = ".part-"
"""Begins the name of a folder that is not whole yet, or not wanted any more."""

_FORMAT: Final = "torch beside a CPU build, 1"
"""Marks a manifest as one of this module's."""

BESIDE: Final = ("torchvision", "torchaudio")
"""The packages that are compiled against torch's very build, and are put beside it if the user has them."""

MEND: Final = "gputrain emulate --install"


class File(msgspec.Struct, frozen=True, array_like=True):
    """The properties of a file when it was unpacked."""

    size: int
    modified: int
    """The time of its last change, in whole seconds since 1970."""
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a build, and the Python and the torch that it is for."""

    format: str = _FORMAT
    python: str
    """The implementation, ABI and machine of the Python that can import it."""
    libc: str
    versions: dict[str, str]
    """The version of each project."""
    left_out: dict[str, str] = {}
    """The versions of those that the user has and that are of another release of torch."""
    wheels: dict[str, str]
    """The sha256 of each wheel, by its name."""
    origin: str
    """Where the wheels came from."""
    files: dict[str, File]

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def key(self) -> str:
        """The name of the build's folder, which is made of all that the build depends on."""
        rest = (self.python, self.libc, sorted(self.versions.items()), sorted(self.wheels.items()))
        return f"torch-{self.versions['torch']}-{hashlib.sha256(repr(rest).encode()).hexdigest()[:16]}"


class Build:
    """A CUDA build of torch in the cache.

    Raises:
        ValueError: there is no manifest of such a build in the folder.
        OSError: it is not a folder of this user alone.
    """

    def __init__(self, folder: Path) -> None:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(errno.EACCES, "it is not a folder of this user alone")
        self.folder = folder
        try:
            self.manifest = msgspec.json.decode(read_message(folder / MANIFEST), type=Manifest)
        except UNREADABLE as error:
            raise ValueError(f"{folder / MANIFEST} cannot be read: {error}") from None
        if self.manifest.format != _FORMAT or self.manifest.key != folder.name:
            raise ValueError(f"{folder} is not what its manifest says")

    @property
    def site(self) -> Path:
        """The folder with the packages."""
        return self.folder / SITE

    @property
    def origin(self) -> str:
        """Say which wheel torch came from, and where that wheel was."""
        name, sha256 = next((name, sha256) for name, sha256 in self.manifest.wheels.items() if name.startswith("torch-"))
        return f"{name}, sha256 {sha256}, from {self.manifest.origin}"

    def is_of(self, python: str, libc: str, version: str) -> bool:
        """Tell whether this Python can use the build in place of a torch of this version."""
        made = self.manifest
        return (made.python, made.libc, made.versions["torch"]) == (python, libc, version)

    def damage(self, *, digests: bool = False) -> str:
        """Say which file has changed since it was unpacked; empty if none has.

        Args:
            digests: read all files, which takes seconds. Otherwise their sizes and times of change are compared.
        """
        for name, file in self.manifest.files.items():
            path = self.site / name
            try:
                status = path.lstat()
            except OSError as error:
                return f"{name}: {error.strerror}"
            if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
                return f"{name} has {status.st_size:,} bytes instead of {file.size:,}"
            if int(status.st_mtime) != file.modified:
                return f"{name} was changed"
            if digests:
                with path.open("rb") as opened:
                    if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                        return f"{name} has another sha256"
        return ""

    def remove(self) -> bool:
        """Remove the build unless a process uses it, and return whether it was removed.

        Raises:
            OSError: it cannot be removed.
        """
        import fcntl  # Only POSIX has this module, and builds exist only there.

        with open(self.folder / LOCK, "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            aside = self.folder.with_name(f"{PART}{self.folder.name}")
            self.folder.rename(aside)  # other processes must never find a part of it
        shutil.rmtree(aside)
        return True


def builds_folder() -> Path:
    """Return this user's folder for builds."""
    return cache_folder("pytest-gputrain-torch")


def builds() -> Iterator[Build]:
    """Yield all builds in this user's folder. Other files there are ignored."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for folder in sorted(builds_folder().iterdir()):
            with contextlib.suppress(ValueError, OSError):
                yield Build(folder)


def this_python() -> str:
    """Return the implementation, ABI, free threading and machine of this Python, in the form of extensions' names."""
    return machinery.EXTENSION_SUFFIXES[0]


def this_libc() -> str:
    """Return the C library and its version."""
    return "-".join(platform.libc_ver())


def release(version: str) -> str:
    """Return the version without its local part: ``2.13.0`` of ``2.13.0+cpu``."""
    return version.partition("+")[0]


def beside(environment: Path) -> dict[str, str]:
    """Return the versions of `BESIDE` that are installed in this folder of packages."""
    found = {}
    for name in BESIDE:
        for distribution in metadata.distributions(name=name, path=[str(environment)]):
            found[name] = release(distribution.version)
            break
    return found


def find(version: str, environment: Path) -> Build | None:
    """Return the build for this Python and for a torch of this version; None if there is none.

    Args:
        version: of the torch that the user has installed.
        environment: the folder of packages that it lies in.

    Raises:
        CannotEmulate: there is one, and it is damaged, or it was made for other versions of torch's companions.
    """
    fitting = [build for build in builds() if build.is_of(this_python(), this_libc(), release(version))]
    if not fitting:
        return None
    wanted = beside(environment)
    for build in fitting:
        if _companions(build.manifest) == wanted:
            if damage := build.damage():
                raise CannotEmulate(f"the CUDA build of torch in {build.folder} is damaged ({damage}); mend it with: {MEND}")
            return build
    made, now = (_listed(versions) for versions in (_companions(fitting[0].manifest), wanted))
    raise CannotEmulate(
        f"the CUDA build of torch in {fitting[0].folder} was installed beside {made}, and this environment has {now}; "
        f"install another one with: {MEND}"
    )


def _companions(manifest: Manifest) -> dict[str, str]:
    versions = {**manifest.versions, **manifest.left_out}
    return {name: versions[name] for name in BESIDE if name in versions}


def _listed(versions: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items()) or f"no {' and no '.join(BESIDE)}"
