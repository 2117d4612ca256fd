"""Each generated function does what its caller sees by the types of NVIDIA's headers, or fails with its name."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import nvidia_prototypes
import pytest

from pytest_gputrain.hardware.emulation import boards, build, libraries

# What no header declares: they are called by code that NVIDIA's compiler writes, or by torch without a header.
WITHOUT_HEADER = re.compile(
    "__cuda(InitModule|RegisterFatBinaryEnd|RegisterVar|UnregisterFatBinary)|cudaProfiler(Start|Stop)|"
    "cuptiActivityEnableCudaEventDeviceTimestamps|nvshmemid_hostlib_finalize"
)

# Addresses that are read only, though their type has no const, and structures that their library alone looks into.
INPUTS = re.compile("cuLinkAddData_v2|cuptiActivitySetAttribute|nvrtcDestroyProgram|cusparseLt\\w+")

# Calls functions with parameters that are surrounded by bytes of a pattern. Prints what went wrong.
CALLS = """
    import ctypes, json, sys
    GUARD, SPACE, PATTERN = 64, 4096, 0xA5
    folder, wanted = sys.argv[1], json.load(sys.stdin)
    kinds = {"1": ctypes.c_byte, "2": ctypes.c_int16, "4": ctypes.c_int, "8": ctypes.c_longlong,
             "f4": ctypes.c_float, "f8": ctypes.c_double}
    libraries = {}
    for soname, name, codes in wanted:
        library = libraries.setdefault(soname, ctypes.CDLL(f"{folder}/{soname}"))
        function = getattr(library, name)
        function.restype, values, buffers = ctypes.c_int, [], []
        for code in codes:
            if code in kinds:
                values.append(kinds[code](1))
            elif code[0] == "s":
                fields = [("bytes", ctypes.c_byte * int(code[1:]))]
                values.append(type("structure", (ctypes.Structure,), {"_fields_": fields})())
            else:
                buffer = (ctypes.c_ubyte * (2 * GUARD + SPACE))()
                ctypes.memset(buffer, PATTERN, ctypes.sizeof(buffer))
                values.append(ctypes.c_void_p(ctypes.addressof(buffer) + GUARD))
                buffers.append((code, buffer))
        status = function(*values)
        print("status", name, status)
        for place, (code, buffer) in enumerate(buffers):
            size = int(code[1:] or 0) if status == 0 else 0
            inner, outer = bytes(buffer[GUARD : GUARD + size]), bytes(buffer[:GUARD]) + bytes(buffer[GUARD + size :])
            if outer.strip(bytes([PATTERN])):
                print("wrong", name, code, "writes where it must not")
            if code[0] == "w" and PATTERN in inner:
                print("wrong", name, code, "leaves an answer unset")
"""


@pytest.fixture(scope="module")
def generated(torch, tmp_path_factory):
    """The folder of stand-ins, and their generated functions by library."""
    written, folder = {}, tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        original = build.stubs_text
        patch.setattr(build, "stubs_text", lambda stem, names: original(stem, written.setdefault(stem, list(names))))
        needed = libraries.needed_functions(torch, libraries.users_of_cuda(torch))
        build.compile_all(build.find_compiler(), torch, needed, folder)
    return folder, {soname: written[soname.removeprefix("lib").split(".so.")[0]] for soname in needed}


def stem_of(soname):
    return soname.removeprefix("lib").split(".so.")[0]


def test_each_writes_its_answers_where_its_caller_expects_them_or_fails_with_its_name(generated):
    folder, functions = generated
    prototypes = nvidia_prototypes.recorded()
    wanted, without = [], []
    for soname, names in functions.items():
        for name in names:
            codes = prototypes.get((stem_of(soname), name))
            if codes is None:
                without.append([soname, name, ["c"] * 6])
            elif "String" not in name:
                wanted.append([soname, name, (codes.replace("w", "o") if INPUTS.fullmatch(name) else codes).split()])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CALLS), str(folder)],
        env=os.environ | {"GPUTRAIN_EMULATED_DEVICE": boards.describe(boards.board("h100"), kernels=90, devices=1)},
        input=json.dumps(wanted + without),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("wrong")] == []
    statuses = {words[1]: int(words[2]) for words in map(str.split, done.stdout.splitlines()) if words[0] == "status"}
    assert len(statuses) == len(wanted) + len(without) > 500
    unnamed = [name for name, status in statuses.items() if status and f"no answer to {name}" not in done.stderr]
    assert unnamed == []
    succeed = {name for _, name, _ in without if not statuses[name] and f"no answer to {name}" not in done.stderr}
    assert [name for name in sorted(succeed) if not WITHOUT_HEADER.fullmatch(name)] == []
    # The first of these are what torch cannot do without.
    assert {"cudnnCreate", "cublasCreate_v2", "cusolverDnSpotrf"} <= {
        name for name, status in statuses.items() if not status
    }


def header_folders():
    """The folders of headers that are here: those that GPUTRAIN_NVIDIA_HEADERS names, and those of installed wheels."""
    named = [Path(folder) for folder in os.environ.get("GPUTRAIN_NVIDIA_HEADERS", "").split(os.pathsep) if folder]
    site = [Path(folder) for folder in sys.path if folder]
    # Triton's first: NVIDIA's wheel of the runtime lacks headers that its own include.
    triton = [folder / "triton/backends/nvidia/include" for folder in site]
    return [*named, *filter(Path.exists, triton), *(one for folder in site for one in folder.glob("nvidia/*/include"))]


@pytest.mark.parametrize("stem", sorted(nvidia_prototypes.HEADERS))
def test_the_recorded_parameters_are_those_of_the_headers(stem):
    recorded = {name: codes for (library, name), codes in nvidia_prototypes.recorded().items() if library == stem}
    declared = nvidia_prototypes.read(stem, recorded, header_folders())
    if declared is None:
        pytest.skip(f"needs {nvidia_prototypes.HEADERS[stem]} of NVIDIA's wheel; install it by pip --no-deps")
    assert declared == recorded
