"""Models that are known by their config.json: what the worker finds out about them, and that they train so."""

from unittest import mock

import msgspec
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from zoo_examples import count, measured, run

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures import facts
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.model_config import config_of, declare
from pytest_gputrain.records import Crashed, Measurement
from pytest_gputrain.worker import methods, zoo
from pytest_gputrain.worker.flops import count_flops, formulas
from pytest_gputrain.worker.precision import PRECISIONS
from pytest_gputrain.worker.training import Training
from pytest_gputrain.worker.zoo.completed import architecture_of

PUBLISHED = msgspec.json.decode(facts._PUBLISHED.read_bytes(), type=dict[str, facts.Published])


def sizes(hidden, layers, heads, **others):
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, **others}


QWEN = sizes(1024, 28, 16, num_key_value_heads=8, head_dim=128, intermediate_size=3072, vocab_size=151936)
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8}
OTHERS = {
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    "gpt_neox": sizes(2048, 16, 8, intermediate_size=8192, vocab_size=50304),
    "opt": sizes(768, 12, 12, ffn_dim=3072, vocab_size=50272, word_embed_proj_dim=768),
    "olmoe": sizes(2048, 16, 16, num_key_value_heads=16, intermediate_size=1024, vocab_size=50304, **EXPERTS),
    "gpt_oss": sizes(2880, 24, 64, num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=32)
    | {"num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128},
}
"""Configs of other types of models, as users bring them."""


def declared(kind, config):
    name = f"{kind}#{abs(hash(str(config)))}"
    declare(name, {"model_type": kind, **config})
    return name


def config_case(kind, config, method="full", **knobs):
    return Case(model=declared(kind, config), method=method, batch_size=2, sequence_length=512, steps=2, warmup=1, **knobs)


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


def each_by_one(kinds, methods):
    """Each kind by each of its methods, all of them weekly but one, which is another for the next kind."""
    for number, kind in enumerate(kinds):
        own = methods(kind)
        for method in own:
            yield kind, method, [] if method == own[number % len(own)] else [pytest.mark.weekly]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(published_case(name, method), id=f"{kind_of(name)}-{method}", marks=marks)
            for name, method, marks in each_by_one(ONE_OF_EACH_KIND, lambda name: list(architectures()[name].trainable))
        ),
        *(
            pytest.param(config_case(kind, OTHERS[kind], method), id=f"{kind}-{method}", marks=marks)
            for kind, method, marks in each_by_one(OTHERS, lambda kind: ["full", "lora"])
        ),
    ],
)
def test_models_train(case):
    measured(case)


@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        ("full", {"loss_chunks": 4}),
        ("full", {"lengths": "packed", "activation_checkpointing": True, "activation_checkpointing_policy": "save-matmuls"}),
        ("lora", {"lora_rank": 16, "lora_alpha": 8, "lora_dropout": 0.1, "lora_targets": "q_proj+down_proj"}),
        ("lora", {"lora_targets": "all-linear", "attention": "eager"}),
        ("qlora", {"dora": True, "activation_checkpointing": True}),
    ],
    ids=str,
)
def test_knobs_that_ask_for_parts_of_a_model_find_them_by_its_config(method, knobs):
    measured(config_case("qwen3", QWEN, method, **knobs))


def test_products_of_experts_count_each_token_once_however_tokens_are_shared_out():
    tokens, experts = torch.ones(32, 16, requires_grad=True), torch.ones(4, 16, 24, requires_grad=True)
    for ends in ([8, 16, 24, 32], [0, 32, 32, 32]):
        with count_flops() as forward:
            product = torch.nn.functional.grouped_mm(tokens, experts, offs=torch.tensor(ends, dtype=torch.int32))
        assert forward.total == 2 * 32 * 16 * 24
        with count_flops() as backward:
            product.backward(torch.ones_like(product))
        assert backward.total == 2 * forward.total


@pytest.mark.parametrize("operator", ["mm", "addmm", "bmm", "baddbmm"])
def test_products_whose_result_has_a_type_of_its_own_are_counted(operator):
    # Only GPUs have kernels of them, so the formulas are called as the counter calls them. TRL's GRPO takes such products.
    batch = (4,) if "bmm" in operator else ()
    term = [torch.ones(*batch, 8, 24)] if "add" in operator else []
    factors = torch.ones(*batch, 8, 16), torch.ones(*batch, 16, 24)
    count = formulas()[getattr(torch.ops.aten, operator)]
    assert count(*term, *factors, torch.float32, out_val=None) == 2 * 8 * 16 * 24 * (4 if batch else 1)


