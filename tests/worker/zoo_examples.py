"""Cases of every model by every method that it has, and own code: built and trained in this process."""

import functools

import torch

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records import Crashed, Measurement, Task
from pytest_gputrain.worker import run as worker_run
from pytest_gputrain.worker import zoo
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.run import SEED
from pytest_gputrain.worker.training import Training

DEVICE = torch.device("cpu")
MINE = Case(model="mine", method="custom", code="inline", precision="fp32", steps=2, warmup=1)
"""Own code, which a builder stands for."""
_NEEDED = {"sequence_length": 8192, "resolution": "512x512", "frames": 9}
_PECULIAR = {"word2vec": {"optimizer": "sgd", "learning_rate": 1.0}}


def example(model, method=None, **knobs):
    """A case of the model by the method (its first, if none is named), with the fields that it needs."""
    architecture = architectures()[model]
    needed = {field: _NEEDED[field] for field in architecture.needs}
    if "sequence_length" in needed:
        positions = architecture.trained_part.config.get("max_position_embeddings", 8192)
        needed["sequence_length"] = min(needed["sequence_length"], positions)
    fields = {"model": model, "method": method or next(iter(architecture.trainable)), "batch_size": 2, **needed}
    return Case(**{**fields, **_PECULIAR.get(model, {}), **knobs})


STATED = {name: architecture for name, architecture in architectures().items() if architecture.trained_part.model_class}
"""Models whose facts are all stated: what is found of others has tests of its own (`test_zoo_configs`)."""
METHODS_OF_MODELS = [(model, method) for model, architecture in STATED.items() for method in architecture.trainable]
EXAMPLES = [example(*pair) for pair in METHODS_OF_MODELS]
LANGUAGE = [
    model
    for model, architecture in STATED.items()
    if architecture.family == "language" and architecture.trained_part.library == "transformers"
]


def built(model, scale="tiny", device="cpu", **knobs):
    """The example's workload, not adapted."""
    torch.manual_seed(0)
    with torch.device(device):
        return zoo.build(example(model, **knobs), scale)


def inputs_of(workload):
    return workload.batch(DEVICE).inputs


def trained(case):
    """The training of a case, which has taken no step."""
    torch.manual_seed(SEED)
    return Training(case, "tiny", DEVICE)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def stepping(model, inputs, optimizer=torch.optim.AdamW, **options):
    """A step that trains the model to give nothing for the inputs."""
    updates = optimizer(model.parameters(), **options)

    def step():
        loss = model(inputs).square().mean()
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss

    return step


def task_of(case, **fields):
    """The task to run the case at tiny scale."""
    processes = {"processes": case.gpus, "servers": case.servers}
    return Task(**{"case": case, "scale": "tiny", "device_type": "cpu", "root": ".", **processes, **fields})


def run(case, builder=None, **fields):
    """The reply to the case, from this process."""
    return worker_run.run(task_of(case, **fields), Progress(None), builder)


def measured(case, builder=None):
    reply = run(case, builder)
    assert isinstance(reply, Measurement), reply
    return reply


once = functools.cache(measured)
"""For tests that look at different figures of one case."""


def refused(case, builder=None, **fields):
    """The sentence of a case that fails."""
    reply = run(case, builder, **fields)
    assert isinstance(reply, Crashed), reply
    return reply.sentence
