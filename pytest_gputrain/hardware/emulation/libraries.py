"""Finds out which functions of NVIDIA's libraries the installed torch needs, without importing or running it."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from pytest_gputrain.hardware.emulation import installed
from pytest_gputrain.hardware.emulation.elf import Elf, NotElf
from pytest_gputrain.hardware.emulation.wheels import PACKAGES
from pytest_gputrain.utils.errors import CannotEmulate

PREFIXES: Final = {
    "cuda": ("cu",),
    "cudart": ("cuda", "__cuda"),
    "cublas": ("cublas",),
    "cublasLt": ("cublasLt",),
    "cudnn": ("cudnn",),
    "cufft": ("cufft",),
    "cufile": ("cuFile",),
    "cupti": ("cupti",),
    "curand": ("curand",),
    "cusolver": ("cusolver",),
    "cusparse": ("cusparse",),
    "cusparseLt": ("cusparseLt",),
    "nccl": ("nccl", "pnccl"),
    "nvJitLink": ("nvJitLink",),
    "nvidia-ml": ("nvml",),
    "nvrtc": ("nvrtc",),
    "nvshmem_host": ("nvshmem",),
}
"""The prefixes of the names of each library's functions; the longest that fits decides."""

_SONAME: Final = re.compile(rf"lib({'|'.join(map(re.escape, PREFIXES))})\.so\.\d+")

_OPENED: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries that torch, Triton and nvidia-ml-py open while they run."""

_LOOKED_UP: Final = re.compile(rb"(?<=\0)(?:nvml[A-Z]\w{2,60}|cu[A-Z][a-z]\w{2,60})(?=\0)")
"""Names of functions among the constants of a library that looks them up while it runs."""

_ARCHITECTURES: Final = re.compile(rb"(?:(?:sm|compute)_\d+[af]?)(?: (?:sm|compute)_\d+[af]?)*(?=\0)")
"""The architectures that torch was compiled for, as ``torch.cuda.get_arch_list`` returns them; the compiler may put other
text right before it."""

Functions = dict[str, str]
"""Names of functions, with the version of each; empty if the library has no versions."""


MACHINES: Final = ("x86_64", "aarch64")
"""The processors that the stand-ins are compiled for."""


class Torch(NamedTuple):
    """An installed CUDA build of torch."""

    folder: Path
    version: str
    cuda: tuple[int, int]
    cudnn: tuple[int, int, int]
    nccl: tuple[int, int, int]
    environment: Path | None = None
    """The folder of the user's packages, where torch lies in another one, of `installed`."""
    origin: str = ""
    """The wheel that such a torch came from."""

    @property
    def site(self) -> Path:
        """The folder with torch's package and other packages."""
        return self.folder.parent


def check_machine() -> None:
    """Check that a GPU can be emulated on this machine.

    Raises:
        CannotEmulate: it is none of Linux, or has another processor.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise CannotEmulate(
            f"a GPU is emulated on Linux only, on {' or '.join(MACHINES)}, and this is {platform.system()} "
            f"{platform.machine()}; run it in a Linux container, as docs/installing.md shows"
        )


def find_torch() -> Torch:
    """Return the torch that this Python would import, or the CUDA build of the same version that was installed beside it.

    Raises:
        CannotEmulate: there is none, or there is no CUDA build, or this machine is none for it.
    """
    check_machine()
    folder = torch_folder()
    try:
        return read_torch(folder)
    except CannotEmulate:
        build = installed.find(version_of(folder), folder.parent)
        if build is None:
            raise
        found = read_torch(build.site / "torch")
        return found._replace(environment=folder.parent, origin=build.origin)


def torch_folder() -> Path:
    """Return the folder of the torch that this Python would import.

    Raises:
        CannotEmulate: there is none.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotEmulate("there is no torch to emulate a GPU for; install it in this environment (pip install torch)")
    return Path(spec.origin).parent


def version_of(folder: Path) -> str:
    """Return the version of the torch in this folder.

    Raises:
        CannotEmulate: it does not say.
    """
    try:
        return version_file(folder)["__version__"]
    except OSError as error:
        raise CannotEmulate(f"torch in {folder} does not say its version: {error.strerror}") from None
    except KeyError:
        raise CannotEmulate(f"torch in {folder} does not say its version") from None


def version_file(folder: Path) -> dict[str, str]:
    """Return ``__version__``, ``cuda`` and ``hip`` of the torch in this folder, as far as its version file has them.

    Raises:
        OSError: it cannot be read.
    """
    text = (folder / "version.py").read_text()
    return dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^']*)'", text, re.MULTILINE))


def read_torch(folder: Path) -> Torch:
    """Return a description of the torch in this folder, with its versions.

    Raises:
        CannotEmulate: it is no CUDA build.
    """
    version = version_of(folder)
    cuda = re.fullmatch(r"(\d+)\.(\d+)", version_file(folder).get("cuda", ""))
    if cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        raise CannotEmulate(
            f"torch {version} in {folder} is not a CUDA build; {installed.MEND} puts one beside it for emulated GPUs "
            "alone (about 0.8 GB to download and 2 GB on disk), and leaves this environment as it is"
        )
    requires = _requirements(folder)
    return Torch(
        folder=folder,
        version=version,
        cuda=(int(cuda[1]), int(cuda[2])),
        cudnn=_pinned(requires, "nvidia-cudnn", (9, 10, 2)),
        nccl=_pinned(requires, "nvidia-nccl", (2, 27, 5)),
    )