TINY = {
    "gemma-3-1b": {"layer_types": [*["sliding_attention"] * 5, "full_attention"], "num_key_value_heads": 1},
    "qwen3-4b": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3-30b-a3b": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mistral-7b-v0.1": {"sliding_window": 32},
    "deepseek-v2-lite": {"q_lora_rank": None, "num_hidden_layers": 2},
}


def test_the_tiny_model_keeps_what_decides_the_code_path_with_blocks_of_every_kind():
    for name, expected in TINY.items():
        assert architecture_of(name).trained_part.facts("tiny").items() >= expected.items(), name


@pytest.mark.parametrize(
    ("kind", "method", "expected", "whole"),
    [
        ("gpt2", "lora", {"c_attn"}, True),  # peft's own
        ("gpt_neox", "lora", {"query_key_value"}, True),
        ("olmoe", "lora", {"q_proj", "k_proj", "v_proj", "o_proj"}, False),
        ("opt", "qlora", {"fc1", "fc2", "out_proj", "k_proj", "q_proj", "v_proj"}, True),  # whatever is adapted
    ],
)
def test_the_layers_that_are_adapted_or_packed_are_found(kind, method, expected, whole):
    case = config_case(kind, OTHERS[kind], method)
    model = methods.adapt(zoo.build(case, "tiny").model, architecture_of(case.model), case, PRECISIONS["bf16"])
    names = [name.removesuffix(".base_layer") for name, module in model.named_modules() if _is_of(module, method)]
    found = {name.split(".")[-1] for name in names}
    assert found == expected if whole else found > expected


def _is_of(module, method):
    return type(module).__name__ == "Linear4bit" if method == "qlora" else "lora_A" in module._modules


def test_keys_that_a_class_derives_of_others_are_left_to_it():
    # As transformers writes them: an infinite number has a form of its own in JSON.
    config = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 512, "num_heads": 8, "head_dim": 64, "n_groups": 1}
    written = {"time_step_limit": [0.0, {"__float__": "Infinity"}], "layer_types": ["mamba", "mamba"]}
    name = declared("mamba2", {**config, **written})
    assert architecture_of(name).trained_part.facts("tiny")["num_hidden_layers"] == 2


NEMOTRON_H = {
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}
"""Nemotron-H 8B as the hub has it: its class derives the number of layers of the pattern."""


def test_layers_that_a_class_derives_of_another_key_are_counted_by_that():
    part = architecture_of(declared("nemotron_h", NEMOTRON_H)).trained_part
    assert part.parameters["full"] == 8_100_852_736, "published as 8.1B"
    assert len(part.facts("tiny")["layers_block_type"]) == 8, "as many as have one of every kind"
    longcat = {"hidden_size": 256, "num_layers": 6, "n_routed_experts": 16}
    part = architecture_of(declared("longcat_flash", longcat)).trained_part
    assert part.facts("tiny")["num_layers"] == 2


QWEN3_8B = sizes(4096, 36, 32, num_key_value_heads=8, head_dim=128, intermediate_size=12288, vocab_size=151936)
QWEN2_7B = sizes(3584, 28, 28, num_key_value_heads=4, intermediate_size=18944, vocab_size=152064)
GEMMA_3_4B = sizes(2560, 34, 8, num_key_value_heads=4, head_dim=256, intermediate_size=10240, vocab_size=262208)
DEEPSEEK_V3 = {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280}
OF_MORE_THAN_TEXT = {
    "a text model without a head": ("qwen3_vl", {"text_config": QWEN3_8B}, 8_190_735_360),
    "keys that are not apart": ("qwen2_5_vl", QWEN2_7B, 7_615_616_512),
    "a class of its own, and tied": ("gemma3", {"text_config": GEMMA_3_4B}, 3_880_263_168),
    "sizes that are the class's own": (
        "llava",
        {"text_config": {"model_type": "llama", "vocab_size": 32064}},
        6_738_939_904,
    ),
    "a type that only the hub has": ("internvl_chat", {"llm_config": {"model_type": "qwen2", **QWEN2_7B}}, 7_615_616_512),
    "a class that architectures name": (
        "kimi_k2",
        DEEPSEEK_V3 | {"architectures": ["DeepseekV3ForCausalLM"]},
        671_026_404_352,
    ),
}
"""Models and the published count of parameters of their language models, which are those of models of text."""


