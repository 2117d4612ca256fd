"""AMD GPUs as four releases of the real binding tell of them, on a C library that is a stand-in (`amd_stand_in`)."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import amd_scenes
import amd_stand_in
import pytest

RELEASES = {"6.2": "6.2.4", "6.3": "6.3.3", "6.4": "6.4.3", "7.0": "7.0.2"}
"""By release of ROCm, the binding on the package index."""

Host = Callable[..., Any]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder with the binding of a release, and installs it there if need be."""
    root = tmp_path_factory.mktemp("amdsmi")

    def install(release: str) -> Path:
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
def rocm(tmp_path_factory: pytest.TempPathFactory, installed: Callable[[str], Path]) -> Callable[[str], Path]:
    """Returns a folder like /opt/rocm of a release, with the C library."""
    root = tmp_path_factory.mktemp("rocm")

    def build(release: str) -> Path:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            pytest.skip("needs a C compiler (cc, gcc or clang)")
        if not (root / release).exists():
            amd_stand_in.library(root / release, installed(release), f"{release}.1", compiler)
        return root / release

    return build


@pytest.fixture
def host(tmp_path: Path, installed: Callable[[str], Path], rocm: Callable[[str], Path]) -> Host:
    """Runs the plugin on a host with the GPUs of a scene, and returns what it tells, or what a command prints."""

    def run(
        binding: str,
        gpus: list[dict[str, Any]] | None,
        *command: str,
        library: str = "",
        nodes: tuple[int, ...] = (),
        refused: tuple[int, ...] = (),
        path: Path | None = None,
    ) -> Any:
        """
        Args:
            gpus: None where the binding is not expected to be imported.
            library: ROCm's release; that of the binding by default.
            nodes: numbers of the render nodes that are there.
            refused: of those that this user may not open.
            path: a folder of modules that are found before others.
        """
        (tmp_path / "kfd").touch()
        (tmp_path / "dri").mkdir(exist_ok=True)
        for number in nodes:
            (tmp_path / "dri" / f"renderD{number}").touch()
        scene = tmp_path / "scene.json"
        scene.write_text(json.dumps({"root": str(tmp_path), "gpus": gpus, "refused": refused}))
        choosing = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ROCM_HOME")
        variables = {name: value for name, value in os.environ.items() if name not in choosing}
        variables["ROCM_PATH"] = str(rocm(library or binding))
        if path is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(path), variables.get("PYTHONPATH", "")])
        program = [sys.executable, amd_stand_in.__file__, str(installed(binding)), str(scene), *command]
        done = subprocess.run(program, env=variables, capture_output=True, text=True, check=False, timeout=60)
        if command:
            return done
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return run


every_release = pytest.mark.parametrize("release", RELEASES)


@every_release
def test_the_library_of_rocm_calls_pcie_1_and_xgmi_2(host: Host, release: str) -> None:
    """ROCm 6.3 and 6.4 have a second enumeration, in which these are exchanged."""
    first, other = amd_scenes.MI300X
    gpus = [{**first, "link": 1}, {**other, "link": 2}, {**other, "bdf": "0000:e0:00.0", "serial": "1", "link": 0}]
    assert host(release, gpus)["paths"] == [["X", "PCIE", "PCIE"], ["XGMI", "X", "XGMI"], ["N/A", "N/A", "X"]]


@every_release
def test_a_gpu_tells_what_was_published_of_it(host: Host, release: str) -> None:
    told = host(release, amd_scenes.MI300X)
    expected = {
        "index": 1,
        "uuid": "GPU-bbb09363b4d6f06e",
        "name": "AMD Instinct MI300X",
        "memory_bytes": amd_scenes.TOTAL,
        "driver": "6.12.12",
        "vendor": "amd",
        "power_limit_watts": 750.0,
        "compute_units": None if release == "6.2" else 304,
    }
    assert told["gpus"][1].items() >= expected.items()
    assert told["free"] == [amd_scenes.TOTAL - amd_scenes.USED] * 2
    assert [(reading["power_watts"], reading["clock_mhz"]) for reading in told["readings"]] == [(201, 2107), (210, 2104)]
    assert (told["readings"][0]["utilization"], told["readings"][0]["energy_joules"]) == (0.0, None)


