"""The GPUs of machines that are not here, by what their drivers' libraries reply."""

import ctypes
import dataclasses
import enum
import json
import os
import sys
import types
from pathlib import Path

import pytest

from pytest_gputrain.cli.main import main
from pytest_gputrain.execution.launch.environment import worker_environment
from pytest_gputrain.hardware import amd, drivers
from pytest_gputrain.hardware.devices import HardwareError
from pytest_gputrain.hardware.machine import detect, marker_of
from pytest_gputrain.hardware.recording import ERRORS, Recorder, Replay, recorded, replayed
from pytest_gputrain.records import Case, Holder, Task
from pytest_gputrain.utils.units import MiB

RECORDINGS = Path(__file__).parent / "recordings"
LARGE, SMALL = "MIG-1fbd3d20-3f11-5d4b-8a43-0d9e6d1c2a11", "MIG-5c2f8e77-9a90-5e0e-b7f2-55d1b0a1c3f2"
FIRST_OF_HIP, SECOND_OF_HIP = "GPU-c0b106985c515c91", "GPU-bbb09363b4d6f06e"
PYTHON = Holder(pid=230139, gpu=1, name="/usr/bin/python3.12", bytes=528378265)


@pytest.fixture
def on(request):
    """Replays the recording that the test is parametrised with."""
    with replayed(RECORDINGS / f"{request.param}.json"):
        yield


def machine(name):
    return pytest.mark.parametrize("on", [name], indirect=True)


def _read(at):
    gpu = drivers.gpus()[at]
    with drivers.driver(gpu.vendor) as driver:
        return driver.read(gpu)


def _told():
    """Everything that is known of the GPUs here, without what is not."""
    gpus, readings = drivers.gpus(), []
    for gpu in gpus:
        with drivers.driver(gpu.vendor) as driver:
            readings.append(driver.read(gpu)._asdict())
    occupancy = [drivers.occupancy([gpu]) for gpu in gpus]
    return {
        "gpus": [dataclasses.asdict(gpu) | {"marker": marker_of(gpu)} for gpu in gpus],
        "readings": [{name: value for name, value in reading.items() if value is not None} for reading in readings],
        "free MiB": [free and free / MiB for free, _ in (*occupancy, drivers.occupancy(gpus))],
        "holders": [holders if holders is None else list(map(str, holders)) for _, holders in occupancy],
        "paths": drivers.paths(gpus),
    }


@pytest.mark.parametrize("recording", [path.stem for path in sorted(RECORDINGS.glob("*.json"))])
def test_gpus_are_as_their_own_tools_printed_them(recording, snapshot):
    """Parts stand in the place of a GPU, without what is counted for the whole of it; AMD's come in HIP's order."""
    with replayed(RECORDINGS / f"{recording}.json"):
        assert _told() == snapshot


@pytest.mark.parametrize(("namespace", "named"), [("pid:[4026531836]", True), ("pid:[4026532281]", False), ("", False)])
def test_a_process_is_named_only_where_its_number_is_the_hosts(tmp_path, monkeypatch, namespace, named):
    """In a container another program has the number that the driver tells, and where a machine is replayed."""
    link = tmp_path / "pid"
    if namespace:
        link.symlink_to(namespace)
    monkeypatch.setattr(drivers, "PID_NAMESPACE", link)
    (holder,) = drivers.other_processes([Holder(pid=os.getpid(), gpu=0)], own=())
    assert (holder.name != "") == named
    with replayed(RECORDINGS / "nvidia-h100-x2.json"):
        (holder,) = drivers.other_processes([Holder(pid=os.getpid(), gpu=0)], own=())
    assert holder.name == ""


@machine("nvidia-mig")
@pytest.mark.parametrize(
    ("variable", "shown"),
    [("0", [LARGE]), (SMALL, [SMALL]), ("MIG-5c2f", [SMALL]), (f"{SMALL},{LARGE}", [SMALL, LARGE]), ("", [])],
)
def test_parts_are_visible_by_their_names(on, variable, shown):
    # Of two kinds of parts one must be chosen.
    ids = [shown[0]] if shown else None
    assert [gpu.uuid for gpu in detect(environ={"CUDA_VISIBLE_DEVICES": variable}, gpu_ids=ids).gpus] == shown[:1]


