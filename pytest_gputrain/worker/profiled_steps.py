"""Runs further steps under torch's profiler, which shows how long the GPU works and what each step launches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final
from unittest import mock

import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler

from pytest_gputrain.records import Counts, GpuSteps
from pytest_gputrain.worker.counted_steps import CountedSteps, compiled
from pytest_gputrain.worker.device import Device
from pytest_gputrain.worker.gpu_events import (
    GAP,
    Activity,
    CannotTell,
    ProfiledStep,
    assign,
    name_of_call,
    read_counts,
    read_seconds,
)
from pytest_gputrain.worker.loop import Steps, schedule
from pytest_gputrain.worker.thread_operators import silence_profiler

PROFILED_STEPS: Final = 5


def steps_to_profile(timed: Sequence[bool], accumulation: int) -> int:
    """Return the number of steps to profile, so that their median step is of the same kind as that of the timed ones.

    Accumulation over two steps makes as many steps that update as others. Of an odd number one more updates, which is the
    last. Where no few steps have such a median, it is the number of timed ones.

    Args:
        timed: for each timed step whether it updates.
    """

    def kind_of_median(updates: Sequence[bool]) -> int:
        return (2 * sum(updates) > len(updates)) - (2 * sum(updates) < len(updates))

    few = range(PROFILED_STEPS, 2 * PROFILED_STEPS)
    alike = (steps for steps in few if kind_of_median(schedule(steps, accumulation)) == kind_of_median(timed))
    return next(alike, len(timed))


def find_gpu() -> None:
    """Have torch's profiler find the GPU. If the first profile of a process covers the CPU alone, no later one shows a
    GPU."""
    silence_profiler()
    if not profiler._is_profiler_enabled:
        with contextlib.suppress(Exception), _profile():
            pass


def _profile() -> profiler.profile:
    StepProfile.is_attached = True
    return profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True)


class StepProfile:
    """Profiles further steps on a GPU. The steps run even if the profiler fails, because other processes run theirs.

    Args:
        meet: waits for the other processes between two steps.
    """

    is_attached: ClassVar[bool] = False
    """Whether a profile was made in this process: torch's profiler stays attached to the driver until the process ends."""

    def __init__(self, device: Device, meet: Callable[[], None] = lambda: None) -> None:
        self._device, self._meet = device, meet
        self._steps: list[ProfiledStep] = []
        self._activities: list[Activity] = []
        self._refusal = ""
        """The reason why there are no activities."""
        self._other_threads: set[int] = set()
        """Python's threads beside this one, by either number that the profiler may tell. Autograd's are none of Python's."""

    def steps(self, updates: Sequence[bool]) -> Steps:
        """Run a step of warm-up, which the start of the profiler slows, and then one step for each of ``updates``."""
        with self._noting_threads(), self._profiling():
            for number, update in enumerate((updates[0], *updates)):
                self._device.synchronize()
                self._meet()
                counted, memory = CountedSteps(None), _torch_memory()
                counted.compiled = compiled()
                time.sleep(GAP / 1e9)
                step = ProfiledStep(begin=_now(), update=update)
                yield update
                step.end = _now()
                time.sleep(GAP / 1e9)
                self._device.synchronize()
                step.idle = _now()
                allocated, freed = _torch_memory()
                step.torch_memory = allocated - memory[0], freed - memory[1]
                step.compiled = tuple(counted.compiled_since())
                if number:
                    self._steps.append(step)

    def read(self) -> tuple[GpuSteps, Counts | None]:
        """Return how long the GPU worked in each step, and for an NVIDIA GPU the counts of each step.

        Raises:
            CannotTell: the profile does not tell.
        """
        if self._refusal:
            raise CannotTell(self._refusal)
        assign(self._activities, self._steps)
        seconds = read_seconds(self._steps)
        if self._device.type != "cuda":
            return seconds, None
        counted = CountedSteps(None)
        counted.profiled = True
        counted.lines_unknown = "torch's profiler of a GPU tells none"
        for step in self._steps:
            counted.add(*read_counts(step, self._other_threads), update=step.update)
        return seconds, counted.counts()

    @contextlib.contextmanager
    def _profiling(self) -> Iterator[None]:
        """Provide a context that profiles the steps. An error of the profiler becomes the reason for missing figures."""
        profile = None
        silence_profiler()
        if profiler._is_profiler_enabled:
            self._refusal = "the program uses torch's profiler itself"
        else:
            try:
                profile = _profile()
                profile.__enter__()
            except Exception as error:
                self._refuse(error)
        try:
            yield
        finally:
            if not self._refusal and profile is not None:
                try:
                    profile.__exit__(None, None, None)
                    assert profile.kineto_results is not None, "torch sets them at the end"
                    events = profile.kineto_results.events()
                    self._activities = [_activity(event) for event in events if not event.is_user_annotation()]
                except Exception as error:
                    self._refuse(error)

    @contextlib.contextmanager
    def _noting_threads(self) -> Iterator[None]:
        """Provide a context that records the threads that run and those that start."""
        start = threading.Thread.start

        def note(thread: threading.Thread) -> None:
            self._other_threads |= {(thread.ident or 0) & 0xFFFFFFFF, thread.native_id or 0}

        def start_noted(thread: threading.Thread) -> None:
            start(thread)
            note(thread)

        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not isinstance(thread, threading._DummyThread):
                note(thread)
        with mock.patch.object(threading.Thread, "start", start_noted):
            yield

    def _refuse(self, error: Exception) -> None:
        self._refusal = f"torch's profiler failed ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"


def _now() -> int:
    # The profiler's events use this clock. If the clock jumps, events lie outside of their steps, and the profile is
    # refused.
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def _torch_memory() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats.get("num_device_alloc", 0), stats.get("num_device_free", 0)


def _activity(event: Any) -> Activity:
    on_gpu = event.device_type() == DeviceType.CUDA
    name, start = event.name(), event.start_ns()
    return Activity(
        name=name if on_gpu else name_of_call(name),
        start=start,
        end=start + event.duration_ns(),
        call=event.correlation_id(),
        on_gpu=on_gpu,
        thread=0 if on_gpu else event.device_resource_id() & 0xFFFFFFFF,
    )
