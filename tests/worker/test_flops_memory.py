"""Counting FLOPs takes no memory: on a GPU, a step that just fits must still fit when its FLOPs are counted."""

import contextlib
import gc

import pytest
import torch
from zoo_examples import DEVICE, STATED, example, task_of

from pytest_gputrain.worker.allocations import AllocationCounter
from pytest_gputrain.worker.building import build
from pytest_gputrain.worker.compiling import uncompiled
from pytest_gputrain.worker.flops import count_flops
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.run import SEED

ONE_OF_EACH_FAMILY = {architecture.family: example(model) for model, architecture in STATED.items()}.values()
SOME = ("vgg-16", "word2vec", "qwen2-vl-7b", "flux.2-klein-4b")
"""Those that convolve, look up rows, attend, or denoise; the others run weekly."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.model in SOME else [pytest.mark.weekly], id=str(case))
        for case in ONE_OF_EACH_FAMILY
    ],
)
def test_a_step_holds_as_much_while_its_flops_are_counted(case):
    load(case)
    torch.manual_seed(SEED)
    training = build(task_of(case), DEVICE)

    def peak_of_step(counting):
        # Cycles, in which exceptions of libraries hold tensors, must not die in the midst of one of the two.
        gc.collect()
        with AllocationCounter() as counter, uncompiled(case), counting:
            training.step(True)
        return counter.peak_bytes

    gc.disable()
    try:
        peak_of_step(contextlib.nullcontext())  # it makes the optimizer's states
        plain = peak_of_step(contextlib.nullcontext())
        counted = peak_of_step(count_flops())
    finally:
        gc.enable()
    assert plain > 0
    assert counted <= 1.01 * plain
