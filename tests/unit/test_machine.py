"""What a run may use: the driver's GPUs within CUDA_VISIBLE_DEVICES and the options."""

import keyword
import re
import sys
import tomllib
import types
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gputrain.hardware import catalog, nvidia
from pytest_gputrain.hardware.catalog import MARKERS, PLATFORMS, marker_of, peak_flops, slug
from pytest_gputrain.hardware.devices import Gpu, HardwareError
from pytest_gputrain.hardware.machine import Machine, detect
from pytest_gputrain.utils.units import GiB, MiB

H200 = ("GPU-1f0e5c1a-0000-1111-2222-333344445555", "NVIDIA H200", 141 * GiB)
TWIN = ("GPU-2a9b8c7d-0000-1111-2222-333344445555", "NVIDIA H200", 141 * GiB)
Z9000 = ("GPU-0", "NVIDIA Z9000", GiB)
T4 = ("GPU-3c3c3c3c-0000-1111-2222-333344445555", "Tesla T4", 16 * GiB)

Driver = Callable[..., list[str]]


@pytest.fixture
def driver(monkeypatch):
    """Puts an NVML with these GPUs in the place of pynvml, and returns the calls that open and close it."""

    def install(*gpus, loaded=True):
        calls = []
        nvml = types.ModuleType("pynvml")

        class NVMLError(Exception):
            value = 9

        nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_LIBRARY_NOT_FOUND = 9, 12

        def init():
            calls.append("init")
            if not loaded:
                raise NVMLError("Driver Not Loaded")

        nvml.NVMLError = NVMLError
        nvml.nvmlInit = init
        nvml.nvmlShutdown = lambda: calls.append("shutdown")
        nvml.nvmlSystemGetDriverVersion = lambda: "580.10"
        nvml.nvmlDeviceGetCount = lambda: len(gpus)
        nvml.nvmlDeviceGetHandleByIndex = lambda index: gpus[index]
        nvml.nvmlDeviceGetUUID = lambda gpu: gpu[0]
        nvml.nvmlDeviceGetName = lambda gpu: gpu[1]
        nvml.nvmlDeviceGetMemoryInfo = lambda gpu: types.SimpleNamespace(total=gpu[2], free=gpu[2] - GiB)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return calls

    return install


def _indices(machine):
    return [gpu.index for gpu in machine.gpus]


def _detect(visible=None, **how):
    return detect(environ={} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, **how)


def test_a_gpu_is_as_its_driver_describes_it(driver):
    calls = driver(H200)
    machine = _detect()
    (gpu,) = machine.gpus
    assert (gpu.index, gpu.uuid, gpu.name, gpu.memory_bytes, gpu.driver) == (0, *H200, "580.10")
    assert (machine.platform, machine.device_type) == ("h200", "gpu")
    assert (machine.device_name, machine.slug) == ("NVIDIA H200", "nvidia-h200")
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize("visible", [None, "0"])
def test_a_host_without_a_driver_or_gpus_or_binding_is_a_cpu(driver, visible, monkeypatch):
    calls = driver(loaded=False)
    machine = _detect(visible)
    assert (machine.gpus, machine.platform, machine.device_type) == ((), "cpu", "cpu")
    assert (machine.device_name, machine.slug) == ("cpu", "cpu")
    assert calls == ["init"]
    driver()
    assert _detect(visible).platform == "cpu"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _detect(visible).platform == "cpu"


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1]),
        ("0,1", [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        (" 1 , 0 ", [1, 0]),
        (TWIN[0], [1]),
        ("GPU-2a9b", [1]),
        (f"{TWIN[0]},0", [1, 0]),
        ("0,7,1", [0]),
        ("-1", []),
        ("-1,0", []),
        ("NoDevFiles", []),
        ("1,-1,0", [1]),
        ("", []),
    ],
)
def test_visible_devices_are_those_cuda_would_show(driver, visible, indices):
    driver(H200, TWIN)
    machine = _detect(visible)
    assert _indices(machine) == indices
    assert machine.platform == ("h200" if indices else "cpu")


