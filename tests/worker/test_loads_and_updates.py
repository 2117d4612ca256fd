"""What own code asks of torch's DataLoader and of optimizers in each step, and how long it waits for batches."""

import time
from collections import UserDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from zoo_examples import MINE, measured

from pytest_gputrain.worker.counted_steps import CountedSteps
from pytest_gputrain.worker.loads_and_updates import LoadsAndUpdates
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.python_calls import PythonCalls

# From Python 3.12 on; torch's DataLoader forks so, too.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SAMPLE = 16 * 4 + 8
"""The bytes of a sample: 16 numbers of fp32 and a label."""


class Slow(Dataset):
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __len__(self):
        return 1000

    def __getitem__(self, number):
        time.sleep(self.seconds)
        return {"x": torch.full((16,), float(number % 7)), "label": number % 2}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(16), 1)] * 1000)


class Whole(Slow):
    """A data set that makes a batch at once, of a kind that it chooses."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def __getitems__(self, numbers):
        return self.make([self[number] for number in numbers])


def together(batch):
    return {"x": torch.cat([part["x"] for part in batch])}


def training(*loaders, updates=1, optimizer=torch.optim.SGD, optimizers=1):
    """A loop that takes a batch of each loader in a step, and updates by each of its optimizers so often."""

    def build(setup):
        layer = nn.Linear(16, 1, device=setup.device)
        batches = [iter(DataLoader(**options)) for options in loaders]
        makers = [optimizer(layer.parameters(), lr=0.01) for _ in range(optimizers)]
        while True:
            for batch in batches:
                taken = next(batch)  # takes
            x = torch.ones(2, 16) if not loaders else taken["x"] if isinstance(taken, dict) else taken[0]
            for _ in range(updates):
                loss = layer(x.view(-1, 16)).square().mean()
                loss.backward()
                for each in makers:
                    each.step()  # updates
                layer.zero_grad()
            yield loss

    return build


def asked(build, **fields):
    """The figures of the last counted step, and its causes by what is counted."""
    counts = measured(MINE.replace(**fields), build).counts
    return counts.of_step(-1), {cause.what: cause for cause in counts.causes if cause.own}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("options", "samples", "size"),
    [
        ({"dataset": Slow(), "batch_size": 4}, 4, 4 * SAMPLE),
        ({"dataset": Stream(), "batch_size": 3}, 3, 3 * SAMPLE),
        ({"dataset": Slow(), "batch_size": None}, 1, 16 * 4),
        ({"dataset": Slow(), "batch_size": 4, "collate_fn": together}, 4, 4 * 16 * 4),
    ],
)
def test_samples_bytes_and_processes_of_a_loader_are_counted_whoever_loads(options, samples, size, workers):
    figures, causes = asked(training({**options, "num_workers": workers}))
    assert (figures.loads, figures.loaded_bytes, figures.loader_workers) == (samples, size, workers)
    assert causes["loads"].own.text == "taken = next(batch)  # takes"
    assert causes["loads"].by == type(options["dataset"]).__name__


@pytest.mark.parametrize(
    ("make", "collate", "samples"),
    [(list, together, 4), (iter, lambda batch: together([*batch]), 1), (together, lambda batch: batch, 1)],
    ids=["list", "iterator", "dict"],
)
def test_a_batch_that_a_data_set_makes_itself_is_one_unless_it_is_a_list_of_samples(make, collate, samples):
    figures, _ = asked(training({"dataset": Whole(make), "batch_size": 4, "collate_fn": collate}))
    assert (figures.loads, figures.loaded_bytes) == (samples, 4 * 16 * 4)


class Doubling(_SingleProcessDataLoaderIter):
    """An iterator that changes what torch's takes of the data set."""

    def _next_data(self):
        return {name: 2 * value for name, value in super()._next_data().items()}


