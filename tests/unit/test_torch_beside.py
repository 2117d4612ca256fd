"""The CUDA build of torch that `gputrain emulate --install` puts beside a CPU build: how safely, and who finds it.

All wheels are made up, and come from a folder or from a server of this host.
"""

import base64
import contextlib
import errno
import hashlib
import http.server
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import pytest
from packaging.tags import sys_tags

from pytest_gputrain.cli.main import main
from pytest_gputrain.hardware.emulation import build, elf, install, installed, libraries, wheels
from pytest_gputrain.hardware.emulation.environment import STARTUP, emulated_environment
from pytest_gputrain.utils.errors import CannotEmulate, WrongTorch
from pytest_gputrain.utils.torch_beside import ORIGIN_VARIABLE, SITE_VARIABLE
from pytest_gputrain.worker import libraries as worker_libraries

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="GPUs are emulated on Linux")

TAG = str(next(sys_tags()))
CUDA = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
TORCH = {"torch/__init__.py": "print('it runs')", "torch/version.py": CUDA, "torch/lib/libtorch_cuda.so": "\x7fELF" * 2000}


def make_wheel(folder, project, version, files, *, requires=(), record=None, tag=TAG):
    """Write a wheel; ``record`` changes the rows of its RECORD."""
    name = f"{project}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    about = {f"{name}.dist-info/METADATA": metadata, f"{name}.dist-info/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n"}
    rows = {}
    path = folder / f"{name}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, **about}.items():
            info = file if isinstance(file, zipfile.ZipInfo) else zipfile.ZipInfo(file)  # of 1980
            archive.writestr(info, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows[info.filename] = f"sha256={digest},{len(text)}"
        rows |= record or {}
        lines = [f"{file},{rest}" for file, rest in rows.items() if rest]
        archive.writestr(f"{name}.dist-info/RECORD", "\n".join([*lines, f"{name}.dist-info/RECORD,,"]))
    return path


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Beside:
    """A user's environment with a CPU build, a folder of wheels, a cache and a table of known hashes."""

    def __init__(self, tmp_path, monkeypatch):
        self.environment, self.offered, self.table = (tmp_path / name for name in ("environment", "offered", "wheels.txt"))
        self.cache = tmp_path / "cache" / "pytest-gputrain-torch"
        self.said = []
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(wheels, "_TABLE", self.table)
        monkeypatch.setattr(libraries, "torch_folder", lambda: self.environment / "torch")
        monkeypatch.setattr(install.os, "sync", lambda: None)
        monkeypatch.setattr(build.sys, "platform", "linux")
        self.offered.mkdir()
        self.have("torch", "2.13.0+cpu", **{"torch/version.py": CPU})
        self.offer("torch", "2.13.0", TORCH, requires=["numpy", 'triton==3.7.1; platform_system == "Linux"'])
        self.offer("triton", "3.7.1", {"triton/__init__.py": ""})

    def have(self, project, version, **files):
        """Install a project into the user's environment."""
        about = self.environment / f"{project}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        for name, text in files.items():
            (self.environment / name).parent.mkdir(exist_ok=True)
            (self.environment / name).write_text(text)

    def offer(self, project, version, files, *, known=True, **more):
        path = make_wheel(self.offered, project, version, files, **more)
        lines = self.table.read_text().splitlines() if self.table.exists() else []
        lines = [line for line in lines if path.name not in line]
        self.table.write_text(
            "\n".join([*lines, *([f"{sha256_of(path)} {path.stat().st_size} {path.name}"] * known)]) + "\n"
        )
        wheels._table.cache_clear()
        return path

    def install(self, **source):
        return install.install(install.Source(**(source or {"folder": self.offered})), self.said.append)

    def refusal(self, call=None):
        with pytest.raises(CannotEmulate) as refused:
            (call or self.install)()
        assert self.left() == []
        return str(refused.value)

    def left(self):
        return [path.name for path in self.cache.iterdir() if path.name != ".lock"] if self.cache.exists() else []


@pytest.fixture
def beside(tmp_path, monkeypatch):
    yield Beside(tmp_path, monkeypatch)
    wheels._table.cache_clear()


@pytest.fixture
def index(beside):
    """The address of an index that offers the folder's wheels."""

    class Page(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path.endswith("/"):
                project = self.path.strip("/").rpartition("/")[2]
                names = [path.name for path in beside.offered.glob(f"{project}-*")]
                text = "".join(f'<a href="/files/{name}">{name}</a>' for name in names).encode()
            else:
                text = (beside.offered / self.path.rpartition("/")[2].replace("%2B", "+")).read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments):
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
        server.shutdown()
        thread.join()


def test_the_build_of_the_installed_version_is_found_by_emulated_gpus_and_the_environment_is_as_it_was(beside):
    before = sorted(beside.environment.rglob("*"))
    with pytest.raises(CannotEmulate, match="gputrain emulate --install puts one beside it"):
        libraries.find_torch()
    made = beside.install()
    torch = libraries.find_torch()
    assert (torch.version, torch.folder, torch.environment) == ("2.13.0+cu130", made.site / "torch", beside.environment)
    assert sorted(beside.environment.rglob("*")) == before
    assert beside.install().folder == made.folder


def test_nothing_is_installed_beside_a_cuda_build(beside):
    (beside.environment / "torch" / "version.py").write_text(CUDA)
    (beside.environment / "torch" / "lib").mkdir()
    (beside.environment / "torch" / "lib" / "libtorch_cuda.so").touch()
    assert beside.install() is None
    assert beside.left() == []


# 1: the very artefact


@pytest.mark.slow
def test_the_wheel_with_the_hash_is_taken_where_others_of_the_version_are_offered(beside, index, monkeypatch, tmp_path):
    beside.offer("torch", "2.13.0+cpu", {**TORCH, "torch/version.py": CPU}, known=False)
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links = {beside.offered}\nconstraint = /nowhere\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(beside.offered))
    made = beside.install(address=index)
    assert made.manifest.versions == {"torch": "2.13.0", "triton": "3.7.1"}
    assert made.manifest.wheels[f"torch-2.13.0-{TAG}.whl"] == sha256_of(beside.offered / f"torch-2.13.0-{TAG}.whl")
    assert (made.site / "torch" / "version.py").read_text() == CUDA
    assert made.manifest.origin == index