@pytest.mark.parametrize(
    ("ids", "indices"), [(("0",), [0]), (("1", "0"), [1, 0]), ((TWIN[0],), [1]), (("GPU-2a9b",), [1]), ((), [0, 1])]
)
def test_ids_choose_among_the_visible(driver, ids, indices):
    driver(H200, TWIN)
    assert _indices(_detect(gpu_ids=ids)) == indices
    driver(H200, T4)
    assert [_detect(gpu_ids=[of_kind]).platform for of_kind in "01"] == ["h200", "t4"], "of two kinds one can be chosen"


@pytest.mark.parametrize(
    ("gpu", "platform", "found"),
    [(H200, "h200", "h200"), (Z9000, None, "unknown"), (Z9000, "h100", "h100"), (T4, None, "t4")],
)
def test_a_gpu_that_the_catalog_lacks_passes_for_what_is_asked(driver, gpu, platform, found):
    driver(gpu)
    machine = _detect(platform=platform)
    assert (machine.platform, machine.slug, _indices(machine)) == (found, slug(gpu[1]), [0])


@pytest.mark.parametrize(
    ("gpus", "visible", "how", "sentence"),
    [
        *(
            ((H200, TWIN), visible, {}, f"CUDA_VISIBLE_DEVICES={visible} shows none of the 2 GPUs")
            for visible in ("7,0", "none", "2a9b8c7d", "MIG-2a9b8c7d", "all")
        ),
        *(
            ((H200, TWIN), None, {"gpu_ids": [wanted]}, rf"--gpu-ids: .*{wanted!r}.*0 \({H200[0]}\), 1 \({TWIN[0]}\)")
            for wanted in ("2", "GPU-9", "", "h200", "01")
        ),
        ((("ddd1d5ac-9f3c", "Orin (nvgpu)", GiB),), "ddd1", {}, "CUDA_VISIBLE_DEVICES=ddd1 shows none of the 1 GPU"),
        ((H200, TWIN), "0", {"gpu_ids": ["1"]}, "no visible GPU '1'"),
        ((), None, {"gpu_ids": ["0"]}, "visible: none"),
        ((H200, (TWIN[0], "NVIDIA H200", 70 * GiB)), None, {}, r"NVIDIA H200 \(h200\), NVIDIA H200 \(of no marker\)"),
        ((H200, T4), None, {}, r"NVIDIA H200, Tesla T4.*--gpu-ids"),
        ((H200,), None, {"platform": "h100"}, r"--gpu-platform=h100, but the GPU here is h200 \(NVIDIA H200\)"),
        ((), None, {"platform": "h100"}, "--gpu-platform=h100, but no GPU is visible"),
        ((H200,), None, {"platform": "cpu", "gpu_ids": ["0"]}, "--gpu-ids"),
    ],
)
def test_what_no_gpu_here_can_be_is_told(driver, gpus, visible, how, sentence):
    driver(*gpus)
    with pytest.raises(HardwareError, match=sentence):
        _detect(visible, **how)


@pytest.mark.parametrize(("visible", "ids"), [("0,0", []), (f"0,{H200[0]}", []), (None, ["0", H200[0]])])
def test_one_gpu_never_counts_as_two(driver, visible, ids):
    """A case of two GPUs would wait for ever for the second lease of the same device."""
    driver(H200)
    try:
        indices = _indices(_detect(visible, gpu_ids=ids))
    except HardwareError:
        return
    assert len(indices) == len(set(indices))


def test_a_host_with_gpus_but_without_their_library_is_no_cpu(driver, monkeypatch, tmp_path):
    driver(loaded=False)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(nvidia, "DEVICE_FILES", tmp_path)
    with pytest.raises(HardwareError, match="--gpu-platform=cpu"):
        _detect()


