"""The replay of CUDA's caching allocator, against traces worked out by hand and against what must always hold."""

import itertools
from random import Random

import pytest
from driver_addresses import ON_AN_H200
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

from pytest_gputrain.utils.units import GiB, KiB, MiB
from pytest_gputrain.worker.prediction.addresses import Addresses
from pytest_gputrain.worker.prediction.allocator import Allocator, CapacityExceeded, replay, ties_of
from pytest_gputrain.worker.trace import EMPTY_CACHE, Trace

SIZES = st.one_of(
    st.integers(0, 4 * KiB), st.integers(0, 2 * MiB), st.integers(0, 64 * MiB), st.sampled_from([MiB, 10 * MiB, 20 * MiB])
)


def allocate(trace, size):
    return trace.allocate(size, "aten.empty", "forward", (size,), "uint8")


@pytest.mark.parametrize(
    ("wanted", "allocated", "reserved"),
    [
        (0, 512, 2 * MiB),
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (11 * MiB + 1, 12 * MiB, 12 * MiB),
    ],
)
def test_sizes_and_segments(wanted, allocated, reserved):
    allocator = Allocator()
    allocator.allocate(wanted)
    # A rest of up to 1 MiB is not split off a large block.
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


@pytest.mark.parametrize(
    ("first", "freed", "then", "reserved"),
    [
        ([0.5] * 4, [], [], 2),  # small blocks share a segment
        ([0.5] * 4, [], [1 / 2048], 4),
        ([15], [0], [1], 16 + 2),  # the pools do not mix
        ([40, 12, 20], [0, 1, 2], [12, 13, 25, 15], 72),  # the best fit, and what is left over
        ([5] * 4, [0, 2, 1, 3], [20], 20),  # neighbours merge
        ([5] * 4, [0, 2], [10], 30),  # fragments cannot be joined
    ],
)
def test_what_is_free_is_used_again(first, freed, then, reserved):
    allocator = Allocator()
    blocks = [allocator.allocate(int(size * MiB)) for size in first]
    for place in freed:
        allocator.free(blocks[place])
    for size in then:
        allocator.allocate(int(size * MiB))
    assert allocator.reserved == reserved * MiB


def test_segments_lie_where_a_driver_put_them():
    addresses = Addresses()
    first = [addresses.take(2 * MiB) for _ in range(4)][1]
    assert [(addresses.take(2 * MiB * -(-size // 2)) - first) // MiB for size, _ in ON_AN_H200] == [
        offset for _, offset in ON_AN_H200
    ]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.integers(0, 100)), max_size=60))
def test_addresses_in_use_are_apart_and_all_come_back(asked):
    addresses, held = Addresses(), {}
    for gives, pages, which in asked:
        if gives and held:
            start = sorted(held)[which % len(held)]
            addresses.give(start, held.pop(start))
        else:
            held[addresses.take(2 * MiB * pages)] = 2 * MiB * pages
        ends = [start + size for start, size in sorted(held.items())]
        assert all(end <= start for end, start in zip(ends, sorted(held)[1:], strict=False))
    for start, size in held.items():
        addresses.give(start, size)
    assert addresses.take(408 * MiB) == 0
    assert addresses.take(1024 * MiB) == -1024 * MiB


@pytest.mark.parametrize(("version", "taken"), [("2.9.1", 1), ("2.11.0+cu130", 1), ("2.12.0", 0), ("2.14.1+cu130", 0)])
def test_of_segments_of_one_size_the_lower_is_taken_by_old_versions_of_torch_and_the_older_by_new_ones(version, taken):
    allocator = Allocator(ties=ties_of(TorchVersion(version)))
    blocks = [allocator.allocate(500 * MiB) for _ in range(2)]
    segments = [block.segment for block in blocks]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(500 * MiB).segment == segments[taken], "the driver puts the second below the first"


@pytest.mark.parametrize(("version", "taken"), [("2.11.0", 0), ("2.12.0", 1024), ("2.13.0", 0)])
def test_of_blocks_of_one_segment_the_first_is_taken_but_by_torch_2_12_the_one_that_was_made_first(version, taken):
    allocator = Allocator(ties=ties_of(TorchVersion(version)))
    blocks = [allocator.allocate(512) for _ in range(4)]
    for block in blocks[:2]:
        allocator.free(block)
    remade = [allocator.allocate(512) for _ in range(2)]
    assert [block.address for block in remade] == [0, 512]
    allocator.free(remade[0])
    allocator.free(blocks[2])
    assert allocator.allocate(512).address == taken


def test_at_the_capacity_free_segments_are_given_back_and_one_in_use_is_not():
    allocator = Allocator(capacity=60 * MiB)
    allocator.free(allocator.allocate(30 * MiB))
    held = allocator.allocate(40 * MiB)
    assert (allocator.retries, allocator.reserved, allocator.peak_reserved) == (1, 40 * MiB, 40 * MiB)
    allocator.allocate(12 * MiB)
    allocator.free(held)
    with pytest.raises(CapacityExceeded):
        allocator.allocate(50 * MiB)


