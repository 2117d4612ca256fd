"""Tests ``gputrain doctor``: what it finds on this host, on hosts that are recorded, and on those that lack something."""

import errno
import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

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
def bare(monkeypatch, tmp_path):
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
def h100s(tmp_path, monkeypatch):
    """Two recorded H100, whose driver supports CUDA up to 12.4."""
    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_CUDA)
    document = json.loads((RECORDINGS / "nvidia-h100-x2.json").read_text())
    document["calls"]["nvmlSystemGetCudaDriverVersion()"] = [{"reply": 12040}]
    (tmp_path / "host.json").write_text(json.dumps(document))
    with replayed(tmp_path / "host.json"):
        yield


@pytest.fixture
def mi300xs(monkeypatch):
    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_ROCM)
    with replayed(RECORDINGS / "amd-mi300x-x2.json"):
        yield


def _rocm(tmp_path, version):
    (tmp_path / "rocm" / "lib").mkdir(parents=True)
    (tmp_path / "rocm" / "lib" / "libamd_smi.so").touch()
    (tmp_path / "rocm" / ".info").mkdir()
    (tmp_path / "rocm" / ".info" / "version").write_text(f"{version}-123\n")


def _said(*names):
    """What is not ok, or what is said of some checks; the folder of the test without its name."""
    checks = [check for check in doctor.examine() if check.name in names or (not names and check.status != "ok")]
    return [f"{check.status} {check.name}: {check.found}; {check.remedy}" for check in checks]


@pytest.fixture
def saying(tmp_path, snapshot):
    """What the doctor says of each host of a test, which is compared with the snapshot in the end."""
    hosts = {}
    yield hosts
    folder, group = str(tmp_path), amd.group_of(tmp_path)
    assert {
        host: [line.replace(folder, "...").replace(f"group {group}", "group of the file") for line in lines]
        for host, lines in hosts.items()
    } == snapshot


def test_a_host_without_gpus_is_fine(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", name] for name in ("nvidia", "amd", "visible", "torch", "compiler", "locks")
    ]
    assert lines[2].endswith("no GPU: cases train on the CPU, at tiny scale")


def test_this_host_can_be_examined_without_importing_torch():
    """Whatever it has: in a process of its own, without anything in the place of what is here."""
    code = (
        "import json, sys; from pytest_gputrain.cli import doctor, main; status = main.main(['doctor', '--json']); "
        "assert 'torch' not in sys.modules; print(json.dumps(doctor.torch_build())); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    *lines, build = done.stdout.splitlines()
    document = json.loads("\n".join(lines))
    assert done.returncode == (0 if document["sound"] else 1), done.stderr
    assert document["sound"] == all(check["status"] != "problem" for check in document["checks"])
    assert {"torch", "compiler", "locks"} <= {check["name"] for check in document["checks"]}
    assert all(check["remedy"] or check["found"] for check in document["checks"])
    if found := importlib.util.find_spec("torch"):  # which says of itself in a file that holds nothing else
        (folder,) = found.submodule_search_locations
        about = runpy.run_path(str(Path(folder) / "version.py"))
        assert json.loads(build) == [about["__version__"], about["cuda"] or "", about["hip"] or ""]


def test_gpus_are_listed_below_the_checks_and_recorded_for_a_replay(h100s, tmp_path, capsys):
    """Several readings are recorded of each GPU; other tests tell what is in the list."""
    assert main(["doctor"]) == 0
    checks, listed = capsys.readouterr().out.split("\n\n", 1)
    assert checks.splitlines()[0].startswith("ok       nvidia ")
    assert "588 W of 700 W" in listed
    assert main(["doctor", "--record", str(tmp_path / "driver.json")]) == 0
    assert capsys.readouterr().out == f"{checks}\n\n{listed}"
    assert main(["doctor", "--replay", str(tmp_path / "driver.json")]) == 0
    assert "588 W of 700 W" in capsys.readouterr().out
    (document,) = json.loads((tmp_path / "driver.json").read_text())
    (utilization,) = {
        len(replies) for call, replies in document["calls"].items() if call.startswith("nvmlDeviceGetUtilizationRates(")
    }
    assert utilization == 5
    assert main(["doctor", "--record", str(tmp_path / "no" / "folder" / "\0")]) == 2


def test_a_driver_that_fails_is_a_finding_and_is_recorded(tmp_path, capsys):
    mismatch = {"error": 18, "says": "Driver/library version mismatch"}
    with _replay(tmp_path, "nvidia-h100-x2", nvmlInit=mismatch):
        assert main(["doctor", "--record", str(tmp_path / "driver.json")]) == 1
    out, err = capsys.readouterr()
    assert "problem  nvidia" in out
    assert err.startswith("gputrain: the GPUs are not listed: ")
    assert main(["doctor", "--replay", str(tmp_path / "driver.json")]) == 1
    out, err = capsys.readouterr()
    assert (out, "Driver/library version mismatch" in err) == ("", True)


def test_torch_must_be_built_for_the_gpus(h100s, monkeypatch, saying):
    saying["sound"] = [*_said(), *_said("gpus", "torch")]
    for name, torch in {
        "for the CPU": FOR_CPU,
        "for ROCm": FOR_ROCM,
        "for a newer CUDA": doctor.Torch("2.9.0", "13.0", ""),
        "for a newer minor release of CUDA": doctor.Torch("2.9.0+cu128", "12.8", ""),
        "none": None,
    }.items():
        monkeypatch.setattr(doctor, "torch_build", lambda torch=torch: torch)
        saying[name] = _said()


def test_amd_gpus(mi300xs, monkeypatch, tmp_path, saying):
    """The binding is to be of the release of ROCm that is here, and torch too; of versions of another kind nobody knows."""
    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_CUDA)
    saying["a torch for CUDA"] = _said()
    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_ROCM)
    _rocm(tmp_path, "7.0.1")
    saying["a torch for an older ROCm"] = _said()
    shutil.rmtree(tmp_path / "rocm")
    _rocm(tmp_path, "6.3.3")
    for version in ("6.4.3", "6.3.1", "25.1.0+8dc45db", "of unknown version"):
        monkeypatch.setattr(doctor, "_installed", lambda name, version=version: version)
        saying[f"the binding {version}"] = _said("amd", "torch")