def test_passing_for_a_cpu_leaves_the_driver_alone(driver):
    calls = driver(H200)
    assert (_detect(platform="cpu").gpus, calls) == ((), [])


# Catalog

WHOLE = [
    # Names that drivers give, with the MiB that nvidia-smi or amd-smi prints; 0 where that is not known, or not told.
    ("NVIDIA H100 80GB HBM3", 81559, "h100"),
    ("NVIDIA H100 PCIe", 81559, "h100_pcie"),
    ("NVIDIA H100 NVL", 95830, "h100_nvl"),
    ("NVIDIA H200", 143771, "h200"),
    ("NVIDIA H200 NVL", 143771, "h200_nvl"),
    ("NVIDIA H20", 97871, "h20"),
    ("NVIDIA H20-3e", 143771, "h20_3e"),
    ("NVIDIA H800", 81559, "h800"),
    ("NVIDIA H800 PCIe", 81559, "h800_pcie"),
    ("NVIDIA GH200 480GB", 97871, "gh200"),
    ("NVIDIA GH200 120GB", 97871, "gh200"),
    ("NVIDIA GH200 144G HBM3e", 0, "gh200_144gb"),
    ("NVIDIA B200", 183359, "b200"),
    ("NVIDIA GB200", 189471, "gb200"),
    ("NVIDIA B300 SXM6 AC", 275040, "b300"),
    ("NVIDIA GB300", 284208, "gb300"),
    ("NVIDIA GB10", 0, "gb10"),
    ("NVIDIA A100-SXM4-80GB", 81920, "a100"),
    ("NVIDIA A100-SXM4-40GB", 40960, "a100_40gb"),
    ("A100-SXM4-40GB", 40536, "a100_40gb"),
    ("NVIDIA A100 80GB PCIe", 81920, "a100_pcie"),
    ("NVIDIA A100-PCIE-40GB", 40960, "a100_pcie_40gb"),
    ("NVIDIA A800-SXM4-80GB", 81920, "a800"),
    ("NVIDIA A800 80GB PCIe", 81920, "a800_pcie"),
    ("Tesla V100-SXM2-16GB", 16160, "v100"),
    ("Tesla V100-SXM2-32GB", 32510, "v100_32gb"),
    ("Tesla V100-PCIE-16GB", 16160, "v100_pcie"),
    ("Tesla V100-PCIE-32GB", 32510, "v100_pcie_32gb"),
    ("Tesla V100S-PCIE-32GB", 32510, "v100s"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("NVIDIA L40", 46068, "l40"),
    ("NVIDIA L4", 23034, "l4"),
    ("NVIDIA A10", 23028, "a10"),
    ("NVIDIA A10G", 23028, "a10g"),
    ("Tesla T4", 15109, "t4"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx_pro_6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "rtx_pro_6000_maxq"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx_pro_6000_server"),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx_6000_ada"),
    ("NVIDIA RTX A6000", 49140, "rtx_a6000"),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx_3090"),
    ("GeForce RTX 3090", 24576, "rtx_3090"),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx_4090"),
    ("NVIDIA GeForce RTX 5090", 32607, "rtx_5090"),
    ("NVIDIA RTX PRO 5000 72GB Blackwell", 0, "rtx_pro_5000_72gb"),
    ("NVIDIA RTX PRO 5000 Blackwell", 48935, "rtx_pro_5000"),
    ("NVIDIA RTX PRO 4500 Blackwell", 32623, "rtx_pro_4500"),
    ("NVIDIA RTX PRO 4000 Blackwell", 24467, "rtx_pro_4000"),
    ("NVIDIA RTX 5000 Ada Generation", 32760, "rtx_5000_ada"),
    ("NVIDIA RTX 4500 Ada Generation", 24570, "rtx_4500_ada"),
    ("NVIDIA RTX 4000 Ada Generation", 20475, "rtx_4000_ada"),
    ("NVIDIA RTX 4000 SFF Ada Generation", 20475, "rtx_4000_sff_ada"),
    ("NVIDIA RTX A5500", 24564, "rtx_a5500"),
    ("NVIDIA RTX A5000", 24564, "rtx_a5000"),
    ("NVIDIA RTX A4500", 20470, "rtx_a4500"),
    ("NVIDIA RTX A4000", 16376, "rtx_a4000"),
    ("NVIDIA GeForce RTX 5080", 16303, "rtx_5080"),
    ("NVIDIA GeForce RTX 5070 Ti", 16303, "rtx_5070_ti"),
    ("NVIDIA GeForce RTX 5070", 12227, "rtx_5070"),
    ("NVIDIA GeForce RTX 5060 Ti", 8151, "rtx_5060_ti"),
    ("NVIDIA GeForce RTX 5060 Ti", 16311, "rtx_5060_ti_16gb"),
    ("NVIDIA GeForce RTX 4080 SUPER", 16376, "rtx_4080_super"),
    ("NVIDIA GeForce RTX 4080", 16376, "rtx_4080"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "rtx_4070_ti_super"),
    ("NVIDIA GeForce RTX 4070 Ti", 12282, "rtx_4070_ti"),
    ("NVIDIA GeForce RTX 4070 SUPER", 12282, "rtx_4070_super"),
    ("NVIDIA GeForce RTX 4070", 12282, "rtx_4070"),
    ("NVIDIA GeForce RTX 4060 Ti", 8188, "rtx_4060_ti"),
    ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx_4060_ti_16gb"),
    ("NVIDIA GeForce RTX 3090 Ti", 24564, "rtx_3090_ti"),
    ("NVIDIA GeForce RTX 3080 Ti", 12288, "rtx_3080_ti"),
    ("NVIDIA GeForce RTX 3080", 12288, "rtx_3080_12gb"),
    ("NVIDIA GeForce RTX 3080", 10240, "rtx_3080"),
    ("NVIDIA GeForce RTX 3070 Ti", 8192, "rtx_3070_ti"),
    ("NVIDIA GeForce RTX 3070", 8192, "rtx_3070"),
    ("NVIDIA GeForce RTX 3060 Ti", 8192, "rtx_3060_ti"),
    ("NVIDIA GeForce RTX 3060", 12288, "rtx_3060"),
    ("AMD Instinct MI355X", 294896, "mi355x"),
    ("AMD Instinct MI325X", 262128, "mi325x"),
    ("AMD Instinct Mi325X VF", 262128, "mi325x"),
    ("AMD Instinct MI300X", 196592, "mi300x"),
    ("AMD Instinct MI300X OAM", 196592, "mi300x"),
    ("AMD Instinct MI300X VF", 196592, "mi300x"),
    ("AMD Instinct MI300A", 0, "mi300a"),
    ("AMD Instinct MI250X", 65520, "mi250x"),
    ("AMD INSTINCT MI250 (MCM) OAM AC MBA", 65520, "mi250"),
    ("AMD Instinct MI210", 65520, "mi210"),
]


@pytest.mark.parametrize(("name", "mib", "marker"), WHOLE, ids=[name for name, _, _ in WHOLE])
def test_boards_are_known_by_what_their_drivers_say(name, mib, marker):
    assert {marker_of(spelt, mib * MiB) for spelt in (name, name.lower(), name.upper())} == {marker}
    assert {of_board for _, _, of_board in WHOLE} == PLATFORMS.keys()


PARTS = (
    "NVIDIA L40S-48Q, NVIDIA L40S-8Q, NVIDIA L4-24Q, NVIDIA T4-16Q, GRID T4-16Q, GRID V100DX-32C, NVIDIA A10-24Q, "
    "NVIDIA A100-40C, GRID A100D-80C, NVIDIA H100-80C, NVIDIA H100L-94C, NVIDIA H200-141C, NVIDIA B200-180C, "
    "NVIDIA RTX Pro 6000 Blackwell DC-1-12Q, NVIDIA A100-SXM4-40GB MIG 1g.5gb, NVIDIA H100 80GB HBM3 MIG 1g.10gb, "
    "AMD Instinct MI300X CPX"
)
"""Virtual GPUs, and parts of GPUs."""
OTHERS = (
    "NVIDIA H100 64GB HBM2, NVIDIA H100 96GB HBM3, NVIDIA A100-SXM-64GB, NVIDIA A800 40GB Active, NVIDIA H800 NVL, "
    "Tesla V100-SXM3-32GB, Tesla V100-FHHL-16GB, NVIDIA L20, NVIDIA T4G, NVIDIA T400, NVIDIA A1000, "
    "NVIDIA RTX PRO 6000 Blackwell, NVIDIA GeForce RTX 5090 D v2, NVIDIA GeForce RTX 5090 Laptop GPU, "
    "NVIDIA RTX A5000 Laptop GPU, NVIDIA GeForce RTX 4060 Ti, NVIDIA GeForce RTX 3080, Orin (nvgpu), NVIDIA Thor, "
    "AMD Instinct MI308X OAM, AMD Instinct MI300X HF, "
    "AMD Radeon Graphics, Graphics Device, cpu, "
)
"""Other boards of that family, names that two boards have, and no board."""


@pytest.mark.parametrize("name", [*PARTS.split(", "), *OTHERS.split(", ")])
def test_what_is_no_whole_board_of_the_catalog_has_no_marker(name):
    assert marker_of(name) is None


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 72, True),
        ("NVIDIA H100 80GB HBM3", 71.9, False),
        ("NVIDIA H100 80GB HBM3", 81.6, True),
        ("NVIDIA H100 80GB HBM3", 81.7, False),
        ("AMD Instinct MI300X VF", 96, False),
        ("NVIDIA H100 80GB HBM3", 0, True),
        ("NVIDIA GeForce RTX 3060", 8, False),
    ],
)
def test_a_board_with_other_memory_is_another(name, gib, known):
    assert (marker_of(name, int(gib * GiB)) is not None) == known