@pytest.mark.parametrize(("kind", "config", "parameters"), OF_MORE_THAN_TEXT.values(), ids=OF_MORE_THAN_TEXT)
def test_the_language_model_is_found(kind, config, parameters):
    assert architecture_of(declared(kind, config)).trained_part.parameters["full"] == parameters


def test_a_text_model_trains_with_the_head_of_its_whole_model():
    for tied in (True, False):
        config = {"text_config": QWEN, "tie_word_embeddings": tied}
        case = config_case("qwen3_vl", config, activation_checkpointing=True)
        measured(case)
        model = zoo.build(case, "tiny").model
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


LLAMA_4 = {"text_config": sizes(5120, 48, 40, num_key_value_heads=8, intermediate_size=8192, vocab_size=202048)}
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("kind", "config", "targets", "found", "without"),
    [
        # peft's default for the whole model, though its text model has another type.
        ("llama4", LLAMA_4, "", {"q_proj", "v_proj"}, LAYERS - {"q_proj", "v_proj"}),
        ("llama4", LLAMA_4, "all-linear", LAYERS, {"router"}),
        ("gemma4", {"text_config": {"num_hidden_layers": 30, "hidden_size": 1536}}, "", {"q_proj"}, {"o_proj", "up_proj"}),
        ("deepseek_v4", sizes(4096, 43, 64, vocab_size=129280), "", {"o_b_proj"}, {"o_a_proj"}),
        # A class of its own that multiplies as any linear layer does.
        ("falcon", sizes(4544, 32, 71, vocab_size=65024), "", {"query_key_value"}, set()),
    ],
)
def test_adapters_are_where_peft_has_them_but_on_no_layer_of_another_arithmetic(kind, config, targets, found, without):
    case = config_case(kind, config, "lora", lora_targets=targets)
    training = Training(case, "tiny", torch.device("cpu"))
    adapted = {name.split(".")[-1] for name, module in training.model.named_modules() if "lora_A" in module._modules}
    assert adapted >= found
    assert not adapted & without
    left_out = " ".join(training.notes)
    assert bool(left_out) == any(name in left_out for name in without), "the layers are named"


LLAMA = {"num_hidden_layers": 2, "hidden_size": 64}
NOT_BUILT = "cannot be built from its config.json: "