# 2: the call


def test_pip_gets_the_way_to_the_network_and_nothing_else_of_the_users_configuration(beside, monkeypatch):
    listed = """
        :env:.find-links='/evil'
        :env:.timeout='9'
        global.cert='/ca.pem'
        global.timeout='8'
        download.proxy='http://me:secret@proxy:1'
        global.index-url='https://evil'
        global.trusted-host='evil'
        global.extra-index-url='https://evil'
    """
    called = []

    def run(command, env=None, **more):
        called.append((command, env))
        text = "\n".join(line.strip() for line in listed.splitlines())
        return types.SimpleNamespace(returncode=bool(env), stdout=text, stderr=b"ERROR: no way\n")

    monkeypatch.setattr(install.subprocess, "run", run)
    for name in ("PIP_INDEX_URL", "PIP_TARGET", "pip_trusted_host"):
        monkeypatch.setenv(name, "evil")
    assert "no way" in beside.refusal(lambda: beside.install(address="https://mirror/simple"))
    command, environ = called[-1]
    assert "evil" not in " ".join([*command, *environ.values()])
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "--isolated"]
    assert {"download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir"} < set(command)
    assert [command[command.index(option) + 1] for option in ("--cert", "--timeout")] == ["/ca.pem", "9"]
    assert "secret" not in " ".join(command)
    assert environ["https_proxy"] == "http://me:secret@proxy:1"
    assert {name: value for name, value in environ.items() if name.upper().startswith("PIP_")} == {
        "PIP_CONFIG_FILE": os.devnull
    }


