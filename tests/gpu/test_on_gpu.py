"""What only a GPU can show. Every test skips where there is none."""

import pytest
import torch

from pytest_gputrain import Case, MiB

LLAMA = Case(model="llama-3.1-8b", batch_size=2, sequence_length=8192, activation_checkpointing=True, steps=3, warmup=1)


@pytest.fixture(autouse=True)
def _on_a_gpu(gputrain):
    machine = gputrain._runner.bench.machine
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


def do_nothing(setup):
    return lambda: None


def ask_for_too_much(setup):
    return lambda: torch.empty(1 << 50, dtype=torch.uint8, device=setup.device)


def test_peaks_come_from_the_allocator(gputrain):
    figures = gputrain.measure(allocate_a_lot, precision="fp32", steps=2)
    assert figures.peak_allocated_bytes >= (256 + 4 * 256) * MiB
    assert figures.peak_reserved_bytes >= figures.peak_allocated_bytes
    assert figures.device_used_bytes > figures.peak_reserved_bytes


def test_asynchronous_work_is_inside_the_step(gputrain):
    slept = gputrain.measure(sleep_on_the_device, steps=3)
    idle = gputrain.measure(do_nothing, steps=3)
    assert slept.median_step_seconds > 0.02
    assert slept.median_step_seconds > 100 * idle.median_step_seconds


def test_running_out_of_memory_is_told(gputrain):
    with pytest.raises(pytest.fail.Exception, match="ran out of device memory"):
        gputrain.measure(ask_for_too_much, steps=1)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_cases_train(gputrain, method):
    figures = gputrain.measure(LLAMA, method=method, steps=2)
    assert figures.environment.device_type in ("cuda", "rocm")
    # A GPU's backward runs on threads of its own: recomputation there must be told apart all the same.
    assert 0 < figures.recomputed_flops_per_step < figures.flops_per_step


def test_lent_gpu_is_the_visible_one(gpu):
    assert gpu.name in torch.cuda.get_device_name(0)
