"""Reads what a GPU did in profiled steps: how long it worked, and the counts of each step. Imports no torch."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from pytest_gputrain.records import CountCause, CountName, GpuSteps

GAP: Final = 1_000_000
"""Nanoseconds by which the clocks of the GPU and of the host may differ. For this long before a step and after it nothing is
asked for."""

_VERSION: Final = re.compile(r"(_v\d+|_ptsz)+$")
_LAUNCH: Final = re.compile(r"(cu|cuda|hip)(Ext)?(Module)?Launch(?!Host)\w*")
_COLLECTIVE: Final = re.compile(r"\b(nccl|rccl|msccl)|symmetric_memory::|nvshmem", re.I)
_COPY: Final = re.compile(r"Memcpy (\w)to(\w) \((\w+) -> (\w+)\)")
_COUNTED_CALLS: Final[dict[str, CountName]] = {
    "cudaStreamSynchronize": "waits",
    "cudaDeviceSynchronize": "waits",
    "cudaEventSynchronize": "waits",
    "cudaMemcpy": "waits",
    "cudaMemcpy2D": "waits",
    "cudaMalloc": "mallocs",
    "cudaMallocAsync": "mallocs",
    "cudaMallocFromPoolAsync": "mallocs",
    "cudaMallocManaged": "mallocs",
    "cudaHostAlloc": "mallocs",
    "cudaMallocHost": "mallocs",
    "cudaFree": "frees",
    "cudaFreeAsync": "frees",
    "cudaFreeHost": "frees",
    "cudaStreamWaitEvent": "stream_waits",
    "cudaStreamBeginCapture": "captures",
    "cudaGraphLaunch": "replays",
}
"""The counts of calls of CUDA's runtime. Copies, memsets and kernels are counted by the activities of the GPU."""

_MOST_NAME: Final = 60


class CannotTell(Exception):
    """The profiler's events do not show what the GPU did. The text is the reason, as a part of a sentence."""


class Activity(NamedTuple):
    """An event of the profiler. Times are in nanoseconds."""

    name: str
    """The function of CUDA without its version, the kernel, or what torch calls a copy."""
    start: int
    end: int
    call: int
    """The number of the call that the host made. An activity of the GPU has the number of the call that started it."""
    on_gpu: bool
    """Whether it is a kernel, a copy or a memset, and no call."""
    thread: int = 0
    """The thread that made the call."""

    @property
    def kind(self) -> _Kind:
        """The kind of this activity."""
        return _kind_of(self.name, self.on_gpu)


_Kind = Literal["call", "launch", "graph launch", "kernel", "collective", "copy"]
"""A call, one that launches a kernel or a CUDA graph, and what the GPU does; memsets are copies."""


@functools.cache
def _kind_of(name: str, on_gpu: bool) -> _Kind:
    if on_gpu:
        copies = name.startswith(("Memcpy", "Memset"))
        return "copy" if copies else "collective" if _COLLECTIVE.search(name) else "kernel"
    return "graph launch" if name.endswith("GraphLaunch") else "launch" if _LAUNCH.fullmatch(name) else "call"


def name_of_call(name: str) -> str:
    """Return the name of a function of CUDA without its version."""
    return _VERSION.sub("", name)


@functools.cache
def short_name(kernel: str) -> str:
    """Return the name of a kernel without namespaces, parameters and arguments of templates."""
    bare = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", bare, maxsplit=1)[0].rpartition("::")[2][:_MOST_NAME]


@dataclass(kw_only=True, slots=True)
class ProfiledStep:
    """A step and what happened for it. Times are in nanoseconds, by the clock of the events."""

    begin: int
    """When it began, with an idle GPU."""
    end: int = 0
    """When its code had returned."""
    idle: int = 0
    """When the GPU was idle again."""
    update: bool = True
    """Whether the optimizer was to update at its end."""
    torch_memory: tuple[int, int] = (0, 0)
    """How often torch's caching allocator asked the driver for memory of the GPU, and how often it gave some back."""
    compiled: tuple[CountCause, ...] = ()
    """The functions that torch.compile compiled, and its graph breaks."""
    calls: dict[int, Activity] = field(default_factory=dict)
    """The calls of the host, by their numbers."""
    work: list[Activity] = field(default_factory=list)
    """The activities of the GPU."""


def assign(activities: Iterable[Activity], steps: Sequence[ProfiledStep]) -> None:
    """Assign to each step its calls, and the work of the GPU that these calls started.

    What the GPU did for no known call belongs to the step in whose time it began.

    Args:
        activities: of the profiler, in any order.
        steps: in the order of their times.
    """
    begins = [step.begin for step in steps]

    def at(time: int) -> ProfiledStep | None:
        number = bisect_right(begins, time) - 1
        return steps[number] if number >= 0 and time <= steps[number].idle else None

    known: dict[int, ProfiledStep | None] = {}
    of_gpu = []
    for activity in activities:
        if activity.on_gpu:
            of_gpu.append(activity)
            continue
        step = at(activity.start)
        # A call that begins after the step's code has returned belongs to no step: the measurement itself made it.
        known[activity.call] = step = step if step is not None and activity.start <= step.end else None
        if step is not None:
            step.calls[activity.call] = activity
    for activity in of_gpu:
        step = known[activity.call] if activity.call in known else at(activity.start)
        if step is not None:
            step.work.append(activity)


