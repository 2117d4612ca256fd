"""TF32 is a switch of torch that a case sets on a GPU, that ends with it, and that no CPU knows."""

import pytest
import torch
from zoo_examples import MINE, example, measured, predicted, stepping

from pytest_gputrain.gate.summary import summarise
from pytest_gputrain.hardware import catalog
from pytest_gputrain.hardware.targets import allowing_tf32, target_of
from pytest_gputrain.worker.precision import tf32_allowed

LLAMA = example("llama-3.1-8b", precision="fp32")


def switches():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("allowed", [True, False])
def test_both_switches_are_set_and_set_back(allowed):
    before = switches()
    assert before == (False, True), "torch's defaults, which docs name"
    with tf32_allowed(allowed):
        assert switches() == (allowed, allowed)
    assert switches() == before
    with tf32_allowed(None):
        assert switches() == before


def test_a_cpu_is_left_as_it_is():
    seen = set()

    def build(setup):
        step = stepping(torch.nn.Linear(4, 1), torch.ones(2, 4))
        while True:
            seen.add(switches())
            yield step()

    measured(MINE.replace(tf32=True), build)
    assert seen == {(False, True)}
    plain, allowed = (measured(LLAMA.replace(tf32=value, steps=1, warmup=0)) for value in (None, True))
    assert plain.losses == allowed.losses
    assert plain.peak_allocated_bytes == allowed.peak_allocated_bytes


def test_rates_are_those_of_data_sheets():
    rates = {marker: platform.tf32_flops for marker, platform in catalog.PLATFORMS.items()}
    published = {"a100": 156e12, "h100": 494.7e12, "h20": 74e12, "rtx_3090": 35.5e12, "rtx_4090": 82.6e12}
    assert {marker: rates[marker] for marker in published} == published
    assert rates["v100"] == catalog.peak_flops("v100", "fp32"), "it has no TF32"
    assert rates["mi300x"] is None


@pytest.mark.slow
def test_the_least_time_and_the_utilization_are_by_its_rate():
    a100 = target_of("a100")
    targets = {None: a100, True: allowing_tf32(a100)}
    without, with_it = (predicted(LLAMA.replace(tf32=value), target, scale="full") for value, target in targets.items())
    assert with_it.peak_allocated_bytes == without.peak_allocated_bytes
    assert with_it.flops_per_step == without.flops_per_step
    assert 0.125 < with_it.roofline_seconds / without.roofline_seconds < 0.3, "an eighth, and what memory takes"
    reply = measured(LLAMA.replace(steps=1, warmup=0))
    used = [summarise(LLAMA.replace(tf32=value), "a100", (reply,)).model_flops_utilization for value in (None, True)]
    assert used[0] == pytest.approx(8 * used[1])
    assert "fp32" not in allowing_tf32(target_of("mi300x")).peak_flops
    assert allowing_tf32(target_of("cpu")) == target_of("cpu")
