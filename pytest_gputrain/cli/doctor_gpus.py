"""Draws the table of GPUs of ``gputrain doctor``: what their drivers say of each, and the paths between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from pytest_gputrain.gate import contention
from pytest_gputrain.hardware import drivers, topology
from pytest_gputrain.hardware.devices import SELF, UNKNOWN, Gpu, Reading
from pytest_gputrain.hardware.machine import marker_of
from pytest_gputrain.report import tables
from pytest_gputrain.utils.units import format_bytes, format_percent

_HEADERS: Final = ("GPU", "Name", "Marker", "Memory", "Free", "Power", "Clock", "Busy", "Slowed by", "Held by")
_SECONDS_BETWEEN: Final = 0.2


def describe(host: topology.Sysfs, *, readings: int = 1) -> str:
    """Return tables of all GPUs as their drivers describe them, whatever CUDA_VISIBLE_DEVICES says, and of their links.

    Args:
        host: where network cards and cores are looked up.
        readings: how often each GPU is read; the table has the last.

    Returns:
        The text; empty if there is no GPU.

    Raises:
        HardwareError: a driver does not answer.
    """
    gpus = drivers.gpus()
    described = [gpu for gpu in gpus if not gpu.fault]
    rows = [_silent_row(gpu) if gpu.fault else _row(gpu, _read(gpu, readings)) for gpu in gpus]
    vendors = dict.fromkeys(gpu.vendor for gpu in described)
    between = [links([gpu for gpu in described if gpu.vendor == vendor], host) for vendor in vendors]
    title = f"GPUs, driver {', '.join(dict.fromkeys(gpu.driver for gpu in gpus))}"
    table = tables.TextTable(title=title, headers=_HEADERS, rows=tuple(rows))
    paths = [paths for paths in between if len(paths.headers) > 2]
    return tables.render([table, *paths], "terminal") if gpus else ""


def _read(gpu: Gpu, times: int) -> Reading:
    with drivers.driver(gpu.vendor) as driver:
        assert driver is not None, "it has just told of this GPU"
        for _ in range(times - 1):
            driver.read(gpu)
            time.sleep(_SECONDS_BETWEEN)
        return driver.read(gpu)


def _row(gpu: Gpu, reading: Reading) -> tuple[str, ...]:
    free, holders = drivers.occupancy([gpu])
    power = "" if reading.power_watts is None else f"{reading.power_watts:.0f} W"
    if power and gpu.power_limit_watts is not None:
        power = f"{power} of {gpu.power_limit_watts:.0f} W"
    return (
        str(gpu.index),
        gpu.name,
        marker_of(gpu) or "none: unknown to the catalog",
        format_bytes(gpu.memory_bytes) if gpu.memory_bytes else "not told",
        "" if free is None else format_bytes(free),
        power,
        "" if reading.clock_mhz is None else f"{reading.clock_mhz} MHz",
        "" if reading.utilization is None else format_percent(reading.utilization, signed=False),
        ", ".join(sorted(reading.throttling or ())),
        "not told" if holders is None else contention.describe_holders(holders),
    )


def _silent_row(gpu: Gpu) -> tuple[str, ...]:
    cells = (str(gpu.index), f"not described: {gpu.fault}")
    return (*cells, *[""] * (len(_HEADERS) - len(cells)))


def links(gpus: Sequence[Gpu], host: topology.Sysfs) -> tables.TextTable:
    """Return a table of how GPUs of one vendor reach each other and the network cards, and of the nearest cores."""
    # All parts of a GPU have its links, so one part is enough.
    whole = list({gpu.index: gpu for gpu in gpus}.values())
    cards = host.cards()
    places = [host.place(gpu.pci_address) for gpu in whole]
    columns = {
        **{f"GPU {gpu.index}": column for gpu, column in zip(whole, drivers.paths(whole) or [(SELF,)], strict=True)},
        **{card: [host.path(gpu.pci_address, address) for gpu in whole] for card, address in cards.items()},
        "Cores": [place.cores for place in places],
        "NUMA node": ["" if place.numa_node is None else str(place.numa_node) for place in places],
    }
    filled = {header: column for header, column in columns.items() if any(cell not in ("", UNKNOWN) for cell in column)}
    rows = zip((f"GPU {gpu.index}" for gpu in whole), *filled.values(), strict=True)
    return tables.TextTable(title="Paths between GPUs and to network cards", headers=("", *filled), rows=tuple(rows))
