"""The timed loop times each step alone, and schedules updates as accumulation asks."""

import statistics
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.worker import loop
from pytest_gputrain.worker.loop import schedule, timed
from pytest_gputrain.worker.profiled_steps import steps_to_profile


def test_a_step_lasts_until_the_device_is_idle_and_what_happens_between_steps_is_not_timed(monkeypatch):
    now, pending, updates = 0.0, 100.0, []  # work from before the window belongs to no step

    def synchronize():
        nonlocal now, pending
        now, pending = now + pending, 0.0

    def after(index, seconds):
        nonlocal now
        now += 50.0

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now))
    device = SimpleNamespace(synchronize=synchronize)
    timing = timed([False, True, False], device, after)
    while True:
        try:
            updates.append(next(timing))
        except StopIteration as end:
            seconds = list(end.value)
            break
        now += 1.0
        pending += 4.0
    assert seconds == [5.0, 5.0, 5.0]
    assert updates == [False, True, False]


@given(st.integers(0, 200), st.integers(1, 64))
def test_updates_follow_the_accumulation_and_close_the_window(count, accumulation):
    updates = schedule(count, accumulation)
    assert len(updates) == count
    assert [index + 1 for index, update in enumerate(updates) if update] == sorted(
        {*range(accumulation, count + 1, accumulation), *([count] if count else [])}
    )


@pytest.mark.parametrize("accumulation", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("timed_steps", [1, 4, 9, 10])
def test_profiled_steps_have_the_median_of_timed_ones(accumulation, timed_steps):
    """The step with the update takes longer. Of an even number of steps half may update."""

    def median(steps):
        return statistics.median(14.0 if update else 10.0 for update in schedule(steps, accumulation))

    steps = steps_to_profile(schedule(timed_steps, accumulation), accumulation)
    assert median(steps) == median(timed_steps)
    assert 5 <= steps <= 8 or steps == timed_steps
