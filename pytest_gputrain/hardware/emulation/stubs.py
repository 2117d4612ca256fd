"""Writes the C text of the functions that are not written by hand: they do nothing and succeed, or say what is not known."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from pytest_gputrain.hardware.emulation.libraries import Functions


class _Workspace(NamedTuple):
    """The parameters in which a function returns the size of a workspace: by numbers of parameters from 1, as values of a
    type in C."""

    parameters: tuple[int, ...]
    type: str = "size_t"
    of: str = ""
    """The name of the workspace in reports, if it is not that of its library."""


_WORKSPACES: Final = {
    "cudnnGetConvolutionForwardWorkspaceSize": _Workspace((7,)),
    "cudnnGetConvolutionBackwardDataWorkspaceSize": _Workspace((7,)),
    "cudnnGetConvolutionBackwardFilterWorkspaceSize": _Workspace((7,)),
    "cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize": _Workspace((9,)),
    "cudnnGetBatchNormalizationBackwardExWorkspaceSize": _Workspace((11,)),
    "cudnnGetBatchNormalizationTrainingExReserveSpaceSize": _Workspace((6,)),
    "cudnnGetCTCLossWorkspaceSize": _Workspace((9,)),
    "cudnnGetCTCLossWorkspaceSize_v8": _Workspace((6,)),
    "cudnnGetRNNTempSpaceSizes": _Workspace((5, 6), of="what cuDNN's recurrent layers keep for the backward pass"),
    "cudnnDropoutGetStatesSize": _Workspace((2,)),
    **{
        f"cusolverDn{number}{name}_bufferSize": _Workspace((at,), "int")
        for at, names in {
            4: ["gesvd"],
            5: ["sytrf"],
            6: ["geqrf", "getrf", "potrf"],
            8: ["syevd", "heevd", "syevj", "heevj", "syevjBatched", "heevjBatched", "orgqr", "ungqr"],
            12: ["ormqr", "unmqr", "gesvdjBatched"],
            13: ["gesvdj"],
            17: ["gesvdaStridedBatched"],
        }.items()
        for name in names
        for number in "SDCZ"
    },
    # Of the device, and of the host.
    "cusolverDnXpotrf_bufferSize": _Workspace((9, 10)),
    "cusolverDnXgeqrf_bufferSize": _Workspace((11, 12)),
    "cusolverDnXsyevd_bufferSize": _Workspace((12, 13)),
    "cusolverDnXsyevBatched_bufferSize": _Workspace((12, 13)),
    "cusolverDnXsytrs_bufferSize": _Workspace((12, 13)),
    "cusolverDnXgeev_bufferSize": _Workspace((18, 19)),
    "cusparseSpMM_bufferSize": _Workspace((11,)),
    "cusparseSDDMM_bufferSize": _Workspace((11,)),
    "cusparseSpSM_bufferSize": _Workspace((11,)),
    "cusparseSpMV_bufferSize": _Workspace((10,)),
    "cusparseSpSV_bufferSize": _Workspace((10,)),
    "cusparseXcoosort_bufferSizeExt": _Workspace((7,)),
    "cusparseXcsrsort_bufferSizeExt": _Workspace((7,)),
}
"""These answer that they need none, and the figures of the program are then those of at least so much."""

_OUTCOMES: Final = {
    **{
        f"cusolverDn{number}{name}": at
        for at, names in {
            6: ["potrfBatched"],
            8: ["potrf", "getrf"],
            9: ["geqrf", "potrs"],
            10: ["getrs", "orgqr", "ungqr", "syevd", "heevd", "syevj", "heevj"],
            14: ["ormqr", "unmqr"],
            15: ["gesvdj"],
            16: ["gesvd"],
        }.items()
        for name in names
        for number in "SDCZ"
    },
    "cusolverDnXpotrf": 13,
    "cusolverDnXgeqrf": 15,
    "cusolverDnXsyevd": 16,
    "cusolverDnXsyevBatched": 16,
    "cusolverDnXgeev": 22,
}
"""The parameter that holds on the device whether a factorization succeeded: an integer, 0 if it did. torch raises for
others."""

_SIZES: Final = ("ufferSize", "orkspaceSize", "GetWorkspace", "CompressedSize", "workEstimation", "MatGetSize", "geam2Nnz")
"""The parts of names of other functions that return a size, including the size of a result. They fail."""

_REFUSED: Final = {"cusolver": 9, "cusparse": 10, "cusparseLt": 10, "cublas": 15, "cublasLt": 15, "cudnn": 3000}
"""The libraries' own numbers for what they do not support."""

_COMPUTING: Final = frozenset({"cublas", "cublasLt", "cudnn", "cufft", "curand", "cusolver", "cusparse", "cusparseLt"})
"""The libraries whose functions compute on a GPU, but for those whose names say that they only prepare."""

_PREPARING: Final = re.compile(
    "[Cc]reate|[Dd]estroy|Set|Get|Init|Version|Property|Logger|Query|_analysis|Finalize|AutoAllocation"
)

_NAMES: Final = {"cudnn": "cuDNN", "cusolver": "cuSOLVER", "cusparse": "cuSPARSE"}


def stubs_text(stem: str, names: Iterable[str]) -> str:
    """Write the C text of these functions of a library."""
    return "\n".join(['#include "emulated.h"', *(_stub(stem, name) for name in names)]) + "\n"


def _stub(stem: str, name: str) -> str:
    if name in _WORKSPACES:
        workspace = _WORKSPACES[name]
        parameters = _parameters(max(workspace.parameters))
        answers = " ".join(f"if (p{number}) *({workspace.type} *)p{number} = 0;" for number in workspace.parameters)
        unknown = workspace.of or f"{_NAMES[stem]}'s workspaces"
        return f'int {name}({parameters}) {{ gputrain_unknown("{unknown}"); {answers} return 0; }}'
    if any(part in name for part in _SIZES):
        return f'int {name}(void) {{ return gputrain_missing("{name}", {_REFUSED.get(stem, 801)}); }}'
    count = f'gputrain_count("library_calls", "{name}", 0); ' if stem in _COMPUTING and not _PREPARING.search(name) else ""
    if name in _OUTCOMES:
        at = _OUTCOMES[name]
        return f"int {name}({_parameters(at)}) {{ {count}*(int *)p{at} = 0; return 0; }}"
    parameters, body = "void", "return 0;"
    if ("Create" in name or name.endswith("createDescr")) and "Identity" not in name:
        parameters, body = "void **out", "*out = gputrain_handle(); return 0;"
    return f'long {name}({parameters}) {{ static int seen; gputrain_trace("{name}", &seen); {count}{body} }}'


def _parameters(count: int) -> str:
    """Return the parameters in C, where pointers and whole numbers are passed alike, in eight bytes each."""
    return ", ".join(f"void *p{number}" for number in range(1, count + 1))


def version_script(functions: Functions) -> str:
    """Write what the linker is told of the functions' versions, which whoever loads them compares."""
    versions: defaultdict[str, list[str]] = defaultdict(list)
    for name, version in sorted(functions.items()):
        versions[version].append(name)
    return "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items() if version)