def test_a_mirror_must_be_reached_by_https_and_its_password_is_not_shown(beside):
    assert "is not an address of HTTPS" in beside.refusal(lambda: beside.install(address="http://mirror/simple"))
    assert str(install.Source(address="https://me:secret@mirror/simple")) == "https://mirror/simple"


# 3: hashes


@pytest.mark.slow
def test_a_mirror_with_another_file_is_refused(beside, index):
    make_wheel(beside.offered, "torch", "2.13.0", {**TORCH, "torch/more.py": ""})
    sentence = beside.refusal(lambda: beside.install(address=index))
    assert sentence.startswith(f"pip cannot download torch-2.13.0-{TAG}.whl from {index}: ")


def test_a_file_of_another_hash_is_not_unpacked(beside):
    path = make_wheel(beside.offered, "torch", "2.13.0", {**TORCH, "torch/more.py": ""})
    assert f"has the sha256 {sha256_of(path)}, and it should have " in beside.refusal()


def test_triton_is_the_one_that_torch_asks_for(beside):
    beside.offer("triton", "3.9.0", {"triton/newer.py": ""})
    assert beside.install().manifest.versions["triton"] == "3.7.1"


def test_a_version_without_a_known_hash_needs_one_from_the_user(beside):
    requires = ["triton==3.7.1"]
    paths = [
        beside.offer("torch", "2.13.0", TORCH, known=False, requires=requires),
        beside.offered / f"triton-3.7.1-{TAG}.whl",
    ]
    assert "knows no CUDA build of torch 2.13.0 on PyPI for Python 3." in beside.refusal()
    made = beside.install(folder=beside.offered, hashes=("0" * 64, sha256_of(paths[0])))
    assert made.manifest.wheels == {path.name: sha256_of(path) for path in paths}


def test_every_supported_torch_has_hashes_of_its_wheels_and_they_are_whole():
    lines = [line.split() for line in (Path(wheels.__file__).with_name("wheels.txt")).read_text().splitlines()]
    assert len({name for _, _, name in lines}) == len(lines) > 300
    assert all(len(bytes.fromhex(sha256)) == 32 and int(size) > 100_000 and "+" not in name for sha256, size, name in lines)
    for version in ("2.9.1", "2.11.0", "2.13.0", "2.15.0"):
        for python in ("cp311", "cp312", "cp313"):
            assert any(name.startswith(f"torch-{version}-{python}-{python}-") for _, _, name in lines)


# 4: no code at install


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


