"""Writes the C text of the functions that are not written by hand: each gives what its caller reads, or fails by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from pytest_gputrain.hardware.emulation.libraries import Functions


class _Workspace(NamedTuple):
    """The parameters in which a function returns the size of a workspace. They have numbers from 1 and a type of C."""

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
    # The two numbers are positions of arguments: the sizes of the workspace on the device and on the host.
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
"""The functions that return the size of a workspace. They return 0, so the program's memory is then only a lower bound."""


class _Outcome(NamedTuple):
    """The parameter in which a function returns whether it succeeded: one number of a type of C, or one for each matrix of a
    batch."""

    at: int
    batch_at: int = 0
    """The position of the parameter with the number of matrices; 0 if the function takes one matrix."""
    type: str = "int"
    value: int = 0


_OUTCOMES: Final = {
    **{
        f"cusolverDn{number}{name}": _Outcome(at, batch_at)
        for (at, batch_at), names in {
            (6, 7): ["potrfBatched"],
            (8, 0): ["potrf", "getrf"],
            (9, 0): ["geqrf", "potrs", "sytrf", "potrsBatched"],
            (10, 0): ["getrs", "orgqr", "ungqr", "syevd", "heevd", "syevj", "heevj"],
            (10, 12): ["syevjBatched", "heevjBatched"],
            (14, 0): ["ormqr", "unmqr"],
            (14, 16): ["gesvdjBatched"],
            (15, 0): ["gesvdj"],
            (16, 0): ["gesvd"],
            (19, 21): ["gesvdaStridedBatched"],
        }.items()
        for name in names
        for number in "SDCZ"
    },
    "cusolverDnXpotrf": _Outcome(13),
    "cusolverDnXpotrs": _Outcome(12),
    "cusolverDnXgeqrf": _Outcome(15),
    "cusolverDnXsyevd": _Outcome(16),
    "cusolverDnXsyevBatched": _Outcome(16, 17),
    "cusolverDnXsytrs": _Outcome(16),
    "cusolverDnXgeev": _Outcome(22),
    **{
        f"cublas{number}{name}Batched": _Outcome(at, batch_at)
        for name, at, batch_at in (("getrf", 6, 7), ("geqrf", 7, 0), ("gels", 10, 0), ("getrs", 10, 0))
        for number in "SDCZ"
    },
    "cusparseXbsrsm2_zeroPivot": _Outcome(3, value=-1),
    "cusparseXbsrsv2_zeroPivot": _Outcome(3, value=-1),
}
"""Every factorization succeeds. torch raises for others."""

_MORE_OUTCOMES: Final = {
    **{f"cusolverDn{number}gesvdaStridedBatched": _Outcome(20, 21, "double") for number in "SDCZ"},
    **{f"cublas{number}gelsBatched": _Outcome(11, 12) for number in "SDCZ"},
}
"""A second one, which the caller may leave out."""

_RESULTS: Final = (
    (re.compile(r"cublas[SDCZ]dot[uc]?_v2"), 7),
    (re.compile(r"cublas([SDCZ]|I[sdcz]|Sc|Dz)(nrm2|asum|amax|amin)_v2"), 5),
    (re.compile(r"cublas[SDCZ]rotm?g_v2"), 2),
    (re.compile("cublasDotEx"), 9),
)
"""The functions of cuBLAS whose result is one number, and the parameter that says where it belongs: on the device nobody
knows it, and on the host the program would go by it."""

_REFUSED: Final = {
    "cublas": 15,
    "cublasLt": 15,
    "cudnn": 3000,
    "cufft": 16,
    "cufile": 5007,
    "cupti": 27,
    "cusolver": 9,
    "cusparse": 10,
    "cusparseLt": 10,
    "nccl": 5,
    "nvidia-ml": 3,
    "nvrtc": 11,
}
"""The libraries' own numbers for what they do not support, or next to it; 801 where the library has CUDA's."""

_COMPUTING: Final = frozenset({"cublas", "cublasLt", "cudnn", "cufft", "curand", "cusolver", "cusparse", "cusparseLt"})
"""The libraries whose functions compute on a GPU, but for those whose names say that they only prepare."""

_PREPARING: Final = re.compile(
    "[Cc]reate|[Dd]estroy|Set|Get|Init|Version|Property|Logger|Query|_analysis|Finalize|AutoAllocation"
)

_HANDLES: Final = re.compile(
    r"(cublas|cublasLt|cudnn|curand|cusolver|cusparse)\w*Create(?!Identity)\w*|cusparse\w+_createDescr|"
    "nvrtcCreateProgram"
)
"""The functions whose first parameter gets the address of what the caller only passes back."""

_ANSWERING: Final = re.compile(
    r"\w*(Get|Query|Find|[Ss]ize|Nnz|Estimat|Export)\w*|cufft\w*Plan\w*|cublasSet(Vector|Matrix)\w*|"
    r"cusparseSpGEMM_(?!create|destroy)\w*"
)
"""The functions of these libraries that give the host an answer, or write into memory what it goes by. They fail."""

