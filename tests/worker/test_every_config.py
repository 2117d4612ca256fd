"""The config.json of every class that transformers has, as the class writes it with its defaults."""

import re

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from zoo_examples import measured, refused, run

from pytest_gputrain import Case
from pytest_gputrain.cases.model_config import config_of, with_model
from pytest_gputrain.records import Crashed
from pytest_gputrain.utils.errors import BadCase

QUICK = ("bloom", "deepseek_v3", "gemma4_text", "gptj", "olmo2", "starcoder2")
"""Among them linear and partial positions, compressed attention, experts, and layers that differ from each other."""

ENCODERS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES))


def case_of(folder, kind, method):
    """The case of a class's defaults."""
    file = folder / f"{kind}.json"
    file.write_text(CONFIG_MAPPING[kind]().to_json_string())
    return with_model(Case(model=file.name, method=method, batch_size=2, sequence_length=128, steps=2, warmup=1), folder)


@pytest.mark.parametrize("kind", QUICK)
def test_a_class_trains(tmp_path, kind):
    measured(case_of(tmp_path, kind, "lora"))


def complaint_about(folder, kind):
    """The sentence that refuses a class's config before anything is imported; empty where it does not."""
    try:
        case_of(folder, kind, "full")
    except BadCase as error:
        return str(error)
    return ""


def has_defaults(kind):
    """Whether the class takes what it has itself as defaults."""
    try:
        CONFIG_MAPPING[kind]()
    except Exception:
        return False
    return True


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("kind", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ENCODERS)))
def test_every_class_trains_or_says_why_not(tmp_path, kind, method):
    if not has_defaults(kind):
        pytest.skip("the class refuses its own defaults")
    if complaint := complaint_about(tmp_path, kind):
        assert re.search("has (is_encoder_decoder=true|[a-z]+_config), ?", complaint.replace(";", ",")), complaint
        assert "\n" not in complaint
        return
    case = case_of(tmp_path, kind, method)
    reply = run(case, model_config=config_of(case))
    if isinstance(reply, Crashed):
        assert "\n" not in reply.sentence
        of_values = ("trained tensors did not change", "the loss of timed step")
        assert case.model in reply.sentence or any(words in reply.sentence for words in of_values)


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_no_language_model_that_trains_from_a_config(tmp_path, kind):
    if complaint := complaint_about(tmp_path, kind):
        assert "is_encoder_decoder" in complaint
        return
    case = case_of(tmp_path, kind, "full")
    sentence = refused(case, scale="full")
    assert f"has model_type={kind!r}, which in transformers" in sentence
    assert sentence.endswith("is not a decoder-only language model")


def test_a_state_space_layer_is_adapted_where_peft_allows_it(tmp_path):
    case = case_of(tmp_path, "falcon_h1", "lora")
    measured(case)
    all_linear = run(case.replace(lora_targets="all-linear"))
    assert isinstance(all_linear, Crashed)
    assert all_linear.refused
    assert "cannot be adapted by peft" in all_linear.sentence
