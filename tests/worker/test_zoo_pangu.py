"""PanGu is a GPT with a query layer, by a module of our own."""

import math

import pytest
import torch
from torch.nn import functional
from zoo_examples import built, inputs_of

from pytest_gputrain.cases.architectures.facts import architectures


@pytest.mark.parametrize(("name", "checkpoint_megabytes"), [("pangu-350m", 659), ("pangu-2.6b", 5010)])
def test_the_count_is_that_of_the_published_checkpoint(name, checkpoint_megabytes):
    """Stored in fp16, as the repository of the benchmark tells its size (2.6B: half of 9.8 GB in fp32)."""
    stored = 2 * architectures()[name].trained_part.parameters["full"] / 2**20
    assert stored == pytest.approx(checkpoint_megabytes, rel=2e-3)


def naive_logits(model, ids, heads):
    """The network written down once more, with attention as a tensor of scores."""
    length = ids.shape[1]
    later = torch.ones(length, length).triu(1).bool()

    def split(states):
        return states.view(*states.shape[:2], heads, -1).permute(0, 2, 1, 3)

    hidden = model.wte.weight[ids] + model.wpe.weight[:length]
    for index, block in enumerate(model.blocks):
        is_query_layer = index == len(model.blocks) - 1
        if is_query_layer:
            hidden = model.ln_f(hidden)
        states = block.ln_1(hidden)
        attention = block.attention
        source = model.wqe.weight[:length].expand_as(hidden) if is_query_layer else states
        query, key, value = (
            split(layer(of))
            for layer, of in [(attention.q_proj, source), (attention.k_proj, states), (attention.v_proj, states)]
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        mixed = scores.masked_fill(later, -math.inf).softmax(dim=3) @ value
        hidden = hidden + attention.c_proj(mixed.permute(0, 2, 1, 3).reshape(hidden.shape))
        hidden = hidden + block.mlp.c_proj(functional.gelu(block.mlp.c_fc(block.ln_2(hidden))))
    return hidden @ model.wte.weight.T


def test_logits_are_those_of_the_network_written_down_naively():
    model = built("pangu-350m").model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        ids = torch.randint(0, 512, (2, 30))
        torch.testing.assert_close(model(ids), naive_logits(model, ids, heads=4))


def test_dropout_is_on_in_attention_embeddings_and_both_outputs():
    model = built("pangu-350m").model
    states = torch.randn(1, 8, 64)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    for part, given in [(model.blocks[0].attention, states), (model.blocks[0].mlp, states), (model, ids)]:
        assert not torch.equal(part(given), part(given))
    attention = model.blocks[0].attention
    attention.dropout.eval()  # what is dropped of the weights remains
    assert not torch.equal(attention(states), attention(states))


def test_a_fresh_model_knows_nothing_and_layers_that_end_in_the_residual_start_smaller_with_depth():
    workload = built("pangu-350m")
    assert workload.loss(inputs_of(workload)).item() == pytest.approx(math.log(512), rel=0.05)
    deviations = {name: value.std().item() for name, value in workload.model.named_parameters() if value.ndim > 1}
    assert deviations.pop("wqe.weight") == pytest.approx(0.02, rel=0.1)
    ends = [value for name, value in deviations.items() if "c_proj" in name]
    assert ends == pytest.approx([0.02 / math.sqrt(2 * 3)] * 6, rel=0.1)
