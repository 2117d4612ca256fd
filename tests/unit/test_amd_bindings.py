"""AMD GPUs as four releases of the real binding tell of them, on a C library that is a stand-in (`amd_stand_in`)."""

import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import amd_scenes
import amd_stand_in
import pytest

pytestmark = pytest.mark.slow  # installs four releases of the binding

RELEASES = {"6.2": "6.2.4", "6.3": "6.3.3", "6.4": "6.4.3", "7.0": "7.0.2"}
"""By release of ROCm, the binding on the package index."""


class Scene(NamedTuple):
    """A host, by its GPUs and files."""

    gpus: list[dict[str, Any]] | None
    """None where the binding is not expected to be imported."""
    nodes: tuple[int, ...] = ()
    """Numbers of the render nodes that are there."""
    refused: tuple[int, ...] = ()
    """Of those that this user may not open."""
    in_kernel: bool = False
    """Whether the kernel tells which render node is whose: before ROCm 6.4 nobody else does."""


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Returns the folder with the binding of a release, and installs it there if need be."""
    root = tmp_path_factory.mktemp("amdsmi")

    def install(release):
        folder = root / release
        if not folder.exists():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
            done = subprocess.run(
                [*command, f"amdsmi=={RELEASES[release]}"], capture_output=True, text=True, check=False, timeout=120
            )
            if done.returncode:
                said = (done.stderr.strip().splitlines() or ["no word"])[-1]
                pytest.skip(f"amdsmi {RELEASES[release]} cannot be installed: {said}")
        return folder

    return install


@pytest.fixture(scope="session")
def rocm(tmp_path_factory, installed):
    """Returns a folder like /opt/rocm of a release, with the C library."""
    root = tmp_path_factory.mktemp("rocm")

    def build(release):
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            pytest.skip("needs a C compiler (cc, gcc or clang)")
        if not (root / release).exists():
            amd_stand_in.library(root / release, installed(release), f"{release}.1", compiler)
        return root / release

    return build


@pytest.fixture
def run(tmp_path, installed, rocm):
    """Runs the plugin on hosts, by default beside the release of ROCm that the binding is of."""

    def run_(binding, scenes, *command, library="", path=None):
        hosts = {}
        for name, scene in scenes.items():
            root = tmp_path / name
            (root / "dri").mkdir(parents=True, exist_ok=True)
            (root / "kfd").touch()
            for number in scene.nodes:
                (root / "dri" / f"renderD{number}").touch()
            for gpu in scene.gpus if scene.in_kernel else ():
                (root / "pci" / gpu["bdf"] / "drm" / f"renderD{gpu['render']}").mkdir(parents=True, exist_ok=True)
            hosts[name] = {"root": str(root), "gpus": scene.gpus, "refused": scene.refused}
        (tmp_path / "scenes.json").write_text(json.dumps(hosts))
        choosing = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ROCM_HOME")
        variables = {name: value for name, value in os.environ.items() if name not in choosing}
        variables["ROCM_PATH"] = str(rocm(library or binding))
        if path is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(path), variables.get("PYTHONPATH", "")])
        program = [sys.executable, amd_stand_in.__file__, str(installed(binding)), str(tmp_path / "scenes.json"), *command]
        return subprocess.run(program, env=variables, capture_output=True, text=True, check=False, timeout=600)

    return run_


FIRST, OTHER = amd_scenes.MI300X
LINKED = [{**FIRST, "link": 1}, {**OTHER, "link": 2}, {**OTHER, "bdf": "0000:e0:00.0", "serial": "1", "link": 0}]
DIES = [
    {**amd_scenes.MI250[0], "bdf": bdf, "serial": serial} for bdf, serial in (("0000:2f:00.0", "1"), ("0000:32:00.0", "2"))
]


def scenes_of(release):
    parts = amd_scenes.CPX if release >= "6.4" else amd_scenes.CPX_MIRRORED
    unknown = {str(mode): [{**gpu, "partition": mode} for gpu in parts] for mode in ("", "N/A")}
    unknown["not told"] = [{name: value for name, value in gpu.items() if name != "partition"} for gpu in parts]
    return {
        "links: PCIe is 1 and xGMI 2": Scene(LINKED),
        "two MI300X": Scene(amd_scenes.MI300X),
        "a lowered clock": Scene([{**gpu, "violations": {"ppt_pwr": 1, "hbm_thrm": 0}} for gpu in amd_scenes.MI300X]),
        "an MI250, whose energy is a counter times its resolution": Scene(amd_scenes.MI250),
        "the dies of an MI250X, which are whole GPUs": Scene(DIES),
        "two MI325X in the order of HIP and not of the bus": Scene(amd_scenes.MI325X_VF, (177, 185)),
        "a GPU of another container": Scene(amd_scenes.MI325X_VF, (185,)),
        "a GPU of another container, by the kernel": Scene(amd_scenes.MI325X_VF, (185,), in_kernel=True),
        "GPUs of a group that one is not in": Scene(amd_scenes.MI325X_VF, (177, 185), refused=(177, 185)),
        "parts, none of which passes for a whole GPU": Scene(parts, (128, 129)),
        **{f"parts of the mode {mode}": Scene(gpus, (128, 129)) for mode, gpus in unknown.items()},
        "one part of an unknown mode": Scene([{**FIRST, **unknown["not told"][1]}], (129,)),
    }


def shown(told, folder):
    """A line for each GPU with what is known of it, and one for all of them."""
    lines = []
    for gpu, reading, holders, free in zip(told["gpus"], told["readings"], told["holders"], told["free"], strict=True):
        everything = {**gpu, **reading, "holders": holders, "free": free}
        known = {name: value for name, value in everything.items() if value not in (None, "", [])}
        lines.append(", ".join(f"{name} {value}" for name, value in known.items()))
    others = {name: told[name] for name in ("paths", "left_out", "unseen") if told[name]}
    return [
        *lines,
        re.sub(f"{re.escape(str(folder))}/[^/]+/", ".../", str(others)).replace(f"group {folder.group()}", "group G"),
    ]


def test_gpus_are_as_was_published_of_them(run, tmp_path, snapshot):
    """Before ROCm 6.3 nobody tells the order of HIP, and the library before 6.4 not which file is whose."""
    releases = {}
    for release in RELEASES:
        done = run(release, scenes_of(release))
        assert done.returncode == 0, done.stdout + done.stderr
        for what, told in json.loads(done.stdout).items():
            releases.setdefault((what, "\n".join(shown(told, tmp_path))), []).append(release)
    assert {f"{what} ({', '.join(of)})": lines.splitlines() for (what, lines), of in releases.items()} == snapshot


@pytest.mark.parametrize("release", ["6.2", "6.3", "6.4"])
def test_a_binding_that_is_newer_than_rocm_is_told_with_its_error(run, release):
    """Without a version pip installs it on every ROCm."""
    unseen = json.loads(run("7.0", {"host": Scene(None)}, library=release).stdout)["host"]["unseen"]
    assert "undefined symbol: amdsmi_" in unseen
    assert f'pip install "amdsmi=={release}.*"' in unseen
    assert unseen.endswith(f"{release}/share/amd_smi")


@pytest.fixture
def torch_for_rocm(tmp_path):
    """A folder with a torch that must not be imported."""
    (tmp_path / "modules" / "torch").mkdir(parents=True)
    (tmp_path / "modules" / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (tmp_path / "modules" / "torch" / "version.py").write_text(
        "__version__ = '2.6.0+rocm6.2.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2.41134-65d174c3e'\n"
    )
    return tmp_path / "modules"


def test_the_doctor_tells_what_is_amiss(run, torch_for_rocm, tmp_path):
    """ROCm 7 has a torch for ROCm 6 here; a GPU that is left out is no problem where another is there."""
    mi300x, mi325x = amd_scenes.MI300X, amd_scenes.MI325X_VF
    for release, scene, library, status, told in (
        ("6.4", Scene(mi300x), "", 0, []),
        ("7.0", Scene(mi300x), "", 0, ["warning torch"]),
        ("6.4", Scene(mi325x, (185,)), "", 0, ["warning left"]),
        ("6.4", Scene(mi325x, refused=(185,)), "", 1, ["warning amd", *["problem left"] * 2]),
        ("7.0", Scene(None), "6.3", 1, ["problem amd"]),
    ):
        done = run(
            release, {f"{release}{scene.nodes}{scene.refused}": scene}, "doctor", library=library, path=torch_for_rocm
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(("warning", "problem"))]
        assert done.returncode == status, done.stdout
        assert [" ".join(line.split()[:2]) for line in lines] == told, done.stdout
        if not library:
            sound = f"driver 6.12.12, binding amdsmi {RELEASES[release]}, ROCm {release}.1"
            assert (sound in done.stdout) == (scene.gpus == mi300x)
    assert "AttributeError: " in done.stdout
    assert 'pip install "amdsmi==6.3.*"' in done.stdout
