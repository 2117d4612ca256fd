"""The knob ``loss``: what the cross entropy is computed of."""

from unittest import mock

import pytest
import torch
from test_prediction import compare
from torch.nn import functional
from zoo_examples import built, example, inputs_of, measured, predicted_on_cpu


def loss_and_types(**knobs):
    """The loss of a batch of tiny Llama in bf16, and the types of the logits that cross entropies were of."""
    types = []
    cross_entropy = functional.cross_entropy

    def seen(logits, *args, **options):
        types.append(logits.dtype)
        return cross_entropy(logits, *args, **options)

    torch.manual_seed(0)
    workload = built("llama-3.1-8b", activation_checkpointing=False, **knobs)
    workload.model.bfloat16()
    with mock.patch.object(functional, "cross_entropy", seen):
        loss = workload.loss(inputs_of(workload))
    return loss, types


def test_logits_are_copied_to_fp32_where_the_case_says_so():
    plain, types = loss_and_types()
    assert (plain.dtype, types) == (torch.bfloat16, [torch.bfloat16])
    whole, types = loss_and_types(loss="fp32")
    assert (whole.dtype, types) == (torch.float32, [torch.float32])
    parts, types = loss_and_types(loss="fp32", loss_chunks=3)
    assert types == [torch.float32] * 3
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)
    assert plain.item() == pytest.approx(whole.item(), rel=2**-7)


def test_it_is_the_loss_of_transformers():
    workload = built("llama-3.1-8b", loss="fp32", lengths="padded")
    inputs = inputs_of(workload)
    # transformers shifts the labels by itself.
    unshifted = torch.roll(inputs["labels"], 1, dims=1)
    expected = workload.model(**{**inputs, "labels": unshifted}).loss
    assert workload.loss(inputs).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        example("llama-3.1-8b", loss="fp32"),
        example("llama-3.1-8b", "lora", loss="fp32", loss_chunks=4, lengths="padded"),
        example("gemma-2-9b", loss="fp32", precision="bf16-amp"),
        example("qwen2-vl-2b", loss="fp32"),
    ],
    ids=str,
)
def test_a_prediction_counts_it(case):
    compare(case)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2-vl-2b"])
def test_a_copy_takes_memory(model):
    plain, copied = (predicted_on_cpu(example(model, batch_size=8, loss=loss)) for loss in ("", "fp32"))
    assert copied.peak_allocated_bytes > 1.1 * plain.peak_allocated_bytes


def test_a_case_trains_by_it():
    case = example("llama-3.1-8b", loss="fp32", steps=2, warmup=1)
    assert measured(case).losses != measured(case.replace(loss="")).losses