_WITHOUT_ANSWER: Final = re.compile(
    # Functions that register, load, allow or give back something have no effect that a program sees.
    r"__cuda\w*|cuda(DeviceEnablePeerAccess|FuncSetAttribute|KernelSetAttributeForDevice|LibraryUnload|MemPoolSet\w+|"
    r"MemPoolTrimTo|MemPrefetchAsync|MemcpyToSymbol|Profiler\w+|StreamDestroy)|cu(LinkAddData|LinkDestroy|LibraryUnload|"
    r"MemSetAccess|ModuleUnload)(_v2)?|"
    # Queries find that everything has ended already.
    "cu(Event|Stream)Query|"
    # The stand-in for CUPTI calls no callbacks, and the form of its records is fixed. So functions that change either have
    # no effect.
    r"cupti(Activity(Enable|Set)\w+|Enable\w+|Finalize)|"
    r"nvrtc(AddNameExpression|CompileProgram|DestroyProgram)|nvshmem\w*finalize"
)
"""The functions of the other libraries that only succeed. All others fail."""

_STREAMS: Final = re.compile(r"\w+(?<!cufft)(Set|Get)Stream(_v2)?")
"""The functions that set or return the stream of a handle."""

_BY_HANDLE: Final = frozenset({"cublas", "cudnn", "curand", "cusolver", "cusparse"})
"""The libraries whose functions work on the stream of their first parameter, a handle."""

_TEXTS: Final = re.compile(r"\w+(Error|Status)(String|Name)")
"""The functions that return a text for an error."""

_POINTERS: Final = re.compile(r"nvshmem(x_mc_ptr|_ptr|_malloc)")
"""The functions that return an address, and NULL if there is none."""

_NAMES: Final = {"cudnn": "cuDNN", "cusolver": "cuSOLVER", "cusparse": "cuSPARSE"}


def stubs_text(stem: str, names: Iterable[str]) -> str:
    """Return C code for these functions of a library."""
    return "\n".join(['#include "emulated.h"', *(_stub(stem, name) for name in names)]) + "\n"


def _stub(stem: str, name: str) -> str:
    refused = _REFUSED.get(stem, 801)
    if name in _WORKSPACES:
        workspace = _WORKSPACES[name]
        parameters = _parameters(max(workspace.parameters))
        answers = " ".join(f"if (p{number}) *({workspace.type} *)p{number} = 0;" for number in workspace.parameters)
        unknown = workspace.of or f"{_NAMES[stem]}'s workspaces"
        return f'int {name}({parameters}) {{ gputrain_unknown("{unknown}"); {answers} return 0; }}'
    if stem in _BY_HANDLE and (match := _STREAMS.fullmatch(name)):
        work = "gputrain_set_stream(p1, p2)" if match[1] == "Set" else "*(void **)p2 = gputrain_stream_of(p1)"
        return f"int {name}({_parameters(2)}) {{ {work}; return 0; }}"
    if _TEXTS.fullmatch(name):
        return f'const char *{name}(void) {{ return "error of an emulated GPU"; }}'
    if _POINTERS.fullmatch(name):
        return f'void *{name}(void) {{ gputrain_missing("{name}", 0); return NULL; }}'
    outcomes = [table[name] for table in (_OUTCOMES, _MORE_OUTCOMES) if name in table]
    known = name in _OUTCOMES or _HANDLES.fullmatch(name)
    if not known and not (_WITHOUT_ANSWER.fullmatch(name) if stem not in _COMPUTING else not _ANSWERING.fullmatch(name)):
        return f'long {name}(void) {{ return gputrain_missing("{name}", {refused}); }}'
    parameters, body = "void", ""
    if outcomes:
        parameters, body = _parameters(max(max(one.at, one.batch_at) for one in outcomes)), " ".join(map(_written, outcomes))
    elif _HANDLES.fullmatch(name):
        parameters, body = "void **out", "*out = gputrain_handle();"
    for pattern, at in _RESULTS:
        if pattern.fullmatch(name):
            parameters = _parameters(at)
            body = f'if (gputrain_kind(p{at}, NULL) < DEVICE) return gputrain_missing("{name} for the host", {refused});'
    count = ""
    if stem in _COMPUTING and not _PREPARING.search(name):
        parameters = "void *p1" if parameters == "void" else parameters
        stream = f"gputrain_stream_of({'p1' if stem in _BY_HANDLE else 'NULL'})"
        count = f'if (gputrain_ask({stream}, "library_calls", "{name}", 0)) return {refused}; '
    return (
        f'long {name}({parameters}) {{ static int seen; gputrain_trace("{name}", &seen); '
        f"{count}{body}{' ' if body else ''}return 0; }}"
    )


def _written(outcome: _Outcome) -> str:
    """Return a C statement that writes an outcome, unless the caller passes no pointer for it."""
    count = f"(int)(intptr_t)p{outcome.batch_at}" if outcome.batch_at else "1"
    return f"for (int i = 0; p{outcome.at} && i < {count}; i++) (({outcome.type} *)p{outcome.at})[i] = {outcome.value};"


def _parameters(count: int) -> str:
    """Return a list of C parameters. Pointers and integers are passed in the same way, in eight bytes each."""
    return ", ".join(f"void *p{number}" for number in range(1, count + 1))


def version_script(functions: Functions) -> str:
    """Return the version script for the linker. Programs compare the versions of functions when they load them."""
    versions: defaultdict[str, list[str]] = defaultdict(list)
    for name, version in sorted(functions.items()):
        versions[version].append(name)
    return "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items() if version)
