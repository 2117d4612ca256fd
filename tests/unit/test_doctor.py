"""Tests ``gputrain doctor``: what it finds on this host, on hosts that are recorded, and on those that lack something."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gputrain.cli import doctor
from pytest_gputrain.cli.main import main
from pytest_gputrain.hardware import amd, nvidia
from pytest_gputrain.hardware.recording import replayed

RECORDINGS = Path(__file__).parent / "recordings"
FOR_CUDA = doctor.Torch("2.6.0+cu124", "12.4", "")
FOR_ROCM = doctor.Torch("2.6.0+rocm6.2.4", "", "6.2.41134-65d174c3e")
FOR_CPU = doctor.Torch("2.6.0+cpu", "", "")
CHOOSING = (*doctor.CHOOSING, "CUDA_DEVICE_ORDER", "CC", "ROCM_PATH")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host without GPUs, with a lock folder of its own, whatever this one has."""
    for name in CHOOSING:
        monkeypatch.delenv(name, raising=False)
    for name in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(nvidia, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setattr(amd, "DEVICE_FILE", tmp_path / "dev" / "kfd")
    monkeypatch.setattr(amd, "ROCM", tmp_path / "rocm")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_CPU)
    (tmp_path / "dev").mkdir()


@pytest.fixture
def h100s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two recorded H100, whose driver supports CUDA up to 12.4."""
    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_CUDA)
    document = json.loads((RECORDINGS / "nvidia-h100-x2.json").read_text())
    document["calls"]["nvmlSystemGetCudaDriverVersion()"] = [{"reply": 12040}]
    (tmp_path / "host.json").write_text(json.dumps(document))
    with replayed(tmp_path / "host.json"):
        yield


@pytest.fixture
def mi300xs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_ROCM)
    with replayed(RECORDINGS / "amd-mi300x-x2.json"):
        yield


def _rocm(tmp_path: Path, version: str) -> None:
    (tmp_path / "rocm" / "lib").mkdir(parents=True)
    (tmp_path / "rocm" / "lib" / "libamd_smi.so").touch()
    (tmp_path / "rocm" / ".info").mkdir()
    (tmp_path / "rocm" / ".info" / "version").write_text(f"{version}-123\n")


def _not_ok() -> list[doctor.Check]:
    return [check for check in doctor.examine() if check.status != "ok"]


def _only(name: str, status: str) -> str:
    """The one check that is not ok: its sentence."""
    (check,) = _not_ok()
    assert (check.name, check.status) == (name, status)
    return f"{check.found}; {check.remedy}"


def test_a_host_without_gpus_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", name] for name in ("nvidia", "amd", "visible", "torch", "compiler", "locks")
    ]
    assert lines[2].endswith("no GPU: cases train on the CPU, at tiny scale")


def test_this_host_can_be_examined() -> None:
    """Whatever it has: in a process of its own, without anything in the place of what is here."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gputrain.cli.main", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    document = json.loads(done.stdout)
    assert done.returncode == (0 if document["sound"] else 1)
    assert document["sound"] == all(check["status"] != "problem" for check in document["checks"])
    assert {"torch", "compiler", "locks"} <= {check["name"] for check in document["checks"]}
    assert all(check["remedy"] or check["found"] for check in document["checks"])


def test_torch_is_never_imported() -> None:
    code = (
        "import sys; from pytest_gputrain.cli import doctor; doctor.examine(); build = doctor.torch_build(); "
        "assert 'torch' not in sys.modules; import torch; "
        "assert build == (torch.__version__, torch.version.cuda or '', torch.version.hip or ''), build"
    )
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nvidia_gpus_with_all_they_need(h100s: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"ok"}
    assert "ok       gpus         2 x NVIDIA H100 80GB HBM3, marker h100" in lines
    assert "ok       torch        torch 2.6.0+cu124 is built for CUDA 12.4, the driver supports CUDA up to 12.4" in lines


