"""The replay of the caching allocator, against the allocator of the torch that is here."""

import pytest

PROGRAM = """
    import random
    import sys
    import torch
    from pytest_gputrain.worker.prediction.allocator import Allocator, ties_of

    MiB = 2**20
    drawn = random.Random(0)
    replayed = Allocator(expandable="expandable" in sys.argv, ties=ties_of(torch.__version__))
    held, starts, apart = [], {}, 0
    for _ in range(3000):
        if len(held) > 80 or (held and drawn.random() < 0.48):
            tensor, block = held.pop(drawn.randrange(len(held)))
            del tensor
            replayed.free(block)
            continue
        size = drawn.choice((700, 768, 300_000, MiB, 3 * MiB, 12 * MiB, 40 * MiB, 500 * MiB, drawn.randrange(1, 64 * MiB)))
        tensor, block = torch.empty(size, dtype=torch.uint8, device="cuda"), replayed.allocate(size)
        held.append((tensor, block))
        # A segment lies where its first tensor does: all others must have their places in it.
        start = starts.setdefault((block.small, block.segment), tensor.data_ptr() - block.address)
        apart += start + block.address != tensor.data_ptr()
    print(len(starts), apart, replayed.peak_reserved - torch.cuda.max_memory_reserved())
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_every_tensor_is_where_the_replay_puts_it(emulate, expandable):
    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    done, _ = emulate(PROGRAM, *(["expandable"] if expandable else []), gpu="h200", **settings)
    assert done.returncode == 0, done.stderr
    segments, apart, difference = map(int, done.stdout.split())
    assert (apart, difference) == (0, 0)
    assert (segments == 2) is expandable
