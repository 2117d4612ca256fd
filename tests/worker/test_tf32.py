"""TF32 is a switch of torch that a case sets on a GPU, that ends with it, and that no CPU knows."""

import msgspec
import pytest
import torch
from zoo_examples import MINE, example, measured, stepping

from pytest_gputrain.gate.summary import summarise
from pytest_gputrain.hardware import catalog
from pytest_gputrain.worker import flops
from pytest_gputrain.worker.flops import count_flops
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


def test_the_utilization_is_by_its_rate():
    reply = measured(LLAMA.replace(steps=1, warmup=0))
    used = [summarise(LLAMA.replace(tf32=value), "a100", (reply,)).model_flops_utilization for value in (None, True)]
    assert used[0] == pytest.approx(8 * used[1])


def test_what_may_be_computed_in_it_is_counted_by_the_switch_of_its_time(monkeypatch):
    monkeypatch.setattr(flops, "device_of", lambda args: "cuda")
    convolution, product = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 4)

    def share(module, *shape):
        with count_flops() as counted:
            module(torch.ones(*shape)).sum().backward()
        return counted.tf32_share

    def shares():
        return share(convolution, 1, 3, 8, 8), share(product, 2, 4)

    assert shares() == (1, 0)
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = False
        assert shares() == (0, 1)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
    monkeypatch.undo()
    assert shares() == (0, 0), "a CPU has no TF32"


def test_the_utilization_of_a_mixture_is_by_the_peaks_of_both():
    case = example("vgg-16", precision="fp32", steps=1, warmup=0)
    reply = measured(case)
    plain, mixed, all_of_it = (
        summarise(case, "h200", (msgspec.structs.replace(reply, tf32_share=share),)).model_flops_utilization
        for share in (None, 0.5, 1.0)
    )
    rate = catalog.PLATFORMS["h200"].tf32_flops / catalog.PLATFORMS["h200"].peak_flops["fp32"]
    assert all_of_it == pytest.approx(plain / rate)
    assert mixed == pytest.approx((plain + all_of_it) / 2)
    assert summarise(case, "mi300x", (msgspec.structs.replace(reply, tf32_share=1.0),)).model_flops_utilization is None
