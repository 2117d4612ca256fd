"""PanGu is a GPT with a query layer, by a module of our own."""

import math

import pytest
import torch
from torch.nn import functional
from zoo_examples import built, example, inputs_of, measured

from pytest_gputrain.cases.architectures.facts import architectures

MODELS = ["pangu-350m", "pangu-2.6b"]


@pytest.mark.parametrize("scale", ["full", "tiny"])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_count_follows_from_the_hyper_parameters(name, scale):
    part = architectures()[name].trained_part
    config = part.facts(scale)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    tables = (config["vocab_size"] + 2 * config["max_position_embeddings"]) * hidden
    attention = 4 * (hidden * hidden + hidden)
    mlp = 2 * hidden * width + width + hidden
    norms = 2 * 2 * hidden
    assert part.parameters[scale] == tables + config["num_hidden_layers"] * (attention + mlp + norms) + 2 * hidden


@pytest.mark.parametrize(("name", "checkpoint_megabytes"), [("pangu-350m", 659), ("pangu-2.6b", 5010)])
def test_the_count_is_that_of_the_published_checkpoint(name, checkpoint_megabytes):
    """Stored in fp16, as the repository of the benchmark tells its size (2.6B: half of 9.8 GB in fp32)."""
    stored = 2 * architectures()[name].trained_part.parameters["full"] / 2**20
    assert stored == pytest.approx(checkpoint_megabytes, rel=2e-3)


@pytest.mark.parametrize("changed", [1, 40, 63])
def test_a_token_changes_no_logits_before_it_and_those_from_it_on(changed):
    model = built("pangu-350m").model.eval()
    ids = torch.randint(0, 512, (1, 64))
    others = ids.clone()
    others[0, changed] = (others[0, changed] + 1) % 512
    difference = (model(ids) - model(others)).abs().amax(dim=(0, 2))
    assert (difference[:changed] == 0).all()
    assert (difference[changed:] > 0).all()


def test_queries_of_the_last_block_come_from_the_table_of_positions():
    model = built("pangu-350m").model
    seen = []
    for block in model.blocks:
        block.attention.q_proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    length = 20
    model(torch.randint(0, 512, (3, length))).square().mean().backward()
    assert torch.equal(seen[-1], model.wqe.weight[:length].expand(3, -1, -1))
    assert not any(torch.equal(query[0], query[1]) for query in seen[:-1])
    # The first position sees one key only, whatever it asks for.
    assert (model.wqe.weight.grad[1:length].abs().amax(dim=1) > 0).all()
    assert (model.wqe.weight.grad[length:] == 0).all()


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


def test_recomputation_covers_every_block_and_changes_nothing():
    plain, recomputed = (
        measured(example("pangu-350m", precision="fp32", activation_checkpointing=share, steps=2)) for share in (False, True)
    )
    assert recomputed.losses == plain.losses
    assert recomputed.peak_allocated_bytes < plain.peak_allocated_bytes
    config = architectures()["pangu-350m"].trained_part.facts("tiny")
    hidden, tokens = config["hidden_size"], recomputed.batch_size * recomputed.sequence_length
    forward = 2 * tokens * (4 * hidden**2 + 2 * hidden * config["intermediate_size"])
    attention = 2 * 2 * tokens * recomputed.sequence_length * hidden
    assert recomputed.recomputed_flops_per_step == config["num_hidden_layers"] * (forward + attention)
