"""Cases of several processes: real ones without waiting for imports each time, and one that trains on all their batches."""

import importlib.util

import pytest
import torch
from zoo_examples import DEVICE, task_of, trained

from pytest_gputrain import Case
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.records import Measurement
from pytest_gputrain.worker.learning_rate import factor
from pytest_gputrain.worker.run import SEED
from pytest_gputrain.worker.training import OPTIMIZERS

PRELOADED = ForkServer()
LLAMA = Case(model="llama-3.1-8b", precision="fp32", batch_size=2, sequence_length=32, learning_rate=1e-2, steps=4, warmup=1)
CLICKS = Case(model="ctr-dnn", precision="fp32", batch_size=50, optimizer="adam", learning_rate=1e-2, steps=4, warmup=1)
"""Imports torch alone."""

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def engine(name, *, weekly=False, **knobs):
    """Knobs of a case by that engine, as a parameter of a test."""
    marks = [needs_deepspeed] * name.startswith("zero") + [pytest.mark.weekly] * weekly
    return pytest.param({"parallel": name, **knobs}, marks=marks, id="-".join([name, *knobs]))


def run(case, *, timeout_seconds=300.0, watch=lambda event: None, preloaded=PRELOADED, environ=None, **fields):
    """The reply of a case from as many processes as it has GPUs, and its servers."""
    options = {"timeout_seconds": timeout_seconds, "watch": watch, "fork_server": preloaded, "environ": environ}
    return launcher.in_process(task_of(case, **fields), gpus=(), **options)


def measured(case, **options):
    reply = run(case, **options)
    assert isinstance(reply, Measurement), reply
    return reply


def alone(case):
    return case.replace(parallel="single", gpus=1, servers=0, compile="off")


def losses_of_one_process(case, updates=None):
    """Timed losses of a plain training on the batches of all workers at once.

    Args:
        updates: for each step, whether the optimizer acts at its end; where left out, it does at all.
    """
    updates = updates or [True] * (2 + case.warmup + case.steps)  # two counted steps come first
    training = trained(alone(case))
    batches = []
    for rank in range(case.gpus):
        torch.manual_seed(SEED + rank)
        batches.append(training._workload.batch(DEVICE).inputs)
    optimizer = OPTIMIZERS[case.optimizer](list(training.model.parameters()), case.learning_rate)
    losses, done = [], 0
    for update in updates:
        loss = sum(training._workload.loss(batch) for batch in batches) / case.gpus
        (loss / case.gradient_accumulation).backward()
        if update:
            if case.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), case.max_grad_norm)
            optimizer.param_groups[0]["lr"] = case.learning_rate * factor(case, done)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        losses.append(loss.item())
    return losses[-case.steps :]
