"""Installs a CUDA build of torch into the user's cache, for emulated workers alone, beside a build for the CPU or ROCm.

pip downloads the wheels, by their hashes and without its configuration. Nothing of them runs here.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from pytest_gputrain.hardware.emulation import installed, libraries, wheels
from pytest_gputrain.hardware.emulation.elf import check_executable
from pytest_gputrain.hardware.emulation.installed import Build, File, Manifest
from pytest_gputrain.hardware.emulation.wheels import Unpacker, Wheel
from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.files import make_own, writable_ancestor
from pytest_gputrain.utils.torch_beside import LOCK, SITE
from pytest_gputrain.utils.units import format_bytes

_TIMES_THE_WHEEL: Final = 4
"""The space that is needed for a moment, in bytes of torch's wheel: 3.9 times as many for torch 2.13 with triton."""

_KEPT_OPTIONS: Final = ("cert", "client-cert", "proxy", "timeout")
"""The options that pip takes from the user's configuration: those for the way to the network. None of them may choose what
is downloaded."""

_CONFIGURED: Final = re.compile(r"^(?::env:|(\w[\w-]*))\.(?:default-)?([\w-]+)=('.*'|\".*\")$", re.MULTILINE)
_OFFLINE: Final = "without a network, bring the wheels in a folder: gputrain emulate --install --from DIR"

Say = Callable[[str], None]


class Source(NamedTuple):
    """The source of wheels: pip's default index, another index, or a folder."""

    folder: Path | None = None
    address: str = ""
    hashes: tuple[str, ...] = ()
    """The sha256 of wheels that the table lacks, which the user vouches for."""

    def __str__(self) -> str:
        address = urlsplit(self.address)
        without_password = address._replace(netloc=address.netloc.rpartition("@")[2])
        return str(self.folder or without_password.geturl() or "pip's own index")


def install(source: Source, say: Say) -> Build | None:
    """Install the CUDA build of the installed torch's version, and return it; None if the installed torch is such a build.

    Args:
        say: called with a sentence for each thing that happens.

    Raises:
        CannotEmulate: it cannot be had, is refused or has no place.
    """
    _check_rights()
    _check_index(source)
    folder = libraries.torch_folder()
    version = libraries.version_of(folder)
    with contextlib.suppress(CannotEmulate):
        libraries.read_torch(folder)
        return None
    cache = installed.builds_folder()
    with _told_where(cache), _alone_in(cache, say):
        _sweep(cache)
        try:
            found = installed.find(version, folder.parent)
        except CannotEmulate as error:
            say(str(error))
            found = None
        return found or _install(cache, version, folder.parent, source, say)