BAD_NAMES = {
    "above": "../torch.py",
    "above, below": "torch/../../x.py",
    "absolute": "/torch/x.py",
    "a backslash": "torch\\x.py",
    "a file of paths": "torch.pth",
    "another package": "setuptools/__init__.py",
    "scripts": "torch-2.13.0.data/scripts/torchrun",
    "a link": link("torch/lib/link.so"),
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_wheel_with_a_file_that_belongs_elsewhere_is_refused_whole(beside, tmp_path, name):
    before = {path.name for path in tmp_path.iterdir()} | {"cache"}
    beside.offer("torch", "2.13.0", {**TORCH, name: "/etc/passwd"})
    assert f"torch-2.13.0-{TAG}.whl is refused: " in beside.refusal()
    assert {path.name for path in tmp_path.iterdir()} == before


OF_OTHERS = f"sha256={base64.urlsafe_b64encode(bytes(32)).decode()},1"


@pytest.mark.parametrize(
    ("files", "record", "why"),
    [
        ({}, {"torch/__init__.py": OF_OTHERS}, "torch/__init__.py is not the file of its RECORD"),
        ({}, {"torch/__init__.py": ""}, "torch/__init__.py is not in its RECORD"),
        ({}, {"torch/absent.py": OF_OTHERS}, "torch/absent.py is in its RECORD alone"),
        ({}, {"torch/__init__.py": "md5=abc,1"}, "its RECORD has a md5 of torch/__init__.py and no sha256"),
        ({"torch/version.py": CPU}, {}, "is not a CUDA build"),
        ({"torch/version.py": CUDA.replace("2.13.0", "2.12.0")}, {}, "the wheel of torch 2.13.0 has torch 2.12.0+cu130"),
    ],
    ids=["another", "not listed", "absent", "weak", "of the CPU", "another version"],
)
def test_a_wheel_is_what_its_record_and_its_name_say(beside, files, record, why):
    beside.offer("torch", "2.13.0", TORCH | files, record=record)
    assert why in beside.refusal()


def test_a_damaged_wheel_that_the_table_knows_is_refused(beside):
    path = beside.offered / f"torch-2.13.0-{TAG}.whl"
    data = bytearray(path.read_bytes())
    data[data.index(b"it runs")] ^= 1
    path.write_bytes(data)
    beside.table.write_text(f"{sha256_of(path)} {len(data)} {path.name}\n")
    wheels._table.cache_clear()
    assert "torch/__init__.py cannot be unpacked: Bad CRC-32" in beside.refusal()


def test_nothing_of_a_wheel_runs_and_programs_in_it_can(beside):
    tool = zipfile.ZipInfo("torch/bin/tool")
    tool.external_attr = (stat.S_IFREG | 0o755) << 16
    beside.offer("torch", "2.13.0", {**TORCH, "torch/__init__.py": "raise SystemExit('it ran')", tool: "tool"})
    site = beside.install().site
    assert os.access(site / "torch" / "bin" / "tool", os.X_OK)
    assert not os.access(site / "torch" / "version.py", os.X_OK)


# 5: the folder


def test_the_folder_is_the_users_alone(beside, tmp_path):
    made = beside.install()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (beside.cache, made.folder, made.site)} == {0o700}
    made.folder.chmod(0o750)
    assert list(installed.builds()) == []
    made.folder.chmod(0o700)
    made.folder.rename(tmp_path / "elsewhere")
    made.folder.symlink_to(tmp_path / "elsewhere")
    assert list(installed.builds()) == []


def test_a_folder_or_an_ancestor_that_others_may_write_to_is_refused(beside, tmp_path):
    above = beside.cache.parent
    above.mkdir()
    above.chmod(0o777)
    assert f"other users may write to {above}" in beside.refusal()
    above.chmod(0o1777)
    assert beside.install()
    beside.cache.chmod(0o777)
    with pytest.raises(CannotEmulate, match="it is not a folder of this user alone"):
        beside.install()
    beside.cache.rename(tmp_path / "elsewhere")
    beside.cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotEmulate, match="it is not a folder of this user alone"):
        beside.install()


# 6: for whom it is


@pytest.mark.parametrize("what", ["this_python", "this_libc", "torch"])
def test_another_python_c_library_or_torch_does_not_find_it(beside, monkeypatch, what):
    made = beside.install()
    if what == "torch":
        (beside.environment / "torch" / "version.py").write_text(CPU.replace("2.13.0", "2.14.0"))
    else:
        monkeypatch.setattr(installed, what, lambda: "another")
    with pytest.raises(CannotEmulate, match="is not a CUDA build"):
        libraries.find_torch()
    assert what == "torch" or beside.install().folder != made.folder


def python_finds(environ, *options):
    code = "import importlib.util; print(getattr(importlib.util.find_spec('torch'), 'origin', None))"
    environ = {"PATH": os.environ["PATH"], **environ}
    return subprocess.run(
        [sys.executable, *options, "-c", code], env=environ, capture_output=True, text=True, check=True
    ).stdout