def test_a_binding_that_cannot_be_imported_is_a_problem_and_no_cpu(capsys, tmp_path, saying):
    (tmp_path / "dev" / "nvidia0").touch()
    saying["NVIDIA"] = _said()
    (tmp_path / "dev" / "nvidia0").unlink()
    (tmp_path / "dev" / "kfd").touch()
    assert main(["doctor"]) == 1
    assert "train on the CPU" not in capsys.readouterr().out
    saying["AMD, without ROCm"] = _said()
    _rocm(tmp_path, "6.4.1")
    saying["AMD"] = _said()
    (tmp_path / "rocm" / ".info" / "version").unlink()
    saying["AMD, of an unknown release"] = _said()


def test_graphics_of_the_processor_are_no_problem_beside_nvidias_gpus(h100s, tmp_path):
    (tmp_path / "dev" / "kfd").touch()
    (line,) = _said()
    assert line.startswith("warning amd: ")
    assert "amdsmi cannot be imported" in line


def _replay(tmp_path, recording, **replies):
    """A host where calls whose names begin so reply something else."""
    document = json.loads((RECORDINGS / f"{recording}.json").read_text())
    for call, reply in replies.items():
        for key in document["calls"]:
            if key.startswith(call.replace("_AT_0", "(0)").replace("_AT_1", "(1)")):
                document["calls"][key] = [reply(document["calls"][key][0]) if callable(reply) else reply]
    (tmp_path / "host.json").write_text(json.dumps(document))
    return replayed(tmp_path / "host.json")


def test_a_driver_with_a_fault_is_told(tmp_path, monkeypatch, saying):
    lost = {"error": 15, "says": "GPU is lost"}
    mismatch = {"error": 18, "says": "Driver/library version mismatch"}
    of_one, of_both = {"nvmlDeviceGetHandleByIndex_AT_1": lost}, {"nvmlDeviceGetHandleByIndex": lost}
    for name, replies in {"it fails": {"nvmlInit": mismatch}, "a lost GPU": of_one, "two lost GPUs": of_both}.items():
        with _replay(tmp_path, "nvidia-h100-x2", **replies):
            saying[name] = [line for line in _said("nvidia", "gpus") if not line.startswith("ok")]

    def another(reply):
        return {"reply": {**reply["reply"], "market_name": "AMD Instinct MI999"}}

    monkeypatch.setattr(doctor, "torch_build", lambda: FOR_ROCM)
    with _replay(tmp_path, "amd-mi300x-x2", amdsmi_get_gpu_asic_info=another):
        saying["a GPU that the catalog lacks"] = _said()


def test_what_a_run_uses_is_told_in_its_order(h100s, monkeypatch, saying):
    for value in ("1,0", "", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        saying[f"CUDA_VISIBLE_DEVICES={value}"] = _said("visible")


def test_files_that_cannot_be_opened_are_a_problem(h100s, tmp_path, monkeypatch, saying):
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    assert _said() == []
    refused = {}
    really_open = os.open

    def opened(path, *arguments):
        if number := refused.get(Path(path).name):
            raise OSError(number, os.strerror(number))
        return really_open(path, *arguments)

    monkeypatch.setattr(os, "open", opened)
    for number in (errno.EACCES, errno.EPERM):
        refused["nvidia1"] = number
        saying[os.strerror(number)] = _said()
    refused.clear()
    (tmp_path / "dev" / "nvidia-uvm").unlink()
    saying["not there"] = _said()


def test_a_host_without_a_compiler_or_locks(monkeypatch, tmp_path, saying):
    (tmp_path / "gputrain-leases").write_text("")
    saying["a file in the place of the locks"] = _said()
    (tmp_path / "gputrain-leases").unlink()
    (tmp_path / "gputrain-leases" / "doctor.lock").mkdir(parents=True)  # in the place of a file that one may not open
    saying["a lock that cannot be opened"] = _said()
    (tmp_path / "gputrain-leases" / "doctor.lock").rmdir()
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    saying["no such compiler"] = _said()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    saying["no compiler"] = _said()
