"""Models that are known by their config.json: what the worker finds out about them, and that they train so."""

import re
from unittest import mock

import bitsandbytes
import msgspec
import pytest
import torch
from zoo_examples import count, measured, predicted_on_cpu, run

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures import facts
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.model_config import declare
from pytest_gputrain.records import Crashed
from pytest_gputrain.worker import methods, zoo
from pytest_gputrain.worker.flops import count_flops
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.precision import PRECISIONS
from pytest_gputrain.worker.zoo.completed import architecture_of

PUBLISHED = msgspec.json.decode(facts._PUBLISHED.read_bytes(), type=dict[str, facts.Published])

OTHERS = {
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    "gpt_neox": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 50304,
    },
    "opt": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
    },
    "olmoe": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
    },
    "gpt_oss": {
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "sliding_window": 128,
    },
}
"""Configs of other types of models, as users bring them."""


def config_case(kind, config, method="full", **knobs):
    declare(f"{kind}#test", {"model_type": kind, **config})
    return Case(model=f"{kind}#test", method=method, batch_size=2, sequence_length=512, steps=2, warmup=1, **knobs)


def kind_of(name):
    return PUBLISHED[name].config.get("model_type") or PUBLISHED[name].config["_class_name"]


ONE_OF_EACH_KIND = list({kind_of(name): name for name in PUBLISHED}.values())


def published_case(name, method):
    needs = {"resolution": "512x512"} if "_class_name" in PUBLISHED[name].config else {"sequence_length": 512}
    return Case(model=name, method=method, batch_size=2, steps=2, warmup=1, activation_checkpointing=True, **needs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_build_has_the_published_parameter_count(name):
    with torch.device("meta"):
        model = zoo.build(published_case(name, "full"), "full").model
    published = PUBLISHED[name].published
    if "," in published:
        assert f"{count(model):,}" == published
        return
    # Rounded ones count the table of positions, which is stored but does not train.
    billions, digits = float(published.removesuffix("B")), len(published.partition(".")[2]) - 1
    stored = count(model) + sum(table.numel() for table in model.buffers())
    assert round(stored / 1e9, digits) == billions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, id=f"{kind_of(name)}-{method}")
        for name in ONE_OF_EACH_KIND
        for method in ("full", "lora", "qlora")
        if method in architectures()[name].trainable
    ],
)
def test_published_models_train_and_are_predicted_to_the_byte(name, method):
    compare(published_case(name, method))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_configs_train_and_are_predicted_to_the_byte(kind, method):
    compare(config_case(kind, OTHERS[kind], method))


def compare(case):
    load(case)  # which makes tensors that are none of the training's
    # A table that bitsandbytes makes when it first quantises is of the training.
    with mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True):
        reply = measured(case)
    prediction = predicted_on_cpu(case)
    assert prediction.peak_allocated_bytes == reply.peak_allocated_bytes
    assert prediction.phase_peak_bytes == reply.phase_peak_bytes
    assert prediction.flops_per_step == reply.flops_per_step
    assert (prediction.parameters, prediction.trainable_parameters) == (reply.parameters, reply.trainable_parameters)


@pytest.mark.slow
@pytest.mark.parametrize("class_name", [name for name, like in facts.denoisers().items() if like.trained_part.config])
def test_the_config_of_every_class_of_denoisers_trains(class_name):
    like = facts.denoisers()[class_name]
    case = denoiser_case(class_name, {"_unknown": 1})
    assert architecture_of(case.model).trained_part.parameters["full"] == like.trained_part.parameters["full"]
    compare(case)


