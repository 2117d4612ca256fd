"""The C stand-ins themselves, compiled without torch and called by ctypes in processes of their own."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from driver_addresses import ON_AN_H200
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gputrain.hardware.emulation import boards, build
from pytest_gputrain.hardware.emulation.boards import CONTEXT_BYTES
from pytest_gputrain.hardware.emulation.elf import Elf
from pytest_gputrain.hardware.emulation.libraries import Torch

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs Linux and a C compiler"
)

CUDA_12 = Torch(Path("none"), "2.9.1", (12, 8), (9, 10, 2), (2, 27, 5))
CUDA_13 = Torch(Path("none"), "2.13.0", (13, 0), (9, 20, 0), (2, 29, 7))

NEEDED = {
    "libcuda.so.1": {"cuInit": "", "cuStreamSynchronize": ""},
    "libcudart.so.13": {"cudaMalloc": "libcudart.so.13", "cudaDeviceSynchronize": "libcudart.so.13"},
    "libcublas.so.13": {"cublasCreate_v2": "libcublas.so.13"},
    "libcublasLt.so.13": {},
    "libcudnn.so.9": {},
    "libcufft.so.12": {},
    "libcupti.so.13": {},
    "libcusolver.so.12": dict.fromkeys(
        ("cusolverDnSgeqrf_bufferSize", "cusolverDnSgeqrf", "cusolverDnSSgels_bufferSize"), "libcusolver.so.12"
    ),
    "libnccl.so.2": {},
    "libnvidia-ml.so.1": {},
    "libnvrtc.so.13": {},
}


WARNINGS = ("-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Without a warning, as all tests with these would fail."""
    folder = tmp_path_factory.mktemp("built")
    build.compile_all(build.find_compiler(), CUDA_13, NEEDED, folder, flags=WARNINGS)
    return folder


@pytest.mark.slow
def test_they_compile_without_a_warning_for_either_cuda(built, tmp_path):
    build.compile_all(build.find_compiler(), CUDA_12, NEEDED, tmp_path, flags=WARNINGS)
    for folder in (tmp_path, built):
        assert {path.name for path in folder.iterdir()} == {build.CORE, *NEEDED}


@pytest.fixture
def call(built):
    """Run code in a process that has the stand-ins as ``core``, ``driver``, ``runtime`` and so on; return what it prints."""

    def run(code, *, marker="h100", devices=1, **variables):
        preamble = """
            import ctypes, sys
            from ctypes import byref, c_int, c_size_t, c_void_p
            def load(name):
                library = ctypes.CDLL(f"{sys.argv[1]}/{name}")
                return library
            core, driver, runtime, solver, management = map(load, (
                "libgputrain_emulated.so", "libcuda.so.1", "libcudart.so.13", "libcusolver.so.12", "libnvidia-ml.so.1"
            ))
            runtime.cudaFree.argtypes = [c_void_p]
            runtime.cudaMemcpy.argtypes = [c_void_p, c_void_p, c_size_t, c_int]
            runtime.cudaMemset.argtypes = [c_void_p, c_int, c_size_t]
            MIB = 1 << 20
            def allocate(size):
                pointer = c_void_p()
                status = runtime.cudaMalloc(byref(pointer), c_size_t(size))
                return status or pointer.value
            def memory():
                left, total = c_size_t(), c_size_t()
                assert runtime.cudaMemGetInfo(byref(left), byref(total)) == 0
                return left.value, total.value
        """
        description = boards.describe(boards.board(marker), kernels=86, devices=devices)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(code), str(built)],
            env={**os.environ, "GPUTRAIN_EMULATED_DEVICE": description, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


def test_memory_comes_as_a_driver_gave_it(call):
    printed = call(f"""
        first = [allocate(2 * MIB) for _ in range(4)][1]
        for size in {[size for size, _ in ON_AN_H200]}:
            print(allocate(size * MIB) - first)
    """)
    assert [int(number) >> 20 for number in printed] == [offset for _, offset in ON_AN_H200]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.integers(0, 100)), min_size=20, max_size=60))
