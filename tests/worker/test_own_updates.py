"""Own code whose optimizer steps more or less often than its case says would have another step's memory and time."""

import pytest
import torch
from torch import nn
from zoo_examples import MINE, measured, run

from pytest_gputrain.records import Crashed


def training(every, *, yields_updates=False, optimizers=1, steps_first=False):
    """A loop whose optimizers step after ``every`` backward passes, and which yields after each, or after each update."""

    def build(setup):
        layers = nn.ModuleList(nn.Linear(32, 32, device=setup.device) for _ in range(optimizers))
        adams = [torch.optim.AdamW(layer.parameters()) for layer in layers]
        batch = torch.randn(8, 32, device=setup.device)
        passes = 0
        while True:
            loss = sum(layer(batch).square().mean() for layer in layers)
            loss.backward()
            passes += 1
            update = passes % every == (1 % every if steps_first else 0)
            if update:
                for number, adam in enumerate(adams):
                    if number == 0 or passes % (2 * every) == 0:  # the second, as of a GAN, every other time
                        adam.step()
                        adam.zero_grad()
            if update or not yields_updates:
                yield loss

    return build


RARE = "optimizer of mine stepped in {} of {}, so memory and time would not be those of steps that train"
OFTEN = "the optimizer of mine stepped {} times in 4 steps, but its case says that gradients are accumulated over 4 steps"


@pytest.mark.parametrize(
    ("build", "accumulation", "sentence"),
    [
        (training(1), 1, ""),
        (training(4), 4, ""),
        (training(4, steps_first=True), 4, ""),
        (training(4, yields_updates=True), 1, ""),
        (training(2, optimizers=2), 4, ""),
        (training(1, optimizers=12), 1, ""),
        (training(4), 1, RARE.format(4, "16 steps")),
        (training(99), 1, "optimizer of mine never stepped in 16 steps, so nothing trains: call optimizer.step(), or set"),
        (training(4), 3, RARE.format(6, "8 rounds of 3 steps")),
        (training(1, optimizers=2), 1, RARE.format(8, "16 steps")),
        (training(4, yields_updates=True), 4, OFTEN.format(4)),
        (training(2), 4, OFTEN.format(2)),
    ],
)
def test_updates_are_as_often_as_the_case_says(build, accumulation, sentence):
    reply = run(MINE.replace(gradient_accumulation=accumulation, steps=5, warmup=3), build)
    assert isinstance(reply, Crashed) == bool(sentence), reply
    assert not sentence or sentence in reply.sentence


def test_a_loop_whose_loss_has_no_gradient_is_told_so():
    def build(setup):
        layer = nn.Linear(32, 32, device=setup.device)
        setup.watch(layer)
        while True:
            with torch.no_grad():
                loss = layer(torch.ones(8, 32, device=setup.device)).sum()
            yield loss

    assert "each trained tensor got no gradient" in run(MINE, build).sentence


def test_a_program_that_asks_for_a_gpu_where_there_is_none_is_told_of_the_device_of_its_setup():
    def build(setup):
        raise AssertionError("Torch not compiled with CUDA enabled")

    assert "take setup.device in place of a GPU's name" in run(MINE, build).sentence


def test_an_error_that_cannot_be_told_is_told_by_its_name():
    class Odd(Exception):
        def __str__(self):
            raise TypeError

    def build(setup):
        raise Odd

    assert "Odd" in run(MINE, build).sentence


def test_a_step_without_an_optimizer_is_no_training_that_updates_too_rarely():
    def build(setup):
        layer = nn.Linear(32, 32, device=setup.device)
        return lambda: layer(torch.ones(8, 32, device=setup.device)).sum().backward()

    measured(MINE, build)