@every_release
def test_energy_is_the_counter_times_its_resolution(host: Host, release: str) -> None:
    """As rocm-smi told of the same counter: 962825096297442.9 µJ."""
    told = host(release, amd_scenes.MI250)
    assert told["readings"][0]["energy_joules"] == pytest.approx(962825096.2974429)
    assert told["readings"][0]["power_watts"] == 89
    assert (told["gpus"][0]["name"], told["gpus"][0]["uuid"]) == (
        "AMD INSTINCT MI250 (MCM) OAM AC MBA",
        "GPU-719d230578348e8c",
    )


@pytest.mark.parametrize("release", ["6.3", "6.4", "7.0"])
def test_a_clock_is_lowered_by_what_the_library_says(host: Host, release: str) -> None:
    gpus = [{**gpu, "violations": {"ppt_pwr": 1, "hbm_thrm": 0}} for gpu in amd_scenes.MI300X]
    assert host(release, gpus)["readings"][0]["throttling"] == ["PPT"]


@every_release
def test_gpus_come_in_the_order_of_hip_and_not_of_the_bus(host: Host, release: str) -> None:
    told = host(release, amd_scenes.MI325X_VF, nodes=(177, 185))
    # Before ROCm 6.3 nobody tells the order.
    in_order = ["GPU-9f444a2fb30adeb0", "GPU-b7d181671a192e45"]
    assert [gpu["uuid"] for gpu in told["gpus"]] == (in_order if release == "6.2" else in_order[::-1])
    assert sorted(told["holders"]) == [[], [[230139, "/usr/bin/python3.12", 528378265]]]


@pytest.mark.parametrize("release", ["6.4", "7.0"])
def test_a_gpu_of_another_container_is_left_out(host: Host, release: str) -> None:
    """The library lists whatever is in /sys, and ROCm only what it can open."""
    told = host(release, amd_scenes.MI325X_VF, nodes=(185,))
    assert [(gpu["index"], gpu["uuid"]) for gpu in told["gpus"]] == [(0, "GPU-9f444a2fb30adeb0")]
    (sentence,) = told["left_out"]
    assert sentence.startswith("the AMD GPU at 0000:8b:00.0 is left out: ")
    assert "renderD177 cannot be opened (No such file or directory); pass it to the container" in sentence


@pytest.mark.parametrize("release", ["6.2", "6.3"])
def test_before_rocm_6_4_the_kernel_tells_which_file_is_whose(host: Host, release: str, tmp_path: Path) -> None:
    for gpu in amd_scenes.MI325X_VF:
        (tmp_path / "pci" / gpu["bdf"] / "drm" / f"renderD{gpu['render']}").mkdir(parents=True)
    told = host(release, amd_scenes.MI325X_VF, nodes=(185,))
    assert [gpu["uuid"] for gpu in told["gpus"]] == ["GPU-9f444a2fb30adeb0"]


def test_a_gpu_of_a_group_that_one_is_not_in_is_left_out(host: Host, tmp_path: Path) -> None:
    told = host("6.4", amd_scenes.MI325X_VF, nodes=(177, 185), refused=(177, 185))
    assert told["gpus"] == []
    assert told["unseen"].count(f"(Permission denied); add this user to the group {tmp_path.group()}") == 2


PARTS = pytest.mark.parametrize(
    ("release", "scene"), [("6.2", "CPX_MIRRORED"), ("6.3", "CPX_MIRRORED"), ("6.4", "CPX"), ("7.0", "CPX")]
)


@PARTS
def test_no_part_of_a_gpu_passes_for_a_whole_one(host: Host, release: str, scene: str) -> None:
    told = host(release, getattr(amd_scenes, scene), nodes=(128, 129))
    assert [gpu["name"] for gpu in told["gpus"]] == ["AMD Instinct MI300X CPX"] * 2
    assert [gpu["power_limit_watts"] for gpu in told["gpus"]] == [None, None]
    # The counters are the whole GPU's.
    assert [reading["power_watts"] for reading in told["readings"]] == [None, None]