@contextlib.contextmanager
def _told_where(cache: Path) -> Iterator[None]:
    """Provide a context that turns errors of files into sentences with the folder and its free space."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(cache) from None
        where = f"{error.filename}: " if error.filename not in (None, str(cache)) else ""
        raise CannotEmulate(
            f"the CUDA build of torch cannot be kept in {cache}: {where}{error.strerror or error}; set XDG_CACHE_HOME to a "
            "folder of yours"
        ) from None


def _no_space(cache: Path, needed: int = 0) -> CannotEmulate:
    wanted = f", and {format_bytes(needed)} are needed for a moment" if needed else ""
    return CannotEmulate(
        f"there is no space for the CUDA build of torch: {format_bytes(_free(cache))} are free in {cache}{wanted}; nothing "
        "was left there; make space, or set XDG_CACHE_HOME to a larger disk"
    )


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _check_rights() -> None:
    """Raise an error if this process would make or replace files of another user."""
    if os.getuid() != os.geteuid() or os.getgid() != os.getegid():
        raise CannotEmulate("a program with the rights of another user (setuid) installs nothing; run it as that user")
    base = installed.builds_folder()
    while not base.exists():
        base = base.parent
    if os.geteuid() == 0 and base.stat().st_uid != 0:
        raise CannotEmulate(f"root would install into {base}, which is another user's; run it without sudo, or set HOME")


def _check_index(source: Source) -> None:
    """Raise an error for an index without HTTPS, because anybody on the network could change its answers."""
    address = urlsplit(source.address)
    if source.address and address.scheme != "https" and address.hostname not in ("localhost", "127.0.0.1"):
        raise CannotEmulate(
            f"--index-url {source} is not an address of HTTPS, so anybody on the way could change what comes"
        )


@contextlib.contextmanager
def _alone_in(cache: Path, say: Say) -> Iterator[None]:
    """Provide the folder under a lock, so that only one process at a time installs into it."""
    import fcntl

    make_own(cache)
    if above := writable_ancestor(cache):
        raise CannotEmulate(
            f"other users may write to {above}, and could replace what is installed in {cache}; set XDG_CACHE_HOME to a "
            "folder that only you may write to"
        )
    descriptor = os.open(cache / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is installing or removing in {cache}; this one waits for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(cache: Path) -> int:
    """Remove what killed installations have left, and return the bytes. The caller holds the lock."""
    freed = 0
    for part in cache.glob(f"{installed.PART}*"):
        if stat.S_ISDIR(part.lstat().st_mode):
            freed += sum(path.lstat().st_size for path in part.rglob("*"))
            shutil.rmtree(part)
    return freed


def _install(cache: Path, version: str, environment: Path, source: Source, say: Say) -> Build:
    torch = _wheel("torch", installed.release(version), source)
    needed = _TIMES_THE_WHEEL * torch.size
    if _free(cache) < needed:
        raise _no_space(cache, needed)
    with tempfile.TemporaryDirectory(dir=cache, prefix=installed.PART) as part:
        whole = Path(part) / "whole"
        (whole / SITE).mkdir(parents=True, mode=0o700)
        putting = _Putting(cache, Path(part), whole / SITE, source, say)
        requires = putting.put(torch)
        if triton := _pinned(requires, "triton"):
            putting.put(_wheel("triton", triton, source))
        left_out = putting.put_beside(installed.beside(environment), torch.version)
        _check_torch(whole / SITE, torch.version)
        manifest = Manifest(
            python=installed.this_python(),
            libc=installed.this_libc(),
            versions=putting.versions,
            left_out=left_out,
            wheels=putting.wheels,
            origin=str(source),
            files=putting.files,
        )
        (whole / LOCK).touch(mode=0o600)
        (whole / installed.MANIFEST).write_bytes(msgspec.json.encode(manifest))
        os.sync()  # thousands of files reach the disk in one call, before the folder gets its name
        whole.chmod(0o700)
        target = cache / manifest.key
        if target.exists() and not _removed(target):
            raise CannotEmulate(f"processes use the CUDA build of torch in {target}; install it again when they have ended")
        whole.rename(target)
    return Build(target)


def _removed(damaged: Path) -> bool:
    """Remove a damaged build, unless a process uses it."""
    with contextlib.suppress(ValueError, FileNotFoundError):
        return Build(damaged).remove()
    shutil.rmtree(damaged)
    return True


def _wheel(project: str, version: str, source: Source) -> Wheel:
    """Return the wheel to take."""
    if wheel := wheels.known(project, version):
        return wheel
    if source.hashes:
        return Wheel(project, version)
    raise CannotEmulate(
        f"this release of pytest-gputrain knows no CUDA build of {project} {version} on PyPI for Python "
        f"{sys.version_info.major}.{sys.version_info.minor} on this machine; install a release of {project} that PyPI has, "
        "upgrade pytest-gputrain, or give the sha256 of each wheel that PyPI shows, by --hash"
    )


class _Putting:
    """Downloads wheels, one after the other, and unpacks them into one folder.

    Attributes:
        versions, wheels, files: what was unpacked so far, for the manifest.
    """

    def __init__(self, cache: Path, part: Path, site: Path, source: Source, say: Say) -> None:
        self._cache, self._part, self._site, self._source, self._say = cache, part, site, source, say
        self.versions: dict[str, str] = {}
        self.wheels: dict[str, str] = {}
        self.files: dict[str, File] = {}

    def put(self, wheel: Wheel, torch: str = "") -> list[str]:
        """Download a wheel and unpack it into the folder. Return the packages that it requires.

        Args:
            torch: the version that it must be for, if it names one; the wheel is left out if that is another.
        """
        size = f", {format_bytes(wheel.size)}" if wheel.size else ""
        hashes = f"sha256 {wheel.sha256}" if wheel.sha256 else "one of the hashes that were given"
        self._say(f"{wheel.name}{size}, {hashes}, from {self._source}, into {self._cache}")
        path, sha256 = self._fetched(wheel)
        try:
            unpacker = Unpacker(path, wheel.project, wheel.version)
            with contextlib.closing(unpacker):
                requires = unpacker.requirements()
                if torch and _pinned(requires, "torch") not in ("", torch):
                    return requires
                if _free(self._cache) < unpacker.size:
                    raise _no_space(self._cache, unpacker.size)
                for name, file in unpacker.unpack(self._site):
                    if name in self.files:
                        raise CannotEmulate(f"{path.name} is refused: {name} is in another wheel, too")
                    self.files[name] = File(*file)
        finally:
            path.unlink()
        self.versions[wheel.project] = wheel.version
        self.wheels[path.name] = sha256
        return requires

    def put_beside(self, wanted: Mapping[str, str], torch: str) -> dict[str, str]:
        """Install the packages that the user has beside torch. Return those that belong to another release of torch and are
        left out."""
        for name, version in wanted.items():
            self.put(_wheel(name, version, self._source), torch)
            if name not in self.versions:
                self._say(f"{name} {version} is of another release of torch than {torch}, so it is left out")
        return {name: version for name, version in wanted.items() if name not in self.versions}

    def _fetched(self, wheel: Wheel) -> tuple[Path, str]:
        """Download the wheel's file and check its hash. Return its path and hash."""
        allowed = (wheel.sha256,) if wheel.sha256 else self._source.hashes
        target = self._part / "wheels"
        target.mkdir(exist_ok=True)
        if self._source.folder is not None:
            path = _copied(self._source.folder, wheel, target)
        else:
            _download(wheel, allowed, target, self._source.address)
            path = _only_file(target, wheel)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 not in allowed:
            raise CannotEmulate(
                f"{path.name} from {self._source} has the sha256 {sha256}, and it should have {' or '.join(allowed)}; "
                "it was not unpacked"
            )
        return path, sha256