def denoiser_case(class_name, keys):
    """The case of the zoo's first model of the class, but for some keys."""
    like = facts.denoisers()[class_name]
    config = {"_class_name": class_name, **like.trained_part.config, **keys}
    name = f"{class_name}#{hash(str(keys))}"
    declare(name, config)
    needs = {"resolution": "512x512", "frames": 9}
    return Case(model=name, batch_size=2, steps=2, warmup=1, **{field: needs[field] for field in like.needs})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("class_name", "keys"),
    [
        ("FluxTransformer2DModel", {"guidance_embeds": False}),  # FLUX.1-schnell
        ("HunyuanVideoTransformer3DModel", {"guidance_embeds": False}),
        ("WanTransformer3DModel", {"in_channels": 16, "image_dim": None, "added_kv_proj_dim": None}),  # of text alone
        ("UNet2DConditionModel", {"cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20]}),  # as version 2
    ],
)
def test_a_denoiser_without_what_the_zoo_s_model_is_conditioned_on_trains(class_name, keys):
    compare(denoiser_case(class_name, keys))


@pytest.mark.parametrize(
    ("class_name", "keys", "sentence"),
    [
        (
            "UNet2DConditionModel",
            {"in_channels": 9},
            "has in_channels=9 and out_channels=4 in its config.json: its inputs",
        ),
        (
            "UNet2DConditionModel",
            {"class_embed_type": "timestep"},
            "has class_embed_type='timestep' in its config.json, a cond",
        ),
        (
            "UNet2DConditionModel",
            {"encoder_hid_dim": 768, "encoder_hid_dim_type": "text_proj"},
            "has encoder_hid_dim_type='text_proj' in its config.json, a cond",
        ),
        ("FluxTransformer2DModel", {"in_channels": 384, "out_channels": 64}, "has in_channels=384 and out_channels=64"),
        ("WanTransformer3DModel", {"in_channels": 48, "out_channels": 48}, "only latents of 16 channels are known"),
    ],
)
def test_a_denoiser_whose_inputs_are_not_known_is_refused_by_its_key(class_name, keys, sentence):
    case = denoiser_case(class_name, keys)
    reply = run(case)
    assert isinstance(reply, Crashed)
    assert reply.sentence.startswith(case.model)
    assert sentence in reply.sentence
    assert reply.refused


@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        ("full", {"loss_chunks": 4}),
        ("full", {"loss": "logits"}),
        ("full", {"optimizer": "adamw_8bit", "max_grad_norm": 1.0}),
        ("full", {"optimizer": "paged_adamw_8bit"}),
        ("full", {"optimizer": "adafactor"}),
        ("full", {"optimizer": "sgd", "learning_rate": 1.0}),
        ("full", {"lengths": "packed", "activation_checkpointing": True, "activation_checkpointing_policy": "save-matmuls"}),
        ("lora", {"lora_rank": 16, "lora_alpha": 8, "lora_dropout": 0.1, "lora_targets": "q_proj+down_proj"}),
        ("lora", {"lora_targets": "all-linear", "attention": "eager"}),
        ("qlora", {"dora": True, "activation_checkpointing": True}),
    ],
    ids=str,
)
def test_each_knob_of_a_model_by_its_config_is_predicted_to_the_byte(method, knobs):
    config = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    compare(
        config_case("qwen3", {**config, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936}, method, **knobs)
    )


def test_products_of_experts_count_each_token_once_however_tokens_are_shared_out():
    tokens, experts = torch.ones(32, 16, requires_grad=True), torch.ones(4, 16, 24, requires_grad=True)
    for ends in ([8, 16, 24, 32], [0, 32, 32, 32]):
        with count_flops() as forward:
            product = torch.nn.functional.grouped_mm(tokens, experts, offs=torch.tensor(ends, dtype=torch.int32))
        assert forward.total == 2 * 32 * 16 * 24
        with count_flops() as backward:
            product.backward(torch.ones_like(product))
        assert backward.total == 2 * forward.total


def test_blocks_of_every_kind_are_in_the_tiny_model():
    gemma, deepseek = (architecture_of(name).trained_part for name in ("gemma-3-1b", "deepseek-v2-lite"))
    assert gemma.facts("tiny")["layer_types"] == [*["sliding_attention"] * 5, "full_attention"]
    assert gemma.facts("tiny")["num_hidden_layers"] == 6
    assert deepseek.facts("tiny")["num_hidden_layers"] == 2
    assert gemma.repeats == {}, "26 layers are no multiple of 6"
    assert deepseek.repeats == {"num_hidden_layers": 1}