@PARTS
@pytest.mark.parametrize("partition", ["", "N/A", None])
def test_a_part_whose_mode_nobody_knows_is_one_all_the_same(
    host: Host, release: str, scene: str, partition: str | None
) -> None:
    gpus = [{**gpu, "partition": partition} for gpu in getattr(amd_scenes, scene)]
    for gpu in gpus:
        if partition is None:
            del gpu["partition"]
    together = host(release, gpus, nodes=(128, 129))
    assert [gpu["name"] for gpu in together["gpus"]] == ["AMD Instinct MI300X partition"] * 2
    if release != "6.2":  # which numbers no parts
        (alone,) = host(release, [{**amd_scenes.MI300X[0], **gpus[1]}], nodes=(129,))["gpus"]
        assert alone["name"] == "AMD Instinct MI300X partition"


@every_release
def test_gpus_without_partitions_are_whole(host: Host, release: str) -> None:
    """The two dies of an MI250X have addresses of their own."""
    gpus = [
        {**amd_scenes.MI250[0], "bdf": bdf, "serial": serial}
        for bdf, serial in (("0000:2f:00.0", "1"), ("0000:32:00.0", "2"))
    ]
    assert [gpu["name"] for gpu in host(release, gpus)["gpus"]] == ["AMD INSTINCT MI250 (MCM) OAM AC MBA"] * 2


@pytest.mark.parametrize("release", ["6.2", "6.3", "6.4"])
def test_a_binding_that_is_newer_than_rocm_is_told_with_its_error(host: Host, release: str) -> None:
    """Without a version pip installs it on every ROCm."""
    told = host("7.0", None, library=release)
    assert "undefined symbol: amdsmi_" in told["unseen"]
    assert f'pip install "amdsmi=={release}.*"' in told["unseen"]
    assert told["unseen"].endswith(f"{release}/share/amd_smi")


@every_release
def test_each_binding_is_imported_beside_its_own_rocm(host: Host, release: str) -> None:
    assert host(release, amd_scenes.MI300X)["unseen"] == ""


@pytest.fixture
def torch_for_rocm(tmp_path: Path) -> Path:
    """A folder with a torch that must not be imported."""
    (tmp_path / "modules" / "torch").mkdir(parents=True)
    (tmp_path / "modules" / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (tmp_path / "modules" / "torch" / "version.py").write_text(
        "__version__ = '2.6.0+rocm6.2.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2.41134-65d174c3e'\n"
    )
    return tmp_path / "modules"


@pytest.mark.parametrize("release", ["6.4", "7.0"])
def test_the_doctor_finds_nothing_amiss_on_a_sound_host(host: Host, release: str, torch_for_rocm: Path) -> None:
    done = host(release, amd_scenes.MI300X, "doctor", path=torch_for_rocm)
    said = done.stdout.splitlines()
    assert (done.returncode, {line.split()[0] for line in said}) == (0, {"ok"} if release == "6.4" else {"ok", "warning"})
    assert any(
        f"ok       amd          driver 6.12.12, binding amdsmi {RELEASES[release]}, ROCm {release}.1" in line
        for line in said
    )
    # ROCm 7 with a torch for ROCm 6.
    assert [line.split()[1] for line in said if line.startswith("warning")] == ([] if release == "6.4" else ["torch"])


def test_the_doctor_tells_what_is_left_out(host: Host, torch_for_rocm: Path) -> None:
    command = functools.partial(host, "6.4", amd_scenes.MI325X_VF, "doctor", path=torch_for_rocm)
    some, none = command(nodes=(185,)), command(refused=(185,))
    assert (some.returncode, none.returncode) == (0, 1)
    assert "warning  left out     the AMD GPU at 0000:8b:00.0 is left out: " in some.stdout
    assert none.stdout.count("problem  left out     the AMD GPU at ") == 2


def test_the_doctor_tells_of_a_binding_that_is_newer_than_rocm(host: Host, torch_for_rocm: Path) -> None:
    done = host("7.0", None, "doctor", library="6.3", path=torch_for_rocm)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert "AttributeError: " in line
    assert "undefined symbol: amdsmi_" in line
    assert 'pip install "amdsmi==6.3.*"' in line
