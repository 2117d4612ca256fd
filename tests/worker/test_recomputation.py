"""Recomputed blocks, torch's older variant of them, and what a policy has them keep: the same training for less memory."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo_examples import METHODS_OF_MODELS, MINE, example, measured, trained

from pytest_gputrain.cases.architectures.facts import architectures

RECOMPUTING = [(model, method) for model, method in METHODS_OF_MODELS if architectures()[model].blocks]
# The quickest of each family.
SOME = [
    *(("phi-3-mini-128k", "full"), ("pangu-350m", "full"), ("llama-3.1-8b", "lora"), ("llama-3.1-8b", "qlora")),
    *(("bert-large", "full"), ("transformer-big", "full"), ("flux.1-dev", "lora"), ("hunyuan-video", "full")),
    *(("mochi-1", "lora"), ("wan2.1-i2v", "full"), ("qwen2-vl-2b", "sft"), ("llava-1.6-7b", "pretrain")),
]
LLAMA = example("llama-3.1-8b", activation_checkpointing=True, precision="fp32", steps=1, warmup=0)
ATTENTION, PRODUCTS = ({"activation_checkpointing_policy": policy} for policy in ("save-attention", "save-matmuls"))


@pytest.mark.parametrize(
    ("model", "method"),
    [pytest.param(*pair, marks=[] if pair in SOME else [pytest.mark.slow, pytest.mark.weekly]) for pair in RECOMPUTING],
)
def test_it_trains_the_same(model, method):
    newer = example(model, method, precision="fp32", activation_checkpointing=True, steps=1, warmup=0, learning_rate=1e-3)
    plain, newer, older = (
        measured(case)
        for case in (newer.replace(activation_checkpointing=False), newer, newer.replace(reentrant_checkpointing=True))
    )
    # The forward peak of a tiny SD3 is of its encoders, which nothing recomputes.
    phase = "backward" if model == "sd3" else "forward"
    for recomputing in (newer, older):
        assert recomputing.losses == pytest.approx(plain.losses, rel=1e-6)
        assert recomputing.trainable_parameters == plain.trainable_parameters
        # In front of frozen blocks transformers' own switch and the older one want a gradient that nobody needs.
        assert recomputing.flops_per_step == pytest.approx(plain.flops_per_step, rel=0.05 if "lora" in method else 0)
        assert recomputing.phase_peak_bytes[phase] < plain.phase_peak_bytes[phase]
    assert plain.recomputed_flops_per_step == 0
    # The newer one stops where all that backward wants is there: before the last product of a block, unless dropout follows.
    assert older.recomputed_flops_per_step >= newer.recomputed_flops_per_step > 0
    if (model, method) == ("phi-3-mini-128k", "full"):
        assert older.recomputed_flops_per_step > newer.recomputed_flops_per_step
        assert older.peak_allocated_bytes != newer.peak_allocated_bytes


def test_every_model_with_blocks_is_among_the_quick_ones_by_its_family():
    assert set(SOME) <= set(RECOMPUTING)
    families = ({architectures()[model].family for model, _ in pairs} for pairs in (RECOMPUTING, SOME))
    assert next(families) == next(families)


def gradients(case):
    training = trained(case)
    training._workload.loss(training._inputs).backward()
    return {name: value.grad for name, value in training.model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("knobs", [ATTENTION, PRODUCTS], ids=str)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_gradients_stay_the_same_whatever_is_kept(knobs, method):
    case = LLAMA.replace(method=method, lora_dropout=0.3 if method == "lora" else None)
    torch.testing.assert_close(gradients(case.replace(**knobs)), gradients(case))


def recomputed(case):
    return measured(case).recomputed_flops_per_step


def test_what_is_kept_is_not_computed_again():
    blocks, samples, heads, tokens, head = 2, 2, 4, 128, 16  # of tiny Llama, and its batch
    scores = blocks * 2 * samples * heads * tokens * tokens * 2 * head
    assert recomputed(LLAMA) - recomputed(LLAMA.replace(**ATTENTION)) == scores
    assert recomputed(LLAMA.replace(**PRODUCTS)) == 0
    packed = LLAMA.replace(method="qlora", precision="bf16")
    assert recomputed(packed.replace(**PRODUCTS)) == 0, "products with packed weights"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        *("pangu-350m", "flux.1-dev", "transformer-big"),
        *(pytest.param(model, marks=pytest.mark.weekly) for model in ("bert-large", "sd3", "sd-1.5", "qwen2-vl-2b")),
    ],
)
def test_every_family_keeps_products(model):
    case = example(model, activation_checkpointing=True, steps=1, warmup=0)
    assert recomputed(case) > 0
    assert recomputed(case.replace(**PRODUCTS)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, 0.5])
def test_less_is_held_than_without_recomputation(share):
    case = LLAMA.replace(batch_size=16)
    peaks = [
        measured(case.replace(activation_checkpointing=blocks, **knobs)).phase_peak_bytes["forward"]
        for blocks, knobs in ((share, {}), (share, ATTENTION), (share, PRODUCTS), (False, {}))
    ]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 4


@pytest.mark.parametrize("how", ["newer", "older", "nested", "plain"])
def test_what_own_code_recomputes_is_counted_apart(how):
    """The product of the last layer of a block is not repeated by the newer variant: nothing of backward needs it."""
    width, samples = 32, 8
    product = 2 * samples * width * width

    def train(setup):
        inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        block = nn.Sequential(inner, nn.Linear(width, width))
        if how == "nested":
            inner.forward = functools.partial(checkpoint, nn.Sequential(*inner), use_reentrant=False)
        batch = torch.randn(samples, width, requires_grad=True)
        while True:
            run = block if how == "plain" else functools.partial(checkpoint, block, use_reentrant=how == "older")
            run(batch).square().mean().backward()
            yield

    found = measured(MINE, train)
    # Forward, and the gradients of inputs and weights: as many without recomputation as with it.
    assert found.flops_per_step == 9 * product
    again = {"newer": 2, "older": 3, "nested": 4, "plain": 0}
    assert found.recomputed_flops_per_step == again[how] * product
