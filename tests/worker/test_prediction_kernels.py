"""What a prediction expects of CUDA's operators, against what they allocated under torch's own CUDA allocator."""

import pytest
from kernel_facts import FACTS
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_gputrain.records import Target
from pytest_gputrain.worker.prediction.kernels import temporaries
from pytest_gputrain.worker.prediction.layouts import layouts
from pytest_gputrain.worker.prediction.patches import patched
from pytest_gputrain.worker.prediction.predict import GPU
from pytest_gputrain.worker.prediction.tracker import Tracker
from pytest_gputrain.worker.trace import EMPTY_CACHE

H100 = Target(marker="h100", kind="cuda")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_as_measured(fact):
    tracker = Tracker(GPU, rounding=512, layouts=layouts(H100), temporaries=temporaries(H100))

    def watched(function):
        before = len(tracker.trace.events)
        result = function()
        events = [event for event in tracker.trace.events[before:] if event > EMPTY_CACHE]
        sizes = tracker.trace.sizes
        return result, [sizes[event] if event >= 0 else -sizes[~event] for event in events]

    with FakeTensorMode(), patched(H100, GPU), tracker:
        assert fact.observed(GPU, watched) == (fact.forward, fact.backward)
