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


def phases_of(step):
    """The phases of a step in the order in which they began."""
    with AllocationCounter() as counter:
        torch.zeros(1)
        counter.begin_step()
        step()
    return tuple(counter.peaks().by_phase)


@pytest.fixture
def weight():
    return torch.zeros(8, requires_grad=True)


def test_a_plain_step(weight):
    optimizer = torch.optim.Adam([weight])

    def step():
        Network.apply(weight).backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    assert phases_of(step) == ("build", "forward", "backward", "between", "optimizer")


def test_an_optimizer_that_steps_in_backward_is_the_optimizer_and_without_an_update_nothing_is(weight):
    before = dict(_global_optimizer_pre_hooks)
    assert phases_of(lambda: Network.apply(weight).backward()) == ("build", "forward", "backward")
    optimizer = torch.optim.Adam([weight])
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    assert phases_of(lambda: Network.apply(weight).backward()) == ("build", "forward", "backward", "optimizer")
    assert _global_optimizer_pre_hooks == before, "hooks are gone afterwards"


def test_a_backward_pass_in_a_closure_is_backward_and_its_forward_is_the_optimizer_s(weight):
    optimizer = torch.optim.LBFGS([weight], max_iter=1)

    def closure():
        loss = Network.apply(weight)
        loss.backward()
        return loss

    # After its step torch ends a span of its profiler, which is an operator, too.
    assert phases_of(lambda: optimizer.step(closure)) == ("build", "forward", "optimizer", "backward", "between")


def test_another_thread_changes_no_phase(weight):
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.zeros(8)

    def step():
        other = threading.Thread(target=optimizer.step)
        other.start()
        other.join()
        torch.zeros(1)

    assert phases_of(step) == ("build", "forward")


def test_an_optimizer_that_raised_ends_with_its_step(weight):
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
