"""A config.json as the model of a case: how it is found and normalised, and what is refused."""

import json
import math

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pytest_gputrain import Case
from pytest_gputrain.cases.model_config import config_of, language_only, quantised_by, with_model
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.records import Task
from pytest_gputrain.session.fitting import Asked, seconds_of
from pytest_gputrain.utils.errors import BadCase

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
}


def written(path, content=LLAMA):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def resolved(folder, model, **knobs):
    return with_model(Case(model=model, sequence_length=512, **knobs), folder)


def test_a_file_becomes_a_name_with_a_digest_of_what_matters(tmp_path):
    written(tmp_path / "a" / "small-llama.json")
    written(tmp_path / "b" / "small-llama.json", dict(reversed(LLAMA.items())) | {"torch_dtype": "bfloat16", "auto_map": {}})
    written(tmp_path / "c" / "small-llama.json", LLAMA | {"hidden_size": 1024})
    first, same, other = (resolved(tmp_path, f"{folder}/small-llama.json") for folder in "abc")
    assert first.model.startswith("small-llama#")
    assert len(first.model) == len("small-llama#12345678")
    assert first == same != other
    assert str(first) == f"{first.model}-full-bf16"
    assert config_of(first) == LLAMA
    assert config_of(other)["hidden_size"] == 1024
    assert problem(first, ()) is None


def test_a_folder_gives_its_name_and_a_binary_file_is_no_config(tmp_path):
    written(tmp_path / "my-llama" / "config.json")
    for model in ("my-llama/config.json", "./my-llama", "my-llama/"):
        assert resolved(tmp_path, model).model.startswith("my-llama#")
    for content in (b"\0" * 64, bytes(range(256)), b"\xff\xfe{"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(BadCase, match=r"model\.safetensors is not JSON that can be read \(.*\); give the config\.json"):
            resolved(tmp_path, "./model.safetensors")


def test_a_pipeline_of_diffusers_gives_what_trains(tmp_path):
    written(
        tmp_path / "sd3" / "model_index.json", {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "X"]}
    )
    written(tmp_path / "sd3" / "transformer" / "config.json", {"_class_name": "SD3Transformer2DModel", "num_layers": 24})
    cases = [
        resolved(tmp_path, model)
        for model in ("./sd3", "sd3/model_index.json", "sd3/transformer", "sd3/transformer/config.json")
    ]
    assert len({case.model for case in cases}) == 1
    assert cases[0].model.startswith("sd3#")
    assert config_of(cases[0])["num_layers"] == 24


VISION = {"model_type": "qwen3_vl", "text_config": LLAMA | {"dtype": "bfloat16"}, "tie_word_embeddings": True}


def test_of_a_model_of_images_only_what_describes_its_language_model_matters(tmp_path):
    written(tmp_path / "a" / "m.json", VISION | {"vision_config": {"depth": 27}, "image_token_id": 7})
    written(tmp_path / "b" / "m.json", VISION | {"vision_config": {"depth": 32}, "image_token_id": 7})
    one, same = resolved(tmp_path, "a/m.json"), resolved(tmp_path, "b/m.json")
    assert one == same
    assert config_of(one) == {**VISION, "text_config": LLAMA, "image_token_id": 7}
    assert "more than the 4,096 positions of m#" in problem(one.replace(sequence_length=4097), ())


def test_all_of_a_model_of_images_keeps_what_describes_its_tower(tmp_path):
    written(tmp_path / "m.json", VISION | {"vision_config": {"depth": 27}})
    case = with_model(Case(model="m.json", part="all", sequence_length=64), tmp_path)
    assert config_of(case)["vision_config"] == {"depth": 27}
    for resolution in ("", "448x448"):
        assert problem(case.replace(resolution=resolution), ()) is None
    written(tmp_path / "m.json", LLAMA)
    with pytest.raises(BadCase, match=r"has no vision_config, which part='all' trains; leave part out"):
        with_model(case.replace(model="m.json"), tmp_path)


@pytest.mark.parametrize(
    ("content", "only"),
    [
        (LLAMA, False),
        (LLAMA | {"vision_config": None}, False),
        (VISION, True),
        (LLAMA | {"vision_config": {}}, True),  # as Qwen2.5-VL is published
        ({"model_type": "internvl_chat", "llm_config": LLAMA}, True),
    ],
)
def test_it_is_known_whether_only_the_language_model_trains(tmp_path, content, only):
    assert language_only(written(tmp_path / "m.json", content)) is only


def test_the_class_that_a_config_names_is_kept_where_its_type_may_be_unknown(tmp_path):
    named = {"architectures": ["DeepseekV3ForCausalLM"]}
    written(tmp_path / "own.json", LLAMA | named | {"auto_map": {"AutoConfig": "mine.Config"}})
    written(tmp_path / "plain.json", LLAMA | named)
    assert config_of(resolved(tmp_path, "own.json")) == LLAMA | named
    assert config_of(resolved(tmp_path, "plain.json")) == LLAMA


