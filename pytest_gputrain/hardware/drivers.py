"""Asks the drivers of all vendors as if they were one: GPUs, the paths between them, and the processes on them.

Another vendor is a module beside `nvidia` and `amd` that opens a `devices.Driver`, with its name in `devices.Vendor` and its
entry in `_OPENERS`. The variables that hide GPUs of it are known to `machine` and `execution.launch.environment`, its boards
to `catalog`, its binding to `recording`, and the device of torch to `worker.device`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_gputrain.hardware import amd, nvidia
from pytest_gputrain.hardware.devices import Driver, Gpu, Occupancy, Vendor
from pytest_gputrain.records import Holder
from pytest_gputrain.utils.units import GiB, MiB

UNSEEN_BYTES: Final = 2 * GiB
"""The memory in use from which an unseen process is assumed: the driver itself takes up to some 600 MiB."""

_IDLE_BYTES: Final = 64 * MiB

PID_NAMESPACE: Final = Path("/proc/self/ns/pid")
_OF_THE_HOST: Final = "pid:[4026531836]"
"""PROC_PID_INIT_INO of Linux: how the namespace reads in which processes have the numbers that drivers tell."""

_OPENERS: Final = {"nvidia": nvidia.opened, "amd": amd.opened}


def gpus() -> tuple[Gpu, ...]:
    """Return every GPU of this machine, NVIDIA's first. A GPU that does not answer has a `Gpu.fault`.

    Raises:
        HardwareError: a driver is there but does not answer.
    """
    every_gpu: list[Gpu] = []
    for opened in _OPENERS.values():
        with opened() as driver:
            every_gpu += driver.gpus() if driver is not None else ()
    return tuple(every_gpu)


def may_be_unseen() -> bool:
    """Tell whether this machine could have GPUs that `gpus` does not list, without opening a driver."""
    return bool(nvidia_binding_fault()) or amd.DEVICE_FILE.exists()


def unseen() -> str:
    """Say why GPUs of the kernel are missing in `gpus`, with the remedies; empty if none is missing.

    Raises:
        HardwareError: a driver is there but does not answer.
    """
    reasons = list(filter(None, (nvidia_binding_fault(), amd.binding_fault())))
    with amd.opened() as driver:
        reasons += driver.left_out() if driver is not None else ()
    return "; ".join(reasons)


def nvidia_binding_fault() -> str:
    """Say why NVML's binding cannot be imported although there is a driver, with the remedy; else empty."""
    files = sorted(nvidia.DEVICE_FILES.glob("nvidia[0-9]*"))
    try:
        import pynvml  # noqa: F401
    except ImportError as error:
        return f"{files[0]} exists, but pynvml cannot be imported ({error}): pip install nvidia-ml-py" if files else ""
    return ""


@contextlib.contextmanager
def driver(vendor: Vendor) -> Iterator[Driver | None]:
    """Provide the open driver of a vendor; None if there is none any more.

    Raises:
        HardwareError: it does not answer, now or while it is open.
    """
    with _OPENERS[vendor]() as opened:
        yield opened


def paths(gpus: Sequence[Gpu]) -> tuple[tuple[str, ...], ...]:
    """Return the paths between the GPUs of a case, a row for each GPU; empty for one GPU.

    Raises:
        HardwareError: the driver does not answer at all.
    """
    if len(gpus) < 2:
        return ()
    with driver(gpus[0].vendor) as vendor_driver:
        return () if vendor_driver is None else vendor_driver.paths(gpus)


def occupancy(gpus: Sequence[Gpu], own: Collection[int] = ()) -> Occupancy:
    """Return the free memory of ``gpus`` and the other processes on them.

    Args:
        own: further processes that belong to this run.

    Raises:
        HardwareError: the driver does not answer.
    """
    if not gpus:
        return Occupancy(None, None)
    with driver(gpus[0].vendor) as vendor_driver:
        return (
            Occupancy(None, None)
            if vendor_driver is None
            else _combined(gpus, [vendor_driver.occupancy(gpu) for gpu in gpus], own)
        )


def _combined(gpus: Sequence[Gpu], occupancies: Sequence[Occupancy], own: Collection[int]) -> Occupancy:
    free = [state.free_bytes for state in occupancies if state.free_bytes is not None]
    listings = [state.holders for state in occupancies if state.holders is not None]
    if len(listings) < len(occupancies):
        return Occupancy(min(free, default=None), None)
    holders = [holder for some in listings for holder in other_processes(some, {os.getpid(), *own})]
    for gpu, state in zip(gpus, occupancies, strict=True):
        used = 0 if state.free_bytes is None else gpu.memory_bytes - state.free_bytes
        # If memory is in use and no process is listed, a process in another container uses the GPU.
        if not state.holders and used > UNSEEN_BYTES:
            holders.append(Holder(pid=None, gpu=gpu.index, bytes=used))
    return Occupancy(min(free, default=None), tuple(holders))


def other_processes(holders: Iterable[Holder], own: Collection[int]) -> list[Holder]:
    """Return the processes that train on the GPUs and do not belong to this run, with their names if this user may know
    them."""
    return [_with_name(holder) for holder in holders if holder.pid not in own and not _is_idle(holder)]


def _is_idle(holder: Holder) -> bool:
    """Tell whether a process has so little memory that it trains nothing here: a monitor, or a program that computes on
    another GPU."""
    return holder.bytes is not None and holder.bytes < _IDLE_BYTES


def _with_name(holder: Holder) -> Holder:
    """Return the process with the name of its program, if this user may know it."""
    if holder.name or holder.pid is None or not _numbers_are_ours():
        return holder
    try:
        with open(f"/proc/{holder.pid}/comm") as name:
            return Holder(pid=holder.pid, gpu=holder.gpu, bytes=holder.bytes, name=name.read().strip())
    except OSError:
        return holder


def _numbers_are_ours() -> bool:
    """Tell whether drivers identify processes by the numbers of this machine. In a container or in a replay they do not."""
    if any(getattr(sys.modules.get(library), "is_replay", False) for library in ("pynvml", "amdsmi")):
        return False
    try:
        return os.readlink(PID_NAMESPACE) == _OF_THE_HOST
    except OSError:
        return False
