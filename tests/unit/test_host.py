"""Tests what is read of the host, on made-up files of Linux."""

import os

import pytest

from pytest_gputrain.utils.host import network_cards, usable_cores, usable_memory_bytes
from pytest_gputrain.utils.units import GiB


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("nonsense", 8)])
def test_a_container_s_quota_limits_the_cores(tmp_path, monkeypatch, quota, cores):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert len(usable_cores(tmp_path)) == cores


def test_a_container_s_limit_is_its_memory(tmp_path):
    of_host = usable_memory_bytes(tmp_path)
    assert of_host == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, expected in (("max", of_host), (str(1 * GiB // 2), GiB // 2), (str(of_host * 2), of_host)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert usable_memory_bytes(tmp_path) == expected


class Sys:
    """A tree like that of /sys, with the links that it has between devices and their interfaces."""

    def __init__(self, path):
        self.path = path

    def device(self, name, driver):
        device = self.path / "devices" / name
        if not device.exists():
            (self.path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            device.mkdir(parents=True)
            (device / "driver").symlink_to(self.path / "drivers" / driver)
        return device

    def interface(self, name, device, speed, operstate="up"):
        folder = self.path / "class" / "net" / name
        folder.mkdir(parents=True)
        if device is not None:
            (folder / "device").symlink_to(device)
        if speed is not None:
            (folder / "speed").write_text(f"{speed}\n")
        (folder / "operstate").write_text(f"{operstate}\n")

    def infiniband(self, name, device, rate, state="4: ACTIVE"):
        folder = self.path / "class" / "infiniband" / name
        port = folder / "ports" / "1"
        port.mkdir(parents=True)
        (folder / "device").symlink_to(device)
        (port / "rate").write_text(f"{rate}\n")
        (port / "state").write_text(f"{state}\n")


@pytest.fixture
def sys(tmp_path):
    return Sys(tmp_path)


def test_cards_are_counted_by_kind_and_rate(sys):
    for number in range(8):
        device = sys.device(f"rail{number}", "mlx5_core")
        sys.infiniband(f"mlx5_{number}", device, "400 Gb/sec (4X NDR)")
        sys.interface(f"ib{number}", device, "400000")  # the same card
    sys.interface("ens1", sys.device("front", "ixgbe"), "10000")
    sys.interface("lo", None, None, "unknown")
    sys.interface("docker0", None, "-1")
    assert network_cards(sys.path) == ("1 x ixgbe 10 Gb/s", "8 x mlx5_core 400 Gb/sec (4X NDR)")


def test_a_card_without_a_link_says_so_a_virtual_one_has_no_rate_and_a_container_has_none(sys):
    assert network_cards(sys.path) == ()
    sys.infiniband("mlx5_0", sys.device("rail0", "mlx5_core"), "10 Gb/sec (4X SDR)", "1: DOWN")
    sys.interface("ens1", sys.device("front", "ixgbe"), None, "down")
    sys.interface("eth0", sys.device("virtio2", "virtio_net"), "-1")
    assert network_cards(sys.path) == ("1 x ixgbe down", "1 x mlx5_core down", "1 x virtio_net")
