"""Cases of several processes: the engines that are here, and what is predicted of a case's first process."""

import importlib.util

import pytest

from pytest_gputrain.records import Prediction, Target, Task
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.prediction.predict import predict
from pytest_gputrain.worker.progress import Progress

CPU = Target(marker="cpu", kind="cpu")

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def engine(name, **knobs):
    """Knobs of a case by that engine, as a parameter of a test."""
    marks = [needs_deepspeed] if name.startswith("zero") else []
    return pytest.param({"parallel": name, **knobs}, marks=marks, id="-".join([name, *knobs]))


def replied(case, target=CPU, builder=None, *, processes=None, servers=None, scale="tiny", deepspeed=None):
    load(case)
    task = Task(
        case=case,
        scale=scale,
        device_type="cpu",
        root=".",
        processes=case.gpus if processes is None else processes,
        servers=case.servers if servers is None else servers,
        target=target,
        deepspeed=deepspeed or {},
    )
    return predict(task, Progress(None), builder)


def predicted(case, target=CPU, **options):
    reply = replied(case, target, **options)
    assert isinstance(reply, Prediction), reply
    return reply
