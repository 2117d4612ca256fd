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
from preloaded_worker import measured as measured_in_processes
from zoo_examples import example, measured, predicted_on_cpu

from pytest_gputrain import Case
from pytest_gputrain.records import Task
from pytest_gputrain.worker import training as recipe
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.loader import Loader
from pytest_gputrain.worker.loop import levelled, timed_steps
from pytest_gputrain.worker.zoo.word_vectors import WordVectorModel

# From Python 3.12 on; torch's DataLoader forks so, too.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

CPU = torch.device("cpu")
WORDS = example("word2vec", batch_size=100, precision="fp32", loader_workers=1, steps=4, warmup=1)
IMAGES = example("resnet-50", batch_size=4, precision="fp32", loader_workers=1, steps=4, warmup=1)


def slowly(draw, seconds):
    def slow(self, device):
        time.sleep(seconds)
        return draw(self, device)

    return slow


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
def test_a_loader_that_is_too_slow_shows_in_the_median_step(workers, monkeypatch):
    """Of three steps one waits for all three batches."""
    monkeypatch.setattr(Case, "loaders", lambda self, beside_gpu: workers)
    case = WORDS.replace(loader_workers=workers)
    quick = measured(case)
    with mock.patch.object(WordVectorModel, "batch", slowly(WordVectorModel.batch, 0.4)):
        slow = measured(case)
    wait = 0.4 / workers
    assert slow.median_step_seconds > 0.8 * wait
    assert slow.median_step_seconds > 4 * quick.median_step_seconds
    assert slow.input_seconds > 0.7 * wait
    assert len(slow.step_seconds) % workers == 0


@pytest.mark.slow
def test_a_loader_that_is_just_too_slow_is_not_hidden_by_what_it_loaded_ahead():
    """A step takes 0.2 s, a batch 0.5 s for two processes: the four batches loaded ahead would do for the timed steps."""
    training = recipe.Training
    step = training.step

    def slow_step(self, update):
        time.sleep(0.2)
        step(self, update)

    with (
        mock.patch.object(WordVectorModel, "batch", slowly(WordVectorModel.batch, 0.5)),
        mock.patch.object(training, "step", slow_step),
    ):
        reply = measured(WORDS.replace(loader_workers=2, steps=2, warmup=0))
    assert reply.median_step_seconds > 0.235


@pytest.mark.slow
def test_a_loader_that_is_fast_enough_adds_nothing_but_the_copy():
    slow_step = recipe.Training.step

    def step(self, update):
        time.sleep(0.3)
        slow_step(self, update)

    with mock.patch.object(recipe.Training, "step", step):
        reply = measured(WORDS.replace(loader_workers=2))
    assert reply.input_seconds < 0.1
    assert reply.median_step_seconds > 0.3


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
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        WORDS,
        IMAGES,
        example("llama-3.1-8b", lengths="padded", loader_workers=1, steps=4, warmup=1),
        example("qwen2-vl-2b", "sft", resolution="504x364", sequence_length=512, loader_workers=1, steps=4, warmup=1),
        example("sd3", loader_workers=1, steps=4, warmup=1),
    ],
    ids=str,
)
def test_memory_is_that_of_one_batch_however_many_are_loaded(case, workers):
    load(case)
    case = case.replace(loader_workers=workers)
    reply = measured(case)
    prediction = predicted_on_cpu(case)
    assert prediction.peak_allocated_bytes == reply.peak_allocated_bytes
    assert prediction.flops_per_step == reply.flops_per_step


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
    torch.manual_seed(7)
    kept = recipe.Training(case, "tiny", CPU)._inputs
    torch.manual_seed(7)
    training = recipe.Training(IMAGES, "tiny", CPU)
    loaded = training._loader.next()
    training.leave()
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[name], kept[name]) for name in kept)


def loaders_of(pid):
    return [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]


def test_batches_are_in_the_type_of_the_weights_and_processes_end_with_the_training():
    before = set(loaders_of(os.getpid()))
    training = recipe.Training(IMAGES.replace(precision="bf16", loader_workers=2), "tiny", CPU)
    assert training._loader.next()["images"].dtype == torch.bfloat16
    started = set(loaders_of(os.getpid())) - before
    assert len(started) == 2
    training.leave()
    psutil.wait_procs(started, timeout=10)
    assert not set(loaders_of(os.getpid())) & started


def test_processes_end_with_a_worker_that_is_killed():
    reading, writing = os.pipe()
    worker = os.fork()
    if not worker:
        try:
            loader = Loader(lambda: {"ids": torch.zeros(4)}, 2, CPU, {"ids"})
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
    _, alive = psutil.wait_procs(started, timeout=3)  # torch's own watchdog looks every five seconds
    assert not alive


def test_no_more_than_two_processes_load_beside_a_cpu():
    case = WORDS.replace(loader_workers=8)
    assert case.loaders(beside_gpu=True) == 8
    training = recipe.Training(case, "tiny", CPU)
    assert training._loader._ahead == 4
    training.leave()
    task = Task(case=case.replace(gpus=2, parallel="ddp"), scale="tiny", device_type="cpu", processes=2, root=".")
    assert task.cores == 2 * 3
