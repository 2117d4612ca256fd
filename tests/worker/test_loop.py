"""The timed loop times each step alone, and schedules updates as accumulation asks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.worker import loop
from pytest_gputrain.worker.loop import schedule, timed


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when told to."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    fake = Clock()
    monkeypatch.setattr(loop, "time", fake)
    return fake


class Idle:
    """A device that waits as it is told."""

    type = "cpu"

    def __init__(self, synchronize=lambda: None):
        self.synchronize = synchronize

    def stamp(self):
        return None


def times(step, updates, *others):
    """The seconds of steps that are taken when they are asked for."""
    timing = timed(updates, *others)
    while True:
        try:
            step(next(timing))
        except StopIteration as end:
            return list(end.value.seconds)


def test_a_step_lasts_until_the_device_is_idle(clock):
    def synchronize():
        nonlocal pending
        clock.now += pending
        pending = 0.0

    def step(update):
        nonlocal pending
        clock.now += 1.0
        pending += 4.0

    pending = 100.0  # work from before the window belongs to no step
    assert times(step, [False] * 3, Idle(synchronize)) == [5.0, 5.0, 5.0]


def test_what_happens_between_steps_is_not_timed(clock):
    def after(index, seconds):
        clock.now += 50.0

    def step(update):
        clock.now += 1.0

    assert times(step, [False] * 3, Idle(), after) == [1.0, 1.0, 1.0]


def test_steps_are_told_when_to_update():
    seen = []
    times(seen.append, [False, True, False], Idle())
    assert seen == [False, True, False]


@given(st.integers(0, 200), st.integers(1, 64))
def test_updates_follow_the_accumulation_and_close_the_window(count, accumulation):
    updates = schedule(count, accumulation)
    assert len(updates) == count
    assert [index + 1 for index, update in enumerate(updates) if update] == sorted(
        {*range(accumulation, count + 1, accumulation), *([count] if count else [])}
    )
