"""What only a GPU can show, or an emulated one: pytest tests/gpu/test_on_gpu.py --gpu-emulate --gpu-platform=h100.

Every test skips where there is neither. Those marked ``hardware`` need times or values.
"""

import contextlib
import ctypes
import time

import pytest

from pytest_gputrain import Case, MiB
from pytest_gputrain.hardware import watch
from pytest_gputrain.hardware.machine import detect

with contextlib.suppress(ImportError):  # Workers find stand-ins of CUDA's libraries on an emulated GPU, and pytest does not.
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode

LLAMA = Case(
    model="llama-3.1-8b",
    batch_size=2,
    sequence_length=8192,
    activation_checkpointing=True,
    steps=3,
    warmup=1,
    named=("activation_checkpointing", "compile"),
)


hardware = pytest.mark.hardware


@pytest.fixture(autouse=True)
def _on_a_gpu(pytestconfig, request):
    if pytestconfig.getoption("--gpu-emulate"):
        if request.node.get_closest_marker("hardware"):
            pytest.skip("needs a real GPU, for its times or values")
        return
    machine = detect(platform=pytestconfig.getoption("--gpu-platform"))
    if not machine.gpus:
        pytest.skip(f"needs a GPU, found {machine.platform}")


def allocate_a_lot(setup):
    block = torch.ones(256 * MiB, dtype=torch.uint8, device=setup.device)

    def step():
        return (block.float() ** 2).mean()

    return step


def sleep_on_the_device(setup):
    def step():
        torch.cuda._sleep(200_000_000)

    return step


def sleep_on_two_streams(setup):
    side = torch.cuda.Stream()

    def step():
        torch.cuda._sleep(100_000_000)
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
        time.sleep(0.2)
        return torch.ones((), device=setup.device).item()

    return step


def multiply(setup):
    matrix = torch.randn(4096, 4096, device=setup.device, dtype=torch.bfloat16)

    def step():
        for _ in range(200):
            torch.mm(matrix, matrix)

    return step


def run_out_and_keep_the_traceback(setup):
    blocks = []

    def step():
        while True:
            blocks.append(torch.empty(1 << 32, dtype=torch.uint8, device=setup.device))

    return step


def reset_the_peak(setup):
    """As libraries do that show the memory of each step."""

    def step():
        torch.cuda.reset_peak_memory_stats()
        block = torch.ones(512 * MiB, dtype=torch.uint8, device=setup.device)
        del block
        torch.cuda.reset_max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()

    return step


def fail_after_the_timed_steps(setup):
    timed = []

    def step():
        if _get_current_dispatch_mode() is not None and timed:
            torch.empty(1 << 50, dtype=torch.uint8, device=setup.device)
        timed.append(1)

    return step


def misuse_captures(setup):
    """Return a step that has CUDA's errors of captures of which no documentation tells, as the emulated GPU assumes them."""
    relaxed, every_thread, illegal_state, unsupported, ok = 2, 0, 401, 900, 0
    cuda = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    one, other = (torch.cuda.Stream() for _ in range(2))
    stream, graph, never_recorded = ctypes.c_void_p(one.cuda_stream), ctypes.c_void_p(), ctypes.c_void_p()

    def end():
        status = cuda.cudaStreamEndCapture(stream, ctypes.byref(graph))
        cuda.cudaGetLastError()
        return status

    def step():
        seen = {"an end without a begin": end()}
        cuda.cudaStreamBeginCapture(stream, relaxed)
        seen["a second begin"] = cuda.cudaStreamBeginCapture(stream, relaxed)
        end()
        cuda.cudaStreamBeginCapture(stream, every_thread)
        seen["a query of another stream"] = cuda.cudaStreamQuery(ctypes.c_void_p(other.cuda_stream))
        end()
        assert cuda.cudaEventCreate(ctypes.byref(never_recorded)) == ok
        cuda.cudaStreamBeginCapture(stream, relaxed)
        seen["a wait for what was never recorded"] = cuda.cudaStreamWaitEvent(stream, never_recorded, 0)
        end()
        assert list(seen.values()) == [illegal_state, illegal_state, unsupported, ok], seen

    return step


def test_errors_of_captures_are_those_that_the_emulated_gpu_assumes(gputrain):
    gputrain.measure(misuse_captures, precision="fp32", steps=1)


def test_peaks_come_from_the_allocator(gputrain):
    figures = gputrain.measure(allocate_a_lot, precision="fp32", steps=2)
    assert figures.peak_allocated_bytes >= (256 + 4 * 256) * MiB
    assert figures.peak_reserved_bytes >= figures.peak_allocated_bytes
    assert figures.device_used_bytes > figures.peak_reserved_bytes


def test_a_step_that_resets_the_peak_hides_nothing(gputrain):
    figures = gputrain.measure(reset_the_peak, precision="fp32", steps=3)
    assert figures.peak_allocated_bytes >= 512 * MiB
    assert figures.peak_reserved_bytes >= 512 * MiB


