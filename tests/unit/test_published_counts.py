"""Counts of parameters of the popular models, added up from their published hyper-parameters without any library."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from pytest_gputrain.cases.architectures import facts

PUBLISHED = msgspec.json.decode(facts._PUBLISHED.read_bytes(), type=dict[str, facts.Published])
LANGUAGE = [name for name, model in PUBLISHED.items() if "model_type" in model.config]


def attention(config: Mapping[str, Any]) -> int:
    """Count the projections of one layer, the norms of queries and keys among them."""
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads", heads)
    if kind == "deepseek_v2":  # arXiv:2405.04434, section 2.1: keys and values are compressed, queries are not
        nope, rope, value, rank = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        compressed = hidden * (rank + rope) + rank + rank * heads * (nope + value)
        return int(hidden * heads * (nope + rope) + compressed + heads * value * hidden)
    width = config.get("head_dim") or hidden // heads
    count = 2 * hidden * heads * width + 2 * hidden * key_heads * width
    if kind == "qwen2":
        count += (heads + 2 * key_heads) * width  # biases
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        count += 2 * width  # norms
    return int(count)


def feed_forward(config: Mapping[str, Any], layer: int) -> int:
    """Count three matrices, those of all experts, and the router's."""
    kind, hidden = config["model_type"], config["hidden_size"]
    dense = 3 * hidden * config["intermediate_size"]
    if kind == "mixtral":
        return int(config["num_local_experts"] * (dense + hidden))
    if kind == "qwen3_moe":
        return int(config["num_experts"] * (3 * hidden * config["moe_intermediate_size"] + hidden))
    if kind == "deepseek_v2" and layer >= config["first_k_dense_replace"]:
        routed, shared = config["n_routed_experts"], config["n_shared_experts"]
        return int((routed + shared) * 3 * hidden * config["moe_intermediate_size"] + routed * hidden)
    return int(dense)


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_count_of_a_language_model_is_the_sum_of_its_layers(name: str) -> None:
    config = PUBLISHED[name].config
    hidden, kind = config["hidden_size"], config["model_type"]
    tables = 1 if config.get("tie_word_embeddings", kind == "gemma3_text") else 2
    norms = 4 if kind == "gemma3_text" else 2
    layers = sum(
        attention(config) + feed_forward(config, layer) + norms * hidden for layer in range(config["num_hidden_layers"])
    )
    assert tables * config["vocab_size"] * hidden + layers + hidden == PUBLISHED[name].parameters


@pytest.mark.parametrize(("name", "positions"), [("sd3.5-medium", 384), ("sd3.5-large", 192)])
def test_the_count_of_stable_diffusion_3_5_is_the_sum_of_its_blocks(name: str, positions: int) -> None:
    config = PUBLISHED[name].config
    head, layers = config["attention_head_dim"], config["num_layers"]
    width = head * config["num_attention_heads"]
    patch = config["patch_size"] ** 2 * config["in_channels"]

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    stream = (
        linear(width, 6 * width) + 4 * linear(width, width) + 2 * head + linear(width, 4 * width) + linear(4 * width, width)
    )
    second_attention = linear(width, 3 * width) + 4 * linear(width, width) + 2 * head
    # The last block lets go of the text behind its attention.
    left_out = linear(width, 4 * width) + linear(width, width) + linear(width, 4 * width) + linear(4 * width, width)
    blocks = 2 * layers * stream + len(config["dual_attention_layers"]) * second_attention - left_out
    embedders = linear(patch, width) + linear(config["joint_attention_dim"], width) + 2 * linear(width, width)
    embedders += linear(256, width) + linear(config["pooled_projection_dim"], width)
    trained = blocks + embedders + linear(width, 2 * width) + linear(width, patch)
    assert config["pos_embed_max_size"] == positions
    assert f"{(trained + positions**2 * width) / 1e9:.1f}B" == PUBLISHED[name].published


def test_the_count_of_flux_2_klein_is_the_sum_of_its_blocks() -> None:
    part = facts.architectures()["flux.2-klein-4b"].trained_part
    config = part.config
    head = config["attention_head_dim"]
    width, ratio = head * config["num_attention_heads"], int(config["mlp_ratio"])
    double = 2 * (4 + 3 * ratio) * width**2 + 4 * head
    single = (3 + 2 * ratio + 1 + ratio) * width**2 + 2 * head
    modulations = (2 * 6 + 3 + 2) * width**2  # of image, text, both, and the last norm
    outside = (2 * config["in_channels"] + config["joint_attention_dim"] + 256 + width) * width
    total = config["num_layers"] * double + config["num_single_layers"] * single + modulations + outside
    assert total == part.parameters["full"] == 3_875_544_576