def test_the_tiny_model_keeps_what_decides_the_code_path():
    tiny = {name: architecture_of(name).trained_part.facts("tiny") for name in PUBLISHED}
    assert tiny["gemma-3-1b"]["num_key_value_heads"] == 1
    assert tiny["qwen3-4b"]["num_key_value_heads"] == 2
    assert tiny["qwen3-30b-a3b"]["num_local_experts"] == 8
    assert tiny["qwen3-30b-a3b"]["num_experts_per_tok"] == 2
    assert tiny["mistral-7b-v0.1"]["sliding_window"] == 32
    assert tiny["qwen3-4b"]["tie_word_embeddings"]
    assert tiny["deepseek-v2-lite"]["q_lora_rank"] is None


def test_targets_are_peft_s_own_or_all_linear_layers():
    def adapted(kind):
        case = config_case(kind, OTHERS[kind], "lora")
        architecture = architecture_of(case.model)
        model = methods.adapt(zoo.build(case, "tiny").model, architecture, case, PRECISIONS["bf16"])
        return {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}

    assert adapted("gpt2") == {"c_attn"}
    assert adapted("gpt_neox") == {"query_key_value"}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} < adapted("olmoe")


def test_qlora_packs_all_linear_layers_whatever_is_adapted():
    case = config_case("opt", OTHERS["opt"], "qlora")
    model = methods.adapt(zoo.build(case, "tiny").model, architecture_of(case.model), case, PRECISIONS["bf16"])
    packed = {name.split(".")[-1] for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    assert {"fc1", "fc2", "out_proj", "k_proj"} <= packed
    assert "lm_head" not in packed


def test_keys_that_a_class_derives_of_others_are_left_to_it():
    # As transformers writes them: an infinite number has a form of its own in JSON.
    config = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "num_heads": 8,
        "head_dim": 64,
        "n_groups": 1,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "layer_types": ["mamba", "mamba"],
    }
    declare("mamba2#test", {"model_type": "mamba2", **config})
    assert architecture_of("mamba2#test").trained_part.facts("tiny")["num_hidden_layers"] == 2


NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}
"""Nemotron-H 8B as the hub has it: its class derives the number of layers of the pattern."""


def test_layers_that_a_class_derives_of_another_key_are_counted_by_that():
    declare("nemotron#test", NEMOTRON_H)
    part = architecture_of("nemotron#test").trained_part
    assert part.parameters["full"] == 8_100_852_736, "published as 8.1B"
    assert len(part.facts("tiny")["layers_block_type"]) == 8, "as many as have one of every kind"
    declare("longcat#test", {"model_type": "longcat_flash", "hidden_size": 256, "num_layers": 6, "n_routed_experts": 16})
    part = architecture_of("longcat#test").trained_part
    assert part.repeats == {"num_layers": 1}
    assert part.facts("tiny")["num_layers"] == 2


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"model_type": "nemotron_h", "hidden_size": 64},
            "lacks the key num_hidden_layers in its config.json",
        ),
        (
            NEMOTRON_H | {"hybrid_override_pattern": "M-M-M-M*-"},
            "has num_hidden_layers=52 in its config.json, but NemotronHConfig makes it 9 of the other keys",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_key_value_heds": 8},
            r"has the key num_key_value_heds in its config.json, .* would ignore \(did you mean 'num_key_value_heads'\?\)",
        ),
        ({"model_type": "qwen9"}, r"has model_type='qwen9', which transformers [\d.]+ does not have \(did you mean 'qwen"),
        (
            {"model_type": "bert"},
            r"has model_type='bert', which in transformers [\d.]+ is not a decoder-only language model",
        ),
        ({"model_type": "llama", "hidden_size": 64}, "lacks the key num_hidden_layers in its config.json"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "lacks the key hidden_size in its config.json"),
        (
            {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 5},
            "cannot be built from its config.json",
        ),
    ],
)
def test_a_config_that_cannot_be_built_is_one_sentence_that_names_the_key(config, sentence):
    name = f"bad#{abs(hash(str(config)))}"
    declare(name, config)
    reply = run(Case(model=name, sequence_length=128))
    assert isinstance(reply, Crashed)
    assert reply.sentence.startswith(name)
    assert re.search(sentence, reply.sentence)
    assert not reply.detail, "a sentence needs no traceback"
