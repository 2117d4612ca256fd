"""Runs the command ``gputrain devices``, which lists the GPUs of this machine and records what their drivers answer."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gputrain.gate import contention
from pytest_gputrain.hardware import drivers, recording, topology
from pytest_gputrain.hardware.devices import SELF, UNKNOWN, Gpu, HardwareError, Reading
from pytest_gputrain.hardware.machine import marker_of
from pytest_gputrain.report import tables
from pytest_gputrain.utils import console
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.units import format_bytes, format_percent

_READINGS: Final = 5
"""Readings in a recording: several, so that it shows whether counters advance."""
_SECONDS_BETWEEN: Final = 0.2


def add_to(commands: Any) -> None:
    devices = commands.add_parser(
        "devices",
        help="list the GPUs of this machine, with their markers and the processes on them",
        description="List the GPUs of this machine as their drivers describe them, whatever CUDA_VISIBLE_DEVICES says.",
    )
    source = devices.add_mutually_exclusive_group()
    source.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write every reply of the drivers' libraries to this file, to report a problem",
    )
    source.add_argument("--replay", type=Path, metavar="FILE", help="list the GPUs of such a file")


def main(options: argparse.Namespace) -> int:
    """Print the table; 0, or 2 where a driver fails or a file cannot be read or written."""
    try:
        with contextlib.ExitStack() as stack:
            recordings: list[dict[str, Any]] = []
            if options.replay is not None:
                stack.enter_context(recording.replayed(options.replay))
            elif options.record is not None:
                recordings = stack.enter_context(recording.recorded())
            gpus = drivers.gpus()
            described = [gpu for gpu in gpus if not gpu.fault]
            readings = {gpu: _read(gpu, 1 if options.record is None else _READINGS) for gpu in described}
            # Of a machine that is replayed here, neither network cards nor cores are known.
            host = topology.Sysfs() if options.replay is None else topology.Sysfs(Path(os.devnull))
            vendors = dict.fromkeys(gpu.vendor for gpu in described)
            between = [links([gpu for gpu in described if gpu.vendor == vendor], host) for vendor in vendors]
            rows = [_row(gpu, readings[gpu]) if gpu in readings else _silent_row(gpu) for gpu in gpus]
            unseen = drivers.unseen() if options.replay is None else ""
        if options.record is not None:
            write_atomically(options.record, json.dumps(recordings, indent=1).encode() + b"\n")
    except (HardwareError, ValueError) as error:
        console.say(error)
        return 2
    except OSError as error:
        console.say(
            f"{options.replay or options.record} cannot be {'read' if options.replay else 'written'}: {error.strerror}"
        )
        return 2
    if unseen:
        console.say(f"{unseen}; gputrain doctor checks the whole host")
    if not gpus:
        console.put("no GPU is seen here; cases train on the CPU, at tiny scale")
        return 0
    table = tables.TextTable(title=f"GPUs, driver {_drivers(gpus)}", headers=_HEADERS, rows=tuple(rows))
    console.put(tables.render([table, *(paths for paths in between if len(paths.headers) > 2)], "terminal"))
    return 0


_HEADERS: Final = ("GPU", "Name", "Marker", "Memory", "Free", "Power", "Clock", "Busy", "Slowed by", "Held by")


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
    """Describe how GPUs of one vendor reach each other and the network cards, and which cores are near."""
    whole = list({gpu.index: gpu for gpu in gpus}.values())  # one part for all of a GPU
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


def _drivers(gpus: Sequence[Gpu]) -> str:
    return ", ".join(dict.fromkeys(gpu.driver for gpu in gpus))
