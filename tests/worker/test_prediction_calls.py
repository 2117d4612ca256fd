"""Calls that a prediction remembers give what they would give anew, and bring their work along."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_gputrain.worker.prediction.tracker import Tracker
from pytest_gputrain.worker.trace import peaks

DEVICE = torch.device("cpu")


def facts(tensors):
    """All that later operators can tell of tensors, and which of them share a storage with an earlier one."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, storages.index(storage))
        for tensor, storage in zip(tensors, storages, strict=True)
    ]


def with_data(a):
    b = a.clone()
    b.set_(a.new_empty(4, 2))
    return b


OPERATIONS = {
    "times an integer": lambda a: a * 2,
    "times a float": lambda a: a * 2.0,
    "times a truth": lambda a: a * True,
    "bytes": lambda a: a.contiguous().view(torch.uint8),
    "halves": lambda a: a.to(torch.bfloat16),
    "whole numbers": lambda a: a.to(torch.int64),
    "turned": lambda a: a.transpose(0, -1),
    "turned in place": lambda a: a.transpose_(0, -1),
    "second half": lambda a: a[a.shape[0] // 2 :],
    "flat": lambda a: a.reshape(-1),
    "expanded": lambda a: a.unsqueeze(0).expand(3, *a.shape),
    "one more dimension in place": lambda a: a.unsqueeze_(0),
    "sum": lambda a: a.sum(0, keepdim=True),
    "added to in place": lambda a: a.contiguous().add_(1),
    "of another shape": lambda a: a.clone().resize_(5, 2),
    "with data of another": with_data,
    "window": lambda a: a.as_strided((2,), (1,)),
    "strides": lambda a: torch.empty_like(a.transpose(0, -1)),
    "softmax": lambda a: a.float().softmax(-1),
}


@settings(deadline=None)
@given(names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6))
def test_the_second_time_as_the_first_and_as_for_real(names):
    def chain():
        tensors = [torch.empty(4, 6)]
        for name in names:
            if tensors[-1].dim() < 5 and tensors[-1].numel() > 1:
                tensors.append(OPERATIONS[name](tensors[-1]))
        return tensors

    real = facts(chain())
    with FakeTensorMode(), Tracker(DEVICE):
        first = facts(chain())
        assert facts(chain()) == first
    # Strides of single elements differ on fakes.
    assert [(shape, *others) for shape, _, *others in first] == [(shape, *others) for shape, _, *others in real]


def work_of(step, times):
    """Calls, FLOPs and bytes by operator of the last of some steps, and how many bytes lived on."""
    with FakeTensorMode(), Tracker(DEVICE) as tracker:
        for _ in range(times):
            tracker.begin_step()
            step()
        trace = tracker.trace
        live = {event for event in trace.events if event >= 0} - {~event for event in trace.events}
        return tracker.work.operators, tracker.work.bytes, tracker.work.flops, sum(trace.sizes[number] for number in live)


def test_a_remembered_call_works_as_much():
    def step():
        a, b = torch.empty(8, 16), torch.empty(16, 4)
        ((a @ b).expand(2, 8, 4) + 1).sum()

    assert work_of(step, 3) == work_of(step, 1)
    assert work_of(step, 1)[2] == 2 * 8 * 16 * 4


def test_a_storage_that_grows_is_there_twice_and_places_are_those_in_the_storage():
    with FakeTensorMode(), Tracker(DEVICE) as tracker:
        torch.empty(100).resize_(300)
    assert peaks(tracker.trace).bytes == 4 * (100 + 300)
    with FakeTensorMode(), Tracker(DEVICE):
        halves = torch.empty(4, 6).split(2)
        assert [half.as_strided((2,), (1,), 1).storage_offset() for half in halves] == [1, 1]
        assert [half.view(torch.uint8).storage_offset() for half in halves] == [0, 48]
        ones = torch.ones(3)
        torch.add(torch.empty(3), 1, out=ones)
        assert ones[0].item() == 0.0, "what a float is that nobody knows"


def test_of_an_expanded_tensor_no_more_is_read_than_is_stored():
    def step():
        torch.empty(4).expand(8, 4) + 1
        torch.empty(8, 4).as_strided((8, 4), (0, 1)) + 1

    # Of 4 and of 32 elements, and 32 are written twice.
    assert work_of(step, 1)[1] == 4 * (4 + 32 + 32 + 32)


def test_what_lists_of_tensors_write_counts():
    def step():
        weights, gradients = [torch.empty(100), torch.empty(28)], [torch.empty(100), torch.empty(28)]
        torch._foreach_add_(weights, gradients)

    # Both are read and one is written, 128 elements of 4 bytes each.
    assert work_of(step, 1)[0]["aten._foreach_add_"] == [1, 0, 3 * 128 * 4]
    assert work_of(step, 2)[0]["aten._foreach_add_"] == [1, 0, 3 * 128 * 4]


@pytest.mark.slow
def test_nobody_waits_for_a_library_that_a_case_may_not_use():
    code = (
        "import sys; from pytest_gputrain import Case; from pytest_gputrain.worker.libraries import load; "
        "own = Case(model='mine', method='custom', code='mine.py::build'); load(own); "
        "early = {'torch.distributed.fsdp', 'sympy', 'torch._dynamo', 'transformers'} & set(sys.modules); "
        "assert not early, early; "
        "load(own, predicted=True); assert 'torch.distributed.fsdp' in sys.modules; "
        "load(Case(model='llama-3.1-8b', method='lora')); assert 'bitsandbytes' in sys.modules; "
        "assert 'torch._inductor.compile_fx' not in sys.modules, 'a compiler'"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
