"""Supervised fine-tuning of PanGu with and without DeepSpeed ZeRO: the 41 rows of pangu-deepspeed.

Batch 1 a GPU, 512 tokens, no activation checkpointing. Without ZeRO fp16 and bf16 are autocast over fp32 weights; under ZeRO
they are DeepSpeed's own. Axes are the table's columns; where it has no value, DeepSpeed's default holds. The size of the
buckets that gradients are reduced in has no column; it is that of the project's configurations (docs/distributed-suites.md).
Whether fp32 was TF32 on the A100 has none either; the published time shows that it was.
"""

import pytest

from pytest_gputrain import Case, grid

PANGU = Case(batch_size=1, sequence_length=512, gradient_accumulation=8, steps=16, warmup=8)
SMALL, LARGE = PANGU.replace(model="pangu-350m"), PANGU.replace(model="pangu-2.6b")
SMALL_V100, LARGE_V100 = (case.replace(precision="fp16-amp", gpus=3, platforms=("v100",)) for case in (SMALL, LARGE))
LARGE_A100 = LARGE.replace(precision="bf16", gpus=1, platforms=("a100",))
M, G = 10**6, 10**9
HIDDEN_SIZES = {"pangu-350m": 1024, "pangu-2.6b": 2560}


def zero(base, stage, **columns):
    """Return cases of ZeRO, which pin memory if they offload the optimizer."""
    return grid(base.replace(parallel=f"zero{stage}", pin_memory=columns.get("offload_optimizer") == [True]), **columns)


def zero2(base, sizes, **columns):
    """Return cases of stage 2, whose buckets for gradients have the size of those for weights."""
    buckets = [(base.replace(reduce_bucket_size=size), size) for size in sizes]
    return [case for base, size in buckets for case in zero(base, 2, **columns, allgather_bucket_size=[size])]


def zero3(base, **columns):
    """The size of the buckets for gradients is "auto", for which transformers puts the square of the hidden size."""
    return zero(base.replace(reduce_bucket_size=HIDDEN_SIZES[base.model] ** 2), 3, **columns)


# The columns that come as one: what is offloaded, and whether communication overlaps with the backward pass.
KEPT_2 = {"offload_optimizer": [False], "overlap_comm": [False]}
OFFLOADED_2 = {"offload_optimizer": [True], "overlap_comm": [False]}
KEPT_3 = {"offload_optimizer": [False], "offload_param": [False], "overlap_comm": [False]}
OFFLOADED_3 = {"offload_optimizer": [True], "offload_param": [False, True], "overlap_comm": [False]}
OVERLAPPED_3 = {"offload_optimizer": [True], "offload_param": [True], "overlap_comm": [True]}

CASES = [
    # PanGu 350M.
    *grid(SMALL, precision=["fp32", "fp16-amp"], platforms=["v100"]),
    *zero(SMALL_V100, 0),
    *zero(SMALL_V100, 1),
    *zero2(SMALL_V100, [500 * M], **KEPT_2),
    *zero2(SMALL_V100, [200 * M, 500 * M, 1 * G, 5 * G], **OFFLOADED_2),
    *zero3(SMALL_V100, **KEPT_3, allgather_bucket_size=[1 * G]),
    *zero3(SMALL_V100, **OFFLOADED_3, allgather_bucket_size=[1 * G]),
    *zero3(SMALL_V100, **OVERLAPPED_3, allgather_bucket_size=[1 * G, 500 * M, 200 * M]),
    # PanGu 2.6B, without ZeRO on one GPU of either kind.
    *grid(LARGE, precision=["fp32"], platforms=["v100"]),
    *grid(LARGE, precision=["fp32"], tf32=[True], platforms=["a100"]),
    *grid(LARGE, precision=["fp16-amp"], platforms=["v100", "a100"]),
    *grid(LARGE, precision=["bf16-amp"], platforms=["a100"]),
    # On three V100.
    *zero(LARGE_V100, 0),
    *zero(LARGE_V100, 1),
    *zero2(LARGE_V100, [500 * M], **KEPT_2),
    *zero2(LARGE_V100, [200 * M, 500 * M], **OFFLOADED_2),
    *zero3(LARGE_V100, **KEPT_3, stage3_max_live_parameters=[1 * G]),
    *zero3(LARGE_V100, **OFFLOADED_3, stage3_max_live_parameters=[1 * G]),
    # On one A100.
    *zero(LARGE_A100, 0),
    *zero(LARGE_A100, 1),
    *zero2(LARGE_A100, [500 * M], **KEPT_2),
    *zero2(LARGE_A100, [200 * M, 500 * M, 1 * G], **OFFLOADED_2),
    *zero2(LARGE_A100, [500 * M], offload_optimizer=[True], overlap_comm=[True]),
    *zero3(LARGE_A100, **KEPT_3, allgather_bucket_size=[500 * M], stage3_max_live_parameters=[1 * G]),
    *zero3(LARGE_A100, **OFFLOADED_3, stage3_max_live_parameters=[1 * G]),
    *zero3(LARGE_A100, **OVERLAPPED_3, stage3_max_live_parameters=[1 * G, 500 * M, 200 * M]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_deepspeed_zero(gputrain, case):
    gputrain.check(case)


BF16 = LARGE.replace(precision="bf16", gradient_accumulation=1, steps=4, warmup=2, platforms=("a100", "h100", "h200"))


@pytest.mark.parametrize("below", grid(BF16, parallel=["zero0", "zero1", "zero2"], gpus=[2]), ids=str)
def test_the_next_stage_allocates_no_more(compared, below):
    if compared.scale == "tiny" and below.parallel != "zero0":
        pytest.skip("at tiny scale buffers outweigh the gradients and weights that stages 2 and 3 shard")
    above = {"zero0": "zero1", "zero1": "zero2", "zero2": "zero3"}[below.parallel]
    stored, more_sharded = compared.measure(below), compared.measure(below, parallel=above)
    assert more_sharded.peak_allocated_bytes <= stored.peak_allocated_bytes
