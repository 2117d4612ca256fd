"""What a GPU did is read from the events of a profiler, or it is refused with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.worker.gpu_events import (
    GAP,
    Activity,
    CannotTell,
    ProfiledStep,
    assign,
    name_of_call,
    read_counts,
    read_seconds,
    short_name,
    union,
)

KERNEL = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::Meta, 4>(at::native::Meta, int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LENGTH = 10 * GAP
"""Nanoseconds of each step here, and as many between two."""


def kernel(start, end, call, name=KERNEL):
    return Activity(name, start, end, call, on_gpu=True)


def called(name, start, call, thread=1):
    return Activity(name, start, start + 1, call, on_gpu=False, thread=thread)


def launched(number, at=0, length=10, name=KERNEL, call="cudaLaunchKernel"):
    """A launch at a time of a step, and its kernel."""
    return [called(call, at, number), kernel(at + 5, at + 5 + length, number, name)]


def steps_with(*activities):
    """Steps of the same length: what happens in each, by times from its begin."""
    steps, moved = [], []
    for number, of_step in enumerate(activities):
        begin = (2 * number + 1) * LENGTH
        steps.append(ProfiledStep(begin=begin, end=begin + LENGTH // 2, idle=begin + LENGTH))
        moved += [
            one._replace(start=one.start + begin, end=one.end + begin, call=one.call + 1000 * number) for one in of_step
        ]
    assign(moved[::-1], steps)
    return steps


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))))
def test_the_union_has_each_moment_once(intervals):
    activities = [kernel(start, start + length, 0) for start, length in intervals]
    assert union(activities) == len({at for start, length in intervals for at in range(start, start + length)})


def test_kernels_on_several_streams_and_copies_count_once_and_collectives_apart():
    step = [
        *launched(1, length=100),
        *launched(2, at=50, length=100),
        called("cudaMemcpyAsync", 60, 3),
        Activity("Memcpy HtoD (Pinned -> Device)", 140, 200, 3, on_gpu=True),
        *launched(4, at=190, length=500, name=NCCL, call="cuLaunchKernelEx"),
    ]
    figures = read_seconds(steps_with(step, step))
    assert figures.seconds == pytest.approx((195e-9, 195e-9))
    assert figures.collective_seconds == pytest.approx((500e-9, 500e-9))


@given(st.lists(st.lists(st.integers(0, LENGTH // 2 - 1), min_size=1, max_size=5), min_size=1, max_size=4), st.randoms())
def test_what_the_gpu_does_belongs_to_the_step_that_asked_for_it(times, random):
    begins = [(2 * number + 1) * LENGTH for number in range(len(times))]
    steps = [ProfiledStep(begin=begin, end=begin + LENGTH // 2, idle=begin + LENGTH) for begin in begins]
    activities, number = [], 0
    for begin, of_step in zip(begins, times, strict=True):
        for at in of_step:
            number += 1
            activities += launched(number, begin + at, length=LENGTH // 4)
        # What the measurement asks for after the step, and what the GPU does for it within the time of the step.
        activities += [called("cudaDeviceSynchronize", begin + LENGTH // 2 + GAP, -number)]
        activities += launched(10**6 + number, begin + LENGTH // 2 + GAP)
    random.shuffle(activities)
    assign(activities, steps)
    assert [len(step.work) for step in steps] == [len(step.calls) for step in steps] == list(map(len, times))
    assert all(activity.call in step.calls for step in steps for activity in step.work)


def test_events_that_are_missing_or_cannot_be_true_are_refused():
    good = [*launched(1), *launched(2, at=50)]
    graph = [called("cudaGraphLaunch", 0, 1), *(kernel(at, at + 5, 1) for at in (10, 20, 30))]
    assert read_seconds(steps_with(good, good))
    assert read_seconds(steps_with(graph, graph))
    # NCCL may launch by what no event tells of, and a function of the host has no kernel.
    unasked = kernel(LENGTH // 2 + GAP, LENGTH // 2 + GAP + 100, 77, NCCL)
    figures = read_seconds(steps_with([*good, unasked], [*good, called("cudaLaunchHostFunc", 90, 3)]))
    assert figures.collective_seconds == pytest.approx((100e-9, 0))
    for steps, reason in (
        ([[]], "torch's profiler saw no work of the GPU; end other profilers, such as Nsight Systems, of which the driver"),
        ([good, [called("cudaMalloc", 0, 1)]], "the GPU did nothing in a step"),
        ([good, good[:-1]], "1 of 2 launches of a step have no kernel, so events are missing"),
        ([good, [*good, called("hipExtModuleLaunchKernel", 9, 9)]], "1 of 3 launches of a step have no kernel, so events"),
        ([[*good, good[-1]]], "1 of 2 launches of a step have several kernels, so events are repeated"),
        ([[*good, kernel(100, 110, 77)]], "1 kernels of a step have no launch, so events are missing"),
        (
            [graph, graph[:-1]],
            "steps that launch as many CUDA graphs run different numbers of kernels, so events are missing",
        ),
        ([[*good, called("cudaGraphLaunch", 60, 8)]], "1 of 3 launches of a step have no kernel, so events are missing"),
        (
            [[called("cudaStreamBeginCapture", 0, 5), *good]],
            "a step captures a CUDA graph, and what is captured does not run",
        ),
        (
            [launched(1, length=LENGTH + 1)],
            "the GPU worked before or after the step that asked for it, so times of events are",
        ),
        ([launched(1, at=LENGTH // 2, length=LENGTH)], "the GPU worked before or after the step that asked for it"),
        ([[called("cudaLaunchKernel", 5, 1), kernel(-2 * GAP, -GAP, 1)]], "the GPU worked before or after the step"),
    ):
        with pytest.raises(CannotTell) as refused:
            read_seconds(steps_with(*steps))
        assert str(refused.value).startswith(reason)


def test_each_thing_that_a_step_asks_for_has_its_name():
    """Each line is one thing: the call, what the GPU does for it, and as what both are counted."""
    lines = (
        ("cudaStreamSynchronize", "", {"waits"}),
        ("cudaDeviceSynchronize", "", {"waits"}),
        ("cudaEventSynchronize", "", {"waits"}),
        ("cudaMemcpy", "Memcpy DtoH (Device -> Pageable)", {"waits", "d2h_pageable"}),
        ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pinned)", {"d2h_pinned"}),
        ("cudaMemcpyAsync", "Memcpy HtoD (Pageable -> Device)", {"h2d_pageable"}),
        ("cudaMemcpyAsync", "Memcpy HtoD (Pinned -> Device)", {"h2d_pinned"}),
        ("cudaMemcpyAsync", "Memcpy DtoD (Device -> Device)", {"d2d"}),
        ("cudaMemcpyPeerAsync", "Memcpy PtoP (Device -> Device)", {"d2d"}),
        ("cudaMemcpyAsync", "Memcpy HtoH (Pinned -> Pinned)", set()),
        ("cudaMemsetAsync", "Memset (Device)", {"memsets"}),
        ("cudaMalloc", "", {"mallocs"}),
        ("cudaHostAlloc", "", {"mallocs"}),
        ("cudaFree", "", {"frees"}),
        ("cudaStreamWaitEvent", "", {"stream_waits"}),
        ("cudaEventRecord", "", set()),
        ("cudaLaunchKernel", KERNEL, {"kernels"}),
        ("cuLaunchKernelEx", NCCL, {"collectives"}),
        ("cudaGraphLaunch", KERNEL, {"replays", "kernels"}),
    )
    for call, done, names in lines:
        work = [Activity(done, 10, 20, 1, on_gpu=True)] if done else []
        (step,) = steps_with([called(call, 0, 1), *work])
        judged, others = read_counts(step, {2})
        assert {cause.what for cause in judged} == names, call
        assert others == {}
        (step,) = steps_with([called(call, 0, 1, thread=2), *work])
        judged, others = read_counts(step, {2})
        assert {cause.what for cause in others} == names, call
        assert judged == {}


def test_what_a_graph_runs_is_known_from_what_the_host_asks_for():
    (step,) = steps_with([called("cudaGraphLaunch", 0, 1), kernel(10, 20, 1), kernel(20, 30, 1), *launched(2, at=50)])
    judged, _ = read_counts(step, ())
    found = sorted((cause.what, cause.by, cause.replayed, count) for cause, (count, _) in judged.items())
    assert found == [
        ("kernels", "multi_tensor_apply_kernel", False, 1),
        ("kernels", "multi_tensor_apply_kernel", True, 2),
        ("replays", "cudaGraphLaunch", False, 1),
    ]


@given(*[st.integers(0, 3)] * 3)
def test_memory_that_torch_asks_the_driver_for_itself_is_no_blind_spot(events, pinned, of_torch):
    """Where segments can be expanded, no call of the runtime tells of them."""
    calls = [called("cudaMalloc", at, at) for at in range(events)] + [
        called("cudaHostAlloc", 10 + at, 10 + at) for at in range(pinned)
    ]
    (step,) = steps_with(calls)
    step.torch_memory = of_torch, 0
    judged, _ = read_counts(step, ())
    assert sum(count for cause, (count, _) in judged.items() if cause.what == "mallocs") == max(events, of_torch) + pinned


def test_names_are_short():
    assert short_name(KERNEL) == "multi_tensor_apply_kernel"
    assert short_name(NCCL) == "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert [name_of_call(f"cudaLaunchKernel{end}") for end in ("", "_v7000", "_ptsz", "_v7000_ptsz")] == [
        "cudaLaunchKernel"
    ] * 4
