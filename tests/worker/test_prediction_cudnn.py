"""What a prediction expects of cuDNN's workspaces, against what convolutions and attention took on an H200."""

import pytest
from cudnn_measured import ATTENTION, CONVOLUTIONS, LARGE, MIB, attention, convolution, errors, within
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_gputrain.records import Target
from pytest_gputrain.worker.prediction.kernels import temporaries
from pytest_gputrain.worker.prediction.layouts import layouts
from pytest_gputrain.worker.prediction.patches import patched
from pytest_gputrain.worker.prediction.predict import GPU
from pytest_gputrain.worker.prediction.tracker import Tracker
from pytest_gputrain.worker.trace import EMPTY_CACHE


@pytest.fixture
def peak_of():
    """Call a function on fake tensors, and return its result and the highest memory that it allocated."""
    target = Target(marker="h200", kind="cuda")
    tracker = Tracker(GPU, rounding=512, layouts=layouts(target), temporaries=temporaries(target))

    def watched(function):
        before = len(tracker.trace.events)
        result = function()
        live = peak = 0
        for event in tracker.trace.events[before:]:
            if event > EMPTY_CACHE:
                live += tracker.trace.sizes[event] if event >= 0 else -tracker.trace.sizes[~event]
                peak = max(peak, live)
        return result, peak

    with FakeTensorMode(), patched(target, GPU), tracker:
        yield watched


def test_convolutions_take_the_measured_memory_but_for_sums_in_parts(peak_of):
    differences = errors(peak_of, GPU, convolution, CONVOLUTIONS)
    # Without the rules, 144 would be within 1 MiB and 264 within 16 MiB.
    assert [len(differences), within(differences, 1), within(differences, 16)] == [438, 260, 419]


@pytest.mark.parametrize("measured", LARGE, ids=lambda measured: "-".join(map(str, measured[:7])))
def test_batches_of_more_than_two_thousand_million_numbers_are_taken_in_parts(peak_of, measured):
    forward, _ = convolution(peak_of, GPU, *measured)
    assert abs(forward - measured[-2]) < 8 * MIB


def test_attention_takes_the_measured_memory_to_a_block(peak_of):
    assert max(map(abs, errors(peak_of, GPU, attention, ATTENTION))) <= 512
