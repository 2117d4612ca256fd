"""Finds out which functions of NVIDIA's libraries the installed torch needs, without importing or running it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from pytest_gputrain.hardware.emulation.elf import Elf, NotElf
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
"""Names of functions, with the version of each; empty where the library has no versions."""


class Torch(NamedTuple):
    """An installed CUDA build of torch."""

    folder: Path
    version: str
    cuda: tuple[int, int]
    cudnn: tuple[int, int, int]
    nccl: tuple[int, int, int]

    @property
    def site(self) -> Path:
        """The folder that other packages lie in, too."""
        return self.folder.parent


def find_torch() -> Torch:
    """Find the torch that this Python would import.

    Raises:
        CannotEmulate: there is none, or it is no CUDA build.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotEmulate("there is no torch to emulate a GPU for; install it in this environment (pip install torch)")
    return read_torch(Path(spec.origin).parent)


def version_file(folder: Path) -> dict[str, str]:
    """Return ``__version__``, ``cuda`` and ``hip`` of the torch in this folder, those that its file of versions has.

    Raises:
        OSError: it cannot be read.
    """
    text = (folder / "version.py").read_text()
    return dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^']*)'", text, re.MULTILINE))


def read_torch(folder: Path) -> Torch:
    """Read of which versions the torch in this folder is.

    Raises:
        CannotEmulate: it is no CUDA build.
    """
    try:
        about = version_file(folder)
    except OSError as error:
        raise CannotEmulate(f"torch in {folder} does not say its version: {error.strerror}") from None
    version, cuda = about.get("__version__"), re.fullmatch(r"(\d+)\.(\d+)", about.get("cuda", ""))
    if version is None or cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        name = f"torch {version}" if version else "torch"
        raise CannotEmulate(
            f"{name} in {folder} is not a CUDA build; install PyPI's torch for Linux, which is one, in a new environment "
            "(its nvidia-* packages are not needed, so they may be left out)"
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
    """Return the version of NVIDIA's package that torch was compiled against; torch asks for the very one."""
    for requirement in requires:
        if match := re.match(rf"{package}-cu\d+==(\d+)\.(\d+)\.(\d+)", requirement):
            return int(match[1]), int(match[2]), int(match[3])
    return otherwise


def users_of_cuda(torch: Torch) -> list[Path]:
    """Find the libraries in torch's environment that need NVIDIA's: torch's own, those of bitsandbytes and their like.

    Raises:
        CannotEmulate: there are none.
    """
    of_torch = {path: sonames for path in sorted((torch.folder / "lib").glob("*.so")) if (sonames := _sonames(path))}
    if not of_torch:
        raise CannotEmulate(f"no library of torch in {torch.folder} needs CUDA's, so there is nothing to stand in for")
    versions = {_stem(soname): soname for sonames in of_torch.values() for soname in sonames}
    others = {path for pattern in ("*.so", "*/*.so", "*/lib/*.so") for path in torch.site.glob(pattern)} - of_torch.keys()
    # bitsandbytes has a library for each version of CUDA, and loads the one of torch's.
    fitting = [
        path
        for path in sorted(others)
        if (sonames := _sonames(path)) and all(versions.get(_stem(name), name) == name for name in sonames)
    ]
    return [*of_torch, *(path for path in fitting if path.relative_to(torch.site).parts[0] != "nvidia")]


def _sonames(path: Path) -> list[str]:
    """Find which of NVIDIA's libraries this one needs."""
    try:
        with Elf(path) as library:
            return [name for name in library.needed() if is_nvidias(name)]
    except (NotElf, OSError):
        return []


def is_nvidias(soname: str) -> bool:
    """Tell whether this is a library of NVIDIA's that has a stand-in."""
    return _SONAME.fullmatch(soname) is not None


def needed_functions(torch: Torch, users: Iterable[Path]) -> dict[str, Functions]:
    """Find the functions that these libraries need, by the library of NVIDIA's that has them."""
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
    """Tell whether the name is the prefix and a word: ``cublasLtMatmul`` is of cublasLt, ``custom`` is nobody's."""
    rest = name.removeprefix(prefix)
    return rest != name and (rest[:1].isupper() or rest[:1] == "_" or prefix == "nvshmem")


def architectures(torch: Torch) -> tuple[str, ...]:
    """Find the GPUs that torch has kernels for, as ``torch.cuda.get_arch_list`` tells them: ``sm_90``."""
    with Elf(torch.folder / "lib" / "libtorch_python.so") as library:
        found = _ARCHITECTURES.findall(library.constants())
    return tuple(max(found, key=len).decode().split()) if found else ()