def test_amd_gpus_with_all_they_need(mi300xs: None, tmp_path: Path) -> None:
    _rocm(tmp_path, "6.3.3")
    assert _not_ok() == []
    assert any("driver 6.12.12" in check.found and "ROCm 6.3.3" in check.found for check in doctor.examine())


@pytest.mark.parametrize(
    ("torch", "sentence"),
    [
        (FOR_CPU, "torch 2.6.0+cpu is built for the CPU only, and the GPUs are NVIDIA's; install the build for it from"),
        (FOR_ROCM, "torch 2.6.0+rocm6.2.4 is built for ROCm 6.2.41134, and the GPUs are NVIDIA's; install the build"),
        (doctor.Torch("2.9.0", "13.0", ""), "built for CUDA 13.0, the driver supports CUDA up to 12.4; update the driver"),
        (None, 'torch is not installed; pip install "pytest-gputrain[suite]"'),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_a_problem(
    h100s: None, monkeypatch: pytest.MonkeyPatch, torch: doctor.Torch | None, sentence: str
) -> None:
    monkeypatch.setattr(doctor, "torch_build", lambda: torch)
    assert sentence in _only("torch", "problem")


def test_a_torch_for_a_newer_minor_release_of_cuda_is_fine(h100s: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "torch_build", lambda: doctor.Torch("2.9.0+cu128", "12.8", ""))
    assert _not_ok() == []


def test_a_torch_for_cuda_is_none_for_amd(mi300xs: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_CUDA)
    assert "built for CUDA 12.4, and the GPUs are AMD's" in _only("torch", "problem")
    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_ROCM)
    _rocm(tmp_path, "7.0.1")
    assert "built for ROCm 6.2.41134, beside ROCm 7.0.1" in _only("torch", "warning")


def test_a_binding_that_cannot_be_imported_is_a_problem_and_no_cpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "dev" / "kfd").touch()
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if not line.startswith("ok")]
    assert line.startswith("problem  amd          ")
    assert "amdsmi cannot be imported (ModuleNotFoundError" in line
    assert line.endswith(
        f"{tmp_path}/rocm/lib/libamd_smi.so is missing: install ROCm's package amd-smi-lib, or set ROCM_PATH "
        "to where ROCm is"
    )
    assert not any("train on the CPU" in line for line in lines)
    _rocm(tmp_path, "6.4.1")
    assert f'pip install "amdsmi==6.4.*", or the one that ROCm brings, by pip install {tmp_path}' in _only("amd", "problem")
    (tmp_path / "rocm" / ".info" / "version").unlink()
    assert 'pip install "amdsmi==<major.minor of ROCm>.*"' in _only("amd", "problem")


def test_graphics_of_the_processor_are_no_problem_beside_nvidias_gpus(h100s: None, tmp_path: Path) -> None:
    (tmp_path / "dev" / "kfd").touch()
    assert "amdsmi cannot be imported" in _only("amd", "warning")


def test_without_nvmls_binding_an_nvidia_host_is_no_cpu(tmp_path: Path) -> None:
    (tmp_path / "dev" / "nvidia0").touch()
    assert "nvidia0 is there, but pynvml cannot be imported" in _only("nvidia", "problem")