def environment_of(beside, tmp_path):
    """The variables of an emulated worker."""
    folder = tmp_path / "stand-ins"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / build.CORE).touch()
    digests = {build.CORE: build._digest(folder / build.CORE)}
    (folder / "manifest.json").write_text(json.dumps({"digests": digests, "architectures": []}))
    stand_ins = build.StandIns(folder)
    stand_ins.torch = libraries.find_torch()
    environ = emulated_environment({"PYTHONPATH": "/mine"}, stand_ins, "")
    assert environ["PYTHONPATH"] == os.pathsep.join([str(STARTUP), "/mine"])
    return {name: value for name, value in environ.items() if name.startswith(("GPUTRAIN", "PYTHON"))}


def test_emulated_processes_of_the_same_python_alone_find_it(beside, tmp_path):
    made = beside.install()
    environ = environment_of(beside, tmp_path)
    assert python_finds(environ).strip() == str(made.site / "torch" / "__init__.py")
    for other in ({"GPUTRAIN_EMULATED_PYTHON": ".cpython-399.so /other"}, {"GPUTRAIN_EMULATED_SITE": ""}):
        assert str(made.folder) not in python_finds(environ | other)
    assert str(made.folder) not in python_finds(environ, "-I")


# 7: whole or not there


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "it broke")])
def test_an_install_that_is_interrupted_leaves_nothing(beside, monkeypatch, error):
    def interrupt():
        raise error

    monkeypatch.setattr(install.os, "sync", interrupt)
    with pytest.raises((KeyboardInterrupt, CannotEmulate)):
        beside.install()
    assert beside.left() == []


def test_a_folder_without_its_manifest_or_with_anothers_is_no_build(beside):
    made = beside.install()
    manifest = made.folder / installed.MANIFEST
    whole = manifest.read_bytes()
    for text in (b"", whole[:100], whole.replace(b'"libc":"', b'"libc":"other-'), b"{}", whole.replace(b", 1", b", 9", 1)):
        manifest.write_bytes(text)
        assert list(installed.builds()) == []
    manifest.unlink()
    assert list(installed.builds()) == []
    assert beside.install().folder == made.folder


# 8: use


def damage(site, how):
    path = site / "torch" / "lib" / "libtorch_cuda.so"
    if how == "gone":
        path.unlink()
    elif how == "a link":
        path.rename(path.with_name("moved"))
        path.symlink_to("moved")
    elif how == "changed":
        path.write_bytes(path.read_bytes()[::-1])
    else:
        os.truncate(path, {"cut": 100, "empty": 0}[how])


@pytest.mark.parametrize("how", ["gone", "cut", "empty", "changed", "a link"])
def test_a_damaged_build_is_told_in_a_sentence_and_mended_by_its_command(beside, how):
    made = beside.install()
    damage(made.site, how)
    with pytest.raises(CannotEmulate) as refused:
        libraries.find_torch()
    assert str(refused.value).endswith("; mend it with: gputrain emulate --install")
    assert "libtorch_cuda.so" in str(refused.value)
    assert beside.install().folder == made.folder
    assert libraries.find_torch().folder == made.site / "torch"


def test_verify_reads_what_sizes_and_times_do_not_tell(beside, capsys):
    made = beside.install()
    assert main(["emulate", "--verify"]) == 0
    path = made.site / "torch" / "lib" / "libtorch_cuda.so"
    before = path.stat().st_mtime
    damage(made.site, "changed")
    os.utime(path, (before, before))
    libraries.find_torch()
    assert main(["emulate", "--verify"]) == 1
    assert "libtorch_cuda.so has another sha256; mend it with: gputrain emulate --install" in capsys.readouterr().err


# 9: two at once


