"""Finding, building and keeping the stand-ins of CUDA's libraries."""

import errno
import functools
import json
import mmap
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from pytest_gputrain.cli.main import main
from pytest_gputrain.hardware.catalog import PLATFORMS, marker_of
from pytest_gputrain.hardware.emulation import boards, build, elf, libraries
from pytest_gputrain.hardware.emulation.elf import Elf, Import, NotElf
from pytest_gputrain.hardware.emulation.environment import STARTUP, TORCH, emulated_environment
from pytest_gputrain.hardware.emulation.stubs import stubs_text
from pytest_gputrain.records.emulation import OtherKernels
from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.files import locked

COMPILER = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
needs_compiler = pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs Linux and a C compiler")


def compile_library(path, code, *options):
    source = path.with_suffix(".c")
    source.write_text(code)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", str(path), str(source), *options], check=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("compiled")
    site = tmp_path / "site"
    lib = site / "torch" / "lib"
    lib.mkdir(parents=True)
    (site / "torch" / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    runtime, versions = tmp_path / "libcudart.so.13", tmp_path / "versions.map"
    versions.write_text("libcudart.so.13 { global: cudaMalloc; };\n")
    compile_library(runtime, "void cudaMalloc(void) {}", "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={versions}")
    code = """
        extern void cudaMalloc(void), cudnnCreate(void), custom(void), cuFileRead(void);
        const char looked_up[] = "\\0nvmlInit_v2\\0cuStreamCreate\\0cuBe\\0 cuSpaced \\0customer\\0";
        void use(void) { cudaMalloc(); cudnnCreate(); custom(); cuFileRead(); }
        static void mine(void) {}
    """
    compile_library(lib / "libtorch_cuda.so", code, str(runtime))
    compile_library(
        lib / "libtorch_python.so",
        'const char a[] = "sm_\\0sm_80\\0 othersm_75 sm_90 sm_90a\\0";',
        "-Wl,--no-as-needed",
        str(runtime),
    )
    return tmp_path


@pytest.fixture
def site(tmp_path, compiled):
    """An environment with a made-up CUDA build of torch."""
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    return tmp_path / "site"


@needs_compiler
def test_symbols_are_read_as_the_loader_reads_them_and_what_is_no_library_is_told_apart(site, tmp_path):
    path = site / "torch" / "lib" / "libtorch_cuda.so"
    with Elf(path) as library:
        assert "libcudart.so.13" in library.needed()
        imports = {symbol.name: symbol for symbol in library.imports()}
        assert imports["cudaMalloc"] == Import("cudaMalloc", "libcudart.so.13", "libcudart.so.13")
        assert imports["cudnnCreate"] == Import("cudnnCreate", "", "")
        defined = library.defined()
        assert {"use", "looked_up"} <= defined
        assert not {"mine", "cudaMalloc"} & defined
        assert b"nvmlInit_v2" in library.constants()
    whole, other = path.read_bytes(), tmp_path / "other.so"
    for data in (b"", b"text", b"\x7fELF\x01\x01" + whole[6:], whole[:64], whole[: len(whole) - 500]):
        other.write_bytes(data)
        with pytest.raises(NotElf):
            Elf(other)


@needs_compiler
def test_functions_are_found_by_version_by_name_and_by_text(site):
    torch = libraries.read_torch(site / "torch")
    assert (torch.version, torch.cuda, torch.site) == ("2.13.0+cu130", (13, 0), site)
    users = libraries.users_of_cuda(torch)
    assert [path.name for path in users] == ["libtorch_cuda.so", "libtorch_python.so"]
    assert libraries.needed_functions(torch, users) == {
        "libcuda.so.1": {"cuStreamCreate": ""},
        "libnvidia-ml.so.1": {"nvmlInit_v2": ""},
        "libcudart.so.13": {"cudaMalloc": "libcudart.so.13"},
    }
    assert libraries.architectures(torch) == ("sm_75", "sm_90", "sm_90a")


@needs_compiler
def test_a_library_for_another_cuda_is_left_out(site, tmp_path):
    other = tmp_path / "libcudart.so.12"
    compile_library(other, "void cudaMalloc(void) {}", "-Wl,-soname,libcudart.so.12")
    package = site / "bitsandbytes"
    package.mkdir()
    for soname, path in {"12": other, "13": tmp_path / "libcudart.so.13"}.items():
        compile_library(
            package / f"lib{soname}.so", "extern void cudaMalloc(void); void f(void) { cudaMalloc(); }", str(path)
        )
    names = [path.name for path in libraries.users_of_cuda(libraries.read_torch(site / "torch"))]
    assert "lib13.so" in names
    assert "lib12.so" not in names


def test_versions_of_cudnn_and_nccl_are_those_that_torch_asks_for(tmp_path):
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    folder = tmp_path / "torch-2.13.0.dist-info"
    folder.mkdir()
    for asked in ("cudnn-cu13==9.20.0.48", "nccl-cu13==2.29.7"):
        (folder / "METADATA").write_text(f"Name: torch\nRequires-Dist: numpy\nRequires-Dist: nvidia-{asked}\n")
        torch = libraries.read_torch(tmp_path / "torch")
        assert (torch.cudnn, torch.nccl) == (((9, 20, 0), (2, 27, 5)) if "cudnn" in asked else ((9, 10, 2), (2, 29, 7)))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pytest-gputrain-emulation"


@pytest.fixture
def builds(monkeypatch):
    """How often a build was made; what it makes is small."""
    made = []

    def compile_little(compiler, torch, needed, folder):
        made.append(folder)
        (folder / build.CORE).write_bytes(b"core")
        (folder / "libcuda.so.1").write_bytes(b"driver")

    monkeypatch.setattr(build, "compile_all", compile_little)
    monkeypatch.setattr(build, "find_compiler", lambda: ["cc"])
    return made


@needs_compiler
def test_a_second_run_finds_what_the_first_one_built(site, cache, builds):
    torch = libraries.read_torch(site / "torch")
    first, second = build.stand_ins(torch), build.stand_ins(torch)
    assert len(builds) == 1
    assert first.folder == second.folder
    assert [path.name for path in first.libraries] == [build.CORE, "libcuda.so.1"]
    assert (first.folder / "libcuda.so").samefile(first.folder / "libcuda.so.1"), "for the linker of Triton 3.5"
    assert first.architectures == ("sm_75", "sm_90", "sm_90a")
    assert (cache.stat().st_mode & 0o777, first.folder.stat().st_mode & 0o777) == (0o700, 0o700)
    assert list(cache.iterdir()) == [first.folder]


@needs_compiler
def test_a_run_waits_for_the_build_of_one_that_has_another_folder_for_temporary_files(
    site, cache, builds, tmp_path, monkeypatch
):
    torch = libraries.read_torch(site / "torch")
    second = threading.Thread(target=build.stand_ins, args=(torch,))
    cache.mkdir(mode=0o700, parents=True)
    with locked(cache / "a build"):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        second.start()
        second.join(timeout=0.3)
        assert (second.is_alive(), builds) == (True, [])
    second.join(timeout=600)
    assert len(builds) == 1


@needs_compiler
@pytest.mark.parametrize(
    "damage", ["changed", "gone", "no manifest", "half a manifest", "another manifest", "a library elsewhere", "no core"]
)
def test_what_is_not_as_it_was_built_is_built_again(site, cache, builds, damage):
    torch = libraries.read_torch(site / "torch")
    folder = build.stand_ins(torch).folder
    driver, manifest = folder / "libcuda.so.1", folder / "manifest.json"
    if damage == "changed":
        driver.write_bytes(b"others'")
    elif damage == "gone":
        driver.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "a library elsewhere":  # which LD_PRELOAD would name
        (cache / "x.so").write_bytes(b"x")
        document = json.loads(manifest.read_bytes())
        document["digests"]["../x.so"] = build._digest(cache / "x.so")
        manifest.write_text(json.dumps(document))
    elif damage == "no core":
        (folder / build.CORE).write_bytes(b"others'")
        document = json.loads(manifest.read_bytes())
        del document["digests"][build.CORE]
        manifest.write_text(json.dumps(document))
    else:
        manifest.write_bytes(manifest.read_bytes()[:40] if damage == "half a manifest" else b'{"digests": []}')
    assert build.stand_ins(torch).folder == folder
    assert len(builds) == 2
    assert driver.read_bytes() == b"driver"
    assert "libcuda.so.1" in json.loads(manifest.read_bytes())["digests"]


@needs_compiler
def test_a_build_removes_those_that_nobody_has_used_for_a_month(site, cache, builds):
    torch = libraries.read_torch(site / "torch")
    used = build.stand_ins(torch).folder
    month = time.time() - 31 * 86400
    names = {"torch-2.9.1-0123": month, "torch-2.12.0-4567": month + 2 * 86400, ".building-x": month}
    for name, when in names.items():
        (cache / name).mkdir()
        (cache / name / "libcuda.so.1").touch()
        os.utime(cache / name, (when, when))
    os.utime(used, (month, month))
    build.stand_ins(torch)  # finds it
    assert len(list(cache.iterdir())) == 4
    (used / "manifest.json").unlink()
    build.stand_ins(torch)  # builds it
    assert {path.name for path in cache.iterdir()} == {used.name, "torch-2.12.0-4567"}
    os.utime(used, (month, month))
    build.stand_ins(torch)
    assert used.stat().st_mtime > month + 86400


def refusal(call, *arguments):
    with pytest.raises(CannotEmulate) as refused:
        call(*arguments)
    (sentence,) = str(refused.value).splitlines()
    return sentence


@needs_compiler
def test_a_damaged_build_stays_for_those_who_use_it_until_the_new_one_is_there(site, cache, builds, monkeypatch):
    torch = libraries.read_torch(site / "torch")
    folder = build.stand_ins(torch).folder
    (folder / "manifest.json").unlink()
    compile_little, seen = build.compile_all, []

    def compile_and_look(*arguments):
        seen.append((folder / build.CORE).exists())
        compile_little(*arguments)

    monkeypatch.setattr(build, "compile_all", compile_and_look)
    build.stand_ins(torch)
    assert seen == [True]
    assert [path.name for path in cache.iterdir()] == [folder.name]


@needs_compiler
def test_a_disk_that_forbids_execution_a_full_one_and_a_build_of_all_users_are_told(
    site, cache, builds, tmp_path, monkeypatch
):
    torch = libraries.read_torch(site / "torch")
    folder = build.stand_ins(torch).folder
    folder.chmod(0o777)
    said = refusal(build.stand_ins, torch)
    assert said.startswith(f"the emulated GPU cannot be kept in {cache}: {folder}: it is not a folder of this user alone")
    folder.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(elf.mmap, "mmap", functools.partial(_map, mmap.mmap))
        said = refusal(build.stand_ins, torch)
        assert said.startswith(f"no program may run from {cache} (its disk is mounted with noexec)")
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'ld: error: final close failed: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    said = refusal(build._run, [str(compiler)])
    assert said.startswith(f"there is no space for the emulated GPU in {cache} or {tempfile.gettempdir()}")


def _map(map_, *arguments, **more):
    if more.get("prot", 0) & mmap.PROT_EXEC:
        raise PermissionError(errno.EPERM, "not permitted")
    return map_(*arguments, **more)


def test_compiled_code_lies_in_a_folder_of_this_user_alone(tmp_path, monkeypatch):
    stand_ins = made_up_stand_ins(tmp_path / "built")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"torchinductor_{os.geteuid()}"
    emulated_environment({}, stand_ins, "")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert f"compiled code cannot be kept in {folder} (it is not" in refusal(emulated_environment, {}, stand_ins, "")
    assert emulated_environment({"TORCHINDUCTOR_CACHE_DIR": "/c"}, stand_ins, "")["TORCHINDUCTOR_CACHE_DIR"] == "/c/emulated"


@needs_compiler
def test_a_folder_that_is_not_this_users_own_is_refused(site, cache, builds, tmp_path, snapshot):
    torch = libraries.read_torch(site / "torch")
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    said = [refusal(build.stand_ins, torch)]
    cache.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    assert [sentence.replace(str(tmp_path), "...") for sentence in [*said, refusal(build.stand_ins, torch)]] == snapshot
    assert builds == []


@needs_compiler
def test_a_build_that_fails_leaves_nothing(site, cache, monkeypatch, tmp_path, snapshot):
    torch, bad = libraries.read_torch(site / "torch"), tmp_path / "bad-compiler"
    bad.write_text("#!/bin/sh\necho 'x.c:1: fatal error: stdio.h: No such file' >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CC", str(bad))
    assert refusal(build.stand_ins, torch).replace(str(tmp_path), "...") == snapshot
    assert list(cache.iterdir()) == []


def test_what_cannot_be_emulated_is_told_with_what_to_do(monkeypatch, tmp_path, snapshot):
    torch = libraries.Torch(tmp_path, "2.13.0", (13, 0), (9, 20, 0), (2, 29, 7))
    said = {"the GPU h1000": refusal(boards.board, "h1000")}
    said["kernels for nothing"] = refusal(boards.find_kernels, boards.board("l4"), [], "2.13.0")
    for name in ("with space", "with:colon"):
        said[f"a path {name}"] = refusal(emulated_environment, {}, made_up_stand_ins(tmp_path / name), "")
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    said["a CPU build"] = refusal(libraries.read_torch, tmp_path)
    monkeypatch.setenv("CC", "cc-of-mine -m64")
    said["a compiler of another name"] = refusal(build.find_compiler)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    said["no compiler"] = refusal(build.find_compiler)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    said["no torch"] = refusal(libraries.find_torch)
    for system, platform, machine in (
        ("Darwin", "darwin", "arm64"),
        ("Windows", "win32", "AMD64"),
        ("Linux", "linux", "s390x"),
    ):
        monkeypatch.setattr(libraries.sys, "platform", platform)
        monkeypatch.setattr(libraries.platform, "system", lambda system=system: system)
        monkeypatch.setattr(libraries.platform, "machine", lambda machine=machine: machine)
        said[system] = refusal(build.stand_ins, torch)
        assert refusal(libraries.find_torch) == said[system]
    listed = ", ".join(PLATFORMS)
    assert {
        what: sentence.replace(str(tmp_path), "...").replace(listed, "(all of them)") for what, sentence in said.items()
    } == snapshot


def test_the_compiler_of_ziglang_serves_where_the_host_has_none_and_none_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert build.find_compiler() == [sys.executable, "-P", "-m", "ziglang", "cc"]
    with pytest.raises(CannotEmulate):
        build.find_compiler(packaged=False)
    (tmp_path / "gcc").touch(mode=0o755)
    assert build.find_compiler() == [str(tmp_path / "gcc")]


def test_stubs_succeed_make_handles_or_refuse_to_make_up_a_size():
    text = stubs_text(
        "cusparse", ["cusparseSpSM_solve", "cusparseCreateCsr", "cusparseSpMatGetSize", "cusparseSpMV_bufferSize"]
    )
    assert (
        'cusparseSpSM_solve(void *p1) { static int seen; gputrain_trace("cusparseSpSM_solve", &seen); '
        'if (gputrain_ask(gputrain_stream_of(p1), "library_calls", "cusparseSpSM_solve", 0)) return 10; return 0; }'
    ) in text
    assert "gputrain_ask(" not in next(line for line in text.splitlines() if "cusparseCreateCsr" in line)
    assert "cusparseCreateCsr(void **out)" in text
    assert 'cusparseSpMatGetSize(void) { return gputrain_missing("cusparseSpMatGetSize", 10); }' in text
    assert """gputrain_unknown("cuSPARSE's workspaces"); if (p10) *(size_t *)p10 = 0; return 0; }""" in text


def test_what_no_rule_knows_fails_with_its_name_in_libraries_that_compute_nothing():
    assert 'gputrain_missing("cudaOfTomorrow", 801)' in stubs_text("cudart", ["cudaOfTomorrow"])
    assert 'gputrain_missing("ncclCreateTomorrow", 5)' in stubs_text("nccl", ["ncclCreateTomorrow"])


def test_every_gpu_of_the_catalog_can_be_emulated_and_nvidias_are_known_by_their_names():
    for marker, platform in PLATFORMS.items():
        chosen = boards.board(marker)
        kernels = boards.find_kernels(chosen, ["sm_70", "sm_75", "sm_80", "sm_90", "sm_100", "sm_120"], "2.13.0")
        described = boards.describe(chosen, kernels=kernels)
        assert f"memory={platform.usable_bytes}," in described
        if marker.startswith("mi"):
            assert "name=NVIDIA Graphics Device," in described
            assert marker_of("NVIDIA Graphics Device") is None
        else:
            assert described.endswith(f",name={chosen.name}")
            assert marker_of(chosen.name, platform.usable_bytes) == marker
            assert OtherKernels.of_description(described) is None


@pytest.mark.parametrize(
    ("marker", "compiled", "kernels"),
    [
        ("h100", "sm_80 sm_90 sm_100", 90),
        ("l4", "sm_80 sm_86 sm_90", 86),
        ("l4", "sm_80 sm_86 sm_89", 89),
        ("a10g", "sm_80 sm_89", 80),
        ("t4", "sm_70", 70),
        ("b200", "sm_90 sm_100", 100),
    ],
)
def test_the_newest_kernels_of_the_generation_run(marker, compiled, kernels):
    chosen = boards.board(marker)
    assert boards.find_kernels(chosen, compiled.split(), "2.13.0") == kernels
    assert boards.other_kernels(chosen, kernels) is None


@pytest.mark.parametrize(
    ("marker", "compiled", "kernels", "name"),
    [
        ("v100", "sm_75 sm_80 sm_90", 75, "V100, by CUDA's kernels for sm_75"),
        ("mi300x", "sm_75 sm_80 sm_90 sm_100", 90, "MI300X, by CUDA's kernels for sm_90"),
        ("mi300x", "sm_75 sm_86", 86, "MI300X, by CUDA's kernels for sm_86"),
        ("h100", "sm_80 sm_90a sm_100 sm_120", 80, "H100, by CUDA's kernels for sm_80"),
        ("a100", "sm_86", 86, "A100, by CUDA's kernels for sm_86"),
        ("b200", "sm_35 sm_86 sm_90", 90, "B200, by CUDA's kernels for sm_90"),
    ],
)
def test_a_gpu_without_kernels_of_its_own_runs_on_those_of_the_nearest_capability_and_is_named_so(
    marker, compiled, kernels, name
):
    chosen = boards.board(marker)
    assert boards.find_kernels(chosen, compiled.split(), "2.13.0") == kernels
    other = boards.other_kernels(chosen, kernels)
    assert other.name == name
    described = boards.describe(chosen, kernels=kernels)
    assert f"major={kernels // 10},minor={kernels % 10},kernels={kernels}," in described
    assert f"memory={chosen.memory_bytes}," in described
    assert f"multiprocessors={chosen.multiprocessors}," in described
    assert "name=NVIDIA Graphics Device," in described
    assert OtherKernels.of_description(described) == other
    assert f"the kernels for sm_{kernels} decided what was allocated" in other.sentence
    assert ("ROCm" in other.sentence) == marker.startswith("mi")


def test_the_command_says_why_it_cannot_emulate_and_runs_nothing(capsys, monkeypatch, tmp_path):
    program = ["--", "touch", str(tmp_path / "ran")]
    assert main(["emulate", "--gpu", "h1000", *program]) == 2
    assert "the catalog has no GPU 'h1000' (did you mean 'h100'?)" in capsys.readouterr().err
    assert main(["emulate", "--gpu", "h100"]) == 2
    assert "name the program to run: gputrain emulate --gpu h100 -- python train.py" in capsys.readouterr().err
    for number in ("0", "17", "-1", "two"):
        with pytest.raises(SystemExit) as ended:
            main(["emulate", "--gpu", "h100", f"--gpus={number}", *program])
        assert ended.value.code == 2
        assert f"{number!r} is not a number of GPUs from 1 to 16" in capsys.readouterr().err
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    assert main(["emulate", "--gpu", "h100", *program]) == 2
    assert "there is no torch to emulate a GPU for" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def made_up_stand_ins(folder):
    folder.mkdir(mode=0o700)
    (folder / build.CORE).write_bytes(b"")
    manifest = {"digests": {build.CORE: build._digest(folder / build.CORE)}, "architectures": ["sm_90"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return build.StandIns(folder)


def test_the_stand_ins_are_loaded_first_and_what_was_loaded_before_stays(monkeypatch, tmp_path):
    stand_ins = made_up_stand_ins(tmp_path / "built")
    environ = {"LD_PRELOAD": "/lib/mine.so", "CUDA_VISIBLE_DEVICES": "3", "HOME": "/home", "TORCHINDUCTOR_CACHE_DIR": "/c"}
    emulated = emulated_environment(environ, stand_ins, "name=H100", state=tmp_path)
    assert emulated == {
        "HOME": "/home",
        "LD_PRELOAD": f"{tmp_path}/built/{build.CORE}:/lib/mine.so",
        "TRITON_LIBCUDA_PATH": f"{tmp_path}/built",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/compiled",
        "TORCHINDUCTOR_BENCHMARK_EPILOGUE_FUSION": "0",
        "TRITON_CACHE_DIR": "/c/emulated/triton",
        "GPUTRAIN_EMULATED_DEVICE": "name=H100",
        "GPUTRAIN_EMULATED_STATE": str(tmp_path),
    }
    assert emulated_environment(environ, stand_ins, "")["TORCHINDUCTOR_CACHE_DIR"] == "/c/emulated"
    assert emulated_environment({}, stand_ins, "")["LD_PRELOAD"] == f"{tmp_path}/built/{build.CORE}"


@pytest.mark.parametrize(
    "environ", [{"LD_PRELOAD": "/lib/mine.so", "PYTHONPATH": "/mine", "TORCHINDUCTOR_CACHE_DIR": "/c/emulated", "A": ""}, {}]
)
def test_an_emulation_within_another_finds_nothing_of_it(tmp_path, environ):
    outer, inner = (made_up_stand_ins(tmp_path / name) for name in ("outer", "inner"))
    path = os.pathsep.join(filter(None, [str(STARTUP), environ.get("PYTHONPATH")]))
    emulated = emulated_environment(environ, outer, "name=H100", state=tmp_path) | {"PYTHONPATH": path, TORCH: "/torch"}
    assert emulated_environment(emulated, inner, "name=A100") == emulated_environment(environ, inner, "name=A100")
    assert (STARTUP / "sitecustomize.py").is_file()


def test_builds_are_kept_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.stand_ins_folder() == tmp_path / ".cache" / "pytest-gputrain-emulation"