@pytest.mark.parametrize(
    ("kind", "config", "sentence"),
    [
        ("nemotron_h", {"hidden_size": 64}, "lacks the key num_hidden_layers in its config.json"),
        (
            "nemotron_h",
            NEMOTRON_H | {"hybrid_override_pattern": "M-M-M-M*-"},
            "has num_hidden_layers=52 in its config.json, but NemotronHConfig makes it 9 of the other keys",
        ),
        ("llama", LLAMA | {"num_key_value_heds": 8}, "would ignore (did you mean 'num_key_value_heads'?)"),
        ("llama", {"hidden_size": 64}, "lacks the key num_hidden_layers in its config.json"),
        ("llama", {"num_hidden_layers": 2}, "lacks the key hidden_size in its config.json"),
        ("llama", LLAMA | {"num_attention_heads": 5}, "cannot be built from its config.json"),
        ("llama", LLAMA | {"num_attention_heads": 32, "num_key_value_heads": 5}, "which is no multiple of num_key"),
        (
            "llama",
            LLAMA | {"hidden_size": 0},
            "has hidden_size=0 in its config.json; it must be a whole number from 1 to 1,",
        ),
        ("llama", LLAMA | {"hidden_size": "4096"}, "has hidden_size='4096' in its config.json; it must be a whole number"),
        ("llama", LLAMA | {"num_hidden_layers": 10**8}, "has num_hidden_layers=100000000 in its config.json; it must be"),
        ("llama", LLAMA | {"vocab_size": -5}, "has vocab_size=-5 in its config.json"),
        ("llama", LLAMA | {"head_dim": 0}, NOT_BUILT),
        (
            "llama",
            LLAMA | {"rope_scaling": {"rope_type": "none_of_them"}},
            "has rope_scaling.rope_type='none_of_them' in its config.json, a value that transformers does not know",
        ),
        (
            "llama",
            LLAMA | {"hidden_act": "swooglu"},
            "has hidden_act='swooglu' in its config.json, a value that transformers does not know",
        ),
        ("llama", LLAMA | {"hidden_size": None}, "has hidden_size=null in its config.json; it must be"),
        ("llama", LLAMA | {"hidden_size": {"__float__": "NaN"}}, "has hidden_size=NaN in its config.json; it must be"),
        ("qwen2_vl", {"text_config": LLAMA, "vison_config": {}}, "would ignore (did you mean 'vision_config'?)"),
        ("blt", {"vocab_size": 260}, "has model_type='blt', whose class BltConfig has no num_hidden_layers"),
        ("qwen9", {}, "does not have (did you mean 'qwen"),
        ("bert", {}, "is not a decoder-only language model"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_sentence_that_names_the_key(kind, config, sentence):
    name = declared(kind, config)
    reply = run(Case(model=name, sequence_length=128))
    assert isinstance(reply, Crashed)
    assert reply.sentence.startswith(name)
    assert sentence in reply.sentence
    assert "\n" not in reply.sentence
    assert not reply.detail, "a sentence needs no traceback"


def test_what_fails_in_a_step_is_told_with_the_model():
    config = {"hidden_size": 256, "num_hidden_layers": 2, "n_routed_experts": 16, "num_experts_per_tok": None}
    case = Case(model=declared("deepseek_v2", config), sequence_length=128)
    reply = run(case, model_config=config_of(case))
    assert isinstance(reply, Crashed)
    assert reply.sentence.startswith(f"{case.model} does not train as its config.json describes it: TypeError: ")


def test_code_of_a_model_that_needs_autocast_is_told_with_the_precision_that_has_it():
    case = Case(model=declared("xlstm", {"hidden_size": 256, "num_hidden_layers": 2}), sequence_length=128)
    reply = run(case)
    assert isinstance(reply, Crashed)
    assert reply.refused
    assert reply.sentence.startswith(
        f"{case.model} does not train in precision='bf16', because transformers.models.xlstm.modeling_xlstm multiplies "
    )
    assert reply.sentence.endswith("choose precision='bf16-amp'")


def test_what_transformers_keeps_in_fp32_is_in_fp32_in_a_model_of_16_bits():
    case = config_case("ernie4_5_moe", {"num_hidden_layers": 2, "hidden_size": 256})
    kept = {name.split(".")[-2] for name, value in _parameters(case) if value.dtype == torch.float32}
    assert kept == {"gate", "moe_statics"}
    assert {value.dtype for _, value in _parameters(case.replace(precision="fp32"))} == {torch.float32}


def _parameters(case):
    return list(Training(case, "tiny", torch.device("cpu")).model.named_parameters())


def test_layers_that_the_code_of_a_model_computes_with_itself_are_not_packed():
    config = {"text_config": {"num_hidden_layers": 30, "hidden_size": 1536}}
    training = Training(config_case("gemma3n", config, "qlora"), "tiny", torch.device("cpu"))
    layers = [name for name, module in training.model.named_modules() if isinstance(module, Linear4bit)]
    packed = {name.removesuffix(".base_layer").split(".")[-1] for name in layers}
    assert {"modality_router", "gate_proj"} <= packed
    assert not packed & {"correction_coefs", "prediction_coefs"}
    assert "correction_coefs, model.layers.altup.prediction_coefs are not packed" in " ".join(training.notes)


@pytest.mark.parametrize("kind", ["falcon_mamba", "jamba"])
def test_a_state_space_model_trains_with_packed_weights(kind):
    config = {"num_hidden_layers": 8, "hidden_size": 256}
    assert isinstance(run(config_case(kind, config, "qlora")), Measurement)


def test_a_text_model_gets_what_its_whole_model_gives_it():
    assert isinstance(run(config_case("voxtral_realtime", {"text_config": sizes(256, 2, 4)})), Measurement)


def test_labels_are_words_that_the_head_has_when_it_is_padded():
    config = {"text_config": sizes(256, 2, 4, vocab_size=512, unpadded_vocab_size=300)}
    case = config_case("inkling_mm_model", config)
    batch = zoo.build(case, "tiny").batch(torch.device("cpu"))
    assert 290 < batch.inputs["input_ids"].max() < 300


def test_a_config_is_blamed_only_where_plain_full_fine_tuning_fails_in_a_library():
    config = {"hidden_size": 256, "num_hidden_layers": 2, "n_routed_experts": 16, "num_experts_per_tok": None}
    plain = Case(model=declared("deepseek_v2", config), sequence_length=128)
    for case in (plain.replace(method="lora"), plain.replace(activation_checkpointing=True)):
        reply = run(case, model_config=config_of(case))
        assert isinstance(reply, Crashed)
        assert reply.sentence.startswith("TypeError: ")
    with mock.patch("pytest_gputrain.worker.zoo.language.next_token_labels", None):  # a fault of ours
        reply = run(plain, model_config=config_of(plain))
    assert isinstance(reply, Crashed)
    assert "config.json" not in reply.sentence
