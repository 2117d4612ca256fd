"""Reads from Linux where GPUs and network cards sit: the cores that are near a GPU, and the PCIe between it and each card.

GPUs are found by `devices.Gpu.pci_address`, whatever their vendor. The names of paths are those of ``nvidia-smi topo -m``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pytest_gputrain.hardware.devices import UNKNOWN
from pytest_gputrain.utils.host import text_of

_BRIDGE: Final = re.compile(r"pci[0-9a-f]+:[0-9a-f]{2}")
"""A host bridge, as sysfs names it."""
_FUNCTION: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A device on PCIe, or a bridge on the way to it."""


class Place(NamedTuple):
    """The place of a device in its host."""

    cores: str = ""
    """The nearest ones, as Linux writes lists: ``0-19,40-59``; empty if it does not tell."""
    numa_node: int | None = None
    """The NUMA node; None if Linux does not report it, or if there is only one."""


class Sysfs:
    """The GPUs and network cards of this host, as Linux shows them in ``/sys``.

    Args:
        root: where sysfs is mounted.
    """

    def __init__(self, root: Path = Path("/sys")) -> None:
        self._root = root

    def place(self, address: str) -> Place:
        """Return the place of the device with that PCI address."""
        device = self._root / "bus" / "pci" / "devices" / address
        if not address or not device.exists():
            return Place()
        node = text_of(device / "numa_node")
        return Place(text_of(device / "local_cpulist"), int(node) if node.isdecimal() else None)  # -1 means none

    def cards(self) -> dict[str, str]:
        """Return the PCI addresses of network cards by name: of those with RDMA, or of all if none has it."""
        return dict(self._cards("infiniband")) or dict(self._cards("net"))

    def path(self, address: str, other: str) -> str:
        """Return what lies between two devices on PCIe, in the terms of ``nvidia-smi topo -m``; ``N/A`` if it is unknown."""
        ways = self._way(address), self._way(other)
        if not all(ways):
            return UNKNOWN
        # The list of a device has the host bridge, the root port, ports of switches and the device, in this order.
        common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*ways, strict=False))))
        if common == 0:
            nodes = self.place(address).numa_node, self.place(other).numa_node
            return "NODE" if nodes[0] == nodes[1] else "SYS"
        if common == 1:
            return "PHB"
        # Two devices behind one switch share all entries but two: a lower port of the switch, and the device. Without a
        # switch below the root port, only the device differs.
        return "PIX" if max(map(len, ways)) - common <= 2 else "PXB"

    def _way(self, address: str) -> list[str]:
        """Return the host bridge, the bridges and the device, beginning at the processor; empty if the address does not
        exist."""
        device = self._root / "bus" / "pci" / "devices" / address
        if not address or not device.exists():
            return []
        return [part for part in device.resolve().parts if _BRIDGE.fullmatch(part) or _FUNCTION.fullmatch(part)]

    def _cards(self, kind: str) -> Iterator[tuple[str, str]]:
        for card in sorted((self._root / "class" / kind).glob("*")):
            # Bridges and tunnels of the network have no device. The device of a virtual card is a child of the device on
            # PCIe.
            functions = [part for part in (card / "device").resolve().parts if _FUNCTION.fullmatch(part)]
            if (card / "device").exists() and functions:
                yield card.name, functions[-1]
