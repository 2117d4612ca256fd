"""Which phase of training an operator runs in, as the allocation counter follows it."""

import threading

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from pytest_gputrain.worker.allocations import AllocationCounter


class Network(torch.autograd.Function):
    """A sum that allocates in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones_like(ctx.saved_tensors[0]) * gradient


def plain(weight):
    optimizer = torch.optim.Adam([weight])

    def step():
        Network.apply(weight).backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    return step


def without_an_update(weight):
    return lambda: Network.apply(weight).backward()


def in_backward(weight):
    optimizer = torch.optim.Adam([weight])
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    return without_an_update(weight)


def in_a_closure(weight):
    optimizer = torch.optim.LBFGS([weight], max_iter=1)

    def closure():
        loss = Network.apply(weight)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def in_another_thread(weight):
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.zeros(8)

    def step():
        other = threading.Thread(target=optimizer.step)
        other.start()
        other.join()
        torch.zeros(1)

    return step


@pytest.mark.parametrize(
    ("how", "phases"),
    [
        (plain, "forward backward between optimizer"),
        (without_an_update, "forward backward"),
        (in_backward, "forward backward optimizer"),
        # The forward pass is the optimizer's. After its step torch ends a span of its profiler, which is an operator, too.
        (in_a_closure, "forward optimizer backward between"),
        (in_another_thread, "forward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_phases_begin_in_the_order_of_the_step(how, phases):
    before = dict(_global_optimizer_pre_hooks)
    step = how(torch.zeros(8, requires_grad=True))
    with AllocationCounter() as counter:
        torch.zeros(1)
        counter.begin_step()
        step()
    assert list(counter.peaks().by_phase) == ["build", *phases.split()]
    assert _global_optimizer_pre_hooks == before, "hooks are gone afterwards"


def test_an_optimizer_that_raised_ends_with_its_step():
    weight = torch.zeros(8, requires_grad=True)
    optimizer = torch.optim.Adam([weight])

    def failing():
        raise KeyError

    with AllocationCounter() as counter:
        counter.begin_step()
        with pytest.raises(KeyError):
            optimizer.step(failing)
        counter.begin_step()
        tensor = torch.zeros(1000)
    (row,) = counter.trace.largest_at_peaks(counter.peaks())["forward"]
    assert (row.bytes, row.phase) == (tensor.nbytes, "forward")
