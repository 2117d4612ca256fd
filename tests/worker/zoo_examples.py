"""Cases of every model by every method that it has, and own code: built and trained."""

import functools

import torch

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records import Crashed, Measurement, Prediction, Target, Task
from pytest_gputrain.worker import run as worker_run
from pytest_gputrain.worker import zoo
from pytest_gputrain.worker.prediction.predict import predict
from pytest_gputrain.worker.progress import Progress

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


def built(model, scale="tiny", device="cpu", **knobs):
    """The example's workload, not adapted."""
    with torch.device(device):
        return zoo.build(example(model, **knobs), scale)


def inputs_of(workload):
    return workload.batch(torch.device("cpu")).inputs


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def run(case, builder=None, root="."):
    """The reply to the case at tiny scale, from this process."""
    task = Task(case=case, scale="tiny", device_type="cpu", root=str(root))
    return worker_run.run(task, Progress(None), builder)


def measured(case, builder=None):
    reply = run(case, builder)
    assert isinstance(reply, Measurement), reply
    return reply


once = functools.cache(measured)
"""For tests that look at different figures of one case."""


def refused(case, builder=None):
    """The sentence of a case that fails."""
    reply = run(case, builder)
    assert isinstance(reply, Crashed), reply
    return reply.sentence


MINE = Case(model="mine", method="custom", code="inline", precision="fp32", steps=2, warmup=1)
"""Own code, which a builder stands for."""


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


STATED = {name: architecture for name, architecture in architectures().items() if architecture.trained_part.model_class}
"""Models whose facts are all stated: what is found of others has tests of its own (`test_zoo_configs`)."""
MODELS = list(STATED)
METHODS_OF_MODELS = [(model, method) for model, architecture in STATED.items() for method in architecture.trainable]
"""Pairs of names."""
EXAMPLES = [example(*pair) for pair in METHODS_OF_MODELS]
"""One case per pair."""
LANGUAGE = [
    model
    for model, architecture in STATED.items()
    if architecture.family == "language" and architecture.trained_part.library == "transformers"
]


def predicted_on_cpu(case):
    """What is predicted of the case at tiny scale, without the rules of any GPU."""
    task = Task(case=case, scale="tiny", device_type="cpu", root=".", target=Target(marker="cpu", kind="cpu"))
    prediction = predict(task, Progress(None))
    assert isinstance(prediction, Prediction), prediction
    return prediction
