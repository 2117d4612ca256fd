"""The knob ``activation_checkpointing_policy``: which results recomputed blocks keep, and what that costs and saves."""

import pytest
import torch
from test_prediction import compare
from zoo_examples import example, measured, predicted_on_cpu

from pytest_gputrain.worker.run import SEED
from pytest_gputrain.worker.training import Training

LLAMA = example("llama-3.1-8b", activation_checkpointing=True, precision="fp32")
ATTENTION, PRODUCTS = ({"activation_checkpointing_policy": policy} for policy in ("save-attention", "save-matmuls"))
BLOCKS, SAMPLES, HEADS, TOKENS, HEAD = 2, 2, 4, 128, 16
"""Of tiny Llama, and its batch."""


def gradients(case):
    torch.manual_seed(SEED)
    training = Training(case, "tiny", torch.device("cpu"))
    training._workload.loss(training._inputs).backward()
    return {name: value.grad for name, value in training.model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("knobs", [ATTENTION, PRODUCTS], ids=str)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_gradients_stay_the_same(knobs, method):
    case = LLAMA.replace(method=method, lora_dropout=0.3 if method == "lora" else None)
    plain, kept = gradients(case), gradients(case.replace(**knobs))
    assert plain.keys() == kept.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(kept[name], gradient)


def recomputed(case):
    return measured(case.replace(steps=1, warmup=0)).recomputed_flops_per_step


def test_what_is_kept_is_not_computed_again():
    scores = BLOCKS * 2 * SAMPLES * HEADS * TOKENS * TOKENS * 2 * HEAD
    assert recomputed(LLAMA) - recomputed(LLAMA.replace(**ATTENTION)) == scores
    assert recomputed(LLAMA.replace(**PRODUCTS)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["pangu-350m", "bert-large", "sd3", "sd-1.5", "flux.1-dev", "qwen2-vl-2b", "transformer-big"]
)
def test_every_family_keeps_products(model):
    case = example(model, activation_checkpointing=True)
    assert recomputed(case) > 0
    assert recomputed(case.replace(**PRODUCTS)) == 0


def test_products_with_packed_weights_are_kept_too():
    case = LLAMA.replace(method="qlora", precision="bf16")
    assert recomputed(case.replace(**PRODUCTS)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, 0.5])
def test_less_is_held_than_without_recomputation(share):
    case = LLAMA.replace(batch_size=16)
    peaks = [
        predicted_on_cpu(case.replace(activation_checkpointing=blocks, **knobs)).phase_peak_bytes["forward"]
        for blocks, knobs in ((share, {}), (share, ATTENTION), (share, PRODUCTS), (False, {}))
    ]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", [ATTENTION, PRODUCTS], ids=str)
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"method": "lora"},
        {"method": "qlora", "precision": "bf16"},
        {"precision": "bf16-amp", "loss_chunks": 3},
        {"activation_checkpointing": 0.5},
    ],
    ids=str,
)
def test_a_prediction_counts_it(policy, knobs):
    compare(LLAMA.replace(batch_size=8, **policy, **knobs))


@pytest.mark.parametrize("model", ["sd3", "qwen2-vl-2b"])
def test_a_prediction_of_another_family_counts_it(model):
    compare(example(model, activation_checkpointing=True, **PRODUCTS))
