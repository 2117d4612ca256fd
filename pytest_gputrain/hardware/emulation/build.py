"""Builds the stand-ins by the host's C compiler, and keeps them in the user's cache folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain.hardware.emulation.elf import Elf, check_executable
from pytest_gputrain.hardware.emulation.libraries import (
    PREFIXES,
    Functions,
    Torch,
    architectures,
    check_machine,
    needed_functions,
    users_of_cuda,
)
from pytest_gputrain.hardware.emulation.stubs import stubs_text, version_script
from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.files import cache_folder, locked, make_own, within
from pytest_gputrain.utils.reading import read_message, read_whole

SOURCES: Final = Path(__file__).with_name("c")
_LONGEST_BUILD_SECONDS: Final = 600.0
"""The time to wait for another process that builds. That takes seconds, and minutes on a machine that is busy."""

CORE: Final = "libgputrain_emulated.so"
"""The library that holds the state of the emulated GPUs, which all stand-ins share."""

_CORE_SOURCES: Final = (
    "counters.c",
    "gpus.c",
    "graphs.c",
    "handles.c",
    "memory.c",
    "products.c",
    "random.c",
    "threads.c",
    "values.c",
)

_MANIFEST: Final = "manifest.json"
COMPILERS: Final = ("cc", "gcc", "clang")
_FLAGS: Final = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-D_GNU_SOURCE")
_SECONDS: Final = 120.0
"""The time limit of the compiler for one library; it takes less than one second."""


_UNUSED_SECONDS: Final = 30 * 86400.0
"""The time after which an unused build is removed by the next build."""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a folder of stand-ins."""

    digests: dict[str, str]
    """The digest of each library's bytes, by its name."""
    architectures: tuple[str, ...]


class StandIns:
    """The stand-ins that were built for one torch.

    Attributes:
        folder: where they lie.
        libraries: their paths, in the order in which they are to be loaded: before torch, by their absolute paths, since
            torch's own search path comes before that of the environment.
        architectures: of GPUs that torch has kernels for.
        torch: the one that they were built for; None if nobody said.
    """

    torch: Torch | None = None

    def __init__(self, folder: Path) -> None:
        """Read the stand-ins from their folder.

        Raises:
            ValueError: they are not as they were built.
            OSError: they cannot be read.
        """
        manifest = msgspec.json.decode(read_message(folder / _MANIFEST), type=_Manifest)
        if CORE not in manifest.digests:
            raise ValueError(f"{CORE} is missing")
        for name in manifest.digests:
            within(folder, name)
        self.folder = folder
        self.libraries = [folder / CORE, *(folder / name for name in sorted(manifest.digests) if name != CORE)]
        self.architectures = manifest.architectures
        for name, digest in manifest.digests.items():
            if _digest(folder / name) != digest:
                raise ValueError(f"{name} is not what was built")


def stand_ins(torch: Torch) -> StandIns:
    """Return the stand-ins for this torch from the cache, or build them.

    Raises:
        CannotEmulate: they cannot be built or kept here.
    """
    check_machine()
    users = users_of_cuda(torch)
    folder = stand_ins_folder() / _key(torch, users)
    try:
        make_own(folder.parent)
        with locked(folder, _LONGEST_BUILD_SECONDS):
            found = _load(folder)
            if found is None:
                found = _build(folder, torch, users)
                _sweep(folder)
            os.utime(folder)
            found.torch = torch
    except OSError as error:
        where = f"{error.filename}: " if error.filename not in (None, str(folder.parent)) else ""
        raise CannotEmulate(
            f"the emulated GPU cannot be kept in {folder.parent}: {where}{error.strerror or error}; "
            "set XDG_CACHE_HOME to a folder of yours"
        ) from None
    check_executable(folder / CORE, folder.parent)
    return found


def stand_ins_folder() -> Path:
    """Return this user's folder for stand-ins."""
    return cache_folder("pytest-gputrain-emulation")


