"""The GPUs of a case while it is timed."""

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.hardware import drivers, watch
from pytest_gputrain.hardware.devices import Reading
from pytest_gputrain.hardware.recording import RecordedReply, replayed
from pytest_gputrain.hardware.watch import LEAST_READINGS, Sample, between, watching
from pytest_gputrain.records import Event, Holder
from pytest_gputrain.utils.units import MiB

RECORDINGS = Path(__file__).parent / "recordings"


@pytest.fixture
def h100s():
    with replayed(RECORDINGS / "nvidia-h100-x2.json"):
        yield


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(watch, "INTERVAL_SECONDS", 0.005)
    monkeypatch.setattr(watch, "_LOOK_AROUND_SECONDS", 0.0)


def _sample(at, *readings):
    return Sample(at, readings)


@given(
    moments=st.lists(st.integers(0, 10**6), min_size=6, max_size=30, unique=True),
    watts=st.floats(1, 1000),
    gpus=st.integers(1, 8),
)
def test_energy_is_power_times_the_time_between_the_moments(moments, watts, gpus):
    """Whenever the counters were read."""
    seconds = [moment / 10_000 for moment in sorted(moments)]
    samples = [_sample(at, *[Reading(energy_joules=7 + watts * at, power_watts=watts)] * gpus) for at in seconds]
    begin, end = (seconds[0] + seconds[1]) / 2, (seconds[-2] + seconds[-1]) / 2
    telemetry = between(samples, begin, end)
    assert telemetry.energy_joules == pytest.approx(watts * (end - begin) * gpus, rel=1e-6, abs=1e-6)
    assert telemetry.power_watts == pytest.approx(watts * gpus)
    assert telemetry.readings == len(moments) - 2


@pytest.mark.parametrize(
    ("joules", "begin", "end"),
    [
        ((1.0, 2.0, 3.0), 0.5, 3.0),  # what the counters do not enclose is not extrapolated
        ((1.0, 2.0, 3.0), 1.0, 3.5),
        ((50.0, 60.0, 2.0, 12.0), 1.0, 4.0),  # and a counter that began anew is no energy
    ],
)
def test_energy_that_the_counters_do_not_tell_is_not_told(joules, begin, end):
    samples = [_sample(at, Reading(energy_joules=figure, clock_mhz=1000)) for at, figure in enumerate(joules, 1)]
    telemetry = between(samples, begin, end)
    assert (telemetry.energy_joules, telemetry.clock_mhz) == (None, 1000)


def test_too_few_readings_tell_nothing_and_one_gpu_that_tells_nothing_leaves_no_total():
    samples = [_sample(at, Reading(clock_mhz=1000)) for at in range(10)]
    assert between(samples, 0, LEAST_READINGS - 2) is None
    assert between(samples, 0, LEAST_READINGS - 1) is not None
    assert between([], 0, 1) is None
    samples = [_sample(at, Reading(energy_joules=at, power_watts=1.0), Reading()) for at in (0.0, 1.0, 2.0)]
    telemetry = between(samples, 0, 2)
    assert (telemetry.energy_joules, telemetry.power_watts, telemetry.clock_mhz, telemetry.throttled) == (None,) * 4


def test_the_slowest_gpu_and_the_most_lowered_clock_count():
    hot, cool = frozenset({"HW Slowdown", "SW Power Cap"}), frozenset({"SW Power Cap"})
    of_second = [(1500, frozenset()), (1500, hot), (900, frozenset[str]()), (1500, frozenset[str]())]
    samples = [
        _sample(at, Reading(clock_mhz=1700, throttling=cool), Reading(clock_mhz=clock, throttling=why))
        for at, (clock, why) in enumerate(of_second)
    ]
    telemetry = between(samples, 0, 3)
    assert telemetry.clock_mhz == 1500
    assert telemetry.throttled == {"SW Power Cap": 1.0, "HW Slowdown": 0.25}


def _timed(watched, readings=0):
    """Note what a worker tells of its timed steps, which take as long as so many readings do."""
    watched.note(Event(phase="warmup", at=time.monotonic()))
    watched.note(Event(phase="measure", at=time.monotonic()))
    before, deadline = len(watched._samples), time.monotonic() + 60
    while len(watched._samples) <= before + readings and readings and time.monotonic() < deadline:
        time.sleep(0.001)
    watched.note(Event(phase="measure", step=1, step_seconds=0.1))
    watched.note(Event(phase="check", at=time.monotonic()))


@pytest.mark.usefixtures("h100s")
def test_a_watch_reads_while_the_steps_are_timed():
    gpus = drivers.gpus()
    with watching(gpus, set) as watched:
        _timed(watched, LEAST_READINGS)
    telemetry = watched.telemetry()
    assert telemetry.readings >= LEAST_READINGS
    assert (telemetry.power_watts, telemetry.clock_mhz) == (pytest.approx(588.39 + 69.62), 345)
    assert telemetry.utilization == pytest.approx(0.5)
    assert telemetry.throttled == {}


@pytest.mark.usefixtures("h100s")
def test_a_case_that_never_came_to_its_steps_has_no_telemetry():
    with watching(drivers.gpus(), set) as watched:
        watched.note(Event(phase="build", at=time.monotonic()))
    assert watched.telemetry() is None


@pytest.mark.usefixtures("h100s")
def test_who_comes_meanwhile_is_seen_where_one_knows_oneself():
    gpu = drivers.gpus()[1]
    stranger = Holder(pid=11327, gpu=1, bytes=2566 * MiB)
    library = sys.modules["pynvml"]
    key = next(key for key in library._calls if key.startswith("nvmlDeviceGetComputeRunningProcesses") and "1" in key)
    mine = {"fields": {"pid": 99_999_999, "usedGpuMemory": 1}}
    theirs = library._calls[key][0].reply[0]
    for own, others in (({99_999_999}, (stranger,)), ({11327, 99_999_999}, ()), ({1}, ())):
        library._left[key] = [RecordedReply(reply=[mine, theirs])]
        with watching([gpu], lambda own=own: own) as watched:
            _timed(watched, 3)
        assert watched.others == others


def test_a_driver_that_fails_meanwhile_costs_no_case():
    with replayed(RECORDINGS / "nvidia-h100-x2.json"):
        gpus = drivers.gpus()
        library = sys.modules["pynvml"]
        key = next(key for key in library._calls if key.startswith("nvmlDeviceGetFieldValues"))
        library._left[key] = [RecordedReply(error=15, says="GPU is lost")]
        with watching(gpus, set) as watched:
            _timed(watched)
        assert watched.telemetry() is None


def test_nothing_is_watched_without_gpus():
    with watching((), set) as watched:
        _timed(watched)
    assert watched.telemetry() is None
