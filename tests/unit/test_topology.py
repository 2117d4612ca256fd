"""The paths between GPUs, from what NVML replies on machines that are not here."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_gputrain.cli.devices import links
from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.hardware.drivers import paths
from pytest_gputrain.hardware.topology import Place, Sysfs
from pytest_gputrain.utils.units import format_topology

LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
"""As NVML numbers them."""

TABLE = Path(__file__).parents[2] / "baselines" / "published" / "paddle-distributed.json"


class NVMLError(Exception):
    value = 3
    """Not supported."""


class Machine:
    """An NVML of GPUs whose NVLinks lead to each other's addresses, into switches, or nowhere."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    def __init__(self, matrix: Sequence[Sequence[str]], *, switched: bool = False, knows_types: bool = True) -> None:
        self._switched, self._knows_types = switched, knows_types
        self._ancestors = {
            (row_gpu, other): LEVELS.get(path, LEVELS["SYS"]) if path != "N/A" else None
            for row_gpu, row in enumerate(matrix)
            for other, path in enumerate(row)
        }
        links = [[int(path[2:]) if path.startswith("NV") else 0 for path in row] for row in matrix]
        # Through switches each link leads to all others: a GPU has as many as to any one of them.
        self._ends = [
            [-1] * max(row) if switched else [other for other, count in enumerate(row) for _ in range(count)]
            for row in links
        ]

    def library(self) -> types.ModuleType:
        nvml: Any = types.ModuleType("pynvml")
        for name in ("NVML_NVLINK_MAX_LINKS", "NVML_NVLINK_DEVICE_TYPE_SWITCH"):
            setattr(nvml, name, getattr(self, name))
        for name, level in zip(("SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM"), LEVELS.values(), strict=True):
            setattr(nvml, f"NVML_TOPOLOGY_{name}", level)
        nvml.NVMLError = NVMLError
        nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_LIBRARY_NOT_FOUND = 9, 12
        nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
        nvml.nvmlDeviceGetCount = lambda: len(self._ends)
        nvml.nvmlDeviceGetHandleByIndex = lambda index: index
        nvml.nvmlDeviceGetPciInfo = self._address
        nvml.nvmlDeviceGetNvLinkState = lambda gpu, link: 1 if self._end(gpu, link) is not None else 0
        nvml.nvmlDeviceGetNvLinkRemotePciInfo = lambda gpu, link: (
            self._address(100 + link % 6) if self._switched else self._address(self._end(gpu, link))
        )
        nvml.nvmlDeviceGetNvLinkRemoteDeviceType = self._type
        nvml.nvmlDeviceGetTopologyCommonAncestor = self._ancestor
        return nvml

    def _end(self, gpu: int, link: int) -> int | None:
        if not self._ends[gpu]:
            raise NVMLError("Not Supported")
        if link >= 12 > len(self._ends[gpu]):
            raise NVMLError("Invalid Argument")
        return self._ends[gpu][link] if link < len(self._ends[gpu]) else None

    def _address(self, device: int | None) -> types.SimpleNamespace:
        assert device is not None
        return types.SimpleNamespace(domain=0, bus=0x1B + device, device=0)

    def _type(self, gpu: int, link: int) -> int:
        if not self._knows_types:
            raise NVMLError("Function Not Found")
        return 2 if self._switched else 0

    def _ancestor(self, first: int, other: int) -> int:
        level = self._ancestors[first, other]
        if level is None:
            raise NVMLError("Not Supported")
        return level


def _gpus(*indices: int) -> list[Gpu]:
    return [Gpu(index=index, uuid=f"GPU-{index}", name="GPU", memory_bytes=1, driver="1") for index in indices]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*arguments: Any, **options: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", Machine(*arguments, **options).library())

    return install


def _document() -> list[list[str]]:
    lines = json.loads(TABLE.read_text())["platforms"]["v100_32gb"]["topology"]
    return [line.split()[1:9] for line in lines[1:9]]


@pytest.mark.parametrize("knows_types", [True, False], ids=["", "a driver that tells no types"])
def test_the_machine_of_the_document_is_as_its_matrix(machine: Any, knows_types: bool) -> None:
    machine(_document(), knows_types=knows_types)
    measured_paths = paths(_gpus(*range(8)))
    assert [list(row) for row in measured_paths] == _document()
    assert format_topology(measured_paths) == "8 x NV1, 8 x NV2, 12 x NODE"


def _all(path: str, count: int) -> list[list[str]]:
    return [["X" if row == other else path for other in range(count)] for row in range(count)]


@pytest.mark.parametrize(("count", "links"), [(8, 18), (8, 12), (2, 18)])
def test_switches_link_all_gpus_alike(machine: Any, count: int, links: int) -> None:
    machine(_all(f"NV{links}", count), switched=True)
    measured_paths = paths(_gpus(*range(count)))
    assert [list(row) for row in measured_paths] == _all(f"NV{links}", count)
    assert format_topology(measured_paths) == f"NV{links}"


def test_a_gpu_that_lost_links_into_the_switches_is_seen(machine: Any) -> None:
    matrix = _all("NV18", 4)
    matrix[2] = ["NV9", "NV9", "X", "NV9"]
    for row in matrix[:2] + matrix[3:]:
        row[2] = "NV9"
    machine(matrix, switched=True)
    assert [list(row) for row in paths(_gpus(0, 1, 2, 3))] == matrix


@pytest.mark.parametrize("path", [*LEVELS, "N/A"])
def test_without_links_it_is_where_they_meet_on_pcie(machine: Any, path: str) -> None:
    machine(_all(path, 4))
    assert [list(row) for row in paths(_gpus(0, 1, 2, 3))] == _all(path, 4)


