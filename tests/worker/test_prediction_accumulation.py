"""Autograd adds up gradients in place where it holds them alone, which a prediction has to tell under its own mode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from pytest_gputrain.worker.prediction.tracker import Tracker


def two_parts(x):
    y = x * 2
    return (functional.silu(y[..., :4]) * y[..., 4:]).sum()


def residual(x):
    y = x * 2
    return ((y + functional.silu(y)) * 3).sum()


def expanded(x):
    y = x * 2
    return (y + functional.silu(y)).sum()


def views(x):
    y = x * 2
    return ((y.view(16) + functional.silu(y).view(16)) * 3).sum()


def shared(x):
    y, z = x * 2, x * 3
    h = y + z
    return ((h + functional.silu(y) * torch.sigmoid(z)) * 3).sum()


def held(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient + gradient)  # a sum, but none of autograd's
    h = y + functional.silu(y)
    h.retain_grad()
    x.held = h
    return (h * 3).sum()


def sums_of_autograd(loss):
    with torch.profiler.profile() as profiled:
        loss(torch.ones(2, 8, requires_grad=True)).backward()
    events = profiled.events()
    sums = [event.name for event in events if event.name in ("aten::add", "aten::add_") and event.cpu_parent is not None]
    return {name: sums.count(name) for name in ("aten::add", "aten::add_")}


@pytest.mark.parametrize("loss", [two_parts, residual, expanded, views, shared, held], ids=lambda loss: loss.__name__)
def test_gradients_are_added_up_in_place_where_autograd_does(loss):
    tracker = Tracker(torch.device("cpu", 0), sums_in_place=True)
    with FakeTensorMode(), tracker:
        value = loss(torch.ones(2, 8, device="cpu:0", requires_grad=True))
        tracker.begin_step()
        value.backward()
        counted = {f"aten::{name}": tracker.work.operators.get(f"aten.{name}", [0])[0] for name in ("add", "add_")}
    assert counted == sums_of_autograd(loss)