def test_a_name_of_the_zoo_and_own_code_are_no_paths(tmp_path):
    for case in (
        Case(model="llama-3.1-8b"),
        Case(model="build/it", method="custom", code="x.py::it"),
        Case(model="unknown"),
    ):
        assert with_model(case, tmp_path) is case
        assert config_of(case) == {}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"hidden_size": 8}, "has neither model_type, by which transformers"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "has is_encoder_decoder=true; only decoder-only"),
        (
            {"model_type": "florence2", "text_config": {"is_encoder_decoder": True}},
            "has is_encoder_decoder=true; only decoder-only",
        ),
        ({"auto_map": {"AutoConfig": "mine.Config"}}, "has neither model_type, by which transformers"),
        (
            {"_class_name": "SD3Transformer3DModel"},
            r"a class whose inputs are not known \(did you mean 'SD3Transformer2DModel'\?\)",
        ),
        ("[" * 100_000, "is not JSON that can be read"),
        ('{"model_type": "llama", "name": "\\ud800"}', "is not JSON that can be read"),
    ],
)
def test_what_is_no_model_that_can_train_is_one_sentence(tmp_path, content, sentence):
    written(tmp_path / "m.json", content)
    with pytest.raises(BadCase, match=sentence) as failure:
        resolved(tmp_path, "./m.json")
    assert str(failure.value).startswith("the case ./m.json-full-bf16 names the model ./m.json, but ")
    assert "\n" not in str(failure.value)


def test_neither_weights_nor_a_device_are_read(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(2**30)
    with pytest.raises(BadCase, match=r"model\.safetensors has 1\.00 GiB, which is more than any config has"):
        resolved(tmp_path, "./model.safetensors")
    with pytest.raises(BadCase, match="/dev/zero cannot be read \\(it is a device\\)"):
        resolved(tmp_path, "/dev/zero")


def test_an_infinite_number_is_read_as_python_writes_it(tmp_path):
    written(tmp_path / "m.json", json.dumps(LLAMA | {"model_type": "mamba2", "time_step_limit": [0.0, math.inf]}))
    assert config_of(resolved(tmp_path, "m.json"))["time_step_limit"] == [0.0, {"__float__": "Infinity"}]


@pytest.mark.parametrize(
    ("packed", "by"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"bits": 4}, "unknown"),
        ("gptq", "unknown"),
        (None, ""),
    ],
)
def test_how_published_weights_are_packed_is_told_and_changes_no_case(tmp_path, packed, by):
    written(tmp_path / "a" / "m.json", LLAMA | {"quantization_config": packed, "torch_dtype": "float16"})
    written(tmp_path / "b" / "m.json")
    assert quantised_by(tmp_path / "a" / "m.json") == by
    inside = {"model_type": "kimi_k25", "text_config": LLAMA | {"quantization_config": packed}}
    assert quantised_by(written(tmp_path / "c" / "m.json", inside)) == by
    assert resolved(tmp_path, "a/m.json") == resolved(tmp_path, "b/m.json")


_KEYS = st.sampled_from(
    [
        *("model_type", "_class_name", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "auto_map"),
        *("max_position_embeddings", "quantization_config", "torch_dtype", "text_config", "is_encoder_decoder", "other"),
    ]
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["llama", "FluxTransformer2DModel"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS | st.text(), inner, max_size=3),
    max_leaves=8,
)


@example(content=b'{"model_type": "", "_class_name": null}')
@example(content=b'{"model_type": "", "_class_name": []}')
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.binary(max_size=64) | st.dictionaries(_KEYS, _VALUES).map(lambda config: json.dumps(config).encode()))
def test_any_content_is_a_case_or_one_sentence(tmp_path, content):
    (tmp_path / "any.json").write_bytes(content)
    case, complaint = None, ""
    try:
        case = resolved(tmp_path, "any.json")
    except BadCase as error:
        complaint = str(error)
    if case is None:
        assert complaint.startswith("the case any.json-full-bf16 names the model any.json, but ")
        assert complaint.isprintable()
        return
    sentence = problem(case.replace(batch_size=2), ())
    assert sentence is None or sentence.startswith("the case any#")
    assert seconds_of([Asked(case, "h100")], 1, further=True) > 0
    msgspec.json.encode(Task(case=case, scale="full", device_type="cpu", root=".", model_config=config_of(case)))


def test_layers_that_run_token_by_token_are_told_to_take_minutes(tmp_path):
    def seconds(kind, tokens):
        written(tmp_path / f"{kind}.json", LLAMA | {"model_type": kind})
        case = resolved(tmp_path, f"{kind}.json").replace(sequence_length=tokens)
        return seconds_of([Asked(case, "h100")], 1, further=False)

    assert seconds("llama", 2048) < 10
    assert seconds("falcon_mamba", 2048) > 60
    assert seconds("falcon_mamba", 2048) > 1.5 * seconds("falcon_mamba", 1024)


def test_what_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(BadCase, match=r"m\.json cannot be read \(No such file or directory\); give a path that is relative"):
        resolved(tmp_path, "m.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadCase, match=r"the folder .*empty has no config\.json"):
        resolved(tmp_path, "./empty")
    written(tmp_path / "vae" / "model_index.json", {"vae": []})
    with pytest.raises(BadCase, match=r"lists no transformer or unet"):
        resolved(tmp_path, "./vae")


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_positions_limit_the_sequence(tmp_path, key):
    written(tmp_path / "m.json", {**{k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}, key: 4096})
    case = resolved(tmp_path, "m.json")
    assert problem(case.replace(sequence_length=4096), ()) is None
    sentence = problem(case.replace(sequence_length=4097), ())
    assert "has sequence_length=4097, more than the 4,096 positions of m#" in sentence
    assert f"({key}); shorten it, or raise that key" in sentence