def test_addresses_in_use_are_apart_and_all_come_back(call, asked):
    first, *apart, again = call(f"""
        held = {{}}
        first = allocate(2 * MIB)
        print(first)
        for gives, pages, which in {asked}:
            if gives and held:
                start = sorted(held)[which % len(held)]
                runtime.cudaFree(start)
                del held[start]
            else:
                start = allocate(2 * MIB * pages)
                ends = [other + 2 * MIB * size for other, size in held.items()]
                print(all(end <= start or start + 2 * MIB * pages <= other for other, end in zip(held, ends)))
                held[start] = pages
        for start in [first, *held]:
            runtime.cudaFree(start)
        print(allocate(408 * MIB))
    """)
    assert set(apart) <= {"True"}
    assert again == first, "all of the first range of addresses is free again"


def test_what_does_not_fit_is_refused_and_counted(call, tmp_path):
    printed = call(
        """
        import os
        left, total = memory()
        print(total, total - left)
        first = allocate(60 << 30)
        print(allocate(20 << 30), runtime.cudaGetLastError(), runtime.cudaGetLastError())
        runtime.cudaFree(first)
        print(memory()[0] == left, allocate(20 << 30) > 0, os.getpid())
        """,
        GPUTRAIN_EMULATED_STATE=str(tmp_path),
    )
    assert printed[:2] == [str(boards.board("h100").memory_bytes), str(CONTEXT_BYTES)]
    assert printed[2:5] == ["2", "2", "0"]
    assert printed[5:7] == ["True", "True"]
    shared = tmp_path / printed[7]
    assert shared.stat().st_mode & 0o777 == 0o600
    figures = memoryview(shared.read_bytes()).cast("Q")
    used, peak, missing = figures[0], figures[16], figures[32]
    free = boards.board("h100").memory_bytes - (60 << 30) - CONTEXT_BYTES
    assert (used, peak, missing) == ((20 << 30) + CONTEXT_BYTES, (60 << 30) + CONTEXT_BYTES, (20 << 30) - free)


def test_small_contents_are_kept_and_large_ones_are_zero(call):
    printed = call("""
        device = allocate(64 * MIB)
        small, large = ctypes.create_string_buffer(b"x" * MIB, MIB), ctypes.create_string_buffer(b"x" * (2 * MIB), 2 * MIB)
        runtime.cudaMemcpy(device, small, MIB, 1)
        back = ctypes.create_string_buffer(MIB)
        runtime.cudaMemcpy(back, device, MIB, 2)
        print(back.raw == small.raw)
        runtime.cudaMemcpy(large, device, 2 * MIB, 2)
        print(set(large.raw) == {0})
        runtime.cudaMemset(device, 0, 64 * MIB)
        runtime.cudaMemcpy(back, device, MIB, 2)
        print(set(back.raw) == {0})
        runtime.cudaMemset(device, 7, 1024)
        runtime.cudaMemcpy(back, device, MIB, 2)
        print(set(back.raw[:1024]) == {7})
        runtime.cudaFree(device)
        runtime.cudaMemcpy(back, allocate(64 * MIB), MIB, 2)
        print(set(back.raw) == {0})
    """)
    assert printed == ["True"] * 5


def test_memory_that_is_not_touched_takes_none_of_the_host_and_a_lifted_limit_refuses_nothing(call):
    printed = call("""
        import resource
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(10):
            runtime.cudaMemset(allocate(4 << 30), 0, 4 << 30)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        print(allocate(81 << 30))
        core.gputrain_limit(c_size_t(-1))
        print(allocate(81 << 30) > 2, memory()[0])
    """)
    assert int(printed[0]) < 4096  # KiB
    assert printed[1:] == ["2", "True", "0"]


def test_physical_memory_is_counted_when_it_is_made_and_not_when_it_is_mapped(call):
    printed = call("""
        import struct
        left = memory()[0]
        start, handle = c_void_p(), c_void_p()
        print(driver.cuMemAddressReserve(byref(start), c_size_t(100 << 30), c_size_t(0), None, ctypes.c_uint64(0)))
        print(left - memory()[0])
        properties = struct.pack("4i", 1, 0, 1, 0)
        print(driver.cuMemCreate(byref(handle), c_size_t(40 * MIB), properties, ctypes.c_uint64(0)))
        print(left - memory()[0])
        driver.cuMemMap.argtypes = [c_void_p, c_size_t, c_size_t, c_void_p, ctypes.c_uint64]
        print(driver.cuMemMap(start, 40 * MIB, 0, handle, 0))
        ctypes.memset(start.value, 1, 40 * MIB)
        driver.cuMemUnmap.argtypes = [c_void_p, c_size_t]
        driver.cuMemRelease.argtypes = [c_void_p]
        print(driver.cuMemUnmap(start, 40 * MIB), driver.cuMemRelease(handle), left - memory()[0])
        properties = struct.pack("4i", 1, 0, 1, 0)
        print(driver.cuMemCreate(byref(handle), c_size_t(100 << 30), properties, ctypes.c_uint64(0)))
    """)
    assert list(map(int, printed)) == [0, 0, 0, 40 << 20, 0, 0, 0, 0, 2]


