"""What vision-language models take, what of them trains, and that the frozen tower stays out of the backward pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo_examples import METHODS_OF_MODELS, measured, run

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records import Crashed
from pytest_gputrain.worker import checks, zoo
from pytest_gputrain.worker import training as recipe
from pytest_gputrain.worker.flops import count_flops
from pytest_gputrain.worker.zoo.vision_language import LEAD, PatchedImage, TiledImage

CPU = torch.device("cpu")
META = torch.device("meta")
MODELS = [name for name, architecture in architectures().items() if architecture.family == "vision_language"]
PAIRS = [(model, method) for model, method in METHODS_OF_MODELS if model in MODELS]
LLAVA, QWEN = "llava-1.6-13b", "qwen2-vl-2b"  # one has three blocks at tiny scale, the other ties its head
SIDES = st.integers(1, 2000)


def example(model, method="sft", **knobs):
    resolution = "336x336" if model.startswith("llava") else "504x364"
    fields = {"sequence_length": 2048, "resolution": resolution, "batch_size": 2, "precision": "fp32", **knobs}
    return Case(model=model, method=method, **fields)


def trained(model, method="sft", **knobs):
    return recipe.Training(example(model, method, **knobs), "tiny", CPU)


def workload(model, scale="tiny", device="cpu", **knobs):
    with torch.device(device):
        return zoo.build(example(model, **knobs), scale)


def facts(model, scale="tiny"):
    return architectures()[model].trained_part.facts(scale)


def parts_of(model):
    """Its vision tower and its language model, adapted or not."""
    named = dict(model.named_modules())
    tower = next(module for name, module in named.items() if name.split(".")[-1] in ("vision_tower", "visual"))
    return tower, next(module for name, module in named.items() if name.endswith("language_model"))


def blocks_of(tower):
    return next(module for name, module in tower.named_modules() if name in ("encoder.layers", "blocks"))


@pytest.fixture(scope="module")
def tiny():
    return {model: workload(model) for model in (LLAVA, QWEN)}


# What a sample is


PUBLISHED_TOKENS = [("336x336", 1176), ("400x300", 1368), ("640x480", 2340), ("480x640", 2352), ("1920x1080", 1948)]


@pytest.mark.parametrize(("resolution", "tokens"), [*PUBLISHED_TOKENS, ("1008x336", 2328), ("672x672", 2928)])
def test_tiled_images_take_the_known_tokens(resolution, tokens):
    assert workload(LLAVA, "full", "meta", resolution=resolution)._image("full").tokens == tokens


@pytest.mark.parametrize(
    ("resolution", "tokens"), [("504x364", 234), ("448x448", 256), ("1024x1024", 1369), ("9x2800", 100), ("42x70", 4)]
)
def test_patched_images_take_the_known_tokens(resolution, tokens):
    assert workload(QWEN, "full", "meta", resolution=resolution)._image("full").tokens == tokens


@settings(max_examples=15, deadline=None)
@given(width=SIDES, height=SIDES)
def test_a_tiled_image_takes_what_the_model_packs(tiny, width, height):
    model = tiny[LLAVA].model
    image = TiledImage(facts=facts(LLAVA), width=width, height=height)
    inputs = image.inputs(1, 2, CPU)
    with torch.no_grad():
        (features,) = model.get_image_features(**inputs).pooler_output
    assert features.shape[0] == image.tokens


@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), text=st.integers(LEAD + 1, 9))
def test_a_patched_image_is_what_the_library_makes_of_it(tiny, width, height, text):
    from transformers.vision_utils import get_vision_position_ids

    model = tiny[QWEN].model
    image = PatchedImage(facts=facts(QWEN), width=width, height=height)
    inputs = image.inputs(2, text, CPU)
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
    batch = made.batch(CPU)
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


@pytest.mark.parametrize("model", MODELS)
def test_a_full_sequence_is_as_long_as_the_case_says(model):
    batch = workload(model, "full", "meta", batch_size=3).batch(META)
    assert batch.inputs["input_ids"].shape == (3, 2048)
    assert (batch.samples, batch.sequence_length) == (3, 2048)


@pytest.mark.parametrize(("model", "tokens"), [(LLAVA, 1176), (QWEN, 234)])
@pytest.mark.parametrize("scale", ["full", "tiny"])
def test_a_sequence_must_hold_its_image_at_full_size(model, tokens, scale):
    needed = tokens + LEAD + 1
    assert workload(model, scale, "meta", sequence_length=needed).batch(META)
    with pytest.raises(checks.CheckFailed, match=f"alone takes {tokens} tokens; set sequence_length to at least {needed}"):
        workload(model, scale, "meta", sequence_length=needed - 1).batch(META)


def test_a_sequence_too_short_is_told_in_one_sentence():
    reply = run(example(QWEN, sequence_length=100))
    assert isinstance(reply, Crashed)
    assert reply.sentence == (
        "qwen2-vl-2b-sft-fp32 has sequence_length=100, but its image of 504x364 pixels alone takes 234 tokens; "
        "set sequence_length to at least 236, or a lower resolution"
    )


# The step


@pytest.mark.parametrize("model", [LLAVA, QWEN])
def test_loss_is_the_library_s_own(model, tiny):
    inputs = tiny[model].batch(CPU).inputs
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
    made = workload(model, "full", "meta")
    assert made.loss(made.batch(META).inputs).shape == ()


@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_every_method_trains_in_fp32(model, method):
    assert measured(example(model, method, activation_checkpointing=True, steps=1, warmup=1)).updates >= 1


@pytest.mark.parametrize("precision", ["bf16-amp", "fp16-amp"])
@pytest.mark.parametrize("model", [LLAVA, QWEN])
def test_autocast_reaches_the_tower_too(model, precision):
    assert measured(example(model, precision=precision, steps=1, warmup=1)).updates >= 1


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
    for name, value in trained(model, method).model.named_parameters():
        path = name.removeprefix("base_model.model.").split(".")
        kind = "adapters" if "lora_A" in path or "lora_B" in path else "weights"
        of_parts.setdefault((path[1] if path[0] == "model" else path[0], kind), set()).add(value.requires_grad)
    wanted = {(part, "adapters" if method == "lora" else "weights") for part in TRAINED[model, method]}
    assert of_parts == {part: {part in wanted} for part in of_parts}
    assert wanted <= set(of_parts)


class Passes:
    """Counts how often the tower's and the language model's blocks run, and whether autograd records the tower."""

    def __init__(self, model):
        self.tower, self.language = [], []
        self.recorded = False
        tower, language = parts_of(model)
        for counts, blocks in ((self.tower, blocks_of(tower)), (self.language, language.layers)):
            for index, block in enumerate(blocks):
                counts.append(0)
                # Inside of a block, whose own call is not repeated, and before its end, where recomputation stops early.
                block.mlp.register_forward_pre_hook(self.count(counts, index))

    def count(self, counts, index):
        def hook(module, inputs):
            counts[index] += 1
            self.recorded |= counts is self.tower and inputs[0].requires_grad

        return hook


@pytest.mark.parametrize(("share", "twice"), [(False, 0), (0.4, 1), (0.7, 2), (True, 3)])
@pytest.mark.parametrize("method", ["pretrain", "sft", "lora"])
def test_the_language_model_alone_is_recomputed(method, share, twice):
    training = trained(LLAVA, method, activation_checkpointing=share)
    passes = Passes(training.model)
    training.step(False)
    assert passes.language == [2] * twice + [1] * (3 - twice)
    assert passes.tower == [1, 1, 1]
    assert not passes.recorded


def test_qwen_s_tower_is_not_recomputed_either():
    training = trained(QWEN, activation_checkpointing=True)
    passes = Passes(training.model)
    training.step(False)
    assert (passes.language, passes.tower, passes.recorded) == ([2, 2], [1, 1], False)


@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_recomputation_changes_no_gradient(model, method):
    def gradients(share):
        torch.manual_seed(0)
        training = trained(model, method, activation_checkpointing=share)
        if method == "lora":
            # Fresh adapters multiply by zero, which hides the gradients of their first halves.
            for name, value in training.model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.ones_(value)
        training.step(False)
        return {name: value.grad for name, value in training.model.named_parameters() if value.requires_grad}

    plain = gradients(False)
    assert all(gradient is not None and gradient.any() for gradient in plain.values())
    torch.testing.assert_close(gradients(True), plain)


def flops_by_hand(model, method, tokens, samples, tower, features):
    """The tower forward only; the language model and the projector by what they need.

    Two operations per weight and token forward, two for the gradient of the input and two for that of the weight.
    Attention has two products forward and five backward.
    """
    config = facts(model)["text_config"]
    hidden, width, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    weights = layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * width) + config["vocab_size"] * hidden
    language = (6 if method == "sft" else 4) * samples * tokens * weights + 14 * samples * tokens**2 * hidden * layers
    # Nothing before the projector wants a gradient.
    seen = facts(model)["vision_config"]["hidden_size"]
    projector = features * (4 * seen * hidden + 6 * hidden * hidden) if model == LLAVA else 0
    return tower + language + projector


@pytest.mark.parametrize(("model", "method"), [(LLAVA, "sft"), (LLAVA, "pretrain"), (QWEN, "sft")])
def test_flops_are_the_tower_forward_and_the_rest_both_ways(model, method, tiny):
    reply = measured(example(model, method, activation_checkpointing=True, steps=1, warmup=0))
    inputs = tiny[model].batch(CPU).inputs
    pixels = inputs["pixel_values"]
    with torch.no_grad(), count_flops() as tower:
        if model == LLAVA:
            parts_of(tiny[model].model)[0](pixels.flatten(0, 1))
        else:
            parts_of(tiny[model].model)[0](pixels, grid_thw=inputs["image_grid_thw"])
    tiles, patches = 2 * 3, (56 // 14) ** 2
    by_hand = flops_by_hand(model, method, reply.sequence_length, 2, tower.total, tiles * patches)
    assert reply.flops_per_step == by_hand
