"""Tensors of own code that do not train are told with their names, and tensors of the zoo that do not are refused."""

import contextlib
import itertools
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_examples import MINE, measured, refused

from pytest_gputrain.records import TrainedTensors
from pytest_gputrain.worker.checks import Movement


class Pooled(nn.Module):
    """A model whose pooler is not used, as that of BERT under mean pooling."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.pooler = nn.Linear(16, 16)

    def forward(self, batch):
        for layer in self.layers:
            batch = layer(batch).relu()
        return batch


def training(*, idle=(), rate=1e-3, forward=lambda model, batch: model(batch)):
    def build(setup):
        model = Pooled().to(setup.device)
        setup.watch(model, idle=idle)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

        def step():
            loss = forward(model, torch.ones(4, 16, device=setup.device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return build


NONE = "2 of 8 trained tensors got no gradient and did not change: pooler.weight, pooler.bias; if that is intended, say it"


def test_a_tensor_that_gets_no_gradient_is_told_once_with_its_name():
    figures = measured(MINE, training())
    assert figures.trained == TrainedTensors(learning={"layers.*": 6}, idle={"pooler.weight": 1, "pooler.bias": 1})
    assert [note.startswith(NONE) for note in figures.notes] == [True]


def test_numbers_of_layers_are_not_told_one_by_one():
    def shallow(model, batch):
        return model.pooler(batch)

    figures = measured(MINE, training(forward=shallow))
    assert figures.trained == TrainedTensors(learning={"pooler": 2}, idle={"layers.*.weight": 3, "layers.*.bias": 3})
    assert "layers.*.weight (3), layers.*.bias (3);" in figures.notes[0]


@pytest.mark.parametrize("idle", [["pooler.*"], ["pooler.weight", "pooler.bias"]], ids=["pattern", "names"])
def test_idle_tensors_that_the_code_declares_are_not_told(idle):
    figures = measured(MINE, training(idle=idle))
    assert (figures.trained, figures.notes) == (TrainedTensors(learning={"layers.*": 6}), ())


@pytest.mark.parametrize(
    ("idle", "sentence"),
    [
        (["layers.1.*"], r"has 'layers\.1\.\*' in idle, but layers\.1\.weight changes in training; take it out"),
        (
            ["poler.*"],
            r"has 'poler\.\*' in idle, but no trained tensor of the model has such a name; its names are like lay",
        ),
        ("pooler.*", r"takes a list of names as idle, such as idle=\['pooler\.\*'\], and got 'pooler\.\*'"),
    ],
    ids=["trains", "unknown", "no list"],
)
def test_what_is_wrongly_declared_to_be_idle_is_refused(idle, sentence):
    assert re.search(sentence, refused(MINE, training(idle=idle)))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"rate": 0.0}, "4 of 8 trained tensors did not change"),
        ({"forward": lambda model, batch: batch.requires_grad_()}, "each trained tensor got no gradient, and none changed"),
    ],
    ids=["rate", "gradient"],
)
def test_a_model_of_which_nothing_trains_is_refused(wrong, sentence):
    assert sentence in refused(MINE, training(**wrong))


def test_a_part_that_trains_in_other_steps_is_not_idle():
    turn = itertools.count()
    figures = measured(MINE, training(forward=lambda model, batch: model.layers[next(turn) % 3](batch)))
    assert figures.trained.learning == {"layers.*": 6}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_to_follow_the_gradients_of_own_code_runs_no_operator(sparse):
    class Noted(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def operators(followed):
        table = nn.Embedding(8, 4, sparse=sparse)
        movement = Movement(table, accepts_zeros=True)
        with movement.watching() if followed else contextlib.nullcontext(), Noted() as noted:
            table(torch.tensor([1, 1, 2])).sum().backward()
        return noted.names, movement.changes()[1]

    names, _ = operators(followed=False)
    assert operators(followed=True) == (names, {"weight"})
