"""Reads from NVIDIA's headers which parameters functions have, and keeps them in ``nvidia_prototypes.txt`` beside this file.

    python tests/emulated/nvidia_prototypes.py FOLDER ...

writes that file for the functions that are in it, and for those that are named on standard input. The folders are `include`
folders of NVIDIA's wheels: nvidia-cublas, nvidia-cudnn-cu13, nvidia-cusolver, nvidia-cusparse, nvidia-cusparselt-cu13,
nvidia-cufft, nvidia-cuda-nvrtc, and that of Triton, which has CUDA's and CUPTI's. NVIDIA's wheels are 1.7 GB, so CI reads
only Triton's headers, and the file stands for the others. Every generated function of NCCL and NVML fails, so none is here.

A line has the library, the function, and a code for each parameter:

    4           a number of so many bytes; f8: of floating point; s16: a structure
    p           the address of something that the library knows, or of a function
    c           an address whose contents are not written by a function of the host: `const`, `void *`
    w4          an address where the host expects an answer of so many bytes
    o4          an address of so many bytes or more on the device: vectors and matrices
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

RECORD = Path(__file__).with_suffix(".txt")

HEADERS = {
    "cublas": "cublas_v2.h",
    "cublasLt": "cublasLt.h",
    "cuda": "cuda.h",
    "cudart": "cuda_runtime_api.h",
    "cudnn": "cudnn.h",
    "cufft": "cufftXt.h",
    "cupti": "cupti.h",
    "cusolver": "cusolverDn.h",
    "cusparse": "cusparse.h",
    "cusparseLt": "cusparseLt.h",
    "nvrtc": "nvrtc.h",
}

# Other libraries have no numbers on the device among their parameters.
_COMPUTING = ("cublas", "cusolver", "cusparse")
_NUMBERS = ("int", "float", "double", "cuComplex", "cuDoubleComplex")
_ANSWER = re.compile(r"\w*info\w*|lwork|\w*size\w*|position|\w*nrmF", re.IGNORECASE)

Prototypes = dict[tuple[str, str], str]
"""The codes of the parameters, by library and function."""

# Headers of half types include what only a compiler for GPUs has, and need none of it.
_SHIM = "#define NV_IF_TARGET(...)\n#define NV_IF_ELSE_TARGET(...)\n#define NV_PROVIDES_SM_53\n"

_PRINTED = """
#define PARAMETER(type) do { \\
  int class = __builtin_classify_type(*(type *)0); \\
  if (class == 5) printf(" p"); \\
  else printf(" %s%zu", class == 8 ? "f" : class == 12 || class == 13 ? "s" : "", sizeof(type)); } while (0)
"""


def recorded() -> Prototypes:
    rows = (line.split(maxsplit=2) for line in RECORD.read_text().splitlines())
    return {(stem, name): codes[0] if codes else "" for stem, name, *codes in rows}


def read(stem: str, names: Iterable[str], folders: Sequence[Path]) -> dict[str, str] | None:
    """Read the parameters of those functions that the library's header has; None where the header is not there."""
    if not any((folder / HEADERS[stem]).exists() for folder in folders):
        return None
    with tempfile.TemporaryDirectory() as scratch:
        shim = Path(scratch) / "nv"
        shim.mkdir()
        (shim / "target").write_text(_SHIM)
        options = ["-w", f"-I{scratch}", *(f"-I{folder}" for folder in folders)]
        include = f"#include <stdalign.h>\n#include <{HEADERS[stem]}>\n"
        text = _run(["cc", *options, "-E", "-P", "-x", "c", "-"], include)
        declared = {name: found for name in names if (found := _declared(name, text)) is not None}
        lines = [include, "#include <stdio.h>\n", _PRINTED, "int main(void) {\n"]
        for name, parameters in declared.items():
            printing = "".join(_printing(stem, *parameter) for parameter in parameters)
            lines.append(f'printf("{name}");\n{printing}puts("");\n')
        program = Path(scratch) / "program"
        _run(["cc", *options, "-x", "c", "-", "-o", str(program)], "".join([*lines, "}\n"]))
        rows = (line.partition(" ") for line in _run([str(program)]).splitlines())
        return {name: codes for name, _, codes in rows}


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _declared(name: str, text: str) -> list[tuple[str, str]] | None:
    """Find the types and names of a function's parameters."""
    match = re.search(rf"\b{name}\s*\(([^()]*)\)\s*(?:__attribute__\s*\(\(.*?\)\)\s*)?;", text)
    if match is None:
        return None
    parameters = [" ".join(one.split()) for one in match[1].split(",")]
    return [] if parameters in (["void"], [""]) else list(map(_apart, parameters))


def _apart(parameter: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*?[ *])(\w+)?\s*(\[\d*\])?", parameter)
    assert match is not None, parameter
    return match[1].strip() + ("*" if match[3] else ""), match[2] or ""


def _printing(stem: str, type_: str, name: str) -> str:
    """Return the statement in C that prints a parameter's code."""
    if not type_.endswith("*"):
        return f"PARAMETER({type_});\n"
    to = type_.removesuffix("*").strip()
    constant = to.endswith("const") if "*" in to else "const" in to.split()
    if constant or to == "void":
        return 'printf(" c");\n'
    on_device = stem in _COMPUTING and to.rstrip("* ") in _NUMBERS and not _ANSWER.fullmatch(name)
    return f'printf(" {"o" if on_device else "w"}%zu", sizeof({to}));\n'


def write(names: Iterable[tuple[str, str]], folders: Sequence[Path]) -> None:
    found: Prototypes = {}
    by_stem: dict[str, list[str]] = {}
    for stem, name in names:
        by_stem.setdefault(stem, []).append(name)
    for stem, of_library in by_stem.items():
        of_headers: Mapping[str, str] = read(stem, of_library, folders) or {}
        found |= {(stem, name): codes for name, codes in of_headers.items()}
    RECORD.write_text("".join(f"{' '.join(key)} {codes}".strip() + "\n" for key, codes in sorted(found.items())))


if __name__ == "__main__":
    before = recorded() if RECORD.exists() else {}
    told = [(line.split()[0], line.split()[1]) for line in sys.stdin]
    write({*before, *told}, list(map(Path, sys.argv[1:])))
