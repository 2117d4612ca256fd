"""The models are what they are named, at full size (on the meta device) and at tiny scale."""

import pytest
import torch

from pytest_gputrain import Case
from pytest_gputrain.architectures import architectures
from pytest_gputrain.cases import METHODS, OPTIMIZERS, PRECISIONS
from pytest_gputrain.worker import methods, precision, recipe
from pytest_gputrain.worker.zoo import FAMILIES

MODELS = list(architectures())


def built(name, scale, device, **knobs):
    architecture = architectures()[name]
    case = Case(model=name, batch_size=2, sequence_length=8192, **knobs)
    with torch.device(device):
        return FAMILIES[architecture.family].build(architecture, case, scale), architecture, case


@pytest.mark.parametrize("name", MODELS)
def test_full_size_build_has_the_published_parameter_count(name):
    model, architecture, _ = built(name, "full", "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == architecture.parameters["full"]


@pytest.mark.parametrize("name", MODELS)
def test_full_size_lora_trains_the_known_count(name):
    model, architecture, case = built(name, "full", "meta")
    adapted = methods.lora(
        model, architecture.lora_targets, architecture.lora_parameters["full"], precision.PRECISIONS[case.precision]
    )
    trainable = sum(value.numel() for value in adapted.model.parameters() if value.requires_grad)
    assert trainable == architecture.lora_parameters["full"]


def language_model_parameters(config, is_gemma_2):
    """Embeddings, head unless tied, and per block: attention, gated MLP, norms; counted by hand from the config."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    block = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * width + (4 if is_gemma_2 else 2) * hidden
    tables = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return tables + config["num_hidden_layers"] * block + hidden


@pytest.mark.parametrize("scale", ["full", "tiny"])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_count_follows_from_the_hyper_parameters(name, scale):
    architecture = architectures()[name]
    config = architecture.config if scale == "full" else {**architecture.config, **architecture.tiny}
    counted = language_model_parameters(config, architecture.model_class.startswith("Gemma2"))
    assert counted == architecture.parameters[scale]


def test_tied_embeddings_stay_tied():
    model, *_ = built("gemma-7b", "tiny", "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", MODELS)
def test_batch_is_full_of_real_tokens_with_labels_shifted_by_one(name):
    model, architecture, case = built(name, "tiny", "cpu")
    batch = FAMILIES[architecture.family].batch(model, case, "tiny", torch.device("cpu"))
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape == (2, 128)
    assert torch.equal(labels[:, :-1], ids[:, 1:])
    assert (labels[:, -1] == -100).all()


def test_loss_is_the_library_s_own_up_to_its_cast():
    model, architecture, case = built("llama-3-8b", "tiny", "cpu")
    batch = FAMILIES[architecture.family].batch(model, case, "tiny", torch.device("cpu"))
    ours = FAMILIES[architecture.family].loss(model, batch)
    theirs = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    torch.testing.assert_close(ours, theirs)


def test_activation_checkpointing_is_on_in_every_block():
    model, *_ = built("llama-3-8b", "tiny", "cpu", activation_checkpointing=True)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert model.training


@pytest.mark.parametrize("name", MODELS)
def test_lora_targets_match_every_block(name):
    model, architecture, _ = built(name, "tiny", "cpu")
    adapted = methods.lora(model, architecture.lora_targets, 0, precision.PRECISIONS["bf16"]).model
    adapted_layers = [key for key, _ in adapted.named_modules() if key.endswith("lora_A.default")]
    assert len(adapted_layers) == len(architecture.lora_targets) * architecture.tiny["num_hidden_layers"]


def test_the_parent_s_vocabulary_is_what_the_worker_offers():
    assert set(METHODS) == set(methods.METHODS)
    assert set(PRECISIONS) == set(precision.PRECISIONS)
    assert set(OPTIMIZERS) == set(recipe._OPTIMIZER_OPTIONS)
    assert {architecture.family for architecture in architectures().values()} == set(FAMILIES)