@pytest.mark.parametrize(
    ("name", "units", "marker", "folder"),
    [
        ("AMD Instinct MI250X / MI250", 104, "mi250", "amd-instinct-mi250"),
        ("AMD Instinct MI250X / MI250", 110, "mi250x", "amd-instinct-mi250x"),
        ("AMD Instinct MI250X / MI250", None, None, "amd-instinct-mi250x-mi250"),
        ("AMD INSTINCT MI250 (MCM) OAM AC MBA", 104, "mi250", "amd-instinct-mi250"),
        ("AMD Instinct MI300X", 38, None, "amd-instinct-mi300x"),
    ],
)
def test_boards_of_one_name_are_told_apart_by_their_compute_units_under_every_release_of_rocm(name, units, marker, folder):
    assert marker_of(name, compute_units=units) == marker
    gpu = Gpu(index=0, uuid="0", name=name, memory_bytes=64 * GiB, driver="6", vendor="amd", compute_units=units)
    assert Machine(gpus=(gpu,), platform="").slug == folder


@pytest.mark.parametrize("marker", MARKERS)
def test_every_marker_can_stand_in_an_expression(marker):
    assert marker.isidentifier()
    assert not keyword.iskeyword(marker)
    assert marker == marker.lower()


@pytest.mark.parametrize("marker", PLATFORMS)
def test_every_figure_of_a_platform_is_in_its_unit(marker):
    platform = PLATFORMS[marker]
    assert 8 * GiB <= platform.memory_bytes <= 1024 * GiB
    # Inline error correction takes a sixteenth, the driver less than a gigabyte or three hundredths more.
    assert 0.9 * platform.memory_bytes < platform.usable_bytes < platform.memory_bytes
    assert 1e11 <= platform.bandwidth <= 1e14
    assert set(platform.peak_flops) <= {"fp32", "bf16", "fp16"}
    assert all(1e12 <= rate <= 1e16 for rate in platform.peak_flops.values())
    assert 20 <= platform.multiprocessors <= 400
    assert re.fullmatch(r"sm_\d+|gfx9\w\w", platform.target)
    assert "fp32" in platform.peak_flops
    assert {"fp16", "bf16"} - platform.peak_flops.keys() <= ({"bf16"} if platform.lacks("bf16") else {"bf16", "fp16"})