def test_an_iterator_that_derives_from_that_of_torch_gets_the_data_of_a_batch(monkeypatch):
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda self: Doubling(loader=self))
    figures, _ = asked(training({"dataset": Slow(), "batch_size": 4}))
    assert (figures.loads, figures.loaded_bytes) == (4, 4 * SAMPLE)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_a_sparse_tensor_has_the_bytes_of_its_indices_and_values():
    def sparse(batch):
        indices = torch.zeros(2, len(batch), dtype=torch.int64)
        return {**together(batch), "graph": torch.sparse_coo_tensor(indices, torch.ones(len(batch)), (10**5, 10**5))}

    figures, _ = asked(training({"dataset": Slow(), "batch_size": 4, "collate_fn": sparse}))
    assert figures.loaded_bytes == 4 * 16 * 4 + 4 * (2 * 8 + 4)


def test_a_batch_that_holds_itself_has_its_bytes_once():
    def circular(batch):
        made = together(batch)
        made["all"] = [made]
        return made

    figures, _ = asked(training({"dataset": Slow(), "batch_size": 4, "collate_fn": circular}))
    assert figures.loaded_bytes == 4 * 16 * 4


def test_two_loaders_are_added_up_and_a_loop_without_any_has_none():
    one = {"dataset": Slow(), "batch_size": 4, "num_workers": 1}
    figures, _ = asked(training(one, {**one, "batch_size": 2}))
    assert (figures.loads, figures.loader_workers) == (6, 2)
    figures, _ = asked(training())
    assert (figures.loads, figures.loaded_bytes, figures.loader_workers) == (0, 0, 0)


def test_a_batch_has_the_type_and_the_values_that_its_loader_gives_it():
    loader = {"dataset": Slow(), "batch_size": 4, "num_workers": 1}
    seen = []

    def build(setup):
        for step in training(loader)(setup):
            seen.append(next(iter(DataLoader(**loader))))
            yield step

    measured(MINE, build)
    later = next(iter(DataLoader(**loader)))
    for batch in (*seen, later):
        assert type(batch) is dict
        assert torch.equal(batch["label"], torch.tensor([0, 1, 0, 1]))


def test_to_count_what_a_loader_gives_calls_no_function_of_the_program():
    def calls_of_a_batch(asked):
        batches = iter(DataLoader(Slow(), batch_size=4, collate_fn=lambda batch: UserDict(together(batch))))
        steps = CountedSteps(OwnLines([Path(__file__).parent]))
        calls = PythonCalls(steps.lines, torch.device("cpu"))
        steps.asked = asked
        steps.begin_asked()
        with calls.counting():
            next(batches)
        return calls.total, sum(size for _, size in steps.end_asked().values())

    calls_of_a_batch(LoadsAndUpdates())  # the first one imports
    without, _ = calls_of_a_batch(LoadsAndUpdates())
    counting = LoadsAndUpdates()
    with counting.following():
        assert calls_of_a_batch(counting) == (without, 4 * 16 * 4)


def test_a_step_waits_for_its_batches_for_as_long_as_they_take():
    slow = {"dataset": Slow(0.02), "batch_size": 4}
    reply = measured(MINE.replace(steps=4), training(slow))
    assert 0.08 <= reply.input_seconds <= sum(reply.step_seconds) / 4
    assert measured(MINE, training()).input_seconds is None


class Derived(torch.optim.SGD):
    """An optimizer whose step calls that of its class, which hooks see, too, once one of that class was made."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("options", "repeated"),
    [
        ({}, 0),
        ({"optimizers": 2}, 0),  # as a GAN has them
        ({"updates": 2}, 1),
        ({"updates": 4, "optimizers": 2}, 6),
        ({"optimizer": Derived}, 0),
        ({"optimizer": Derived, "updates": 3}, 2),
    ],
)
def test_steps_of_the_same_optimizer_in_one_step_are_counted_from_the_second_on(options, repeated):
    torch.optim.SGD(nn.Linear(1, 1).parameters())
    figures, causes = asked(training(**options))
    assert figures.repeated_updates == repeated
    assert not repeated or causes["repeated_updates"].own.text == "each.step()  # updates"
    assert not repeated or causes["repeated_updates"].by == options.get("optimizer", torch.optim.SGD).__name__
