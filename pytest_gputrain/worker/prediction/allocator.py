"""Replays CUDA's caching allocator on a trace: how much memory it holds, and whether a capacity suffices.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings, for one stream:

- Sizes are rounded up to 512 bytes. Requests of at most 1 MiB come from the small pool, others from the large one.
- The best fit among free blocks is taken; which one among equals depends on torch (`Ties`). What is left over becomes a free
  block if it is at least 512 bytes in the small pool, over 1 MiB in the large one.
- Without a fit, a new segment: 2 MiB for the small pool; 20 MiB below 10 MiB; else the size rounded up to 2 MiB.
- Where that exceeds the capacity, all segments that are wholly free are given back before memory runs out.
- A freed block merges with its free neighbours in the segment.

With expandable segments each pool is one range of addresses, mapped page by page (2 MiB small, 20 MiB large) where no free
block is large enough. Free pages are unmapped instead of segments given back, and every rest of 512 bytes is split off.

Not covered: several streams, CUDA graphs, settings of PYTORCH_CUDA_ALLOC_CONF other than expandable_segments.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from torch.torch_version import TorchVersion

from pytest_gputrain.utils.units import MiB
from pytest_gputrain.worker.prediction.addresses import Addresses
from pytest_gputrain.worker.trace import EMPTY_CACHE, ROUND, Trace

MIN_BLOCK: Final = 512
SMALL_SIZE: Final = 1 * MiB
SMALL_BUFFER: Final = 2 * MiB
LARGE_BUFFER: Final = 20 * MiB
MIN_LARGE: Final = 10 * MiB
ROUND_LARGE: Final = 2 * MiB

_ENDLESS: Final = 2**60
_MOST_ROUNDS: Final = 10
_QUIET_ROUNDS: Final = 2
"""After so many that need no new memory, none of those that follow is thought to."""

Ties: TypeAlias = Literal["address", "block", "segment"]
"""What decides between free blocks of one size: the lower address (torch up to 2.11), the block that torch made first (torch
2.12, where a split makes a new block of its front part), or the segment that was made first, then the address (torch from
2.13 on)."""


class CapacityExceeded(Exception):
    """Even with all free memory given back, a request exceeds the capacity."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment, handed out, free, or (in a range that grows) not backed by memory."""

    small: bool
    segment: int
    """The address of the segment, or its number."""
    rank: int
    """Among blocks of one size, the lowest is taken."""
    address: int
    """Within its segment."""
    size: int
    free: bool
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None

    def split(self, size: int) -> Block:
        """Keep the first ``size`` bytes; the rest becomes the returned block, alike."""
        start, left = self.address + size, self.size - size
        rest = Block(self.small, self.segment, self.rank, start, left, self.free, self.mapped, self, self.after)
        if self.after is not None:
            self.after.before = rest
        self.size, self.after = size, rest
        return rest

    def absorb_next(self) -> None:
        """Take over the block behind this one."""
        absorbed = self.after
        assert absorbed is not None
        self.size += absorbed.size
        self.after = absorbed.after
        if self.after is not None:
            self.after.before = self


