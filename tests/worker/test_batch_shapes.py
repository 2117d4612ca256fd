"""Data that vary in size are the same whatever was drawn before the training, and the shapes that they have are recorded."""

import copy
import pickle
import random

import numpy
import pytest
import torch
from torch import nn
from zoo_examples import MINE, measured

from pytest_gputrain.records import BatchShapes
from pytest_gputrain.worker.batch_shapes import ShapesNoted
from pytest_gputrain.worker.seeds import Seeds, seed_python


class Graphs(nn.Module):
    """A network on graphs: nodes get the sum of their neighbours."""

    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, nodes, *, edges):
        for layer in self.layers:
            nodes = layer(nodes.index_add(0, edges[1], nodes[edges[0]])).relu()
        return nodes


def of_torch():
    return int(torch.randint(50, 500, ()))


def training(*, before=lambda: None, size=of_torch, generator=False, own_seed=None, layers=2, calls=1):
    """A program that trains on a graph of another size in each step.

    Args:
        before: what is drawn before training.
        own_seed: of the program itself, before everything.
        calls: of the model in a step.
    """

    def build(setup):
        if own_seed is not None:
            torch.manual_seed(own_seed)
        model = Graphs(layers)
        optimizer = torch.optim.AdamW(model.parameters())
        setup.watch(model)
        before()

        def step():
            number = size()
            nodes, edges = torch.ones(number, 32), torch.zeros(2, 3 * number, dtype=torch.int64)
            loss = sum(model(nodes, edges=edges).square().mean() for _ in range(calls))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def loop(setup):
        step = build(setup)
        while True:
            yield step()

    return loop if generator else build


@pytest.mark.parametrize("generator", [False, True], ids=["function", "generator"])
def test_one_more_random_number_before_training_changes_no_size(generator):
    plain, drawn = (measured(MINE, training(before=before, generator=generator)) for before in (of_torch, lambda: None))
    assert plain.batch_shapes == drawn.batch_shapes
    assert (plain.peak_allocated_bytes, plain.flops_per_step) == (drawn.peak_allocated_bytes, drawn.flops_per_step)
    assert len({shapes for _, shapes in plain.batch_shapes.first}) == 4, "the sizes vary"


def test_a_layer_more_changes_no_data_that_are_made_after_the_optimizer():
    def kept(sizes):
        return lambda: sizes.extend(of_torch() for _ in range(3))

    few, many = [], []
    measured(MINE, training(before=kept(few), size=lambda: few[0]))
    measured(MINE, training(before=kept(many), size=lambda: many[0], layers=3))
    assert few == many


def test_what_a_program_seeds_itself_stays_as_it_is():
    assert measured(MINE, training(own_seed=1)).batch_shapes != measured(MINE, training(own_seed=2)).batch_shapes
    drawn = measured(MINE, training(own_seed=1, before=lambda: torch.rand(1)))
    assert measured(MINE, training(own_seed=1)).batch_shapes != drawn.batch_shapes


@pytest.fixture
def _random_numbers_as_before():
    states = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


@pytest.mark.usefixtures("_random_numbers_as_before")
@pytest.mark.parametrize("of_python", [True, False], ids=["own process", "inline"])
def test_python_and_numpy_are_seeded_again_in_a_process_of_the_case_alone(of_python):
    def draw():
        return random.random(), numpy.random.rand()

    def after(count):
        seed_python()
        seeds = Seeds(of_python=of_python)
        with seeds.following():
            for _ in range(count):
                draw()
            seeds.end_build()
            return draw()

    assert (after(1) == after(2)) == of_python


@pytest.mark.usefixtures("_random_numbers_as_before")
@pytest.mark.parametrize("library", [random, numpy.random], ids=["python", "numpy"])
def test_what_a_program_seeds_by_python_or_numpy_stays_as_it_is(library):
    seeds = Seeds(of_python=True)
    with seeds.following():
        library.seed(7)
        states = random.getstate(), numpy.random.get_state()[1].tolist()
        seeds.end_build()
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states


def test_shapes_are_those_of_each_step_and_of_the_one_whose_flops_are_counted():
    sizes = iter(range(100, 200))
    shapes = measured(MINE, training(size=lambda: next(sizes))).batch_shapes

    def of(number):
        return ((number, 32), (2, 3 * number))

    # Four counted steps, one of the warm-up, and after two timed ones the last.
    assert shapes.first == tuple((1, of(number)) for number in range(100, 104))
    assert (shapes.steps, shapes.last) == (6, of(107))


def test_steps_of_one_shape_are_one_row_however_often_the_model_is_called():
    once, twice = (measured(MINE, training(size=lambda: 60, calls=calls)).batch_shapes for calls in (1, 2))
    assert once == twice
    assert once.first == ((6, once.last),)


def test_without_tensors_or_a_watched_model_there_are_none():
    def build(setup):
        weight = nn.Parameter(torch.ones(4, 4))
        optimizer = torch.optim.AdamW([weight])

        def step():
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert measured(MINE, build).batch_shapes is None


class Batch:
    """A batch as libraries for graphs have it: an object, which refers to itself."""

    def __init__(self, **tensors):
        self.store = tensors
        self.parent = self


def noted(model, *given, **named):
    shapes = ShapesNoted()
    with shapes.following(model):
        for _ in shapes.during(iter([True, True])):
            model(*given, **named)
    return shapes.record()


@pytest.mark.parametrize(
    "given",
    [
        (torch.ones(2, 3), torch.ones(4)),
        ([torch.ones(2, 3), {"labels": torch.ones(4), "name": "w"}],),
        (Batch(nodes=torch.ones(2, 3), labels=torch.ones(4), count=torch.tensor(3)),),
        (torch.ones(2, 3), torch.ones(4), nn.Linear(5, 5)),
        (torch.nested.nested_tensor([torch.ones(1, 3)] * 2, layout=torch.jagged), torch.ones(4)),
    ],
    ids=["tensors", "collections", "object", "module", "jagged"],
)
def test_tensors_are_found_in_whatever_a_model_is_given(given):
    class Takes(nn.Module):
        def forward(self, *args):
            pass

    shapes = noted(Takes(), *given)
    of_jagged = [(3,)] if given[0].__class__.__name__ == "NestedTensor" else []  # its offsets
    last = ((2, 3), *of_jagged, (4,))
    assert shapes == BatchShapes(steps=2, digest=shapes.digest, first=((2, last),), last=last)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
def test_the_calls_of_a_scripted_module_cannot_be_seen():
    scripted = torch.jit.script(nn.Linear(3, 4))
    assert noted(scripted, torch.ones(2, 3)) is None
    parts = nn.ModuleList([scripted, nn.Linear(4, 1)])
    shapes = ShapesNoted()
    with shapes.following(parts):
        for _ in shapes.during(iter([True])):
            parts[1](parts[0](torch.ones(2, 3)))
    assert shapes.record().last == ((2, 4),)


def test_the_parts_of_a_container_are_followed_and_nothing_stays_on_them():
    parts = nn.ModuleDict({"generator": nn.Linear(3, 4), "critics": nn.ModuleList([nn.Linear(4, 1)])})

    shapes = ShapesNoted()
    with shapes.following(parts):
        copied, read = copy.deepcopy(parts), pickle.loads(pickle.dumps(parts))
        for _ in shapes.during(iter([True])):
            parts["critics"][0](parts["generator"](torch.ones(2, 3)))
            copied["generator"](torch.ones(5, 3))
            read["generator"](torch.ones(6, 3))
    assert shapes.record().last == ((2, 3), (2, 4))
    assert not any(module._forward_pre_hooks for module in parts.modules())