VISIBLE = {None: 4, "": 0, "-1": 0, "2": 1, "3,1": 2, "1,7,2": 1, "0,0": 0, "1,2,1": 0, "GPU-656d756c": 1, "GPU-1": 0}


@pytest.mark.parametrize("visible", VISIBLE)
def test_cuda_visible_devices_is_read_as_by_the_driver(call, visible):
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    devices = VISIBLE[visible]
    printed = call(
        """
        count = c_int()
        status = runtime.cudaGetDeviceCount(byref(count))
        print(count.value, status, allocate(1) == 100)
        management.nvmlDeviceGetCount_v2(byref(count))
        print(count.value)
        """,
        devices=4,
        **variables,
    )
    assert printed == [str(devices), "0" if devices else "100", str(not devices), "4"]


def test_a_size_that_is_not_known_is_none_and_told_or_an_error(call):
    printed = call("""
        size, outcome = c_int(-1), c_int(-1)
        print(solver.cusolverDnSgeqrf_bufferSize(None, 1, 1, None, 1, byref(size)), size.value)
        print(solver.cusolverDnSgeqrf(None, 1, 1, None, 1, None, None, 0, byref(outcome)), outcome.value)
        core.gputrain_unknown_at.restype = ctypes.c_char_p
        print(core.gputrain_unknown_at(0).decode().replace(" ", "_"), core.gputrain_unknown_at(1))
        print(solver.cusolverDnSSgels_bufferSize(None, 1, 1, 1, None, 1, None, 1, None, 1, None, byref(size)))
    """)
    assert printed == ["0", "0", "0", "0", "cuSOLVER's_workspaces", "None", "9"]


RANKS = """
    import os
    nccl = load("libnccl.so.2")
    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 128)]
    nccl.ncclCommInitRankConfig.argtypes = [c_void_p, c_int, Id, c_int, c_void_p]
    identity = Id()
    nccl.ncclGetUniqueId(byref(identity))
    children = []
    for rank in range(1, 3):
        child = os.fork()
        if child == 0:
            children = []
            break
        children.append(child)
    else:
        rank = 0
    world, part = c_void_p(), c_void_p()
    assert nccl.ncclCommInitRankConfig(byref(world), 3, identity, rank, None) == 0
    def ints(*values):
        return (c_int * len(values))(*values)
    def told(name, *results):
        os.write(1, f"{rank}:{name}:{','.join(map(str, results))}\\n".encode())  # whole, from three processes
    all_, own = ints(0, 0, 0), ints(10 + rank)
    assert nccl.ncclAllGather(own, all_, c_size_t(1), 2, world, None) == 0
    told("gathered", *all_)
    for name, operation in {"sum": 0, "product": 1, "most": 2, "least": 3, "mean": 4}.items():
        assert nccl.ncclAllReduce(own, all_, c_size_t(1), 2, operation, world, None) == 0
        told(name, all_[0])
    floats, result = (ctypes.c_float * 3)(*(rank * 3 + i for i in range(3))), ctypes.c_float()
    assert nccl.ncclReduceScatter(floats, byref(result), c_size_t(1), 7, 0, world, None) == 0
    told("scattered", result.value)
    assert nccl.ncclBroadcast(own, own, c_size_t(1), 2, 2, world, None) == 0
    told("broadcast", own[0])
    assert nccl.ncclAlltoAll(ints(*(10 * rank + i for i in range(3))), all_, c_size_t(1), 2, world, None) == 0
    told("exchanged", *all_)
    assert nccl.ncclCommSplit(world, int(rank > 0), -rank, byref(part), None) == 0
    number, count = c_int(), c_int()
    nccl.ncclCommUserRank(part, byref(number)), nccl.ncclCommCount(part, byref(count))
    told("split", number.value, count.value)
    nccl.ncclGroupStart()
    assert nccl.ncclRecv(own, c_size_t(1), 2, (rank + 2) % 3, world, None) == 0
    assert nccl.ncclSend(ints(100 + rank), c_size_t(1), 2, (rank + 1) % 3, world, None) == 0
    assert nccl.ncclGroupEnd() == 0
    told("received", own[0])
    large = (c_int * (1 << 19))()
    assert nccl.ncclAllReduce(large, large, c_size_t(1 << 19), 2, 0, world, None) == 0  # waits for nobody
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
"""


