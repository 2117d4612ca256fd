"""Scales a model of any config down for a step on a CPU, through the same code path.

A denoiser of diffusers becomes what the zoo's model of its class becomes. The rules for language models, by the names that
transformers has for the keys:

- Layers: as few as have one of every kind, two at least; lists with one entry for each layer are cut.
- Widths: 64, of feed-forward layers 128, of experts 32; 512 tokens; 256 positions.
- Attention: 4 heads; for keys and values as many, one, or else 2; a head as wide as makes 64 of them all, or 32 where the
  full size makes more or less.
- Linear attention: 4 heads of 16; for keys as many or 2.
- State-space layers: 4 heads that are together as wide as the layer; states of 16, chunks of 32, at most 2 groups.
- Experts: 8, of which at most 2 take a token; 2 groups of them, of which one is chosen.
- Windows of attention: 32 tokens, so that they are shorter than a tiny sample.
- Ids of special tokens that the small vocabulary lacks become 0 (padding), 1 (begin) and 2 (end).

What is smaller at full size stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pytest_gputrain.cases.architectures.facts import Part

HEADS: Final = 4

_MOST: Final = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
    "max_position_embeddings": 256,
    "hidden_size": 64,
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "hidden_size_per_layer_input"), 64),
    **dict.fromkeys(
        (
            *("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"),
            *("shared_intermediate_size", "dense_intermediate_size"),
        ),
        128,
    ),
    **dict.fromkeys(
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
            *(
                "expert_ffn_hidden_size",
                "kv_lora_rank",
                "q_lora_rank",
                "o_lora_rank",
                "sliding_window",
                "attention_chunk_size",
            ),
            *("original_max_position_embeddings",),
        ),
        32,
    ),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    "num_attention_heads": HEADS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 32),
    "n_group": 2,
    "topk_group": 1,
}
"""Largest value of each key."""

_KEY_HEADS: Final = ("num_key_value_heads", "num_kv_heads")

_HEADS: Final = (*_KEY_HEADS, "linear_num_key_heads", "head_dim")
"""Keys whose values depend on others."""

_STATE_HEADS: Final = {
    "mamba_n_heads": "mamba_d_head",
    "mamba_num_heads": "mamba_head_dim",
    "n_mamba_heads": "mamba_headdim",
    "num_heads": "head_dim",
}
"""Heads of state-space layers and their width, whose product is that of what these layers compute in."""

_TOKENS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_language_model(config: Any, shallow: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a config whose values differ at tiny scale.

    Args:
        config: the full-size one, of transformers.
        shallow: the given keys, with fewer layers.
        facts: the given keys.
    """
    names: dict[str, str] = type(config).attribute_map
    tiny = {key: value for key, value in shallow.items() if value != facts[key]}

    def full(key: str) -> Any:
        # A default of the class is used, but a value that the class computes from other keys is not, because it is computed
        # anew.
        name = names.get(key, key)
        return facts.get(name, facts.get(key, getattr(type(config), name, None)))

    heads: int = full("num_attention_heads") or 0  # a state-space model has no heads

    def shrunk(key: str, value: int, heads: int = heads) -> int:
        if key in _KEY_HEADS:
            return HEADS if value == heads else min(value, 2)
        if key == "linear_num_key_heads":
            return HEADS if value == full("linear_num_value_heads") else min(value, 2)
        if key == "head_dim":
            if value == full("qk_rope_head_dim"):  # With compressed attention `head_dim` is another name of this size.
                return min(value, _MOST["qk_rope_head_dim"])
            return 16 if value * heads == full("hidden_size") else 32
        return min(value, _MOST[key])

    for key in (*_MOST, *_HEADS):
        value = full(key)
        if _is_count(value) and shrunk(key, value) != value:
            tiny[names.get(key, key)] = shrunk(key, value)
        # The list has one entry for each layer.
        elif isinstance(each := shallow.get(key), list) and all(map(_is_count, each)):
            tiny[key] = [shrunk(key, count) for count in each]
    tiny |= _tiny_state_space(full)
    for name, value in shallow.items():
        if isinstance(value, dict) and value and all(map(str.isdecimal, value)):  # The dict has numbers of layers as keys.
            tiny[name] = {
                number: {
                    key: shrunk(key, count, entry.get("num_attention_heads", heads)) if _is_scaled(key, count) else count
                    for key, count in entry.items()
                }
                for number, entry in value.items()
            }
    if _is_count(facts.get("qk_head_dim")):  # This size is the sum of the parts with and without positions.
        tiny["qk_head_dim"] = sum(tiny.get(key) or full(key) or 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if _is_count(scalar := full("query_pre_attn_scalar")):
        tiny["query_pre_attn_scalar"] = tiny.get("head_dim") or full("head_dim") or scalar
    words = tiny.get("vocab_size", facts["vocab_size"])
    for key, token in _TOKENS.items():
        value = full(key)
        largest = max(value, default=0) if isinstance(value, list) else value
        if _is_count(largest) and largest >= words:
            tiny[key] = token
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(facts.get(key), dict):
            tiny[key] = _tiny_rope(facts[key], (tiny.get("head_dim") or 16) * facts.get("partial_rotary_factor", 1))
    return tiny


_MOST_OF_VISION: Final = {
    **dict.fromkeys(("depth", "num_hidden_layers"), 3),
    **dict.fromkeys(("hidden_size", "embed_dim"), 32),
    "intermediate_size": 64,
    **dict.fromkeys(("num_heads", "num_attention_heads"), HEADS),
}
_TILE: Final = 4
"""Patches of a side of a tiny tile."""


def tiny_vision_language_model(facts: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a vision-language config whose values differ at tiny scale.

    Args:
        facts: all keys of the full-size one.
        text: the keys of its language model whose values differ.
    """
    text = {**facts["text_config"], **text}
    full: dict[str, Any] = facts["vision_config"]
    vision = full | {key: min(most, full[key]) for key, most in _MOST_OF_VISION.items() if _is_count(full.get(key))}
    if "embed_dim" in full:  # In such a config the hidden size is that of the language model.
        vision["hidden_size"] = text["hidden_size"]
    if "head_dim" in full:
        vision["head_dim"] = vision["hidden_size"] // HEADS
    if ratio := full.get("pixel_shuffle_ratio"):  # Neighbouring patches are joined to one input of the next network.
        vision["intermediate_size"] = int(vision["hidden_size"] / ratio**2)
    tiny: dict[str, Any] = {"text_config": text, "vision_config": vision}
    for part, keys in ((vision, full), (tiny, facts)):
        for key in ("out_hidden_size", "projection_dim"):
            if key in keys:
                part[key] = text["hidden_size"]
    for key in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        if key in full:
            vision[key] = [1]
    tile = full.get("image_size")
    if isinstance(tile, list):
        vision["image_size"] = [_TILE * side for side in full["patch_size"]]
    elif _is_count(tile):
        vision["image_size"] = _TILE * full["patch_size"]
        if pinpoints := facts.get("image_grid_pinpoints"):
            tiny["image_grid_pinpoints"] = [[side * vision["image_size"] // tile for side in each] for each in pinpoints]
    if "mm_tokens_per_image" in facts:
        tiny["mm_tokens_per_image"] = _TILE
    tokens = [key for key, value in facts.items() if key.endswith(("_token_id", "_token_index")) and _is_count(value)]
    return tiny | {key: text["vocab_size"] - 1 - number for number, key in enumerate(tokens) if key not in _TOKENS}


def _tiny_state_space(full: Callable[[str], Any]) -> dict[str, Any]:
    """Return the widths of state-space layers, which belong to each other.

    Args:
        full: looks up a key at full size.
    """
    inner = _MOST["hidden_size"] * int(full("mamba_expand") or full("expand") or 2)
    tiny: dict[str, Any] = {}
    for heads, width in _STATE_HEADS.items():
        if _is_count(full(heads)) and _is_count(full(width)) and (heads != "num_heads" or full("expand")):
            tiny |= {heads: HEADS, width: inner // HEADS}
    if _is_count(full("mamba_d_ssm")):
        tiny["mamba_d_ssm"] = inner
    return tiny


def tiny_denoiser(like: Part, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a denoiser's config whose values differ at tiny scale.

    Args:
        like: the zoo's model of the same class.
        facts: all keys of the full-size one.
    """
    tiny = {key: value for key, value in like.tiny.items() if facts.get(key) is not None}
    if facts.get("dual_attention_layers"):
        tiny["dual_attention_layers"] = [0]
    if stages := facts.get("block_out_channels"):
        # These are the lists of a UNet, with one entry for each stage. If the number of groups in its norms is fixed, it is
        # 32.
        first = 16 if facts.get("norm_num_groups") else 32
        tiny |= {"block_out_channels": [first, *[32] * (len(stages) - 1)]}
        tiny |= {key: value for key, value in _TINY_UNET.items() if key in facts and value != facts[key]}
        for key, most in _MOST_OF_A_STAGE.items():
            value = facts.get(key)
            if value is not None:
                tiny[key] = [min(count, most) for count in value] if isinstance(value, list | tuple) else min(value, most)
        if facts.get("addition_embed_type") == "text_time":
            # The 80 inputs are 32 numbers of the text, and six sizes of 8 numbers each.
            tiny |= {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80}
    return tiny


_TINY_UNET: Final = {"layers_per_block": 1, "attention_head_dim": 4}
_MOST_OF_A_STAGE: Final = {
    **dict.fromkeys(("num_attention_heads", "motion_num_attention_heads"), 4),
    "transformer_layers_per_block": 2,
    **dict.fromkeys(("down_num_layers_per_block", "up_num_layers_per_block"), 1),
}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_scaled(key: str, value: object) -> bool:
    return _is_count(value) and key in (*_MOST, *_HEADS)


def _tiny_rope(rope: dict[str, Any], width: float) -> dict[str, Any]:
    """Return rotary positions of a narrow head, whose factors are one for each pair of its values."""
    scaled = dict(rope)
    for key, value in rope.items():
        if isinstance(value, dict):
            scaled[key] = _tiny_rope(value, width)
        elif isinstance(value, list) and key.endswith("_factor"):
            scaled[key] = value[: int(width) // 2]
        elif key == "mrope_section":
            half = int(width * (rope.get("partial_rotary_factor") or 1)) // 2
            others = [max(1, half * part // sum(value)) for part in value[1:]]
            scaled[key] = [half - sum(others), *others]
        elif key == "original_max_position_embeddings" and "long_factor" in rope:
            scaled[key] = 32
    return scaled
