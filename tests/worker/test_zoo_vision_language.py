"""What vision-language models take, what of them trains, and that the frozen tower stays out of the backward pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo_examples import DEVICE, METHODS_OF_MODELS, run, trained

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.model_config import declare
from pytest_gputrain.records import Crashed, Measurement
from pytest_gputrain.worker import checks, zoo
from pytest_gputrain.worker.training import Training
from pytest_gputrain.worker.zoo.vision_language import LEAD, PatchedImage, TiledImage

META = torch.device("meta")
MODELS = [name for name, architecture in architectures().items() if architecture.family == "vision_language"]
PAIRS = [(model, method) for model, method in METHODS_OF_MODELS if model in MODELS]
LLAVA, QWEN = "llava-1.6-13b", "qwen2-vl-2b"  # one has three blocks at tiny scale, the other ties its head


def example(model, method="sft", **knobs):
    resolution = "336x336" if model.startswith("llava") else "504x364"
    fields = {"sequence_length": 2048, "resolution": resolution, "batch_size": 2, "precision": "fp32", **knobs}
    return Case(model=model, method=method, **fields)


def workload(model, scale="tiny", device="cpu", **knobs):
    with torch.device(device):
        return zoo.build(example(model, **knobs), scale)


def facts(model, scale="tiny"):
    return architectures()[model].trained_part.facts(scale)


@pytest.fixture(scope="module")
def tiny():
    return {model: workload(model) for model in (LLAVA, QWEN)}


# What a sample is


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        (LLAVA, {"336x336": 1176, "400x300": 1368, "640x480": 2340, "480x640": 2352, "1920x1080": 1948, "672x672": 2928}),
        (QWEN, {"504x364": 234, "448x448": 256, "1024x1024": 1369, "9x2800": 100, "42x70": 4}),
    ],
)
def test_images_take_the_known_tokens(model, tokens):
    images = {size: workload(model, "full", "meta", resolution=size)._image("full") for size in tokens}
    assert {size: image.tokens for size, image in images.items()} == tokens


@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 2000), height=st.integers(1, 2000))
def test_a_tiled_image_takes_what_the_model_packs(tiny, width, height):
    model = tiny[LLAVA].model
    image = TiledImage(facts=facts(LLAVA), width=width, height=height)
    inputs = image.inputs(1, 2, DEVICE)
    with torch.no_grad():
        (features,) = model.get_image_features(**inputs).pooler_output
    assert features.shape[0] == image.tokens


@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), text=st.integers(LEAD + 1, 9))
def test_a_patched_image_is_what_the_library_makes_of_it(tiny, width, height, text):
    from transformers.vision_utils import get_vision_position_ids

    model = tiny[QWEN].model
    image = PatchedImage(facts=facts(QWEN), width=width, height=height)
    inputs = image.inputs(2, text, DEVICE)
    with torch.no_grad():
        features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    assert [each.shape[0] for each in features] == [image.tokens] * 2

    assert torch.equal(inputs["image_position_ids"], get_vision_position_ids(inputs["image_grid_thw"], 2))
    kinds = torch.zeros(2, image.tokens + text, dtype=torch.int)
    kinds[:, LEAD : LEAD + image.tokens] = 1
    positions, _ = model.model.get_rope_index(kinds.long(), kinds, inputs["image_grid_thw"])
    assert torch.equal(inputs["position_ids"], positions)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("resolution", ["336x336", "300x400", "1000x90"])
def test_a_sample_is_an_image_and_the_text_that_is_learnt(model, resolution):
    made = workload(model, resolution=resolution, sequence_length=8192)
    batch = made.batch(DEVICE)
    image = made._image("tiny")
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    is_image = ids == image.placeholder
    assert batch.sequence_length == ids.shape[1]
    assert is_image.sum(dim=1).tolist() == [image.tokens] * 2
    assert is_image[:, LEAD : LEAD + image.tokens].all()
    learnt = labels != -100
    assert learnt.sum(dim=1).tolist() == [ids.shape[1] - image.tokens - LEAD] * 2
    assert torch.equal(labels[learnt], ids[:, LEAD + image.tokens :].flatten())
    assert not learnt[:, -1].any()
    assert torch.isfinite(made.loss(batch.inputs))


@pytest.mark.parametrize(("model", "tokens"), [(LLAVA, 1176), (QWEN, 234)])
@pytest.mark.parametrize("scale", ["full", "tiny"])
def test_a_sequence_must_hold_its_image_at_full_size(model, tokens, scale):
    needed = tokens + LEAD + 1
    assert workload(model, scale, "meta", sequence_length=needed).batch(META)
    with pytest.raises(checks.CheckFailed, match=f"alone takes {tokens} tokens; set sequence_length to at least {needed}"):
        workload(model, scale, "meta", sequence_length=needed - 1).batch(META)


# The step


@pytest.mark.parametrize("model", [LLAVA, QWEN])
def test_loss_is_the_library_s_own(model, tiny):
    inputs = tiny[model].batch(DEVICE).inputs
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, 1:] = inputs["labels"][:, :-1]
    kept = {name: value for name, value in inputs.items() if name != "labels"}
    if model == QWEN:
        # Let the library find the places of tokens and patches itself.
        del kept["position_ids"], kept["image_position_ids"]
        kept["mm_token_type_ids"] = (kept["input_ids"] == tiny[model]._image("tiny").placeholder).int()
    torch.testing.assert_close(tiny[model].loss(inputs), tiny[model].model(**kept, labels=labels).loss)


@pytest.mark.parametrize("model", MODELS)
def test_a_full_size_step_reads_nothing_from_the_device(model, monkeypatch):
    # Tensors on the meta device have no values: whatever asks for one raises. Two looks of the library itself remain: are
    # there as many image tokens as features, and (Llama) are several sequences packed into one.
    monkeypatch.setenv("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    made = workload(model, "full", "meta", batch_size=3)
    batch = made.batch(META)
    assert batch.inputs["input_ids"].shape == (batch.samples, batch.sequence_length) == (3, 2048)
    assert made.loss(batch.inputs).shape == ()


# What trains, what is recomputed


TRAINED = {
    ("llava-1.6-7b", "pretrain"): {"multi_modal_projector"},
    ("llava-1.6-7b", "sft"): {"language_model", "lm_head", "multi_modal_projector", "image_newline"},
    ("llava-1.6-7b", "lora"): {"language_model"},
    ("qwen2-vl-2b", "sft"): {"language_model"},
    ("qwen2-vl-7b", "sft"): {"language_model", "lm_head"},
}
TRAINED |= {("llava-1.6-13b", method): parts for (model, method), parts in TRAINED.items() if model == "llava-1.6-7b"}


@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_the_method_trains_its_parts_whole(model, method):
    of_parts = {}
    for name, value in trained(example(model, method)).model.named_parameters():
        path = name.removeprefix("base_model.model.").split(".")
        kind = "adapters" if "lora_A" in path or "lora_B" in path else "weights"
        of_parts.setdefault((path[1] if path[0] == "model" else path[0], kind), set()).add(value.requires_grad)
    wanted = {(part, "adapters" if method == "lora" else "weights") for part in TRAINED[model, method]}
    assert of_parts == {part: {part in wanted} for part in of_parts}
    assert wanted <= set(of_parts)


class Passes:
    """Counts how often the tower's and the language model's blocks run, and whether autograd records the tower."""

    def __init__(self, model):
        self.recorded = False
        named = dict(model.named_modules())
        tower = next(module for name, module in named.items() if name.split(".")[-1] in ("vision_tower", "visual"))
        language = next(module for name, module in named.items() if name.endswith("language_model"))
        of_tower = next(module for name, module in tower.named_modules() if name in ("encoder.layers", "blocks"))
        self.tower, self.language = [0] * len(of_tower), [0] * len(language.layers)
        for counts, blocks in ((self.tower, of_tower), (self.language, language.layers)):
            for index, block in enumerate(blocks):
                # Inside of a block, whose own call is not repeated, and before its end, where recomputation stops early.
                block.mlp.register_forward_pre_hook(self.count(counts, index))

    def count(self, counts, index):
        def hook(module, inputs):
            counts[index] += 1
            self.recorded |= counts is self.tower and inputs[0].requires_grad

        return hook


@pytest.mark.parametrize(
    ("model", "method", "share", "twice"),
    [
        *((LLAVA, "sft", *row) for row in [(False, 0), (0.4, 1), (0.7, 2), (True, 3)]),
        *((LLAVA, method, 0.7, 2) for method in ("pretrain", "lora")),
        *((QWEN, "sft", *row) for row in [(0.5, 1), (True, 2)]),
    ],
)
def test_the_language_model_alone_is_recomputed(model, method, share, twice):
    training = trained(example(model, method, activation_checkpointing=share))
    passes = Passes(training.model)
    training.step(False)
    assert passes.language == [2] * twice + [1] * (len(passes.language) - twice)
    assert set(passes.tower) == {1}
    assert not passes.recorded


# Whole models that a config.json describes

QWEN_TEXT = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
TOWER = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
WHOLE = {
    "gemma3": ({"text_config": QWEN_TEXT, "vision_config": {**TOWER, "image_size": 896, "patch_size": 14}}, 256),
    "internvl": ({"text_config": {"model_type": "qwen2", **QWEN_TEXT}, "vision_config": {}}, 256),
    "llama4": ({"text_config": QWEN_TEXT, "vision_config": {"image_size": 336, "vision_output_dim": 4096}}, 144),
    "llava": ({"vision_config": {"model_type": "clip_vision_model", **TOWER, "image_size": 336, "patch_size": 14}}, 576),
    "mistral3": ({"vision_config": {"patch_size": 14}}, 1369),
    "paligemma": ({"vision_config": {**TOWER, "image_size": 224, "patch_size": 14}}, 256),
    # In public the keys of these language models are not apart.
    "qwen2_vl": ({**QWEN_TEXT, **MROPE, "vision_config": {"hidden_size": 256}}, 1369),
    "qwen2_5_vl": ({**QWEN_TEXT, **MROPE, "vision_config": {"out_hidden_size": 256}}, 1369),
    "qwen3_vl": ({"text_config": QWEN_TEXT, "vision_config": {"out_hidden_size": 256}}, 1024),
    "qwen3_5": ({"text_config": QWEN_TEXT, "vision_config": {"out_hidden_size": 256}}, 1024),
}
"""Configs with the sizes that decide how many tokens an image takes, and that number."""


def whole(kind, **knobs):
    config = WHOLE[kind][0]
    name = f"{kind}-whole#{abs(hash(str(config)))}"
    declare(name, {"model_type": kind, **config})
    return Case(model=name, part="all", batch_size=2, sequence_length=2048, steps=2, warmup=1, precision="fp32", **knobs)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_model_trains_on_the_images_that_it_takes(kind):
    case = whole(kind)
    with META:
        assert zoo.build(case, "full")._image("full").tokens == WHOLE[kind][1]
    # transformers compares the number of its features with that of the tokens.
    training = Training(case, "tiny", DEVICE)
    assert isinstance(run(case), Measurement)
    assert any(parameter.requires_grad for name, parameter in training.model.named_parameters() if "vis" in name)
    assert len(training._workload.architecture.blocks) == 2, "towers are recomputed, too"


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_of_a_whole_model_are_in_its_tower_too(method):
    training = Training(whole("gemma3", method=method, lora_targets="q_proj"), "tiny", DEVICE)
    adapted = [name for name, module in training.model.named_modules() if "lora_A" in module._modules]
    assert {"vision_tower" in name for name in adapted} == {True, False}


def test_patches_are_those_of_the_processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28})
    for width, height in ((1024, 1024), (640, 480), (1920, 1080)):
        image = PatchedImage(facts=facts(QWEN, "full"), width=width, height=height)
        assert 4 * image.tokens == processor.get_number_of_image_patches(height, width, {})


def test_images_of_another_size_than_the_tower_takes_are_refused():
    with pytest.raises(checks.CheckFailed, match="have 896x896 pixels; leave resolution out"):
        Training(whole("gemma3", resolution="448x448"), "tiny", DEVICE)


@pytest.mark.parametrize(
    ("part", "keys", "sentence"),
    [
        ("text_config", {"num_hidden_layer": 2}, "has the key num_hidden_layer in its config.json"),
        ("text_config", {"hidden_size": 0}, "has hidden_size=0 in its config.json"),
        ("vision_config", {"num_hidden_layer": 2}, "has the key num_hidden_layer in its config.json"),
    ],
)
def test_a_network_of_a_whole_model_whose_size_is_wrong_is_refused(part, keys, sentence):
    name = f"gemma3#{part}-{min(keys)}-wrong"
    declare(name, {"model_type": "gemma3", "text_config": {}, "vision_config": {}, part: keys})
    reply = run(Case(model=name, part="all", sequence_length=512))
    assert isinstance(reply, Crashed)
    assert sentence in reply.sentence


def test_a_model_of_other_images_names_those_that_are_known():
    declare("idefics3#whole", {"model_type": "idefics3", "vision_config": {}})
    reply = run(Case(model="idefics3#whole", part="all", sequence_length=64))
    assert isinstance(reply, Crashed)
    assert "has model_type='idefics3', for which no images are made; leave part='all' out" in reply.sentence
    assert "gemma3, " in reply.sentence