def test_replay_tells_what_found_no_room():
    trace = Trace()
    first = allocate(trace, 30 * MiB)
    trace.free(first)
    allocate(trace, 40 * MiB)
    assert replay(trace, Allocator(60 * MiB)) is None
    too_large = allocate(trace, 30 * MiB)
    trace.free(too_large)
    assert replay(trace, Allocator(60 * MiB)) == too_large


def training(steps, drawn, *, marked):
    """A trace of steps that are alike, each of which frees some of its tensors only in the next one."""
    trace, due = Trace(512), {}
    choices = (512, 3 * MiB, 12 * MiB, 25 * MiB, 40 * MiB, drawn.randrange(MiB, 60 * MiB))
    program = [(drawn.choice(choices), drawn.randrange(place + 1, 24)) for place in range(12)]
    for step in range(steps):
        if marked and step == steps - 1:
            trace.mark_round()
        for place, (size, freed_at) in enumerate(program, start=12 * step):
            for number in due.pop(place, []):
                trace.free(number)
            due.setdefault(12 * step + freed_at, []).append(allocate(trace, size))
    if marked:
        trace.mark_round()
    return trace


def test_a_round_is_repeated_until_it_needs_no_more_memory():
    held = []
    for seed in range(200):
        replayed = []
        for steps, marked in ((2, False), (2, True), (14, False)):
            allocator = Allocator()
            assert replay(training(steps, Random(seed), marked=marked), allocator) is None
            replayed.append(allocator.peak_reserved)
        held.append(replayed)
    assert all(two <= repeated <= many for two, repeated, many in held)
    assert sum(two < many for two, _, many in held) > 20, "some need more memory in a later step"
    assert sum(repeated < many for _, repeated, many in held) < 10, "some grow again after steps that did not"


def test_a_later_step_may_not_fit_and_one_that_frees_more_than_it_makes_is_not_repeated():
    trace = training(2, Random(0), marked=True)
    allocator = Allocator()
    replay(trace, allocator)
    assert replay(trace, Allocator(allocator.peak_reserved)) is None
    shrinking = Trace()
    first = allocate(shrinking, 30 * MiB)
    shrinking.mark_round()
    shrinking.free(first)
    allocate(shrinking, 12 * MiB)
    shrinking.mark_round()
    assert replay(shrinking, Allocator()) is None


def test_emptying_lets_the_peak_start_anew():
    allocator = Allocator()
    trace = Trace()
    large, _ = allocate(trace, 300 * MiB), allocate(trace, 20 * MiB)
    trace.free(large)
    trace.events.append(EMPTY_CACHE)
    replay(trace, allocator)
    assert allocator.peak_reserved == allocator.reserved == 20 * MiB


def test_growing_segments_join_fragments_at_their_end():
    allocator = Allocator(expandable=True)
    first = allocator.allocate(30 * MiB)
    assert allocator.reserved == 40 * MiB
    allocator.allocate(5 * MiB)
    allocator.allocate(15 * MiB)
    # 10 MiB were there, which a segment of its own could not use.
    assert allocator.reserved == 60 * MiB
    allocator.free(first)
    allocator.allocate(35 * MiB)
    assert allocator.reserved == 100 * MiB


def test_holes_of_growing_segments_are_mapped_again():
    allocator = Allocator(capacity=100 * MiB, expandable=True)
    first = allocator.allocate(40 * MiB)
    allocator.allocate(20 * MiB)
    allocator.free(first)
    allocator.allocate(60 * MiB)  # needs the pages of the first
    assert (allocator.retries, allocator.reserved) == (1, 80 * MiB)
    allocator.allocate(20 * MiB)
    assert allocator.reserved == 100 * MiB


actions = st.lists(st.tuples(st.booleans(), SIZES), max_size=60)


@settings(max_examples=150, deadline=None)
@given(actions, st.booleans(), st.sampled_from([None, 100 * MiB, GiB]), st.sampled_from(["address", "block", "segment"]))
def test_what_always_holds(steps, expandable, capacity, ties):
    allocator = Allocator(capacity, expandable=expandable, ties=ties)
    held = []
    for free, size in steps:
        if free and held:
            allocator.free(held.pop(size % len(held)))
        else:
            try:
                held.append(allocator.allocate(size))
            except CapacityExceeded:
                continue
            assert held[-1].size >= size
        assert allocator.allocated == sum(block.size for block in held)
        assert allocator.allocated <= allocator.reserved <= allocator.peak_reserved
        assert capacity is None or allocator.peak_reserved <= capacity
        ranges = sorted((block.small, block.segment, block.address, block.size) for block in held)
        for block, following in itertools.pairwise(ranges):
            assert block[:2] != following[:2] or block[2] + block[3] <= following[2], "blocks overlap"
    for block in held:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated == allocator.reserved == 0
