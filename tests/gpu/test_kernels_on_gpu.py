"""The figures of `kernel_facts`, measured again: those of torch 2.13 on a GPU of 132 multiprocessors (H100, H200)."""

import pytest
import torch
from kernel_facts import FACTS

BLOCK = 512


@pytest.fixture(autouse=True)
def _on_such_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("the figures are of a GPU of 132 multiprocessors")
    # Workspaces of both threads stay.
    matrix = torch.zeros(16, 16, device="cuda", requires_grad=True)
    (matrix @ matrix).sum().backward()


def watched(function):
    """What it returns, and the bytes that it allocated and, negative, freed."""
    torch.cuda.memory._record_memory_history(enabled=None)  # On an emulated GPU it is recorded from the start.
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    result = function()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    return result, [
        signs[event["action"]] * -(-event["size"] // BLOCK) * BLOCK for event in events if event["action"] in signs
    ]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_as_measured(fact):
    assert fact.observed(torch.device("cuda", 0), watched) == (fact.forward, fact.backward)