def test_rows_are_in_the_order_of_the_case_s_gpus(machine: Any) -> None:
    machine(_document())
    lent = (6, 0, 3)
    matrix = _document()
    assert paths(_gpus(*lent)) == tuple(tuple(matrix[row_gpu][other] for other in lent) for row_gpu in lent)


def test_one_gpu_has_no_topology_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    assert paths(_gpus(0)) == paths([]) == ()


def test_without_a_driver_there_is_no_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert paths(_gpus(0, 1)) == ()


def test_every_pair_counts_once() -> None:
    rows = [["X", "NV2", "SYS"], ["NV2", "X", "SYS"], ["SYS", "SYS", "X"]]
    assert format_topology(rows) == "1 x NV2, 2 x SYS"
    for order in itertools.permutations(range(3)):
        assert format_topology([[rows[row_gpu][other] for other in order] for row_gpu in order]) == "1 x NV2, 2 x SYS"
    assert format_topology(()) == "unknown"


# Cores, and network cards


class FakeSysfs:
    """A sysfs with devices on PCIe, each at the end of its bridges."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bus" / "pci" / "devices").mkdir(parents=True)

    def add(self, *way: str, node: str = "-1", cores: str = "") -> Path:
        device = self.root.joinpath("devices", *way)
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (device / "local_cpulist").write_text(f"{cores}\n")
        (self.root / "bus" / "pci" / "devices" / way[-1]).symlink_to(device)
        return device

    def card(self, kind: str, name: str, device: Path | None) -> None:
        entry = self.root / "class" / kind / name
        entry.mkdir(parents=True)
        if device is not None:
            (entry / "device").symlink_to(device)


@pytest.fixture
def host(tmp_path: Path) -> FakeSysfs:
    """Two sockets. On the first a GPU and a card behind one switch, a GPU behind a second one, and one without a switch."""
    sys = FakeSysfs(tmp_path)
    switch = ("pci0000:16", "0000:16:01.0", "0000:17:00.0")
    sys.add(*switch, "0000:18:00.0", "0000:1b:00.0", node="0", cores="0-19,40-59")
    card = sys.add(*switch, "0000:18:01.0", "0000:1a:00.0", node="0")
    sys.add(*switch, "0000:18:02.0", "0000:30:00.0", "0000:31:00.0", "0000:43:00.0", node="0")
    sys.add("pci0000:16", "0000:16:03.0", "0000:52:00.0", node="0")
    sys.add("pci0000:60", "0000:60:01.0", "0000:61:00.0", node="0")
    other = sys.add("pci0000:80", "0000:80:01.0", "0000:83:00.0", node="1", cores="20-39,60-79")
    sys.card("infiniband", "mlx5_0", card)
    sys.card("infiniband", "mlx5_1", other)
    sys.card("net", "lo", None)
    virtual = other / "virtio1"
    virtual.mkdir()
    sys.card("net", "eth0", virtual)
    return sys


@pytest.mark.parametrize(
    ("gpu", "to_first", "to_second"),
    [
        ("0000:1b:00.0", "PIX", "SYS"),
        ("0000:43:00.0", "PXB", "SYS"),
        ("0000:52:00.0", "PHB", "SYS"),
        ("0000:61:00.0", "NODE", "SYS"),
        ("0000:99:00.0", "N/A", "N/A"),
        ("", "N/A", "N/A"),
    ],
)
def test_cards_are_as_far_as_the_bridges_between(host: FakeSysfs, gpu: str, to_first: str, to_second: str) -> None:
    sysfs = Sysfs(host.root)
    cards = sysfs.cards()
    assert cards == {"mlx5_0": "0000:1a:00.0", "mlx5_1": "0000:83:00.0"}
    assert [sysfs.path(gpu, card) for card in cards.values()] == [to_first, to_second]
    assert [sysfs.path(card, gpu) for card in cards.values()] == [to_first, to_second]


def test_a_host_without_rdma_has_its_other_cards(host: FakeSysfs) -> None:
    shutil.rmtree(host.root / "class" / "infiniband")
    assert Sysfs(host.root).cards() == {"eth0": "0000:83:00.0"}


def test_the_cores_near_a_gpu_are_told(host: FakeSysfs) -> None:
    sysfs = Sysfs(host.root)
    assert sysfs.place("0000:1b:00.0") == Place("0-19,40-59", 0)
    assert sysfs.place("0000:83:00.0") == Place("20-39,60-79", 1)
    host.add("pci0000:90", "0000:91:00.0")
    assert sysfs.place("0000:91:00.0") == sysfs.place("0000:99:00.0") == sysfs.place("") == Place()


def test_a_table_has_only_what_is_known(host: FakeSysfs, machine: Any) -> None:
    machine(_all("NV18", 2), switched=True)
    gpus = [
        dataclasses.replace(gpu, pci_address=address)
        for gpu, address in zip(_gpus(0, 1), ("0000:1b:00.0", "0000:83:00.0"), strict=True)
    ]
    table = links(gpus, Sysfs(host.root))
    assert table.headers == ("", "GPU 0", "GPU 1", "mlx5_0", "mlx5_1", "Cores", "NUMA node")
    assert table.rows == (
        ("GPU 0", "X", "NV18", "PIX", "SYS", "0-19,40-59", "0"),
        ("GPU 1", "NV18", "X", "SYS", "PIX", "20-39,60-79", "1"),
    )
    elsewhere = [dataclasses.replace(gpu, pci_address="0000:99:00.0") for gpu in gpus]
    assert links(elsewhere, Sysfs(host.root)).headers == ("", "GPU 0", "GPU 1")
    assert links(gpus, Sysfs(host.root / "nowhere")).headers == ("", "GPU 0", "GPU 1")
    assert links(gpus[:1], Sysfs(host.root / "nowhere")).rows == (("GPU 0", "X"),)