def test_every_figure_and_document_of_the_catalog_is_read():
    written = tomllib.loads(catalog.BOARDS.read_text())
    read = {"memory", "usable", "usable_bytes", "bandwidth", "fp32", "bf16", "fp16", "multiprocessors", "capability"}
    for board in written["boards"].values():
        assert board.keys() - {"driver"} == {"title", "name", "from"}
        told = [figure for figures in board["from"].values() for figure in figures]
        assert set(told) <= read
        assert len(told) == len(set(told))
    used = {document for board in written["boards"].values() for document in board["from"]}
    assert written["documents"].keys() == used


def test_a_capacity_that_no_driver_reported_is_marked_and_no_higher_than_a_known_one_of_its_size():
    known = {"rtx_3090_ti": 25_291_849_728, "rtx_pro_5000_72gb": 76_374_540_288}
    assert {marker: PLATFORMS[marker].usable_bytes for marker in known} == known
    computed = [platform for platform in PLATFORMS.values() if platform.usable_is_computed]
    assert {"rtx_5060_ti", "h800", "mi250"} <= {platform.marker for platform in computed}
    for one in PLATFORMS.values():
        same = [other for other in computed if other.memory_bytes == one.memory_bytes]
        # Inline error correction, and a host that shares its memory, take more than a driver.
        if not one.usable_is_computed and one.marker not in ("l4", "l40", "l40s", "a10", "a10g", "t4", "gb10"):
            assert all(other.usable_bytes <= one.usable_bytes for other in same)


