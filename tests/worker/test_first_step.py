"""Where the build of a generator ends and its first step begins, for memory that is counted by phases."""

import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from zoo_examples import MINE, measured

from pytest_gputrain.worker.allocations import AllocationCounter
from pytest_gputrain.worker.first_step import has_begun

SIZE = 64


class Parts:
    """A model with its optimizer, and one step of it that keeps its gradients."""

    def __init__(self):
        self.model = nn.Linear(SIZE, SIZE, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)

    def step(self, batch):
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def in_its_own_loop(setup):
    parts = Parts()
    for batch in [torch.ones(8, SIZE) for _ in range(16)]:
        yield parts.step(batch)


def in_nested_loops(setup):
    for _ in range(1):
        parts = Parts()
        while True:
            yield parts.step(torch.ones(8, SIZE))


def of_another_generator(setup):
    for loss in in_its_own_loop(setup):
        yield float(loss)


def of_a_decorated_generator(setup):
    yield from enclosed(setup)


def undecorated(function):
    return function


@undecorated
@undecorated
def enclosed(setup):
    parts = Parts()
    with torch.enable_grad():
        for batch in batches():
            try:
                yield parts.step(batch)
            finally:
                del batch


def batches():
    table = torch.ones(8, SIZE)
    while True:
        yield table + 1


def of_an_iterator(setup):
    class Losses(Iterator):
        def __init__(self):
            self.parts = Parts()

        def __next__(self):
            return self.parts.step(torch.ones(8, SIZE))

    for loss in Losses():
        yield float(loss)


OWN = [in_its_own_loop, in_nested_loops, of_another_generator, of_a_decorated_generator, of_an_iterator]


@pytest.mark.parametrize("loop", OWN, ids=lambda loop: loop.__name__)
def test_nothing_of_the_first_step_counts_as_the_build(loop):
    found = measured(MINE, loop)
    # The weights, and at most 16 batches: there is no gradient beside them, which is as large as 8.
    assert found.phase_peak_bytes["build"] <= (SIZE + 16 * 8) * SIZE * 4
    made_in_build = {row.operator for rows in found.largest.values() for row in rows if row.phase == "build"}
    assert made_in_build <= {"aten.empty", "aten.ones"}
    # The gradient and the momentum live in each phase, as what made them, though the first step did.
    makers = {(row.operator, row.phase) for row in found.largest["forward"] if row.shape == (SIZE, SIZE)}
    assert makers == {("aten.empty", "build"), ("aten.mm", "backward"), ("aten.clone", "optimizer")}


def test_the_first_step_has_no_peak_and_a_function_has_the_same_phases():
    def large_at_first(setup):
        parts, size = Parts(), 10**6
        while True:
            large = torch.ones(size)
            del large
            yield parts.step(torch.ones(8, SIZE))
            size = 1

    def function(setup):
        parts = Parts()
        return lambda: parts.step(torch.ones(8, SIZE))

    loop, plain = measured(MINE, large_at_first), measured(MINE, function)
    assert loop.phase_peak_bytes == plain.phase_peak_bytes


def unrolled(setup):
    parts = Parts()
    yield parts.step(torch.ones(8, SIZE))
    while True:
        yield parts.step(torch.ones(8, SIZE))


def of_no_known_source(setup):
    source = "def steps(parts, torch, SIZE):\n    while True:\n        yield parts.step(torch.ones(8, SIZE))"
    made = {}
    exec(source, made)
    return made["steps"](Parts(), torch, SIZE)


@pytest.mark.parametrize("loop", [unrolled, of_no_known_source], ids=lambda loop: loop.__name__)
def test_without_a_known_loop_the_build_ends_with_the_first_gradient(loop):
    found = measured(MINE, loop)
    makers = {(row.operator, row.phase) for row in found.largest["forward"] if row.shape == (SIZE, SIZE)}
    assert makers == {("aten.empty", "build"), ("aten.mm", "backward"), ("aten.clone", "optimizer")}


def test_training_before_the_loop_that_yields_is_a_part_of_the_build():
    def warmed_up(setup):
        parts = Parts()
        parts.step(torch.ones(8, SIZE))
        while True:
            yield parts.step(torch.ones(8, SIZE))

    found = measured(MINE, warmed_up)
    assert {row.phase for row in found.largest["forward"] if row.shape == (SIZE, SIZE)} == {"build"}


def test_a_generator_that_runs_nowhere_has_not_begun():
    assert has_begun(in_its_own_loop(None)) is None


def test_an_operator_of_a_layer_that_a_generator_makes_is_no_step():
    def layers():
        for _ in range(3):
            yield nn.Linear(SIZE, SIZE)

    def made_of_layers(setup):
        model = nn.Sequential(*layers())
        for layer in layers():
            model.append(layer)
        while True:
            yield model(torch.ones(1, SIZE)).sum().backward()

    generator = made_of_layers(None)
    assert isinstance(generator, types.GeneratorType)
    with AllocationCounter() as counter:
        counter.phases.first_step_began = lambda: has_begun(generator)
        next(generator)
    phases = {row.phase for row in counter.trace.allocations if row.shape == (SIZE, SIZE)}
    assert phases == {"build", "backward"}
    assert {row.phase for row in counter.trace.allocations if row.operator == "aten.empty"} == {"build"}