def _key(torch: Torch, users: Iterable[Path]) -> str:
    """Return a key of all that stand-ins depend on: torch, the other libraries that need CUDA, and this package's own
    code."""
    digest = hashlib.sha256(repr(torch).encode())
    for path in users:
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    for path in sorted((*SOURCES.glob("*.[ch]"), *Path(__file__).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return f"torch-{torch.version}-{digest.hexdigest()[:16]}"


def _digest(path: Path) -> str:
    return hashlib.sha256(read_whole(path)).hexdigest()


def _load(folder: Path) -> StandIns | None:
    """Return what an earlier run has built; None if there is nothing, or if a file has changed since."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # msgspec's errors are ValueErrors.
        folder.lstat()
        make_own(folder)
        return StandIns(folder)
    return None


def _build(folder: Path, torch: Torch, users: Iterable[Path]) -> StandIns:
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as made:
        target = Path(made) / "whole"
        target.mkdir(mode=0o700)
        compile_all(compiler, torch, needed_functions(torch, users), target)
        digests = {path.name: _digest(path) for path in sorted(target.glob("*.so*"))}
        manifest = _Manifest(digests=digests, architectures=architectures(torch))
        (target / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
        # Triton 3.5, which torch 2.9 has, links its kernels with -lcuda.
        (target / "libcuda.so").symlink_to(next(name for name in digests if name.startswith("libcuda.so.")))
        # Damaged files are moved away and not deleted, because a process may still use them.
        with contextlib.suppress(FileNotFoundError):
            folder.rename(Path(made) / "damaged")
        target.rename(folder)
    return StandIns(folder)


def _sweep(new: Path) -> None:
    """Remove stand-ins for other versions in the same folder that no process has used for long."""
    made = new.stat().st_mtime
    for folder in new.parent.iterdir():
        with contextlib.suppress(OSError):
            if made - folder.lstat().st_mtime > _UNUSED_SECONDS:
                shutil.rmtree(folder)


def find_compiler(*, packaged: bool = True) -> list[str]:
    """Return the command of a C compiler: the one that CC names, the system's, or the one of the package ziglang.

    Args:
        packaged: whether that package will do, which only this one asks for.

    Raises:
        CannotEmulate: there is none.
    """
    chosen = os.environ.get("CC", "").split()
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise CannotEmulate(f"CC names the C compiler {chosen[0]}, which is not installed; unset CC or install it")
        return chosen
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    if packaged and importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-P", "-m", "ziglang", "cc"]
    raise CannotEmulate(
        "emulating a GPU needs a C compiler, and there is no cc, gcc or clang; install one (apt-get install gcc libc6-dev), "
        "name it in CC, or install the one that pip has (pip install ziglang)"
    )


def compile_all(
    compiler: list[str], torch: Torch, needed: Mapping[str, Functions], folder: Path, *, flags: Iterable[str] = ("-w",)
) -> None:
    """Compile a stand-in for each library.

    Args:
        needed: the functions that each must have.
        flags: about warnings, for which nobody is to be stopped but who develops this.

    Raises:
        CannotEmulate: the compiler fails.
    """
    options = [*flags, *_FLAGS, *_versions(torch), f"-I{SOURCES}"]
    core = folder / CORE
    sources = [str(SOURCES / name) for name in _CORE_SOURCES]
    _run(compiler, *options, f"-Wl,-soname,{CORE}", "-o", str(core), *sources, "-lpthread", "-ldl")
    driver = next(name for name in needed if name.startswith("libcuda.so."))

    def compile_one(soname: str, *others: Path) -> None:
        _compile_one(compiler, options, soname, needed[soname], folder, [core, *others])

    compile_one(driver)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The driver is built first, because the runtime calls it.
        rest = [soname for soname in needed if soname != driver]
        for _ in pool.map(lambda soname: compile_one(soname, folder / driver), rest):
            pass


def _versions(torch: Torch) -> list[str]:
    (cuda_major, cuda_minor), cudnn, nccl = torch.cuda, torch.cudnn, torch.nccl
    return [
        f"-DCUDA_VERSION={cuda_major * 1000 + cuda_minor * 10}",
        f"-DCUDNN_VERSION={cudnn[0] * 10000 + cudnn[1] * 100 + cudnn[2]}",
        f"-DNCCL_VERSION={nccl[0] * 10000 + nccl[1] * 100 + nccl[2]}",
    ]


def _compile_one(
    compiler: list[str], options: list[str], soname: str, functions: Functions, folder: Path, others: list[Path]
) -> None:
    stem = soname.removeprefix("lib").split(".so.")[0]
    assert stem in PREFIXES, soname
    source = SOURCES / f"{stem}.c"
    with tempfile.TemporaryDirectory() as scratch:
        parts, written = [], set()
        if source.exists():
            written_part = Path(scratch) / "written.o"
            compiling = (option for option in options if option != "-shared")
            _run(compiler, *compiling, "-c", str(source), "-o", str(written_part))
            with Elf(written_part) as part:
                written = part.defined()
            parts.append(str(written_part))
        stubs = Path(scratch) / "stubs.c"
        stubs.write_text(stubs_text(stem, sorted(functions.keys() - written)))
        script = Path(scratch) / "versions.map"
        script.write_text(version_script(functions))
        versioned = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
        linked = [*versioned, f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN", *map(str, others), "-ldl", "-lm"]
        _run(compiler, *options, "-o", str(folder / soname), str(stubs), *parts, *linked)


def _run(compiler: list[str], *arguments: str) -> None:
    command = [*compiler, *arguments]
    try:
        environ = {**os.environ, "LC_ALL": "C"}  # the compiler's messages are read below
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotEmulate(f"the C compiler {command[0]} cannot be run: {error}; name another in CC") from None
    if done.returncode and any(os.strerror(number) in done.stderr for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
        raise CannotEmulate(
            f"there is no space for the emulated GPU in {stand_ins_folder()} or {tempfile.gettempdir()}; free some, or set "
            "XDG_CACHE_HOME and TMPDIR to other disks"
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise CannotEmulate(
            f"the C compiler fails: {lines[0] if lines else f'exit status {done.returncode}'} "
            f"({shlex.join(compiler)}); name another in CC, or install the C library's headers (libc6-dev)"
        )