def read_seconds(steps: Sequence[ProfiledStep]) -> GpuSteps:
    """Return how long the GPU worked in each step.

    Raises:
        CannotTell: events are missing, or cannot be true.
    """
    if not any(step.work for step in steps):
        raise CannotTell(
            "torch's profiler saw no work of the GPU; end other profilers, such as Nsight Systems, of which the driver "
            "accepts one at a time"
        )
    for step in steps:
        _check_launches(step)
    _check_graphs(steps)
    return GpuSteps(
        seconds=tuple(_union_of_step(step) / 1e9 for step in steps),
        collective_seconds=tuple(union(_of_kind(step.work, "collective")) / 1e9 for step in steps),
    )


def union(activities: Iterable[Activity]) -> int:
    """Return the nanoseconds in which at least one of the activities ran."""
    total = until = 0
    for start, end in sorted((activity.start, activity.end) for activity in activities):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def _of_kind(activities: Iterable[Activity], *kinds: _Kind) -> list[Activity]:
    return [activity for activity in activities if activity.kind in kinds]


def _check_launches(step: ProfiledStep) -> None:
    """Check that each launch of a step has its kernel, and each kernel its call."""
    if any(call.name.endswith("StreamBeginCapture") for call in step.calls.values()):
        raise CannotTell("a step captures a CUDA graph, and what is captured does not run")
    kernels = Counter(activity.call for activity in _of_kind(step.work, "kernel", "collective"))
    launches = _of_kind(step.calls.values(), "launch", "graph launch")
    if missing := sum(not kernels[launch.call] for launch in launches):
        raise CannotTell(f"{missing} of {len(launches)} launches of a step have no kernel, so events are missing")
    if repeated := sum(kernels[launch.call] > 1 for launch in launches if launch.kind == "launch"):
        raise CannotTell(f"{repeated} of {len(launches)} launches of a step have several kernels, so events are repeated")
    if unasked := sum(kernel.call not in step.calls for kernel in _of_kind(step.work, "kernel")):
        raise CannotTell(f"{unasked} kernels of a step have no launch, so events are missing")


def _check_graphs(steps: Sequence[ProfiledStep]) -> None:
    """Check that steps which launch as many kernels and CUDA graphs run as many kernels: a graph may have any number."""
    kernels: dict[tuple[int, int], int] = {}
    for step in steps:
        graphs = len(_of_kind(step.calls.values(), "graph launch"))
        launches = graphs, len(_of_kind(step.calls.values(), "launch"))
        number = len(_of_kind(step.work, "kernel", "collective"))
        if graphs and kernels.setdefault(launches, number) != number:
            raise CannotTell("steps that launch as many CUDA graphs run different numbers of kernels, so events are missing")


def _union_of_step(step: ProfiledStep) -> int:
    total = union(_of_kind(step.work, "kernel", "copy"))
    if not total:
        raise CannotTell("the GPU did nothing in a step")
    outside = any(activity.start < step.begin - GAP or activity.end > step.idle + GAP for activity in step.work)
    if outside or total > step.idle - step.begin:
        raise CannotTell("the GPU worked before or after the step that asked for it, so times of events are wrong")
    return total


# --- Counts

_Numbers = dict[CountCause, tuple[int, int]]
"""The causes of counts, each with its count and 0 in place of its bytes, which are not known."""


def read_counts(step: ProfiledStep, other_threads: Collection[int]) -> tuple[_Numbers, _Numbers]:
    """Return the counts of a step on an NVIDIA GPU: those of the training's threads, and those of other threads.

    Args:
        other_threads: the numbers of threads that do not train.
    """
    judged: _Numbers = defaultdict(lambda: (0, 0))
    others: _Numbers = defaultdict(lambda: (0, 0))

    def add(what: CountName, by: str, thread: int = 0, *, number: int = 1, replayed: bool = False) -> None:
        causes = others if thread in other_threads else judged
        cause = CountCause(what=what, by=by, replayed=replayed, counts=())
        causes[cause] = causes[cause][0] + number, 0

    for call in step.calls.values():
        if what := _COUNTED_CALLS.get(call.name):
            add(what, call.name, call.thread)
    for activity in step.work:
        call = step.calls.get(activity.call, activity)
        if what := _counted_as(activity):
            by = short_name(activity.name) if activity.kind != "copy" else call.name
            add(what, by, call.thread, replayed=call.kind == "graph launch")
    # With expandable segments torch calls the driver directly, which no event shows, so its own counters are used.
    names: tuple[CountName, CountName] = "mallocs", "frees"
    for name, function, number in zip(names, ("cuMemCreate", "cuMemRelease"), step.torch_memory, strict=True):
        told = sum(count for cause, (count, _) in judged.items() if cause.what == name and "Host" not in cause.by)
        if number > told:
            add(name, function, number=number - told)
    for cause in step.compiled:
        judged[cause] = judged[cause][0] + 1, 0
    return judged, others


def _counted_as(activity: Activity) -> CountName | None:
    """Return the count that an activity of the GPU belongs to; None for a copy from the host to the host."""
    if activity.kind != "copy":
        return "collectives" if activity.kind == "collective" else "kernels"
    if activity.name.startswith("Memset"):
        return "memsets"
    copy = _COPY.match(activity.name)
    match copy and (copy[1], copy[2]):
        case "H", "H":
            return None
        case "H", _:
            return "h2d_pageable" if copy and copy[3] == "Pageable" else "h2d_pinned"
        case _, "H":
            return "d2h_pageable" if copy and copy[4] == "Pageable" else "d2h_pinned"
    return "d2d"
