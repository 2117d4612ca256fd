"""What a run may use: the driver's GPUs within CUDA_VISIBLE_DEVICES and the options."""

from __future__ import annotations

import keyword
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.hardware import catalog, drivers, nvidia
from pytest_gputrain.hardware.catalog import MARKERS, PLATFORMS, marker_of, peak_flops, slug
from pytest_gputrain.hardware.devices import HardwareError
from pytest_gputrain.hardware.machine import Machine, detect
from pytest_gputrain.utils.units import GiB

H200 = ("GPU-1f0e5c1a-0000-1111-2222-333344445555", "NVIDIA H200", 141 * GiB)
TWIN = ("GPU-2a9b8c7d-0000-1111-2222-333344445555", "NVIDIA H200", 141 * GiB)
T4 = ("GPU-3c3c3c3c-0000-1111-2222-333344445555", "Tesla T4", 16 * GiB)

Driver = Callable[..., list[str]]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Puts an NVML with these GPUs in the place of pynvml, and returns the calls that open and close it."""

    def install(*gpus: tuple[str, str, int], as_bytes: bool = False, loaded: bool = True) -> list[str]:
        calls: list[str] = []
        nvml: Any = types.ModuleType("pynvml")
        encode = str.encode if as_bytes else str

        class NVMLError(Exception):
            value = 9

        nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_LIBRARY_NOT_FOUND = 9, 12

        def init() -> None:
            calls.append("init")
            if not loaded:
                raise NVMLError("Driver Not Loaded")

        nvml.NVMLError = NVMLError
        nvml.nvmlInit = init
        nvml.nvmlShutdown = lambda: calls.append("shutdown")
        nvml.nvmlSystemGetDriverVersion = lambda: encode("580.10")
        nvml.nvmlDeviceGetCount = lambda: len(gpus)
        nvml.nvmlDeviceGetHandleByIndex = lambda index: gpus[index]
        nvml.nvmlDeviceGetUUID = lambda gpu: encode(gpu[0])
        nvml.nvmlDeviceGetName = lambda gpu: encode(gpu[1])
        nvml.nvmlDeviceGetMemoryInfo = lambda gpu: types.SimpleNamespace(total=gpu[2], free=gpu[2] - GiB)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return calls

    return install


def _indices(machine: Machine) -> list[int]:
    return [gpu.index for gpu in machine.gpus]


def test_without_a_driver_the_machine_is_a_cpu(driver: Driver) -> None:
    calls = driver(loaded=False)
    machine = detect(environ={})
    assert (machine.gpus, machine.platform, machine.device_type) == ((), "cpu", "cpu")
    assert (machine.device_name, machine.slug) == ("cpu", "cpu")
    assert calls == ["init"]


@pytest.mark.parametrize("variable", ["7,0", "none", "2a9b8c7d", "MIG-2a9b8c7d", "all"])
def test_a_variable_that_shows_no_gpu_of_a_gpu_host_is_told(driver: Driver, variable: str) -> None:
    driver(H200, TWIN)
    with pytest.raises(HardwareError, match=f"CUDA_VISIBLE_DEVICES={variable} shows none of the 2 GPUs"):
        detect(environ={"CUDA_VISIBLE_DEVICES": variable})


def test_a_variable_left_on_a_host_without_gpus_says_nothing(driver: Driver) -> None:
    driver(loaded=False)
    assert detect(environ={"CUDA_VISIBLE_DEVICES": "0"}).platform == "cpu"


def test_a_driver_that_does_not_match_its_library_is_no_cpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(H200, loaded=False)
    monkeypatch.setattr(sys.modules["pynvml"].NVMLError, "value", 18)
    with pytest.raises(HardwareError, match="NVIDIA driver failed"):
        detect(environ={})


def test_a_driver_that_fails_is_told(driver: Driver) -> None:
    calls = driver(H200)
    nvml = sys.modules["pynvml"]

    def lost(index: int) -> object:
        raise nvml.NVMLError("GPU is lost")

    nvml.nvmlDeviceGetHandleByIndex = lost
    with pytest.raises(HardwareError, match="GPU is lost"):
        detect(environ={})
    assert calls == ["init", "shutdown"]


def test_without_the_binding_the_machine_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect(environ={}).platform == "cpu"


def test_a_driver_without_gpus_is_a_cpu(driver: Driver) -> None:
    driver()
    assert detect(environ={}).platform == "cpu"


@pytest.mark.parametrize("as_bytes", [False, True], ids=["text", "bytes of older bindings"])
def test_a_gpu_is_as_its_driver_describes_it(driver: Driver, as_bytes: bool) -> None:
    driver(H200, as_bytes=as_bytes)
    machine = detect(environ={})
    (gpu,) = machine.gpus
    assert (gpu.index, gpu.uuid, gpu.name, gpu.memory_bytes, gpu.driver) == (0, *H200, "580.10")
    assert (machine.platform, machine.device_type) == ("h200", "gpu")
    assert (machine.device_name, machine.slug) == ("NVIDIA H200", "nvidia-h200")


def test_the_driver_is_let_go(driver: Driver) -> None:
    calls = driver(H200)
    detect(environ={})
    assert calls == ["init", "shutdown"]


def test_a_gpu_the_catalog_lacks_is_unknown(driver: Driver) -> None:
    driver(("GPU-0", "NVIDIA Z9000", GiB))
    assert detect(environ={}).platform == "unknown"


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        ("0,1", [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        (" 1 , 0 ", [1, 0]),
        (TWIN[0], [1]),
        ("GPU-2a9b", [1]),
        (f"{TWIN[0]},0", [1, 0]),
        ("0,7,1", [0]),
        ("-1", []),
        ("1,-1,0", [1]),
        ("", []),
    ],
)
def test_visible_devices_are_those_cuda_would_show(driver: Driver, variable: str, indices: list[int]) -> None:
    driver(H200, TWIN)
    machine = detect(environ={"CUDA_VISIBLE_DEVICES": variable})
    assert _indices(machine) == indices
    assert machine.platform == ("h200" if indices else "cpu")


def test_all_devices_are_visible_without_the_variable(driver: Driver) -> None:
    driver(H200, TWIN)
    assert _indices(detect(environ={})) == [0, 1]


@pytest.mark.parametrize(
    ("ids", "indices"), [(("0",), [0]), (("1", "0"), [1, 0]), ((TWIN[0],), [1]), (("GPU-2a9b",), [1]), ((), [0, 1])]
)
def test_ids_choose_among_the_visible(driver: Driver, ids: tuple[str, ...], indices: list[int]) -> None:
    driver(H200, TWIN)
    assert _indices(detect(gpu_ids=ids, environ={})) == indices


@pytest.mark.parametrize("wanted", ["2", "GPU-9", "", "h200", "01"])
def test_an_unknown_id_is_told_with_the_visible_ones(driver: Driver, wanted: str) -> None:
    driver(H200, TWIN)
    with pytest.raises(HardwareError, match=rf"--gpu-ids: .*{wanted!r}.*0 \({H200[0]}\), 1 \({TWIN[0]}\)"):
        detect(gpu_ids=[wanted], environ={})


def test_an_id_that_is_not_visible_is_unknown(driver: Driver) -> None:
    driver(H200, TWIN)
    with pytest.raises(HardwareError, match="no visible GPU '1'"):
        detect(gpu_ids=["1"], environ={"CUDA_VISIBLE_DEVICES": "0"})


def test_ids_without_any_gpu_are_told(driver: Driver) -> None:
    driver(loaded=False)
    with pytest.raises(HardwareError, match="visible: none"):
        detect(gpu_ids=["0"], environ={})


@pytest.mark.parametrize(
    "how",
    [
        {"environ": {"CUDA_VISIBLE_DEVICES": "0,0"}},
        {"environ": {"CUDA_VISIBLE_DEVICES": f"0,{H200[0]}"}},
        {"environ": {}, "gpu_ids": ["0", H200[0]]},
    ],
    ids=["visible twice", "visible by index and UUID", "ids by index and UUID"],
)
def test_one_gpu_never_counts_as_two(driver: Driver, how: dict[str, Any]) -> None:
    """A case of two GPUs would wait for ever for the second lease of the same device."""
    driver(H200)
    try:
        indices = _indices(detect(**how))
    except HardwareError:
        return
    assert len(indices) == len(set(indices))


def test_gpus_of_several_kinds_are_told(driver: Driver) -> None:
    driver(H200, T4)
    with pytest.raises(HardwareError, match=r"NVIDIA H200, Tesla T4.*--gpu-ids"):
        detect(environ={})


@pytest.mark.parametrize(("ids", "platform"), [(["0"], "h200"), (["1"], "t4")])
def test_one_of_several_kinds_can_be_chosen(driver: Driver, ids: list[str], platform: str) -> None:
    driver(H200, T4)
    assert detect(gpu_ids=ids, environ={}).platform == platform


def test_a_gpu_of_another_platform_than_asked_for_is_told(driver: Driver) -> None:
    driver(H200)
    with pytest.raises(HardwareError, match=r"--gpu-platform=h100, but the GPU here is h200 \(NVIDIA H200\)"):
        detect(platform="h100", environ={})
    assert detect(platform="h200", environ={}).platform == "h200"


def test_a_gpu_that_the_catalog_lacks_passes_for_what_is_asked(driver: Driver) -> None:
    driver(("GPU-0", "NVIDIA Z9000", GiB))
    machine = detect(platform="h100", environ={})
    assert (machine.platform, machine.slug, _indices(machine)) == ("h100", "nvidia-z9000", [0])


@pytest.mark.parametrize("variable", ["-1,0", "NoDevFiles", "", "-1"])
def test_a_variable_may_say_that_no_gpu_is_to_be_used(driver: Driver, variable: str) -> None:
    driver(H200)
    assert detect(environ={"CUDA_VISIBLE_DEVICES": variable}).platform == "cpu"


def test_a_host_with_gpus_but_without_their_library_is_no_cpu(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver(loaded=False)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(nvidia, "DEVICE_FILES", tmp_path)
    with pytest.raises(HardwareError, match="--gpu-platform=cpu"):
        detect(environ={})


def test_passing_for_a_cpu_leaves_the_driver_alone(driver: Driver) -> None:
    calls = driver(H200)
    assert (detect(platform="cpu", environ={}).gpus, calls) == ((), [])


def test_a_platform_without_a_gpu_is_told(driver: Driver) -> None:
    driver()
    with pytest.raises(HardwareError, match="--gpu-platform=h100, but no GPU is visible"):
        detect(platform="h100", environ={})


def test_ids_contradict_the_platform_cpu(driver: Driver) -> None:
    driver(H200)
    with pytest.raises(HardwareError, match="--gpu-ids"):
        detect(platform="cpu", gpu_ids=["0"], environ={})


# Catalog


@pytest.mark.parametrize(
    ("name", "marker"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("A100-SXM4-40GB", "a100"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3090", "rtx_3090"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X", "mi250x"),
        ("nvidia h100", "h100"),
        ("NVIDIA L40", None),
        ("NVIDIA A10", None),
        ("NVIDIA T400", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA A1000", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_devices_are_known_by_their_drivers_name(name: str, marker: str | None) -> None:
    assert marker_of(name) == marker


@pytest.mark.parametrize("marker", MARKERS)
def test_markers_can_stand_in_an_expression(marker: str) -> None:
    assert marker.isidentifier()
    assert not keyword.iskeyword(marker)
    assert marker == marker.lower()


@pytest.mark.parametrize("marker", PLATFORMS)
def test_a_platform_is_found_by_its_own_title(marker: str) -> None:
    assert PLATFORMS[marker].marker == marker
    assert marker_of(f"NVIDIA {PLATFORMS[marker].title}") == marker


def test_markers_are_the_platforms_and_cpu() -> None:
    assert (*PLATFORMS, catalog.CPU) == MARKERS
    assert catalog.CPU not in PLATFORMS


@pytest.mark.parametrize("marker", PLATFORMS)
def test_figures_of_a_platform_are_in_their_units(marker: str) -> None:
    platform = PLATFORMS[marker]
    assert 8 * GiB <= platform.memory_bytes <= 1024 * GiB
    assert 1e11 <= platform.bandwidth <= 1e14
    assert set(platform.peak_flops) <= {"fp32", "bf16", "fp16"}
    assert all(1e12 <= rate <= 1e16 for rate in platform.peak_flops.values())
    assert platform.source


@pytest.mark.parametrize(
    ("marker", "precision", "peak"),
    [
        ("h100", "bf16", 989.4e12),
        ("h100", "bf16-amp", 989.4e12),
        ("v100", "fp16-amp", 125e12),
        ("h100", "fp32", 67e12),
        ("v100", "bf16", None),
        ("unknown", "bf16", None),
        ("cpu", "fp32", None),
        (None, "fp32", None),
    ],
)
def test_peak_arithmetic_is_by_platform_and_precision(marker: str | None, precision: str, peak: float | None) -> None:
    assert peak_flops(marker, precision) == peak


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb"),
        ("cpu", "cpu"),
        ("", "unknown"),
        ("../..", "unknown"),
    ],
)
def test_slugs_name_folders(name: str, folder: str) -> None:
    assert slug(name) == folder


@given(st.text())
def test_any_device_name_becomes_one_plain_folder(name: str) -> None:
    assert set(slug(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert slug(name) == slug(slug(name)) != ""


def _process(pid: int) -> Any:
    return types.SimpleNamespace(pid=pid)


def test_occupancy_is_the_least_free_memory_and_the_other_processes(driver: Driver) -> None:
    driver(H200, T4)
    listed = {H200[0]: [_process(7), _process(os.getpid())], T4[0]: [_process(7), _process(8)]}
    sys.modules["pynvml"].nvmlDeviceGetComputeRunningProcesses = lambda gpu: listed[gpu[0]]
    both = drivers.gpus()
    free, holders = drivers.occupancy(both)
    assert free == 15 * GiB
    assert [(holder.pid, holder.gpu) for holder in holders or ()] == [(7, 0), (7, 1), (8, 1)]
    assert drivers.occupancy(both[:1], own={7}) == (140 * GiB, ())
    assert drivers.occupancy(()) == (None, None)


def test_processes_that_the_driver_does_not_list_are_unknown(driver: Driver) -> None:
    driver(H200)
    nvml = sys.modules["pynvml"]

    def refused(gpu: object) -> object:
        raise nvml.NVMLError("Not Supported")

    nvml.nvmlDeviceGetComputeRunningProcesses = refused
    assert drivers.occupancy(drivers.gpus()) == (140 * GiB, None)