def _copied(folder: Path, wheel: Wheel, target: Path) -> Path:
    """Copy a wheel from the user's folder, so that it cannot change any more, and return the path of the copy."""
    names = (
        [wheel.filename] if wheel.filename else [path.name for path in folder.glob(f"{wheel.project}-{wheel.version}-*.whl")]
    )
    for name in names:
        if (folder / name).is_file():
            return Path(shutil.copyfile(folder / name, target / name))
    raise CannotEmulate(f"{folder} has no {wheel.name}; bring it there")


def _only_file(folder: Path, wheel: Wheel) -> Path:
    paths = list(folder.iterdir())
    if len(paths) != 1:
        raise CannotEmulate(f"pip brought {len(paths)} files for {wheel.project} {wheel.version} instead of one")
    return paths[0]


def _download(wheel: Wheel, allowed: Sequence[str], target: Path, index: str) -> None:
    """Download the one file with this hash by pip."""
    # `==2.13.0` would also take 2.13.0+cpu, and `===` does not.
    hashes = " ".join(f"--hash=sha256:{sha256}" for sha256 in allowed)
    (wanted := target.parent / "requirements.txt").write_text(f"{wheel.project}==={wheel.version} {hashes}\n")
    (temporary := target.parent / "tmp").mkdir(exist_ok=True)
    environ, options = _way_to_the_network()
    command = [
        *(sys.executable, "-P", "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-input", "--no-cache-dir"),
        *("--retries", "1", *options, "download", "--no-deps", "--only-binary=:all:", "--require-hashes"),
        *("--dest", str(target), "--requirement", str(wanted), *(("--index-url", index) if index else ())),
    ]
    environ |= {"PIP_CONFIG_FILE": os.devnull, "TMPDIR": str(temporary)}
    # pip's progress goes to stderr, because it is not the output of this command.
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        if "No module named pip" in said:
            raise CannotEmulate(
                f"{sys.executable} has no pip to download by; install it with: {sys.executable} -m ensurepip"
            )
        if os.strerror(errno.ENOSPC) in said:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        errors = re.findall(r"^ERROR: *(.+)$", said, re.MULTILINE) or said.strip().splitlines()[-1:]
        raise CannotEmulate(
            f"pip cannot download {wheel.name} from {Source(address=index)}: "
            f"{errors[-1] if errors else f'exit status {done.returncode}'}; {_OFFLINE}"
        )


def _way_to_the_network() -> tuple[dict[str, str], list[str]]:
    """Return an environment and options for pip. Of the user's configuration they only keep the proxy, certificates and
    time-out."""
    command = [sys.executable, "-P", "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    kept: dict[str, str] = {}
    for section in ("global", "download", None):  # The environment (None) comes last, because it overrides files.
        for where, name, value in _CONFIGURED.findall(listed):
            if (where or None) == section and name in _KEPT_OPTIONS:
                kept[name] = str(ast.literal_eval(value))
    environ = {name: value for name, value in os.environ.items() if not name.upper().startswith("PIP_")}
    if proxy := kept.pop("proxy", ""):
        # The proxy is no argument, because all users of the host see arguments, and it may have a password.
        environ |= {"http_proxy": proxy, "https_proxy": proxy}
    return environ, [part for name, value in sorted(kept.items()) for part in (f"--{name}", value)]


def _pinned(requires: Sequence[str], project: str) -> str:
    """Return the exact version of a project that is required; empty if none is."""
    for requirement in requires:
        if match := re.match(rf"{project} *\(?== *([\w.]+)\)? *(?:;|$)", requirement):
            return match[1]
    return ""


def _check_torch(site: Path, version: str) -> None:
    """Check that the unpacked build is a CUDA build of this version, and that code may run from its folder."""
    found = libraries.read_torch(site / "torch")
    if installed.release(found.version) != version:
        raise CannotEmulate(f"the wheel of torch {version} has torch {found.version}, so it is not installed")
    check_executable(site / "torch" / "lib" / "libtorch_cuda.so", site.parents[2])


def uninstall(say: Say) -> bool:
    """Remove all builds of the cache that no process uses. Return whether all were removed.

    Raises:
        CannotEmulate: the folder is not this user's.
    """
    cache = installed.builds_folder()
    if not cache.exists():
        say(f"there is nothing in {cache}")
        return True
    with _told_where(cache), _alone_in(cache, say):
        freed, kept = _sweep(cache), False
        for build in list(installed.builds()):
            size = build.manifest.bytes
            if build.remove():
                freed += size
                say(f"{build.folder} is removed")
            else:
                kept = True
                say(f"{build.folder} is used by a process, so it stays; remove it when that has ended")
        say(f"{format_bytes(freed)} were freed in {cache}")
    return not kept