def test_only_hardware_before_ampere_lacks_bf16():
    lacking = {marker for marker, platform in PLATFORMS.items() if platform.lacks("bf16-amp")}
    assert lacking == {"v100", "v100_32gb", "v100_pcie", "v100_pcie_32gb", "v100s", "t4"}
    assert not PLATFORMS["gb10"].lacks("bf16")  # its rate is not told
    assert peak_flops("gb10", "bf16") is None


@pytest.mark.parametrize(
    ("marker", "precision", "tf32", "peak"),
    [
        ("h100", "bf16", False, 989.4e12),
        ("h100", "bf16-amp", False, 989.4e12),
        ("v100", "fp16-amp", False, 125e12),
        ("h100", "fp32", False, 67e12),
        ("v100", "bf16", False, None),
        ("unknown", "bf16", False, None),
        ("cpu", "fp32", False, None),
        (None, "fp32", False, None),
        # TF32 is half as fast as bf16, where there is any.
        ("h100", "fp32", True, 494.7e12),
        ("a100_40gb", "fp32", True, 156e12),
        ("v100_32gb", "fp32", True, 15.7e12),
        ("gb10", "fp32", True, None),
        ("mi300x", "fp32", True, None),
    ],
)
def test_peak_arithmetic_is_by_platform_and_precision(marker, precision, tf32, peak):
    assert peak_flops(marker, precision, tf32=tf32) == peak


@given(st.text())
@example("../..")
def test_any_device_name_becomes_one_plain_folder(name):
    assert set(slug(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert slug(name) == slug(slug(name)) != ""
    assert (slug("Tesla V100-SXM2-16GB"), slug("../..")) == ("tesla-v100-sxm2-16gb", "unknown")