def test_a_binding_of_another_release_than_rocm_is_doubtful(
    mi300xs: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _rocm(tmp_path, "6.3.1")
    for version, told in (("6.4.3", True), ("6.3.3", False), ("25.1.0+8dc45db", False), ("of unknown version", False)):
        monkeypatch.setattr(doctor, "_installed", lambda name, version=version: version)
        assert [check.name for check in _not_ok()] == (["amd"] if told else [])
    monkeypatch.setattr(doctor, "_installed", lambda name: "6.4.3")
    assert "amdsmi 6.4.3 beside ROCm 6.3.1 is the binding of another release" in _only("amd", "warning")
    assert 'pip install "amdsmi==6.3.*"' in _only("amd", "warning")


def test_a_driver_that_fails_is_a_problem(tmp_path: Path) -> None:
    document = json.loads((RECORDINGS / "nvidia-h100-x2.json").read_text())
    document["calls"]["nvmlInit()"] = [{"error": 18, "says": "Driver/library version mismatch"}]
    (tmp_path / "host.json").write_text(json.dumps(document))
    with replayed(tmp_path / "host.json"):
        assert "NVIDIA driver failed to describe its GPUs (Driver/library version mismatch)" in _only("nvidia", "problem")


@pytest.mark.parametrize(("lost", "status"), [((1,), "warning"), ((0, 1), "problem")])
def test_a_gpu_that_its_driver_does_not_describe_is_told(tmp_path: Path, lost: tuple[int, ...], status: str) -> None:
    document = json.loads((RECORDINGS / "nvidia-h100-x2.json").read_text())
    for index in lost:
        document["calls"][f"nvmlDeviceGetHandleByIndex({index})"] = [{"error": 15, "says": "GPU is lost"}]
    (tmp_path / "host.json").write_text(json.dumps(document))
    with replayed(tmp_path / "host.json"):
        told = [(check.status, check.found) for check in doctor.examine() if check.name == "gpus" and check.status != "ok"]
    assert told == [(status, f"GPU {index} is not described by its driver (GPU is lost)") for index in lost]


def test_what_a_run_uses_is_told_in_its_order(h100s: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    (visible,) = [check for check in doctor.examine() if check.name == "visible"]
    assert visible.found.startswith("a run uses GPU 1 (GPU-6a3f1c0e-0001")
    assert visible.found.endswith("CUDA_VISIBLE_DEVICES=1,0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "a run uses none of the 2 GPUs: CUDA_VISIBLE_DEVICES=; unset it" in _only("visible", "warning")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES=7 shows none of the 2 GPUs here" in _only("visible", "problem")


def test_a_gpu_that_the_catalog_lacks_may_pass_for_another(tmp_path: Path) -> None:
    document = json.loads((RECORDINGS / "amd-mi300x-x2.json").read_text())
    for key, replies in document["calls"].items():
        if key.startswith("amdsmi_get_gpu_asic_info"):
            replies[0]["reply"]["market_name"] = "AMD Instinct MI999"
    (tmp_path / "host.json").write_text(json.dumps(document))
    with replayed(tmp_path / "host.json"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "torch_build", lambda: FOR_ROCM)
        assert "2 x AMD Instinct MI999, which the catalog does not know; name the platform" in _only("gpus", "warning")


def test_files_that_cannot_be_opened_are_a_problem(h100s: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    assert _not_ok() == []
    refused: dict[str, int] = {}
    really_open = os.open

    def opened(path: Any, *arguments: Any) -> int:
        if number := refused.get(Path(path).name):
            raise OSError(number, os.strerror(number))
        return really_open(path, *arguments)

    monkeypatch.setattr(os, "open", opened)
    refused["nvidia1"] = errno.EACCES
    assert f"nvidia1 cannot be opened (Permission denied); add this user to the group {tmp_path.group()}" in _only(
        "permissions", "problem"
    )
    refused["nvidia1"] = errno.EPERM
    assert "nvidia1 cannot be opened (Operation not permitted); pass --device " in _only("permissions", "problem")
    refused.clear()
    (tmp_path / "dev" / "nvidia-uvm").unlink()
    assert "nvidia-uvm is missing, without which CUDA does not start; run nvidia-modprobe -u" in _only(
        "permissions", "problem"
    )


def test_a_host_without_a_compiler_is_warned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert _only("compiler", "warning").startswith(f"no C compiler is found (CC={tmp_path}/cc)")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "(cc, gcc, clang)" in _only("compiler", "warning")


def test_locks_that_cannot_be_taken_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "gputrain-leases").write_text("")
    assert "GPUs cannot be lent: " in _only("locks", "problem")
    (tmp_path / "gputrain-leases").unlink()
    (tmp_path / "gputrain-leases" / "doctor.lock").mkdir(parents=True)  # in the place of a file that one may not open
    assert "GPUs cannot be lent: [Errno 21] Is a directory" in _only("locks", "problem")