def test_ranks_exchange_what_is_small(call, tmp_path):
    printed = dict(line.rsplit(":", 1) for line in call(RANKS, devices=3, GPUTRAIN_EMULATED_STATE=str(tmp_path)))
    expected = {"gathered": "10,11,12", "sum": "33", "product": "1320", "most": "12", "least": "10", "mean": "11"}
    expected["broadcast"] = "12"
    assert {name: [printed[f"{rank}:{name}"] for rank in range(3)] for name in expected} == {
        name: [value] * 3 for name, value in expected.items()
    }
    assert [printed[f"{rank}:scattered"] for rank in range(3)] == ["9.0", "12.0", "15.0"]
    assert [printed[f"{rank}:exchanged"] for rank in range(3)] == ["0,10,20", "1,11,21", "2,12,22"]
    assert [printed[f"{rank}:split"] for rank in range(3)] == ["0,1", "1,2", "0,2"]
    assert [printed[f"{rank}:received"] for rank in range(3)] == ["102", "100", "101"]


def test_what_the_runtime_says_of_kernels_and_of_a_capture_of_the_default_stream(call):
    printed = call("""
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        status = runtime.cudaStreamBeginCapture(None, 0)
        attributes = (c_int * 64)()
        print(runtime.cudaFuncGetAttributes(attributes, None), *attributes[6:10])
        print(status, runtime.cudaGetErrorString(status).decode())
    """)
    assert printed[:5] == ["0", "1024", "32", "86", "86"], "the kernels that torch was compiled with"
    assert printed[5] == "900"
    assert " ".join(printed[6:]) == "operation not permitted when stream is capturing"
    assert call("count = c_int(7); print(runtime.cudaGetDeviceCount(byref(count)), count.value)", devices=0) == ["100", "0"]


def test_stand_ins_are_known_by_a_symbol(built):
    with Elf(built / build.CORE) as library:
        assert "gputrain_emulated_gpu" in library.defined()


HEADERS = {"nvidia/cu13/include/driver_types.h": "13000", "nvidia/cuda_runtime/include/driver_types.h": "12080"}


def nvidia_headers():
    folders = [*map(Path, sys.path), *map(Path, os.environ.get("GPUTRAIN_NVIDIA_HEADERS", "").split(os.pathsep))]
    return {folder / name: version for folder in folders for name, version in HEADERS.items() if (folder / name).exists()}


@pytest.mark.slow
def test_the_properties_lie_where_nvidias_header_has_them(tmp_path):
    headers = nvidia_headers()
    if not headers:
        pytest.skip("needs NVIDIA's header: pip install nvidia-cuda-runtime, or its folder in GPUTRAIN_NVIDIA_HEADERS")
    for header, version in headers.items():
        text = header.read_text()
        match = re.search(r"struct __device_builtin__ (cudaDeviceProp\s*\{.*?\n\};)", text, re.DOTALL)
        assert match is not None, header
        names = set(re.findall(r"(\w+)(?:\[\d+\])*;", match[1]))
        assert len(names) > 80
        checks = [
            f'_Static_assert(offsetof(struct properties, {name}) == offsetof(struct cudaDeviceProp, {name}), "{name}");'
            for name in sorted(names)
        ]
        source = tmp_path / "offsets.c"
        source.write_text(
            f'#include "properties.h"\ntypedef struct uuid cudaUUID_t;\nstruct {match[1]}\n'
            + "\n".join(checks)
            + '\n_Static_assert(sizeof(struct properties) == sizeof(struct cudaDeviceProp), "size");\n'
        )
        subprocess.run(
            [*build.find_compiler(), f"-DCUDA_VERSION={version}", f"-I{build.SOURCES}", "-fsyntax-only", str(source)],
            check=True,
        )