def test_a_second_install_waits_says_so_and_finds_the_first(beside, monkeypatch):
    reached, go_on, made = threading.Event(), threading.Event(), []
    waiting = threading.Event()

    def sync():
        reached.set()
        go_on.wait(60)

    def say(sentence):
        beside.said.append(sentence)
        if "this one waits" in sentence:
            waiting.set()

    monkeypatch.setattr(install.os, "sync", sync)
    source = install.Source(folder=beside.offered)
    first, second = (threading.Thread(target=lambda: made.append(install.install(source, say))) for _ in range(2))
    first.start()
    assert reached.wait(60)
    second.start()
    assert waiting.wait(60)
    go_on.set()
    first.join()
    second.join()
    assert made[0].folder == made[1].folder
    assert sum(sentence.startswith("torch-2.13.0-") for sentence in beside.said) == 1


@contextlib.contextmanager
def using(environ):
    """Have an emulated process run."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command, env={"PATH": os.environ["PATH"], **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        try:
            yield
        finally:
            process.communicate(b"\n")


def test_what_a_process_uses_is_neither_removed_nor_replaced(beside, tmp_path, capsys):
    made = beside.install()
    with using(environment_of(beside, tmp_path)):
        assert main(["emulate", "--uninstall"]) == 1
        assert f"{made.folder} is used by a process, so it stays" in capsys.readouterr().err
        damage(made.site, "cut")
        with pytest.raises(CannotEmulate, match="processes use the CUDA build"):
            beside.install()
        assert [name for name in beside.left() if name.startswith(installed.PART)] == []
        assert made.site.exists()
    assert main(["emulate", "--uninstall"]) == 0
    assert beside.left() == []


# 10: space


def test_a_disk_without_the_space_is_told_before_anything_is_downloaded(beside, monkeypatch):
    monkeypatch.setattr(install, "_free", lambda folder: 1000)
    assert f"1,000 B are free in {beside.cache}, and " in beside.refusal().replace("1000", "1,000")
    assert beside.said == []


def test_a_disk_that_fills_up_is_left_as_it_was(beside, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wheels.os, "utime", full)
    assert f"are free in {beside.cache}; nothing was left there" in beside.refusal()


def test_no_wheel_is_kept_and_parts_of_ended_installs_are_removed(beside):
    beside.cache.mkdir(parents=True, mode=0o700)
    (beside.cache / f"{installed.PART}x" / "whole").mkdir(parents=True)
    (beside.cache / f"{installed.PART}x" / "whole" / "large").write_text("large")
    made = beside.install()
    assert beside.left() == [made.folder.name]
    assert not list(made.folder.rglob("*.whl"))


# 11: offline


@pytest.mark.slow
def test_without_a_network_there_is_one_sentence_with_the_way_by_a_folder(beside):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # where nobody listens
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/simple"
        sentence = beside.refusal(lambda: beside.install(address=address))
    assert sentence.endswith("; without a network, bring the wheels in a folder: gputrain emulate --install --from DIR")


def test_a_folder_that_lacks_a_wheel_is_told_which(beside):
    (beside.offered / f"triton-3.7.1-{TAG}.whl").unlink()
    assert beside.refusal() == f"{beside.offered} has no triton-3.7.1-{TAG}.whl; bring it there"


# 12: who sees it, and what lies there


def test_only_torchs_own_packages_and_their_metadata_lie_there(beside):
    beside.have("torchvision", "0.28.0+cpu")
    beside.offer(
        "torchvision", "0.28.0", {"torchvision/_C.so": "", "torchvision.libs/j.so": ""}, requires=["torch (==2.13.0)"]
    )
    names = {path.name for path in beside.install().site.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "torch",
        "triton",
        "torchvision",
        "torchvision.libs",
    }


def test_what_is_of_another_release_of_torch_is_left_out(beside):
    beside.have("torchaudio", "2.11.0")
    beside.offer("torchaudio", "2.11.0", {"torchaudio/_C.so": ""}, requires=["torch==2.11.0"])
    made = beside.install()
    assert not (made.site / "torchaudio").exists()
    assert "torchaudio 2.11.0 is of another release of torch than 2.13.0, so it is left out" in beside.said
    assert libraries.find_torch().folder == made.site / "torch"


def test_another_torchvision_than_the_one_beside_it_needs_another_build(beside):
    beside.install()
    beside.have("torchvision", "0.28.0+cpu")
    with pytest.raises(CannotEmulate) as refused:
        libraries.find_torch()
    assert str(refused.value).endswith(
        "was installed beside no torchvision and no torchaudio, and this environment has torchvision 0.28.0; "
        "install another one with: gputrain emulate --install"
    )


# 13: other libraries


def compiled(path, text, *libraries_):
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(text)
    command = [*build.find_compiler(packaged=False), "-shared", "-fPIC", "-nostdlib", "-o", str(path), str(source)]
    subprocess.run([*command, *map(str, libraries_)], check=True)
    return path


def has_compiler():
    with contextlib.suppress(CannotEmulate):
        return bool(build.find_compiler(packaged=False))
    return False


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
def test_libraries_of_the_environment_that_use_cuda_are_served_and_those_for_the_cpu_named(beside, tmp_path):
    runtime = compiled(
        tmp_path / "lib" / "libcudart.so.13", "void cudaMemPrefetchAsync(void) {}", "-Wl,-soname,libcudart.so.13"
    )
    core = compiled(tmp_path / "lib" / "libtorch_cpu.so", "void at(void) {}", "-Wl,-soname,libtorch_cpu.so")
    uses = "extern void cudaMemPrefetchAsync(void); void f(void) { cudaMemPrefetchAsync(); }"
    cuda = compiled(tmp_path / "lib" / "libtorch_cuda.so", uses, runtime).read_bytes()
    made = beside.install()
    (made.site / "torch" / "lib" / "libtorch_cuda.so").write_bytes(cuda)
    other = compiled(beside.environment / "bitsandbytes" / "libbitsandbytes_cuda130.so", uses, runtime)
    hidden = compiled(beside.environment / "torch" / "libhidden.so", uses, runtime)
    compiled(beside.environment / "torch_scatter" / "_scatter.so", "void at(void); void f(void) { at(); }", core)
    torch = libraries.read_torch(made.site / "torch")._replace(environment=beside.environment)
    users = libraries.users_of_cuda(torch)
    assert other in users
    assert hidden not in users
    assert "cudaMemPrefetchAsync" in libraries.needed_functions(torch, users)["libcudart.so.13"]
    assert libraries.compiled_for_cpu(beside.environment) == ["torch_scatter"]


# 14: results


def test_a_worker_refuses_the_torch_of_the_other_kind(beside, monkeypatch):
    made = beside.install()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__file__=str(made.site / "torch" / "__init__.py")))
    with pytest.raises(WrongTorch, match="which is for emulated GPUs alone"):
        worker_libraries._check_torch(emulated=False)
    monkeypatch.setenv(SITE_VARIABLE, str(made.site))
    worker_libraries._check_torch(emulated=True)
    own = str(beside.environment / "torch" / "__init__.py")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__file__=own))
    with pytest.raises(WrongTorch, match="the emulated GPU is for the torch in "):
        worker_libraries._check_torch(emulated=True)
    monkeypatch.delenv(SITE_VARIABLE)
    for emulated in (True, False):
        worker_libraries._check_torch(emulated=emulated)


def test_the_wheel_and_its_origin_are_passed_to_the_results(beside, tmp_path):
    beside.install()
    origin = environment_of(beside, tmp_path)[ORIGIN_VARIABLE]
    path = beside.offered / f"torch-2.13.0-{TAG}.whl"
    assert origin == f"{path.name}, sha256 {sha256_of(path)}, from {beside.offered}"
    assert libraries.find_torch().origin == origin


# 15: list and uninstall


def test_the_list_names_what_is_there_and_an_uninstall_removes_nothing_else(beside, tmp_path, capsys):
    assert main(["emulate", "--list"]) == 0
    assert capsys.readouterr().err == f"gputrain: there is no CUDA build of torch in {beside.cache}\n"
    made = beside.install()
    assert main(["emulate", "--list"]) == 0
    assert capsys.readouterr().out.startswith(f"{made.folder}: torch 2.13.0, triton 3.7.1 for ")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (beside.cache / "torch-linked").symlink_to(tmp_path / "mine")
    (beside.cache / "torch-mine").mkdir()
    (beside.cache / "torch-mine" / "manifest.json").write_text(json.dumps({"format": "mine"}))
    (beside.cache / f"{installed.PART}linked").symlink_to(tmp_path / "mine")
    assert main(["emulate", "--uninstall"]) == 0
    said = capsys.readouterr().err
    assert f"{made.folder} is removed" in said
    assert "KiB were freed" in said
    assert sorted(beside.left()) == [f"{installed.PART}linked", "torch-linked", "torch-mine"]
    assert (tmp_path / "mine" / "file").exists()


def test_other_builds_stay_where_one_is_installed(beside, monkeypatch):
    old = beside.install()
    monkeypatch.setattr(installed, "this_libc", lambda: "glibc-9.99")
    beside.install()
    assert old.folder.exists()


# 16: rights


@pytest.mark.parametrize("name", ["getuid", "getgid"])
def test_a_setuid_program_installs_nothing(beside, monkeypatch, name):
    monkeypatch.setattr(install.os, name, lambda: 12345)
    assert "setuid" in beside.refusal()


def test_root_does_not_install_into_the_cache_of_another_user(beside, monkeypatch):
    for name in ("getuid", "geteuid"):
        monkeypatch.setattr(install.os, name, lambda: 0)
    status = os.stat_result((stat.S_IFDIR | 0o700, 1, 1, 1, 1000, 1000, 0, 0, 0, 0))
    beside.cache.parent.mkdir()
    monkeypatch.setattr(install.Path, "stat", lambda path, **more: status)
    with pytest.raises(CannotEmulate, match="which is another user's; run it without sudo, or set HOME"):
        install._check_rights()


def test_a_cache_that_forbids_execution_is_told(beside, monkeypatch):
    def refuse(*arguments, **more):
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(elf.mmap, "mmap", refuse)
    assert f"no program may run from {beside.cache} (its disk is mounted with noexec)" in beside.refusal()


def test_what_is_downloaded_is_told_before(beside):
    beside.install()
    path = beside.offered / f"torch-2.13.0-{TAG}.whl"
    assert beside.said[0].startswith(f"{path.name}, ")
    assert beside.said[0].endswith(f" KiB, sha256 {sha256_of(path)}, from {beside.offered}, into {beside.cache}")


# the command


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--install", "--gpu", "h100"], "--install runs no program; leave out the command and its options"),
        (["--install", "--json", "report.json"], "--install runs no program; leave out"),
        (["--uninstall", "--", "python"], "--uninstall runs no program; leave out"),
        (["--list", "--index-url", "https://x"], "--from, --index-url and --hash belong to gputrain emulate --install"),
        (["--install", "--from", ".", "--index-url", "https://x"], "name two places for the wheels; give one of them"),
        (["--", "python"], "name the GPU to emulate: gputrain emulate --gpu h100 -- python train.py"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(beside, capsys, words, sentence):
    assert main(["emulate", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert beside.left() == []


def test_the_command_installs(beside, capsys):
    assert main(["emulate", "--install", "--from", str(beside.offered)]) == 0
    assert "emulated GPUs use " in capsys.readouterr().err
    assert main(["emulate", "--install", "--from", "/nowhere"]) == 0


def test_a_hash_must_be_one(beside, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["emulate", "--install", "--hash", "sha256:12"])
    assert ended.value.code == 2
    assert "'sha256:12' is not a sha256" in capsys.readouterr().err