def test_odd_replies_of_a_driver_are_understood(tmp_path):
    shared = {"reply": {"hip_id": 0, "hip_uuid": FIRST_OF_HIP}}
    with replayed(_changed(tmp_path, "amd-mi300x-cpx", "amdsmi_get_gpu_enumeration_info", shared)):
        assert [gpu.uuid for gpu in drivers.gpus()] == ["0", "1"], "parts that share a UUID have their numbers"
    hot = {"reply": {"active_ppt_pwr": True, "active_socket_thrm": True, "active_hbm_thrm": False, "active_vr_thrm": "N/A"}}
    with replayed(_changed(tmp_path, "amd-mi300x-x2", "amdsmi_get_violation_status", hot)):
        assert _read(0).throttling == {"PPT", "socket thermal"}
    with replayed(_changed(tmp_path, "nvidia-mig", "nvmlDeviceGetMaxMigDeviceCount", {"reply": 0})):
        assert drivers.gpus() == (), "a partitioned GPU without parts is no device"
    monitor = {"reply": [{"fields": {"pid": 5, "usedGpuMemory": 30 * 2**20}}]}
    with replayed(_changed(tmp_path, "nvidia-h100-x2", "nvmlDeviceGetComputeRunningProcesses", monitor)):
        assert drivers.occupancy(drivers.gpus()[:1]).holders == (), "who holds next to nothing does not count"
    for recording, call in (("nvidia-h100-x2", "nvmlShutdown"), ("amd-mi300x-x2", "amdsmi_shut_down")):
        with replayed(_changed(tmp_path, recording, call, {"error": 1, "says": "Uninitialized"})):
            assert len(drivers.gpus()) == 2, "a library that cannot be closed says nothing"


def test_a_damaged_count_is_not_counted_up_to(tmp_path):
    with (
        pytest.raises(ValueError, match=r"changed\.json has replies that no driver gives .* were not recorded"),
        replayed(_changed(tmp_path, "nvidia-mig", "nvmlDeviceGetMaxMigDeviceCount", {"reply": 2**63})),
    ):
        drivers.gpus()


