"""Watches the GPUs of a case while it is timed: energy, power, clocks, what lowers them, and other processes.

Read from this process by a thread of its own, so that the one that trains does nothing for it. The worker tells when its
timed steps begin and end, by the clock that all processes of a host share.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from pytest_gputrain.hardware import drivers
from pytest_gputrain.hardware.devices import Driver, Gpu, HardwareError, Reading
from pytest_gputrain.records import Event, Holder, Telemetry

INTERVAL_SECONDS: Final = 0.2
"""The time between two readings. NVML renews its energy counter and its utilisation five to fifty times a second."""
_LOOK_AROUND_SECONDS: Final = 2.0
"""The time between two looks for other processes."""
_PATIENCE_SECONDS: Final = 5.0
"""The time to wait for a driver that hangs because its GPU does."""
LEAST_READINGS: Final = 3
"""The least readings within the timed steps for a summary."""


class Sample(NamedTuple):
    """All GPUs of a case at one moment."""

    at: float
    """The time of the monotonic clock."""
    readings: tuple[Reading, ...]


class Watch:
    """The samples of `watching`, and the time window of the timed steps from the worker's events."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self._samples: list[Sample] = []
        self._others: dict[tuple[int | None, int], Holder] = {}
        self._begin: float | None = None
        self._end: float | None = None
        self._enough = threading.Event()

    def note(self, event: Event) -> None:
        """Record an event of the worker."""
        if event.phase == "measure" and self._begin is None:
            self._begin = event.at
        elif event.phase == "check" and self._end is None:
            self._end = event.at
            self._enough.set()

    def sample(self, driver: Driver, own: Callable[[], set[int]]) -> None:
        """Read until the timed steps are over."""
        look = 0.0
        while not self._enough.wait(INTERVAL_SECONDS):
            now = self._read(driver)
            if now >= look:
                look = now + _LOOK_AROUND_SECONDS
                self._look_for_others(driver, own())
        self._read(driver)  # The counters of the last part of the steps are read here.

    def _read(self, driver: Driver) -> float:
        """Take a sample, and return its time."""
        now = time.monotonic()
        self._samples.append(Sample(now, tuple(driver.read(gpu) for gpu in self._gpus)))
        return now

    def _look_for_others(self, driver: Driver, own: set[int]) -> None:
        for gpu in self._gpus:
            holders = driver.occupancy(gpu).holders or ()
            # In a container the driver may list processes by the host's numbers, by which a process cannot find itself. Only
            # if it finds itself are all others other programs.
            if any(holder.pid in own for holder in holders):
                self._others |= {(holder.pid, gpu.index): holder for holder in drivers.other_processes(holders, own)}

    def stop(self) -> None:
        self._enough.set()

    def telemetry(self) -> Telemetry | None:
        """Return the telemetry of the timed steps; None if they were not observed, or were over too soon."""
        if self._begin is None or self._end is None:
            return None
        return between(self._samples, self._begin, self._end)

    @property
    def others(self) -> tuple[Holder, ...]:
        """The other processes that were seen on the GPUs while the case used them."""
        return tuple(self._others.values())


def between(samples: Sequence[Sample], begin: float, end: float) -> Telemetry | None:
    """Return a summary of the samples between two moments; None if there are fewer than `LEAST_READINGS`.

    Args:
        samples: in the order of their times. Counters are taken on a line between those around a moment.
    """
    inside = [sample for sample in samples if begin <= sample.at <= end]
    if len(inside) < LEAST_READINGS:
        return None
    gpus = range(len(inside[0].readings))
    clocks = [gpu_clocks for gpu in gpus if (gpu_clocks := _figures(inside, gpu, "clock_mhz"))]
    return Telemetry(
        readings=len(inside),
        energy_joules=_total(_energy(samples, gpu, begin, end) for gpu in gpus),
        power_watts=_total(_mean(_figures(inside, gpu, "power_watts")) for gpu in gpus),
        clock_mhz=min((int(statistics.median(gpu_clocks)) for gpu_clocks in clocks), default=None),
        utilization=_mean([value for gpu in gpus for value in _figures(inside, gpu, "utilization")]),
        throttled=_throttled(inside, gpus),
    )


@contextlib.contextmanager
def watching(gpus: Sequence[Gpu], own: Callable[[], set[int]]) -> Iterator[Watch]:
    """Provide a watch on ``gpus`` until the context ends. Without GPUs or a driver it has no samples.

    Args:
        own: processes that are none of a stranger, asked now and then.
    """
    watch = Watch(gpus)
    thread = threading.Thread(target=_watch, args=(watch, gpus, own), name="gputrain-watch", daemon=True)
    if gpus:
        thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        if gpus:
            thread.join(_PATIENCE_SECONDS)


def _watch(watch: Watch, gpus: Sequence[Gpu], own: Callable[[], set[int]]) -> None:
    # A driver that fails here must not end the case. Its figures are then missing.
    with contextlib.suppress(HardwareError), drivers.driver(gpus[0].vendor) as driver:
        if driver is not None:
            watch.sample(driver, own)


def _figures(samples: Sequence[Sample], gpu: int, name: str) -> list[float]:
    values = (getattr(sample.readings[gpu], name) for sample in samples)
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _total(values: Iterator[float | None]) -> float | None:
    """Return the sum over all GPUs; None if the figure of any GPU is unknown."""
    figures = list(values)
    return None if None in figures else sum(value for value in figures if value is not None)


def _energy(samples: Sequence[Sample], gpu: int, begin: float, end: float) -> float | None:
    """Return the joules between two moments, from a counter that was read around them."""
    read = [(sample.at, joules) for sample in samples if (joules := sample.readings[gpu].energy_joules) is not None]
    at_begin, at_end = _at(read, begin), _at(read, end)
    return None if at_begin is None or at_end is None or at_end < at_begin else at_end - at_begin


def _at(read: Sequence[tuple[float, float]], moment: float) -> float | None:
    """Return the counter at a moment, interpolated between the readings before and after it."""
    for (before, low), (after, high) in itertools.pairwise(read):
        if before <= moment <= after:
            return low + (high - low) * (moment - before) / (after - before) if after > before else low
    return None


def _throttled(samples: Sequence[Sample], gpus: range) -> dict[str, float] | None:
    """Return the share of the readings with lowered clocks by reason, for the GPU with most of them; None if no driver
    reports reasons."""
    shares: dict[str, float] = {}
    any_reported = False
    for gpu in gpus:
        reported = [why for sample in samples if (why := sample.readings[gpu].throttling) is not None]
        any_reported = any_reported or bool(reported)
        for reason in sorted(frozenset().union(*reported)):
            share = sum(reason in why for why in reported) / len(reported)
            shares[reason] = max(share, shares.get(reason, 0.0))
    return shares if any_reported else None