def _requirements(folder: Path) -> list[str]:
    for distribution in metadata.distributions(name="torch", path=[str(folder.parent)]):
        return distribution.requires or []
    return []


def _pinned(requires: Iterable[str], package: str, otherwise: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the version of NVIDIA's package that torch was compiled against, which is the only one that torch accepts."""
    for requirement in requires:
        if match := re.match(rf"{package}-cu\d+==(\d+)\.(\d+)\.(\d+)", requirement):
            return int(match[1]), int(match[2]), int(match[3])
    return otherwise


def users_of_cuda(torch: Torch) -> list[Path]:
    """Return the libraries in torch's environment that need NVIDIA's: those of torch, of bitsandbytes and of similar
    packages.

    Raises:
        CannotEmulate: there are none.
    """
    of_torch = {path: sonames for path in sorted((torch.folder / "lib").glob("*.so")) if (sonames := _sonames(path))}
    if not of_torch:
        raise CannotEmulate(f"no library of torch in {torch.folder} needs CUDA's, so there is nothing to stand in for")
    versions = {_stem(soname): soname for sonames in of_torch.values() for soname in sonames}
    others = set(_of_packages(torch.site)) - of_torch.keys()
    if torch.environment is not None:
        hidden = {path.name for path in torch.site.iterdir()}
        others |= {path for path in _of_packages(torch.environment) if _package(path, torch.environment) not in hidden}
    # bitsandbytes has one library for each version of CUDA, and loads the one for torch's version.
    fitting = [
        path
        for path in sorted(others)
        if (sonames := _sonames(path)) and all(versions.get(_stem(name), name) == name for name in sonames)
    ]
    folders = [folder for folder in (torch.site, torch.environment) if folder is not None]
    return [*of_torch, *(path for path in fitting if all(_package(path, folder) != "nvidia" for folder in folders))]


def _of_packages(site: Path) -> Iterator[Path]:
    """Yield the libraries of the packages in a folder, from the places that packages use."""
    for pattern in ("*.so", "*/*.so", "*/lib/*.so"):
        yield from site.glob(pattern)


def _package(path: Path, site: Path) -> str:
    """Return the name of the package in this folder to which a file belongs; empty if it belongs to none."""
    return path.relative_to(site).parts[0] if path.is_relative_to(site) else ""


def compiled_for_cpu(environment: Path) -> list[str]:
    """Return the packages whose libraries were compiled against a CPU build of torch."""
    packages = set()
    for path in _of_packages(environment):
        with contextlib.suppress(NotElf, OSError), Elf(path) as library:
            needed = library.needed()
            if any(name.startswith("libtorch") for name in needed) and not any("cuda" in name for name in needed):
                packages.add(_package(path, environment))
    return sorted(packages - {name for names in PACKAGES.values() for name in names})


def _sonames(path: Path) -> list[str]:
    """Return the libraries of NVIDIA's that this one needs."""
    try:
        with Elf(path) as library:
            return [name for name in library.needed() if is_nvidias(name)]
    except (NotElf, OSError):
        return []


def is_nvidias(soname: str) -> bool:
    """Tell whether this is a library of NVIDIA's with a stand-in."""
    return _SONAME.fullmatch(soname) is not None


def needed_functions(torch: Torch, users: Iterable[Path]) -> dict[str, Functions]:
    """Return the functions that these libraries need, by the library of NVIDIA's that has them."""
    needed: dict[str, Functions] = {soname: {} for soname in _OPENED}
    unversioned: dict[str, None] = {}
    for path in users:
        for soname in _sonames(path):
            needed.setdefault(soname, {})
        with Elf(path) as library:
            for symbol in library.imports():
                if is_nvidias(symbol.soname):
                    needed.setdefault(symbol.soname, {})[symbol.name] = symbol.version
                elif not symbol.soname:
                    unversioned[symbol.name] = None
            if path.parent == torch.folder / "lib":
                unversioned |= dict.fromkeys(name.decode() for name in _LOOKED_UP.findall(library.constants()))
    by_stem = {_stem(soname): soname for soname in needed}
    for name in unversioned:
        library_of_name = by_stem.get(_library_of(name) or "")
        if library_of_name is not None:
            needed[library_of_name].setdefault(name, "")
    return needed


def _stem(soname: str) -> str:
    match = _SONAME.fullmatch(soname)
    assert match is not None, soname
    return match[1]


def _library_of(name: str) -> str | None:
    lengths = {
        stem: max((len(prefix) for prefix in prefixes if _begins(name, prefix)), default=0)
        for stem, prefixes in PREFIXES.items()
    }
    stem = max(lengths, key=lengths.__getitem__)
    return stem if lengths[stem] else None


def _begins(name: str, prefix: str) -> bool:
    """Tell whether a function's name is the prefix and a word: ``cublasLtMatmul`` begins with cublasLt, and ``custom`` with
    none."""
    rest = name.removeprefix(prefix)
    return rest != name and (rest[:1].isupper() or rest[:1] == "_" or prefix == "nvshmem")


def architectures(torch: Torch) -> tuple[str, ...]:
    """Return the GPUs that torch has kernels for, in the form of ``torch.cuda.get_arch_list``: ``sm_90``."""
    with Elf(torch.folder / "lib" / "libtorch_python.so") as library:
        found = _ARCHITECTURES.findall(library.constants())
    return tuple(max(found, key=len).decode().split()) if found else ()