@machine("amd-mi300x-x2")
@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, [0, 1]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": SECOND_OF_HIP}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, [0, 1]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
    ],
)
def test_amd_gpus_are_visible_as_rocm_and_then_hip_would_show_them(on, environ, shown):
    assert [gpu.index for gpu in detect(environ=environ).gpus] == shown
    with pytest.raises(HardwareError, match="HIP_VISIBLE_DEVICES=1 shows none of the 1 GPUs"):
        detect(environ={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"})


@machine("nvidia-h100-x2")
def test_only_a_host_of_which_no_gpu_is_seen_is_asked_why(on, monkeypatch, tmp_path):
    """Here the processor has graphics of AMD, without a binding."""
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(amd, "DEVICE_FILE", tmp_path / "kfd")
    assert "amdsmi cannot be imported" in drivers.unseen()
    assert detect(environ={"CUDA_VISIBLE_DEVICES": ""}).unseen == ""
    monkeypatch.setattr(drivers, "gpus", lambda: ())
    assert detect(environ={"CUDA_VISIBLE_DEVICES": ""}).unseen == drivers.unseen()


@machine("amd-mi300x-x2")
def test_a_worker_sees_its_amd_gpus_whatever_else_was_chosen(on, monkeypatch):
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"):
        monkeypatch.setenv(name, "1")
    task = Task(case=Case(code="a.py::b"), scale="full", device_type="gpu", root=".")
    environment = worker_environment(task, drivers.gpus()[1:])
    assert environment["ROCR_VISIBLE_DEVICES"] == SECOND_OF_HIP
    assert not environment.keys() & {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
    hidden = worker_environment(task, ())
    assert (hidden["CUDA_VISIBLE_DEVICES"], hidden["ROCR_VISIBLE_DEVICES"]) == ("", "")
    assert "HIP_VISIBLE_DEVICES" not in hidden  # an empty one would be no choice


@machine("amd-mi300x-x2")
def test_the_amd_library_is_shut_down_by_its_last_user_only(on):
    library = sys.modules["amdsmi"]
    with amd.opened(), amd.opened():
        pass
    assert [call for call in library.asked if "init" in call or "shut" in call] == ["amdsmi_init()", "amdsmi_shut_down()"]


def test_a_binding_of_amd_is_imported_only_beside_rocm_and_is_silent(monkeypatch, tmp_path, capfd):
    (tmp_path / "amdsmi.py").write_text("print('Unable to find libamd_smi.so'); raise KeyError('libamd_smi.so')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(amd, "DEVICE_FILE", tmp_path / "kfd")
    with amd.opened() as driver:
        assert driver is None
    assert "amdsmi" not in sys.modules
    (tmp_path / "kfd").touch()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(HardwareError, match=r"no GPU is visible here \(.*amdsmi cannot be imported \(KeyError"):
        detect(platform="mi300x", environ={})
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("recording", "call", "code", "sentence"),
    [
        ("nvidia-h100-x2", "nvmlDeviceGetMemoryInfo", 15, "NVIDIA driver failed to describe its GPUs (GPU is lost)"),
        ("nvidia-h100-x2", "nvmlInit", 18, "NVIDIA driver failed"),
        ("amd-mi300x-x2", "amdsmi_init", 30, "AMD driver failed to describe its GPUs (GPU is lost)"),
    ],
)
def test_a_driver_with_a_fault_is_told(tmp_path, recording, call, code, sentence):
    fault = {"error": code, "says": "GPU is\n lost" if "amd" in recording else "GPU is lost"}
    with replayed(_changed(tmp_path, recording, call, fault)), pytest.raises(HardwareError) as caught:
        detect(environ={})
    assert sentence in str(caught.value)


def _changed(tmp_path, recording, call, *replies):
    """A recording in which calls of that name reply something else."""
    document = json.loads((RECORDINGS / f"{recording}.json").read_text())
    for key in document["calls"]:
        if key.startswith(f"{call}("):
            document["calls"][key] = list(replies)
    (tmp_path / "changed.json").write_text(json.dumps(document))
    return tmp_path / "changed.json"


@pytest.mark.parametrize(
    ("recording", "call"),
    [("nvidia-h100-x2", "nvmlDeviceGetMemoryInfo"), ("amd-mi325x-vf-x2", "amdsmi_get_gpu_memory_total")],
)
def test_a_gpu_without_memory_of_its_own_is_there(tmp_path, recording, call):
    refused = {"error": 3 if "nvidia" in recording else 2, "says": "Not Supported"}
    with replayed(_changed(tmp_path, recording, call, refused)):
        assert [gpu.memory_bytes for gpu in drivers.gpus()] == [0, 0]
        gpu = drivers.gpus()[0 if "nvidia" in recording else 1]
        assert drivers.occupancy([gpu]).holders == (() if "nvidia" in recording else (PYTHON,))


@machine("amd-mi300x-x2")
def test_what_makes_the_amd_library_sleep_is_asked_once_a_second(on, monkeypatch):
    clock = iter((10.0, 10.5, 10.9, 11.0, 11.9))
    monkeypatch.setattr(amd, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    gpu, library = drivers.gpus()[0], sys.modules["amdsmi"]
    with drivers.driver("amd") as driver:
        readings = [(driver.read(gpu).throttling, sum("violation" in call for call in library.asked)) for _ in range(5)]
    assert readings == [(frozenset(), asked) for asked in (1, 1, 1, 2, 2)]


class Handle(ctypes.Structure):
    pass


class Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("name", ctypes.c_char * 8))


class Kind(enum.IntEnum):
    VRAM = 0
    ALIAS = 0


class VendorError(Exception):
    value = 3


def _library():
    """What vendors' bindings are made of: pointers for handles, structures, plain objects, errors, constants."""
    targets = [Handle(), Handle()]
    handles = [ctypes.pointer(target) for target in targets]

    def refuse(handle):
        raise VendorError("Not Supported")

    counter = iter(range(100))
    return types.SimpleNamespace(
        NVMLError=VendorError,
        LIMIT=7,
        Kind=Kind,
        at=lambda index: ctypes.pointer(targets[index]),  # another object for the same handle each time
        memory=lambda handle: Memory(total=80 * (handles.index(handle) if handle in handles else 1), name=b"HBM3"),
        kind=lambda handle, kind: {"kind": kind, "list": [(1, 2.5, None, True)]},
        friendly=lambda: types.SimpleNamespace(pid=4711, used=None),
        refuse=refuse,
        count=lambda: next(counter),
    )


def _use(library):
    first, other = library.at(0), library.at(1)
    replies = [
        library.memory(first).total,
        library.memory(other).name,
        library.kind(first, library.Kind.ALIAS),
        library.LIMIT,
    ]
    replies += [library.friendly().pid, library.friendly().used, library.count(), library.count()]
    try:
        library.refuse(other)
    except library.NVMLError as error:
        replies.append((error.value, str(error)))
    return replies


def test_a_replay_says_what_was_recorded():
    recorder = Recorder(_library(), "pynvml")
    said = _use(recorder)
    replay = Replay(json.loads(json.dumps(recorder.document)))
    again = _use(replay)
    # JSON has no bytes and no tuples.
    assert again == [said[0], "HBM3", {"kind": 0, "list": [[1, 2.5, None, True]]}, *said[3:]]
    assert replay.count() == 1  # the last reply again
    assert recorder.calls.keys() >= {'memory({"handle": 0})', 'memory({"handle": 1})'}


def test_what_was_not_recorded_is_not_supported():
    recorder = Recorder(_library(), "pynvml")
    recorder.memory(recorder.at(0))
    replay = Replay(recorder.document)
    assert not hasattr(replay, "friendly")
    with pytest.raises(replay.NVMLError, match=r"at\(5\) was not recorded") as caught:
        replay.at(5)
    assert caught.value.value == 3


def test_a_module_is_recorded_as_import_finds_it(tmp_path, monkeypatch):
    """The import machinery asks modules for things that JSON does not have."""
    (tmp_path / "pynvml.py").write_text(
        "class NVMLError(Exception):\n    value = 9\n"
        "NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED = 12, 9\n"
        "def nvmlInit(): pass\ndef nvmlShutdown(): pass\ndef nvmlSystemGetDriverVersion(): return b'580.1'\n"
        "def nvmlDeviceGetCount(): return 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(amd, "DEVICE_FILE", tmp_path / "kfd")
    assert main(["doctor", "--record", str(tmp_path / "none.json")]) in (0, 1)  # whatever this host lacks
    (document,) = json.loads((tmp_path / "none.json").read_text())
    assert document["calls"]["nvmlSystemGetDriverVersion()"][0] == {"reply": "580.1"}


def test_a_recording_of_a_replay_is_the_same_again_and_leaves_libraries_as_they_were(tmp_path):
    """What a maintainer is sent tells as much as the machine it comes from."""
    before = {name: sys.modules.get(name) for name in ERRORS}
    with replayed(RECORDINGS / "amd-mi300x-x2.json"), recorded() as recordings:
        assert sys.modules["pynvml"] is None
        table = drivers.gpus()
    assert {name: sys.modules.get(name) for name in ERRORS} == before
    (tmp_path / "again.json").write_text(json.dumps(recordings))
    with replayed(tmp_path / "again.json"):
        assert drivers.gpus() == table


def test_gpus_of_a_recording_are_listed_or_that_it_has_none(capsys, tmp_path):
    assert main(["doctor", "--replay", str(RECORDINGS / "nvidia-h100-x2.json")]) == 0
    printed = capsys.readouterr().out
    assert "588 W of 700 W" in printed
    assert "a process (pid 11345, 15.3 GiB) on GPU 1" in printed
    (tmp_path / "none.json").write_text("[]")
    assert main(["doctor", "--replay", str(tmp_path / "none.json")]) == 0
    assert capsys.readouterr().out == f"no GPU is recorded in {tmp_path / 'none.json'}\n"
