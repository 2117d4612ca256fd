"""The config.json of every class that transformers and diffusers have, as the class writes it with its defaults."""

import json
import re
from unittest import mock

import bitsandbytes
import msgspec
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from pytest_gputrain import Case
from pytest_gputrain.cases.model_config import config_of, with_model
from pytest_gputrain.records import Crashed, Prediction, Target, Task
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.worker import run as worker_run
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.prediction.predict import predict
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.zoo.completed import architecture_of

QUICK = ("bloom", "deepseek_v3", "gemma4_text", "gptj", "olmo2", "starcoder2")
"""Among them linear and partial positions, compressed attention, experts, and layers that differ from each other."""

ENCODERS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES))


def case_of(folder, kind, method):
    """The case of a class's defaults; one whose sentence says why there is none."""
    file = folder / f"{kind}.json"
    file.write_text(CONFIG_MAPPING[kind]().to_json_string())
    return with_model(Case(model=file.name, method=method, batch_size=2, sequence_length=128, steps=2, warmup=1), folder)


def trained_and_predicted(case):
    """The reply of a tiny training on the CPU, and its prediction."""
    task = Task(case=case, scale="tiny", device_type="cpu", root=".", model_config=config_of(case))
    load(case)
    # A table that bitsandbytes makes when it first quantises is of the training.
    with mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True):
        reply = worker_run.run(task, Progress(None))
    return reply, predicted(task)


def predicted(task):
    """The prediction of a task for the CPU."""
    return predict(msgspec.structs.replace(task, target=Target(marker="cpu", kind="cpu")), Progress(None))


def check_equal(reply, prediction):
    assert prediction.peak_allocated_bytes == reply.peak_allocated_bytes
    assert prediction.phase_peak_bytes == reply.phase_peak_bytes
    assert prediction.flops_per_step == reply.flops_per_step
    assert (prediction.parameters, prediction.trainable_parameters) == (reply.parameters, reply.trainable_parameters)


@pytest.mark.parametrize("kind", QUICK)
def test_a_class_trains_and_is_predicted_to_the_byte(tmp_path, kind):
    check_equal(*trained_and_predicted(case_of(tmp_path, kind, "lora")))


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
@pytest.mark.every_config
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("kind", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ENCODERS)))
def test_every_class_trains_and_is_predicted_to_the_byte_or_says_why_not(tmp_path, kind, method):
    if not has_defaults(kind):
        pytest.skip("the class refuses its own defaults")
    if complaint := complaint_about(tmp_path, kind):
        assert re.search("has (is_encoder_decoder=true|[a-z]+_config), ?", complaint.replace(";", ",")), complaint
        assert "\n" not in complaint
        return
    case = case_of(tmp_path, kind, method)
    reply, prediction = trained_and_predicted(case)
    if isinstance(reply, Crashed):
        assert "\n" not in reply.sentence
        of_values = ("trained tensors did not change", "the loss of timed step")
        assert case.model in reply.sentence or any(words in reply.sentence for words in of_values)
    elif isinstance(prediction, Crashed):
        assert prediction.sentence.endswith("measure it instead")
    else:
        check_equal(reply, prediction)


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_no_language_model_that_trains_from_a_config(tmp_path, kind):
    if complaint := complaint_about(tmp_path, kind):
        assert "is_encoder_decoder" in complaint
        return
    case = case_of(tmp_path, kind, "full")
    task = Task(case=case, scale="full", device_type="cpu", root=".", model_config=config_of(case))
    reply = worker_run.run(task, Progress(None))
    assert isinstance(reply, Crashed)
    assert f"has model_type={kind!r}, which in transformers" in reply.sentence
    assert reply.sentence.endswith("is not a decoder-only language model")


def test_a_state_space_layer_is_adapted_where_peft_allows_it(tmp_path):
    case = case_of(tmp_path, "falcon_h1", "lora")
    reply, prediction = trained_and_predicted(case)
    assert isinstance(prediction, Prediction), prediction
    check_equal(reply, prediction)
    all_linear, _ = trained_and_predicted(case.replace(lora_targets="all-linear"))
    assert isinstance(all_linear, Crashed)
    assert all_linear.refused
    assert "cannot be adapted by peft" in all_linear.sentence


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"num_key_value_heads": 5},
            "num_attention_heads=32 in its config.json, which is no multiple of num_key",
        ),
        ({"hidden_size": 0}, "has hidden_size=0 in its config.json; it must be a whole number from 1 to 1,000,000"),
        ({"hidden_size": "4096"}, "has hidden_size='4096' in its config.json; it must be a whole number"),
        (
            {"num_hidden_layers": 10**8},
            "has num_hidden_layers=100000000 in its config.json; it must be",
        ),
        ({"vocab_size": -5}, "has vocab_size=-5 in its config.json"),
        ({"intermediate_size": 0}, "has intermediate_size=0 in its config.json"),
        ({"head_dim": 0}, "cannot be built from its config.json: "),
        ({"rope_scaling": {"rope_type": "none_of_them"}}, "cannot be built from its config.json: "),
    ],
)
def test_a_key_that_no_model_is_built_from_is_named(tmp_path, keys, sentence):
    case = written(tmp_path, "llama", keys | {"num_hidden_layers": keys.get("num_hidden_layers", 2)})
    with pytest.raises(CheckFailed, match=re.escape(sentence)) as failure:
        architecture_of(case.model)
    assert str(failure.value).startswith(case.model)
    assert "\n" not in str(failure.value)


def test_what_fails_in_a_step_is_told_with_the_model(tmp_path):
    case = written(tmp_path, "deepseek_v2", {"num_experts_per_tok": None})
    task = Task(
        case=case,
        scale="tiny",
        device_type="cpu",
        root=".",
        model_config=config_of(case),
    )
    for reply in (worker_run.run(task, Progress(None)), predicted(task)):
        assert isinstance(reply, Crashed)
        assert reply.sentence.startswith(f"{case.model} does not train as its config.json describes it: TypeError: ")


def written(folder, kind, keys):
    """A case of a class's defaults but for some keys."""
    config = json.loads(CONFIG_MAPPING[kind]().to_json_string()) | keys
    (folder / "other.json").write_text(json.dumps(config))
    return with_model(Case(model="other.json", sequence_length=128), folder)