class _Pool:
    """Free blocks that are backed by memory, by size, then rank, then address."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int, int]] = []
        self.blocks: list[Block] = []

    def index(self, size: int, rank: int = -_ENDLESS, address: int = -1) -> int:
        """Return the index of the first block that is not smaller."""
        return bisect.bisect_left(self._keys, (size, rank, address))

    def add(self, block: Block) -> None:
        position = self.index(block.size, block.rank, block.address)
        self._keys.insert(position, (block.size, block.rank, block.address))
        self.blocks.insert(position, block)

    def remove(self, block: Block) -> None:
        position = self.index(block.size, block.rank, block.address)
        assert self.blocks[position] is block
        del self._keys[position], self.blocks[position]


class Allocator:
    """The state of the caching allocator.

    Args:
        capacity: bytes that it may hold, None for no limit.
        expandable: whether segments grow.
        ties: what decides between free blocks of one size.

    Attributes:
        allocated: bytes in blocks handed out: what is left over of one that was too large is part of it where it stays.
        peak_allocated: highest ``allocated`` since the start or `reset_peak`.
        reserved: bytes held.
        peak_reserved: highest ``reserved`` since the start or `reset_peak`.
        retries: how often free memory was given back for want of it.
    """

    def __init__(self, capacity: int | None = None, *, expandable: bool = False, ties: Ties = "segment") -> None:
        self._capacity = capacity
        self._expandable = expandable
        self._ties = ties
        self._pools = {True: _Pool(), False: _Pool()}
        self._addresses = Addresses()
        self._numbers = itertools.count(1)
        """Of segments, and of blocks where those decide."""
        # In a range that grows, an endless block without memory comes last.
        self._ranges = {small: Block(small, 0, 0, 0, _ENDLESS, free=True, mapped=False) for small in (True, False)}
        self.allocated = 0
        self.peak_allocated = 0
        self.reserved = 0
        self.peak_reserved = 0
        self.retries = 0

    def allocate(self, count: int) -> Block:
        """Hand out a block of at least ``count`` bytes.

        Raises:
            CapacityExceeded: the capacity does not suffice.
        """
        size = max(MIN_BLOCK, -(-count // MIN_BLOCK) * MIN_BLOCK)
        small = size <= SMALL_SIZE
        block = self._best_fit(size, small) or self._new_memory(size, small)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new_memory(size, small)
            if block is None:
                raise CapacityExceeded
        self._pools[small].remove(block)
        block.free = False
        excess = block.size - size
        if (excess >= MIN_BLOCK) if small or self._expandable else (excess > SMALL_SIZE):
            rest = block.split(size)
            rest.free = True
            self._pools[small].add(rest)
            if self._ties == "block":
                block.rank = next(self._numbers)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Take back a block of `allocate`."""
        self.allocated -= block.size
        block.free = True
        self._pool(block)

    def empty_cache(self) -> None:
        """Give back what is wholly free: segments, or the pages of a range that grows."""
        for pool in self._pools.values():
            for block in list(pool.blocks):
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size
                    if self._ties == "address":
                        self._addresses.give(block.segment, block.size)

    def reset_peak(self) -> None:
        """Let the peaks start from what is handed out and held now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _pool(self, block: Block) -> Block:
        """Put a free block into its pool, merged with its free neighbours; the merged one has its rank, and is returned."""
        pool = self._pools[block.small]
        before = block.before
        if before is not None and before.free and before.mapped:
            pool.remove(before)
            before.absorb_next()
            before.rank = block.rank
            block = before
        after = block.after
        if after is not None and after.free and after.mapped:
            pool.remove(after)
            block.absorb_next()
        pool.add(block)
        return block

    def _best_fit(self, size: int, small: bool) -> Block | None:
        blocks = self._pools[small].blocks
        index = self._pools[small].index(size)
        if index == len(blocks):
            return None
        # A block that can grow counts with the space behind it: others that fit are taken first.
        while index + 1 < len(blocks) and _space(blocks[index + 1]) < _space(blocks[index]):
            index += 1
        return blocks[index]

    def _new_memory(self, size: int, small: bool) -> Block | None:
        """Return a free block of at least ``size`` made with new memory, in its pool; None where the capacity forbids it."""
        if self._expandable:
            return self._expanded(size, small)
        if small:
            segment_size = SMALL_BUFFER
        elif size < MIN_LARGE:
            segment_size = LARGE_BUFFER
        else:
            segment_size = -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._reserve(segment_size):
            return None
        segment = self._addresses.take(segment_size) if self._ties == "address" else next(self._numbers)
        return self._pool(Block(small, segment, segment, 0, segment_size, free=True))

    def _reserve(self, size: int) -> bool:
        if self._capacity is not None and self.reserved + size > self._capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _expanded(self, size: int, small: bool) -> Block | None:
        block: Block | None = self._ranges[small]
        # The first hole that is large enough, together with the free blocks around it.
        while True:
            assert block is not None, "the last block is endless"
            if not block.mapped:
                start = block.before if block.before is not None and block.before.free else block
                space, last = 0, start
                while space < size and last.free and last.after is not None:
                    space, last = space + last.size, last.after
                if last.after is None or space >= size:
                    break
            block = block.after
        while not start.mapped or start.size < size:
            hole = start
            held = 0
            if start.mapped:
                assert start.after is not None
                hole, held = start.after, start.size
            page = _page(small)
            wanted = min(-(-(size - held) // page) * page, hole.size)
            if not self._reserve(wanted):
                return None
            if wanted < hole.size:
                hole.split(wanted)
            hole.mapped = True
            start = self._pool(hole)
        return start

    def _unmap(self, block: Block) -> None:
        page = _page(block.small)
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if end <= start:
            return
        pool = self._pools[block.small]
        pool.remove(block)
        if start > block.address:
            rest = block.split(start - block.address)
            pool.add(block)
            block = rest
        if end < block.address + block.size:
            pool.add(block.split(end - block.address))
        self.reserved -= block.size
        block.mapped = False
        if block.after is not None and not block.after.mapped:
            block.absorb_next()
        if block.before is not None and not block.before.mapped:
            block = block.before
            block.absorb_next()
        if block.before is None:
            self._ranges[block.small] = block


def ties_of(torch_version: TorchVersion) -> Ties:
    """Return what decides in a version of torch: `torch.__version__`."""
    return "address" if torch_version < "2.12" else "block" if torch_version < "2.13" else "segment"


def replay(trace: Trace, allocator: Allocator) -> int | None:
    """Run a trace through ``allocator``, and its round of steps again until the allocator holds no more memory for it.

    What one step leaves behind decides where the next finds room: the third step of a full fine-tuning of Llama 3.1 8B needs
    a segment more than the second.

    Returns:
        The number of the allocation that exceeded the capacity; None where none did.
    """
    sizes = trace.sizes
    blocks: dict[int, Block] = {}

    def run(begin: int, end: int) -> int | None:
        for event in trace.events[begin:end]:
            if event >= 0:
                try:
                    blocks[event] = allocator.allocate(sizes[event])
                except CapacityExceeded:
                    return event
            elif event > EMPTY_CACHE:
                allocator.free(blocks.pop(~event))
            elif event == EMPTY_CACHE:
                allocator.empty_cache()
                allocator.reset_peak()
        return None

    last = len(trace.events)
    begin, end = [place for place, event in enumerate(trace.events) if event == ROUND] or (last, last)
    refused = run(0, begin)
    live_before = set(blocks)
    if refused is None:
        refused = run(begin, end)
    successors = _successors(sizes, live_before, set(blocks))
    quiet = 0
    for _ in range(_MOST_ROUNDS):
        if refused is not None or successors is None or quiet == _QUIET_ROUNDS:
            break
        for number, successor in successors.items():
            blocks[number] = blocks.pop(successor)
        held = allocator.peak_reserved
        refused = run(begin, end)
        quiet = quiet + 1 if allocator.peak_reserved == held else 0
    return run(end, last) if refused is None else refused


def _successors(sizes: Sequence[int], before: set[int], after: set[int]) -> dict[int, int] | None:
    """Return by what a round frees of the time before it what it leaves in its stead; None if it leaves less.

    It may leave more: a training keeps its losses.
    """
    left: defaultdict[int, list[int]] = defaultdict(list)
    for number in sorted(after - before, reverse=True):
        left[sizes[number]].append(number)
    successors = {number: left[sizes[number]].pop() for number in sorted(before - after) if left[sizes[number]]}
    return successors if len(successors) == len(before - after) else None


def _space(block: Block) -> int:
    behind = block.after
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


def _page(small: bool) -> int:
    return SMALL_BUFFER if small else LARGE_BUFFER
