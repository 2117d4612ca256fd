"""The models are what they are named, at full size (on the meta device) and at tiny scale."""

import re

import pytest
import torch
from zoo_examples import EXAMPLES, LANGUAGE, STATED, built, count

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records.case import KNOBS
from pytest_gputrain.worker import methods, precision, training, zoo

BF16 = precision.PRECISIONS["bf16"]


@pytest.mark.parametrize("name", STATED)
def test_full_size_build_has_the_published_parameter_count(name):
    workload = built(name, "full", "meta")
    counts = [count(module) for module in (workload.model, *workload.encoders.values())]
    assert counts == [part.parameters["full"] for part in architectures()[name].parts.values()]


@pytest.mark.parametrize("case", [case for case in EXAMPLES if case.method != "qlora"], ids=str)
def test_full_size_method_trains_the_known_count(case):
    architecture = architectures()[case.model]
    with torch.device("meta"):
        adapted = methods.adapt(zoo.build(case, "full").model, architecture, case, BF16)
    trainable = sum(value.numel() for value in adapted.parameters() if value.requires_grad)
    assert trainable == architecture.trainable[case.method]["full"]


@pytest.mark.parametrize("name", LANGUAGE)
def test_batch_is_full_of_real_tokens_with_labels_shifted_by_one(name):
    inputs = built(name).batch(torch.device("cpu")).inputs
    ids, labels = inputs["input_ids"], inputs["labels"]
    assert ids.shape == labels.shape == (2, 128)
    assert torch.equal(labels[:, :-1], ids[:, 1:])
    assert (labels[:, -1] == -100).all()


def test_the_parent_s_vocabulary_is_what_the_worker_offers():
    # Other tests may have added models that have a config.json.
    models = [model for name, model in architectures().items() if "#" not in name]
    assert {method for architecture in models for method in architecture.trainable} <= set(KNOBS["method"].words)
    assert set(KNOBS["precision"].words) == set(precision.PRECISIONS)
    assert set(KNOBS["optimizer"].words) == set(training.OPTIMIZERS)
    given_by_config = {"denoiser"}
    assert {architecture.family for architecture in models} == set(zoo.FAMILIES) - given_by_config


@pytest.mark.parametrize("scale", ["full", "tiny"])
@pytest.mark.parametrize("name", [name for name in STATED if architectures()[name].idle])
def test_idle_parameters_are_there(name, scale):
    names = [key for key, _ in built(name, scale, "meta").model.named_parameters()]
    for pattern in architectures()[name].idle[scale]:
        assert any(re.fullmatch(pattern, key) for key in names), pattern


@pytest.mark.parametrize("name", STATED)
def test_facts_are_complete(name):
    architecture = architectures()[name]
    assert ({"lora", "qlora"} & set(architecture.trainable) != set()) == (architecture.lora is not None)
    assert set(architecture.trains) <= set(architecture.trainable)
    for part in architecture.parts.values():
        assert set(part.tiny) <= set(part.config), "a tiny key that replaces nothing"