@hardware
def test_memory_that_runs_out_after_the_timed_steps_loses_no_figures(gputrain):
    with pytest.raises(pytest.fail.Exception, match=r"was measured \(.*failed afterwards \(check\): OutOfMemoryError"):
        gputrain.measure(fail_after_the_timed_steps, precision="fp32", steps=3)


@hardware
def test_asynchronous_work_is_inside_the_step(gputrain):
    assert gputrain.measure(sleep_on_the_device, steps=3).median_step_seconds > 0.02


@hardware
def test_gpu_seconds_are_those_in_which_kernels_run_on_any_stream(gputrain):
    slept = gputrain.measure(sleep_on_the_device, steps=3)
    assert slept.notes == ()
    assert 0.9 < slept.gpu_busy_share <= 1.001
    assert [(step.kernels, step.waits) for step in slept.counts.kinds] == [(1, 0)]
    both = gputrain.measure(sleep_on_two_streams, steps=3)
    assert both.notes == ()
    assert 0.3 * slept.gpu_seconds < both.gpu_seconds < 0.8 * slept.gpu_seconds
    assert both.gpu_busy_share < 0.8
    assert [(step.kernels, step.waits, step.d2h_pinned, step.h2d_pageable) for step in both.counts.kinds] == [(3, 1, 1, 0)]


@hardware
def test_profiled_steps_are_as_long_as_timed_ones_where_the_gpu_is_busy(gputrain):
    seen = gputrain.measure(multiply, steps=20)
    assert 0.9 < seen.gpu_busy_share <= 1.05
    assert max(seen.gpu_steps.seconds) < 1.05 * min(seen.gpu_steps.seconds)
    assert {step.kernels for step in seen.counts.kinds} == {200}


@hardware
def test_the_driver_is_read_while_the_steps_are_timed(gputrain):
    seen = gputrain.measure(multiply, steps=100).telemetry
    assert seen.readings >= 3
    assert seen.clock_mhz > 300
    assert seen.utilization > 0.5
    assert seen.energy_joules is None or seen.energy_joules > 10


@hardware
def test_reading_the_driver_costs_the_step_nothing(gputrain, monkeypatch):
    interval, read, alone = watch.INTERVAL_SECONDS, [], []
    for number in range(3):  # in turn, as clocks drift; a case is measured once a session, so each has steps of its own
        monkeypatch.setattr(watch, "INTERVAL_SECONDS", interval)
        read.append(gputrain.measure(multiply, steps=100 + 2 * number).median_step_seconds)
        monkeypatch.setattr(watch, "INTERVAL_SECONDS", 1e6)
        without = gputrain.measure(multiply, steps=101 + 2 * number)
        assert without.telemetry is None
        alone.append(without.median_step_seconds)
    assert min(read) < 1.005 * min(alone)


@hardware
def test_an_inline_case_that_failed_leaves_the_memory_to_the_next(gputrain):
    free = torch.cuda.mem_get_info()[0]
    with pytest.raises(pytest.fail.Exception, match="ran out of device memory"):
        gputrain.measure(run_out_and_keep_the_traceback, steps=1, inline=True, model="inline")
    assert torch.cuda.mem_get_info()[0] > free - 256 * MiB


def test_compiled_blocks_are_recomputed_as_others_are(gputrain):
    kept, recomputed = (
        gputrain.measure(LLAMA, method="lora", compile="default", activation_checkpointing=share) for share in (False, True)
    )
    assert recomputed.peak_allocated_bytes < 0.8 * kept.peak_allocated_bytes


@hardware
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_compiled_model_trains_as_it_does_otherwise(gputrain, mode):
    plain = gputrain.measure(LLAMA, method="lora", precision="bf16")
    compiled = gputrain.measure(LLAMA, method="lora", precision="bf16", compile=mode)
    assert compiled.losses == pytest.approx(plain.losses, rel=0.02)
    assert compiled.warmup_seconds[0] > compiled.median_step_seconds


def test_running_out_of_memory_is_told(gputrain, pytestconfig):
    if pytestconfig.getoption("--gpu-emulate"):
        assert not gputrain.measure(run_out_and_keep_the_traceback, steps=1).fits
        return
    with pytest.raises(pytest.fail.Exception, match="ran out of device memory"):
        gputrain.measure(run_out_and_keep_the_traceback, steps=1)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_cases_train(gputrain, method):
    figures = gputrain.measure(LLAMA, method=method, steps=2)
    assert figures.environment is None or figures.environment.device_type in ("cuda", "rocm")
    # A GPU's backward runs on threads of its own: recomputation there must be told apart all the same.
    assert 0 < figures.recomputed_flops_per_step < figures.flops_per_step


def test_lent_gpu_is_the_visible_one(gpu):
    assert gpu.name in torch.cuda.get_device_name(0)
