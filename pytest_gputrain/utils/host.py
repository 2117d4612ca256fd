"""Reads the cores and the memory that Linux lets this process use, and the network cards of the host."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CGROUP: Final = Path("/sys/fs/cgroup")
"""The limits of this container."""
_SYS: Final = Path("/sys")


def usable_cores(cgroup: Path = CGROUP) -> list[int]:
    """Return the numbers of the cores that this process may use, by its affinity and by the CPU quota of its container."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        # The file has the microseconds of computing in each period, or "max" for no limit, and the period.
        quota, period = (cgroup / "cpu.max").read_text().split()
        return cores[: max(1, int(quota) // int(period))]
    return cores


def usable_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return the memory of the host, or the container's limit if that is lower."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        return min(memory, int((cgroup / "memory.max").read_text()))
    return memory


def network_cards(sys: Path = _SYS) -> tuple[str, ...]:
    """Return the number, kind and rate of this host's network ports: ``8 x mlx5_core 400 Gb/sec (4X NDR)``.

    Bridges, tunnels and the interfaces of containers are no cards. A port without a link says so instead of a rate: one that
    was there before is why communication got slower.
    """
    ports = Counter([*_infiniband(sys), *_ethernet(sys)])
    return tuple(f"{number} x {port}" for port, number in sorted(ports.items()))


def _infiniband(sys: Path) -> Iterator[str]:
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        rate = text_of(port / "rate") if "ACTIVE" in text_of(port / "state") else "down"
        yield f"{_driver(port.parents[1])} {rate}".strip()


def _ethernet(sys: Path) -> Iterator[str]:
    named_already = {(path / "device").resolve() for path in sys.glob("class/infiniband/*")}
    for interface in sorted(sys.glob("class/net/*")):
        device = interface / "device"
        if not device.exists() or device.resolve() in named_already:
            continue
        speed = text_of(interface / "speed")  # a virtual card has -1, and one without a link raises
        megabits = int(speed) if speed.isdecimal() else 0
        rate = "down" if text_of(interface / "operstate") == "down" else f"{megabits / 1000:g} Gb/s" if megabits else ""
        yield f"{_driver(interface)} {rate}".strip()


def _driver(entry: Path) -> str:
    driver = entry / "device" / "driver"
    return driver.resolve().name if driver.exists() else entry.name


def text_of(path: Path) -> str:
    """Return the text of a file of sysfs; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""
