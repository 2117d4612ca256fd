"""Tables on parameter servers, with real processes on the CPU: what they compute, what they count, how they end."""

import contextlib
import functools

import psutil
import pytest
import torch
from leftovers import has_ended
from several_processes import CLICKS, alone, losses_of_one_process, measured, run
from torch import nn
from zoo_examples import measured as measured_alone

from pytest_gputrain.cases.validation import OF_WHOLE_WEIGHTS
from pytest_gputrain.records import Crashed
from pytest_gputrain.worker import training
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.parallel.parameter_server import _tables_of
from pytest_gputrain.worker.parallel.table_server import Shard, sparse

CLICKS = CLICKS.replace(parallel="ps", gpus=2, servers=2)
WORDS = CLICKS.replace(model="word2vec", batch_size=100, optimizer="sgd", learning_rate=1.0)
UPDATES = 2 + CLICKS.warmup + CLICKS.steps + 1
"""Counted, in the warm-up, timed, and that of the checks."""


once = functools.cache(measured)
"""For tests that look at different figures of one case."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "servers"),
    [
        *(pytest.param(case, number, id=f"{case.model}-{number}") for case, number in ((WORDS, 2), (CLICKS, 1))),
        *(
            pytest.param(case, number, marks=pytest.mark.weekly, id=f"{case.model}-{number}")
            for case, number in ((WORDS, 1), (CLICKS, 2))
        ),
    ],
)
def test_synchronous_losses_are_those_of_one_process_on_the_whole_batch(case, servers):
    case = case.replace(servers=servers)
    expected = losses_of_one_process(case, [True] * (UPDATES - 1))
    assert once(case).losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.01, "a curve that stays where it is would prove nothing"


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(WORDS, marks=pytest.mark.weekly), CLICKS], ids=["word2vec", "ctr-dnn"])
def test_accumulated_micro_batches_are_pushed_once_an_update(case):
    case = case.replace(gradient_accumulation=2, servers=1)
    reply = measured(case)
    # Two of three counted, one of one in the warm-up, two of four timed; then the checks', and that whose calls are counted.
    updates = [True, False, True, True, False, True, False, True]
    assert reply.ranks[-1].updates == sum(updates) + 2
    assert reply.losses == pytest.approx(losses_of_one_process(case, updates), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [WORDS, pytest.param(CLICKS.replace(precision="bf16"), marks=pytest.mark.weekly)], ids=["word2vec", "ctr-dnn"]
)
def test_every_asynchronous_push_is_an_update(case):
    reply = measured(case.replace(asynchronous=True))
    servers = [rank for rank in reply.ranks if rank.role == "server"]
    assert [server.updates for server in servers] == [case.gpus * UPDATES] * case.servers
    assert reply.losses[-1] < reply.losses[0] - 0.01


@pytest.mark.slow
def test_figures_are_those_of_workers_and_servers():
    reply = once(CLICKS)
    single = measured_alone(alone(CLICKS))
    assert [rank.role for rank in reply.ranks] == ["worker", "worker", "server", "server"]
    servers = reply.ranks[2:]
    assert reply.batch_size == 100
    assert reply.environment.device_count == 4, "two workers and two servers"
    assert (reply.parameters, reply.trainable_parameters) == (single.parameters, single.trainable_parameters)
    assert reply.flops_per_step == 2 * single.flops_per_step
    assert reply.peak_allocated_bytes == max(rank.peak_allocated_bytes for rank in reply.ranks)
    assert reply.peak_host_bytes == sum(rank.peak_host_bytes for rank in reply.ranks)
    table, dense = 1009 * 10 * 4, single.model_bytes - 1009 * 10 * 4
    assert reply.model_bytes == max(505 * 10 * 4, dense)
    for server in servers:
        assert server.step_seconds == ()
        assert server.updates == UPDATES + 1
        # Its half of the table twice more for Adam's states, and what an update takes.
        assert 3 * table / 2 < server.peak_allocated_bytes < 6 * table
    # 1,300 ids of each worker, of 1,009: nearly all rows are seen.
    assert 0.8 * 1009 * servers[0].updates < sum(server.rows for server in servers) < 1009 * servers[0].updates


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "role"), [(1, "worker"), (2, "server")])
def test_the_death_of_one_process_ends_the_case_with_its_own_reason(rank, role):
    started = []

    def kill(event):
        if event.phase == "measure" and not started:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # of other tests of this process
                    started.extend([child] if child.cmdline()[-1].isdigit() else [])
            next(child for child in started if child.cmdline()[-1] == str(rank)).kill()

    reply = run(WORDS.replace(steps=100_000), watch=kill, preloaded=None)
    assert isinstance(reply, Crashed), reply
    assert (reply.rank, reply.sentence) == (rank, "the worker ended by SIGKILL without a reply")
    assert len(started) == 4
    assert all(map(has_ended, started))


@pytest.mark.slow
def test_a_worker_that_fails_before_its_tables_are_served_ends_the_case():
    reply = run(CLICKS.replace(model="resnet-50", batch_size=2, resolution="224x224"))
    assert isinstance(reply, Crashed), reply
    assert reply.rank in (0, 1)
    assert reply.sentence.startswith("resnet-50 trains no embedding table")


@pytest.mark.slow
def test_a_server_whose_tables_do_not_change_says_so():
    reply = run(WORDS.replace(learning_rate=0.0))
    assert isinstance(reply, Crashed), reply
    number = reply.rank - WORDS.gpus
    assert reply.sentence == f"3 of 3 tables did not change on server {number} in {UPDATES + 1} updates (first: words)"


@pytest.mark.parametrize("optimizer", sorted({*training.OPTIMIZERS} - {*OF_WHOLE_WEIGHTS}))
def test_rows_are_updated_as_the_optimizer_updates_a_whole_tensor(optimizer):
    make = training.OPTIMIZERS[optimizer]
    table = torch.randn(7, 3)
    shard = Shard("table", table.clone(), lambda rows: make(rows, 0.1))
    seen = torch.tensor([1, 4, 5])
    whole = nn.Parameter(table[seen])
    reference = make([whole], 0.1)
    for _ in range(3):
        gradient = torch.randn(3, 3)
        whole.grad = gradient.clone()
        reference.step()
        assert shard.update(sparse(seen, gradient, 7)) == 3
    torch.testing.assert_close(shard.weight[seen], whole.detach(), rtol=0, atol=0)
    # A row that is not seen stays, whatever it was moved by before.
    before = shard.weight.clone()
    shard.update(sparse(torch.tensor([1]), torch.randn(1, 3), 7))
    others = torch.tensor([0, 2, 3, 4, 5, 6])
    assert torch.equal(shard.weight[others], before[others])
    assert torch.equal(before[[0, 2, 3, 6]], table[[0, 2, 3, 6]])


def test_an_update_without_rows_moves_nothing_and_gradients_of_one_row_are_summed():
    shard = Shard("table", torch.ones(4, 2), lambda rows: training.OPTIMIZERS["adam"](rows, 0.1))
    assert shard.update(sparse(torch.empty(0, dtype=torch.int64), torch.empty(0, 2), 4)) == 0
    assert (shard.pushed, shard.moved()) == (False, False)
    gradient = sparse(torch.tensor([2, 0, 2]), torch.tensor([[1.0], [2.0], [3.0]]), 3)
    assert gradient.to_dense().tolist() == [[2.0], [0.0], [4.0]]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize(
    "model",
    [Tied(), nn.Sequential(nn.Embedding(5, 3, padding_idx=0)), nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))],
    ids=["tied", "padded", "limited"],
)
def test_what_is_more_than_a_table_is_refused_and_frozen_tables_stay(model):
    with pytest.raises(CheckFailed, match="which a parameter server does not do; choose ddp"):
        _tables_of(model, "mine")
    partly = nn.Sequential(nn.Embedding(5, 3).requires_grad_(False), nn.Embedding(4, 3))
    assert list(_tables_of(partly, "mine")) == ["1"]
