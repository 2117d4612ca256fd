"""Where GPUs and network cards are on a host, by its sysfs; test_nvidia_driver has the links that NVML tells of."""

import dataclasses
import itertools
import shutil
import sys

import pytest

from pytest_gputrain.cli.doctor_gpus import links
from pytest_gputrain.hardware import drivers
from pytest_gputrain.hardware.devices import Gpu
from pytest_gputrain.hardware.drivers import paths
from pytest_gputrain.hardware.topology import Place, Sysfs
from pytest_gputrain.utils.units import format_topology


def _gpus(*addresses):
    return [
        Gpu(index=index, uuid=f"GPU-{index}", name="GPU", memory_bytes=1, driver="1", pci_address=address)
        for index, address in enumerate(addresses)
    ]


def test_every_pair_counts_once_and_without_a_driver_there_is_no_topology(monkeypatch):
    rows = [["X", "NV2", "SYS"], ["NV2", "X", "SYS"], ["SYS", "SYS", "X"]]
    for order in itertools.permutations(range(3)):
        assert format_topology([[rows[row_gpu][other] for other in order] for row_gpu in order]) == "1 x NV2, 2 x SYS"
    assert format_topology(()) == "unknown"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert paths(_gpus("0000:1b:00.0", "0000:83:00.0")) == ()


class FakeSysfs:
    """A sysfs with devices on PCIe, each at the end of its bridges."""

    def __init__(self, root):
        self.root = root
        (root / "bus" / "pci" / "devices").mkdir(parents=True)

    def add(self, *way, node="-1", cores=""):
        device = self.root.joinpath("devices", *way)
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (device / "local_cpulist").write_text(f"{cores}\n")
        (self.root / "bus" / "pci" / "devices" / way[-1]).symlink_to(device)
        return device

    def card(self, kind, name, device):
        entry = self.root / "class" / kind / name
        entry.mkdir(parents=True)
        if device is not None:
            (entry / "device").symlink_to(device)


@pytest.fixture
def host(tmp_path):
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
def test_cards_are_as_far_as_the_bridges_between(host, gpu, to_first, to_second):
    sysfs = Sysfs(host.root)
    cards = sysfs.cards()
    assert cards == {"mlx5_0": "0000:1a:00.0", "mlx5_1": "0000:83:00.0"}
    assert [sysfs.path(gpu, card) for card in cards.values()] == [to_first, to_second]
    assert [sysfs.path(card, gpu) for card in cards.values()] == [to_first, to_second]


def test_a_host_without_rdma_has_its_other_cards(host):
    shutil.rmtree(host.root / "class" / "infiniband")
    assert Sysfs(host.root).cards() == {"eth0": "0000:83:00.0"}


def test_the_cores_near_a_gpu_are_told(host):
    sysfs = Sysfs(host.root)
    assert sysfs.place("0000:1b:00.0") == Place("0-19,40-59", 0)
    assert sysfs.place("0000:83:00.0") == Place("20-39,60-79", 1)
    host.add("pci0000:90", "0000:91:00.0")
    assert sysfs.place("0000:91:00.0") == sysfs.place("0000:99:00.0") == sysfs.place("") == Place()


def test_a_table_has_only_what_is_known(host, monkeypatch):
    monkeypatch.setattr(drivers, "paths", lambda gpus: (("X", "NV18"), ("NV18", "X"))[: len(gpus)] if len(gpus) > 1 else ())
    gpus = _gpus("0000:1b:00.0", "0000:83:00.0")
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
