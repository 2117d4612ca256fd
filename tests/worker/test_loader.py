"""Batches from processes of a DataLoader: what a step waits for shows, what they are and how they end."""

import os
import signal
import statistics
import time
from unittest import mock

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from leftovers import has_ended, wait_until
from several_processes import measured as measured_in_processes
from zoo_examples import DEVICE, example, measured, task_of, trained

from pytest_gputrain import Case
from pytest_gputrain.worker import training as recipe
from pytest_gputrain.worker.loader import Loader
from pytest_gputrain.worker.loop import levelled, timed_steps
from pytest_gputrain.worker.zoo.word_vectors import WordVectorModel

# From Python 3.12 on; torch's DataLoader forks so, too.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

WORDS = example("word2vec", batch_size=100, precision="fp32", loader_workers=1, steps=4, warmup=1)
IMAGES = example("resnet-50", batch_size=4, precision="fp32", loader_workers=1, steps=4, warmup=1)


def slowly(function, seconds):
    def slow(*arguments):
        time.sleep(seconds)
        return function(*arguments)

    return slow


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("workers", "step", "batch", "least", "waits"),
    [
        (1, 0.0, 0.4, 0.32, (0.28, 9)),  # every step waits for its batch
        (3, 0.0, 0.4, 0.1, (0.09, 9)),  # of three steps one waits for all three batches
        (2, 0.2, 0.5, 0.235, (0, 9)),  # just too slow: the four batches loaded ahead would do for the timed steps
        (2, 0.3, 0.0, 0.3, (0, 0.1)),  # fast enough
    ],
)
def test_a_loader_that_is_too_slow_shows_in_the_median_step(workers, step, batch, least, waits, monkeypatch):
    monkeypatch.setattr(Case, "loaders", lambda self, beside_gpu: workers)
    with (
        mock.patch.object(WordVectorModel, "batch", slowly(WordVectorModel.batch, batch)),
        mock.patch.object(recipe.Training, "step", slowly(recipe.Training.step, step)),
    ):
        reply = measured(WORDS.replace(loader_workers=workers, steps=2, warmup=0))
    assert reply.median_step_seconds > least
    assert waits[0] <= reply.input_seconds < waits[1]
    assert len(reply.step_seconds) % workers == 0


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(2, 4))
def test_levelled_steps_have_the_same_sum_and_show_every_stall(bursts, loaders):
    seconds = [value for burst in bursts for value in (burst + 1, *[1.0] * (loaders - 1))]
    level = levelled(seconds, loaders)
    assert len(level) == len(seconds)
    assert sum(level) == pytest.approx(sum(seconds))
    assert min(level) > 1
    assert statistics.median(seconds) == 1 or loaders == 2


def test_steps_are_a_multiple_of_the_processes():
    assert [timed_steps(Case(steps=10, loader_workers=workers)) for workers in (0, 1, 4, 16)] == [10, 10, 12, 16]


@pytest.mark.slow
def test_losses_are_those_of_the_same_batch_without_a_loader():
    case = WORDS.replace(parallel="ddp", gpus=2, steps=4, warmup=1, model="ctr-dnn", optimizer="adam", batch_size=20)
    loaded = measured_in_processes(case)
    # One step more before the timed ones.
    kept = measured_in_processes(case.replace(loader_workers=0, warmup=2))
    assert loaded.losses == pytest.approx(kept.losses, rel=1e-5)
    assert loaded.input_seconds is not None
    assert kept.input_seconds is None


def test_the_batch_of_a_process_that_trains_alone_is_the_one_that_it_keeps_without_a_loader():
    case = IMAGES.replace(loader_workers=0)
    kept, training = trained(case)._inputs, trained(IMAGES)
    loaded = training._loader.next()
    training.leave()
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[name], kept[name]) for name in kept)


def loaders_of(pid):
    return {child for child in psutil.Process(pid).children() if not has_ended(child)}


def test_batches_are_in_the_type_of_the_weights_and_processes_end_with_the_training():
    before = loaders_of(os.getpid())
    training = trained(IMAGES.replace(precision="bf16", loader_workers=2))
    assert training._loader.next()["images"].dtype == torch.bfloat16
    started = loaders_of(os.getpid()) - before
    assert len(started) == 2
    training.leave()
    wait_until(lambda: all(map(has_ended, started)))


def test_processes_end_with_a_worker_that_is_killed():
    reading, writing = os.pipe()
    worker = os.fork()
    if not worker:
        try:
            loader = Loader(lambda: {"ids": torch.zeros(4)}, 2, DEVICE, {"ids"})
            loader.next()
            os.write(writing, b"ready")
            time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(reading, 5) == b"ready"
    started = loaders_of(worker)
    assert len(started) == 2
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    wait_until(lambda: all(map(has_ended, started)), 3)  # torch's own watchdog looks every five seconds


def test_no_more_than_two_processes_load_beside_a_cpu():
    case = WORDS.replace(loader_workers=8)
    assert case.loaders(beside_gpu=True) == 8
    training = trained(case)
    assert training._loader._ahead == 4
    training.leave()
    assert task_of(case.replace(gpus=2, parallel="ddp")).cores == 2 * 3
