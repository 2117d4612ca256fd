"""All vendors' drivers as one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from pytest_gputrain.hardware import amd, nvidia
from pytest_gputrain.hardware.devices import Driver, Gpu, Occupancy, Vendor
from pytest_gputrain.records import Holder
from pytest_gputrain.utils.units import GiB, MiB

UNSEEN_BYTES: Final = 2 * GiB
"""In use on a GPU on which no process is seen: the driver itself takes up to some 600 MiB."""

_IDLE_BYTES: Final = 64 * MiB

_OPENERS: Final = {"nvidia": nvidia.opened, "amd": amd.opened}


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of this machine, NVIDIA's first.

    Raises:
        HardwareError: a driver is there but does not answer.
    """
    found: list[Gpu] = []
    for opened in _OPENERS.values():
        with opened() as driver:
            found += driver.gpus() if driver is not None else ()
    return tuple(found)


@contextlib.contextmanager
def driver(vendor: Vendor) -> Iterator[Driver | None]:
    """The driver of a vendor; None where it is gone.

    Raises:
        HardwareError: it does not answer, now or while it is open.
    """
    with _OPENERS[vendor]() as found:
        yield found


def paths(gpus: Sequence[Gpu]) -> tuple[tuple[str, ...], ...]:
    """How the GPUs of a case reach each other, a row for each; empty for one GPU, which reaches none.

    Raises:
        HardwareError: the driver does not answer at all.
    """
    if len(gpus) < 2:
        return ()
    with driver(gpus[0].vendor) as found:
        return () if found is None else found.paths(gpus)


def occupancy(gpus: Sequence[Gpu], own: Collection[int] = ()) -> Occupancy:
    """What is on ``gpus`` beside this process now.

    Args:
        own: further processes that are none of a stranger.

    Raises:
        HardwareError: the driver does not answer.
    """
    if not gpus:
        return Occupancy(None, None)
    with driver(gpus[0].vendor) as found:
        return Occupancy(None, None) if found is None else _together(gpus, [found.occupancy(gpu) for gpu in gpus], own)


def _together(gpus: Sequence[Gpu], each: Sequence[Occupancy], own: Collection[int]) -> Occupancy:
    free = [one.free_bytes for one in each if one.free_bytes is not None]
    seen = [one.holders for one in each if one.holders is not None]
    if len(seen) < len(each):
        return Occupancy(min(free, default=None), None)
    holders = [holder for some in seen for holder in strangers(some, {os.getpid(), *own})]
    for gpu, one in zip(gpus, each, strict=True):
        used = 0 if one.free_bytes is None else gpu.memory_bytes - one.free_bytes
        if not one.holders and used > UNSEEN_BYTES:  # of another container, whose processes are not shown here
            holders.append(Holder(pid=None, gpu=gpu.index, bytes=used))
    return Occupancy(min(free, default=None), tuple(holders))


def strangers(holders: Iterable[Holder], own: Collection[int]) -> list[Holder]:
    """Those that are none of one's own and train there, as far as is known, with their names."""
    return [_named(holder) for holder in holders if holder.pid not in own and not _is_idle(holder)]


def _is_idle(holder: Holder) -> bool:
    """Whether it has so little memory that nothing trains in it: a monitor, or somebody who computes on another GPU."""
    return holder.bytes is not None and holder.bytes < _IDLE_BYTES


def _named(holder: Holder) -> Holder:
    """With the name of its program, where this user may know it."""
    if holder.name or holder.pid is None:
        return holder
    try:
        with open(f"/proc/{holder.pid}/comm") as name:
            return Holder(pid=holder.pid, gpu=holder.gpu, bytes=holder.bytes, name=name.read().strip())
    except OSError:
        return holder
