"""The knobs ``attention``, ``quantized_compute`` and ``loss``: what a model calls, and in which type it computes."""

from unittest import mock

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from torch.nn import functional
from transformers.models.gemma2 import modeling_gemma2
from zoo_examples import built, example, inputs_of

from pytest_gputrain.worker import methods
from pytest_gputrain.worker.precision import PRECISIONS

HEADS, SHARED, TOKENS = 4, 2, 128
"""Of tiny Llama and tiny Gemma 2; their samples at tiny scale."""


def loss_and_calls(name, **knobs):
    """The loss of a batch, and the calls of torch's scaled dot product attention: heads of the keys, mask, is_causal."""
    calls = []
    attend = functional.scaled_dot_product_attention

    def seen(query, key, value, attn_mask=None, **options):
        calls.append((key.shape[1], attn_mask is not None, options["is_causal"]))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    workload = built(name, precision="fp32", sequence_length=TOKENS, activation_checkpointing=False, **knobs)
    with mock.patch.object(functional, "scaled_dot_product_attention", seen):
        loss = workload.loss(inputs_of(workload))
    return loss.item(), calls


@pytest.mark.parametrize(
    ("attention", "calls"),
    [("sdpa", [(SHARED, False, True)] * 2), ("sdpa-4.49", [(HEADS, False, True)] * 2), ("eager", [])],
)
def test_llama_attends_as_its_case_says_and_learns_the_same(attention, calls):
    plain, by_default = loss_and_calls("llama-3.1-8b")
    assert by_default == [(SHARED, False, True)] * 2
    loss, called = loss_and_calls("llama-3.1-8b", attention=attention)
    assert called == calls
    assert loss == pytest.approx(plain, rel=1e-5)


def test_gemma_2_by_sdpa_as_then_sees_what_eager_attention_sees_without_its_cap():
    assert loss_and_calls("gemma-2-9b")[1] == loss_and_calls("gemma-2-9b", attention="eager")[1] == []
    loss, calls = loss_and_calls("gemma-2-9b", attention="sdpa-4.49")
    # Blocks with a sliding window, shorter than the samples, take turns with blocks without.
    assert calls == [(HEADS, True, False), (HEADS, False, True)]

    attend = modeling_gemma2.eager_attention_forward

    def without_cap(*args, softcap, **options):
        return attend(*args, **options)

    with mock.patch.object(modeling_gemma2, "eager_attention_forward", without_cap):
        uncapped, _ = loss_and_calls("gemma-2-9b")
    assert loss == pytest.approx(uncapped, rel=1e-6)


def packed(compute, precision):
    """A packed layer of tiny Llama."""
    case = example("llama-3.1-8b", "qlora", precision=precision, quantized_compute=compute)
    torch.set_default_dtype(PRECISIONS[precision].weights)
    try:
        workload = built("llama-3.1-8b", method="qlora", precision=precision, quantized_compute=compute)
    finally:
        torch.set_default_dtype(torch.float32)
    model = methods.adapt(workload.model, workload.architecture, case, PRECISIONS[precision])
    return model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.base_layer")


@pytest.mark.parametrize(
    ("precision", "compute", "dtype"),
    [
        ("bf16", "", torch.bfloat16),
        ("bf16", "fp32", torch.float32),
        ("fp32", "", torch.float32),
        ("fp32", "bf16", torch.bfloat16),
    ],
)
def test_packed_weights_are_multiplied_in_the_case_s_type(precision, compute, dtype):
    layer = packed(compute, precision)
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    stored = PRECISIONS[precision].weights
    values = torch.randn(3, weight.shape[1], dtype=stored)
    exact = functional.linear(values.to(dtype).float(), weight.to(dtype).float())
    result = layer(values)
    assert result.dtype == stored
    # One rounding, of the result: the sum itself has all digits of fp32.
    coarse = torch.bfloat16 in (dtype, stored)
    torch.testing.assert_close(result.float(), exact, rtol=2**-7 if coarse else 1e-5, atol=1e-2 if coarse else 1e-5)
    assert layer.compute_dtype == dtype


# Loss


def loss_and_types(**knobs):
    """The loss of a batch of tiny Llama in bf16, and the types of the logits that cross entropies were of."""
    workload = built("llama-3.1-8b", activation_checkpointing=False, **knobs)
    workload.model.bfloat16()
    with mock.patch.object(functional, "cross_entropy", wraps=functional.cross_entropy) as cross_entropy:
        loss = workload.loss(inputs_of(workload))
    return loss, [call.args[0].dtype for call in cross_entropy.call_args_list]


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
