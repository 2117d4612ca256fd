"""Classes of diffusers that are known by a config.json alone: what they take, and that they train."""

import inspect
import re

import diffusers
import pytest
import torch
from zoo_examples import measured, refused, run

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures.facts import denoisers
from pytest_gputrain.cases.model_config import declare
from pytest_gputrain.worker import zoo
from pytest_gputrain.worker.zoo.completed import architecture_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning:torch"),  # Kandinsky's, in fp32
]

CLASSES = {name: like for name, like in denoisers().items() if not like.trained_part.config}

COG_VIDEO = {"in_channels": 32, "num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
SKY_REELS = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}

COSMOS_2 = {"in_channels": 17, "num_attention_heads": 16, "extra_pos_embed_type": None, "rope_scale": [1.0, 3.0, 3.0]}
HUNYUAN_DIT = {"in_channels": 4, "patch_size": 2, "hidden_size": 1408, "num_layers": 40, "mlp_ratio": 4.3637}
KANDINSKY = {"in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 1792, "ff_dim": 7168}
CASCADE = {"clip_text_in_channels": 1280, "clip_image_in_channels": 768, "switch_level": [False]}
DDPM = {
    **{"block_out_channels": [128, 256, 256, 256], "downsample_padding": 0, "flip_sin_to_cos": False},
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    **{"freq_shift": 1, "norm_eps": 1e-6, "attention_head_dim": None},
}

CONFIGS = {
    "auraflow": ("AuraFlowTransformer2DModel", {}),
    "chroma": ("ChromaTransformer2DModel", {}),
    "cogvideox-2b": ("CogVideoXTransformer3DModel", {}),
    "cogvideox-5b-i2v": ("CogVideoXTransformer3DModel", {**COG_VIDEO, "use_learned_positional_embeddings": True}),
    "cogvideox-1.5-5b-i2v": (
        "CogVideoXTransformer3DModel",
        {**COG_VIDEO, "patch_size_t": 2, "ofs_embed_dim": 512, "patch_bias": False, "sample_frames": 81},
    ),
    "cogview3-plus": ("CogView3PlusTransformer2DModel", {}),
    "cogview4": ("CogView4Transformer2DModel", {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 128}),
    "cosmos-7b": ("CosmosTransformer3DModel", {}),
    "cosmos-2-2b-v2w": ("CosmosTransformer3DModel", COSMOS_2),
    "cosmos-2.5-2b": (
        "CosmosTransformer3DModel",
        {**COSMOS_2, "use_crossattn_projection": True, "crossattn_proj_in_channels": 100352},
    ),
    "dit-xl-2": ("DiTTransformer2DModel", {"out_channels": 8}),
    "hunyuan-dit": ("HunyuanDiT2DModel", {**HUNYUAN_DIT, "use_style_cond_and_image_meta_size": False}),
    "hunyuan-dit-1.1": ("HunyuanDiT2DModel", HUNYUAN_DIT),
    "hunyuan-image-2.1": ("HunyuanImageTransformer2DModel", {"text_embed_2_dim": 1472}),
    "hunyuan-image-2.1-distilled": (
        "HunyuanImageTransformer2DModel",
        {"text_embed_2_dim": 1472, "guidance_embeds": True, "use_meanflow": True},
    ),
    "kandinsky-5-lite": ("Kandinsky5Transformer3DModel", {**KANDINSKY, "visual_cond": True}),
    "kandinsky-5-lite-image": ("Kandinsky5Transformer3DModel", KANDINSKY),
    "longcat-image": ("LongCatImageTransformer2DModel", {"num_layers": 10, "num_single_layers": 20}),
    "ltx-video": ("LTXVideoTransformer3DModel", {}),
    "lumina-2": ("Lumina2Transformer2DModel", {"cap_feat_dim": 2304}),
    "ovis-image": ("OvisImageTransformer2DModel", {}),
    "pixart-alpha": ("PixArtTransformer2DModel", {"sample_size": 128, "caption_channels": 4096}),
    "pixart-sigma": (
        "PixArtTransformer2DModel",
        {"sample_size": 128, "caption_channels": 4096, "use_additional_conditions": False},
    ),
    "qwen-image": ("QwenImageTransformer2DModel", {}),
    "sana-1.6b": ("SanaTransformer2DModel", {}),
    "sana-sprint": ("SanaTransformer2DModel", {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}),
    "sana-video": ("SanaVideoTransformer3DModel", {}),
    "skyreels-v2-14b": ("SkyReelsV2Transformer3DModel", SKY_REELS),
    "skyreels-v2-14b-i2v": (
        "SkyReelsV2Transformer3DModel",
        {**SKY_REELS, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    ),
    "stable-cascade-prior": ("StableCascadeUNet", CASCADE),
    "stable-cascade-decoder": (
        "StableCascadeUNet",
        {
            **{"in_channels": 4, "out_channels": 4, "patch_size": 2, "conditioning_dim": 1280},
            **{"block_out_channels": [320, 640, 1280, 1280], "num_attention_heads": [-1, -1, 20, 20]},
            **{"down_num_layers_per_block": [2, 6, 28, 6], "up_num_layers_per_block": [6, 28, 6, 2]},
            **{"down_blocks_repeat_mappers": [1, 1, 1, 1], "up_blocks_repeat_mappers": [3, 3, 2, 2]},
            "block_types_per_layer": [
                *[["SDCascadeResBlock", "SDCascadeTimestepBlock"]] * 2,
                *[["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"]] * 2,
            ],
            **{"effnet_in_channels": 16, "pixel_mapper_in_channels": 3, "dropout": [0, 0, 0.1, 0.1]},
            "timestep_conditioning_type": ["sca"],
        },
    ),
    "ddpm-cifar10": ("UNet2DModel", DDPM),
    "ddpm-cifar10-classes": ("UNet2DModel", {**DDPM, "num_class_embeds": 10}),
    "text-to-video": ("UNet3DConditionModel", {}),
    "animatediff-v1": ("UNetMotionModel", {"cross_attention_dim": 768, "use_motion_mid_block": False}),
    "animatediff-v2": ("UNetMotionModel", {"cross_attention_dim": 768}),
    "stable-video-diffusion": ("UNetSpatioTemporalConditionModel", {}),
    "wan-vace": ("WanVACETransformer3DModel", {}),
    "z-image": ("ZImageTransformer2DModel", {}),
}
"""Models by the keys of their config.json that are none of their class's defaults."""

PUBLISHED = {
    "auraflow": "6.8B",  # blog.fal.ai/auraflow
    "chroma": "8.9B",  # its model card
    "cogvideox-2b": "2B",
    "cogview4": "6B",
    "cosmos-7b": "7B",
    "cosmos-2-2b-v2w": "2B",
    "cosmos-2.5-2b": "2B",
    "ddpm-cifar10": "0.0357B",  # arXiv:2006.11239, appendix B
    "hunyuan-dit": "1.5B",  # arXiv:2405.08748
    "hunyuan-image-2.1": "17B",
    "kandinsky-5-lite": "2B",
    "longcat-image": "6B",
    "ltx-video": "2B",
    "lumina-2": "2.6B",  # arXiv:2503.21758
    "ovis-image": "7B",
    "pixart-sigma": "0.6B",  # arXiv:2403.04692
    "qwen-image": "20B",  # arXiv:2508.02324
    "sana-1.6b": "1.6B",  # arXiv:2410.10629
    "sana-video": "2B",
    "skyreels-v2-14b": "14B",
    "stable-cascade-prior": "3.6B",  # its model card
    "stable-video-diffusion": "1.52B",  # arXiv:2311.15127, appendix D
    "z-image": "6B",
}
"""Counts as published, in the name of the model or where it is said."""

QUICK = {"qwen-image", "ltx-video", "stable-cascade-prior"}
WEEKLY = [pytest.mark.slow, pytest.mark.weekly]
COSMOS = [pytest.mark.slow, pytest.mark.recipes]
"""Diffusers resizes a mask of Cosmos by torchvision, which `tox -e recipes` installs."""


def marked(name, *marks):
    return pytest.param(name, marks=COSMOS if CONFIGS[name][0] == "CosmosTransformer3DModel" else marks, id=name)


MODELS = [marked(name, *[] if name in QUICK else WEEKLY) for name in CONFIGS]


def case_of(name, method="full", **knobs):
    class_name, keys = CONFIGS[name]
    return case_with(class_name, keys, method=method, **knobs)


def case_with(class_name, keys, **knobs):
    """The case of a class's defaults, or of the zoo's model of it, but for some keys."""
    like = denoisers()[class_name]
    model = f"{class_name}#{abs(hash(str(keys)))}"
    declare(model, {"_class_name": class_name, **like.trained_part.config, **keys})
    needs = {"resolution": "512x512", "frames": 17}
    return Case(model=model, batch_size=2, steps=2, warmup=1, **{**{field: needs[field] for field in like.needs}, **knobs})


def test_there_is_a_model_of_every_class():
    assert {class_name for class_name, _ in CONFIGS.values()} == set(CLASSES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_build_has_the_published_parameter_count(name):
    parameters = architecture_of(case_of(name).model).trained_part.parameters["full"]
    published = PUBLISHED[name].removesuffix("B")
    assert f"{parameters / 1e9:.{len(published.partition('.')[2])}f}" == published


@pytest.mark.parametrize("class_name", CLASSES)
def test_texts_are_as_long_as_the_pipeline_has_them_by_default(class_name):
    like = CLASSES[class_name]
    pipeline = getattr(diffusers, re.match(r"\w+", like.trained_part.source)[0])
    length = inspect.signature(pipeline.__call__).parameters.get("max_sequence_length")
    tokens = like.step.get("text_tokens")
    if length is not None:
        assert (tokens["full"] if isinstance(tokens, dict) else tokens) == length.default
    elif tokens is not None:
        # Of a tokenizer's own length, which the row says, or CLIP's.
        assert tokens == 77 or f"={tokens}" in like.trained_part.source or f"{tokens} tokens" in like.trained_part.source


@pytest.mark.parametrize(
    ("name", "resolution", "frames", "latents"),
    [
        ("qwen-image", "1664x928", 0, (104 * 58, 64)),
        ("chroma", "1024x1024", 0, (4096, 64)),
        ("z-image", "1024x768", 0, (16, 1, 96, 128)),
        ("sana-1.6b", "1024x1024", 0, (32, 32, 32)),
        ("hunyuan-image-2.1", "2048x2048", 0, (64, 64, 64)),
        ("pixart-sigma", "1024x512", 0, (4, 64, 128)),
        ("stable-cascade-prior", "1024x1024", 0, (16, 24, 24)),
        ("stable-cascade-decoder", "1024x1024", 0, (4, 256, 256)),
        ("ddpm-cifar10", "32x32", 0, (3, 32, 32)),
        ("ltx-video", "704x480", 161, (21 * 15 * 22, 128)),
        ("cogvideox-2b", "720x480", 49, (13, 16, 60, 90)),
        ("cogvideox-1.5-5b-i2v", "1360x768", 81, (22, 16, 96, 170)),
        pytest.param("cosmos-7b", "1280x704", 121, (16, 16, 88, 160), marks=COSMOS),
        pytest.param("cosmos-2-2b-v2w", "1280x704", 93, (16, 24, 88, 160), marks=COSMOS),
        ("kandinsky-5-lite", "768x512", 121, (31, 64, 96, 16)),
        ("skyreels-v2-14b-i2v", "960x544", 97, (16, 25, 68, 120)),
        ("animatediff-v2", "512x512", 16, (4, 16, 64, 64)),
        ("stable-video-diffusion", "1024x576", 14, (14, 4, 72, 128)),
    ],
)
def test_full_size_latents_are_those_of_the_pipeline(name, resolution, frames, latents):
    needs = {"frames": frames} if frames else {}
    with torch.device("meta"):
        inputs = zoo.build(case_of(name, resolution=resolution, **needs), "full").batch(torch.device("meta")).inputs
    assert inputs["latents"].shape == inputs["noise"].shape == (2, *latents)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_models_train(name, method):
    measured(case_of(name, method, activation_checkpointing=method == "lora" and bool(CLASSES[CONFIGS[name][0]].blocks)))


LISTED = [name for name, (class_name, _) in CONFIGS.items() if CLASSES[class_name].blocks]
"""Models that recompute blocks; but for UNets, of which diffusers itself does it."""


@pytest.mark.parametrize("name", [marked(name) for name in LISTED if "mid_block" not in CLASSES[CONFIGS[name][0]].blocks])
def test_the_recomputed_blocks_are_those_that_diffusers_recomputes(name):
    workload = zoo.build(case_of(name), "tiny")
    seen = []

    def recompute(block, *arguments, **keywords):
        seen.append(getattr(block, "__self__", block))
        return block(*arguments, **keywords)

    workload.model.enable_gradient_checkpointing(recompute)
    workload.loss(workload.batch(torch.device("cpu")).inputs)
    assert {id(block) for block in seen} == {id(block) for block in workload.blocks}


OF_THE_ZOO = [
    *((name, {"_unknown": 1}) for name, like in denoisers().items() if like.trained_part.config),
    ("FluxTransformer2DModel", {"guidance_embeds": False}),  # FLUX.1-schnell
    ("HunyuanVideoTransformer3DModel", {"guidance_embeds": False}),
    ("WanTransformer3DModel", {"in_channels": 16, "image_dim": None, "added_kv_proj_dim": None}),  # of text alone
    ("UNet2DConditionModel", {"cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20]}),  # as version 2
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("class_name", "keys"), [*OF_THE_ZOO[-2:], *(pytest.param(*one, marks=WEEKLY) for one in OF_THE_ZOO[:-2])]
)
def test_the_config_of_a_model_of_the_zoo_trains_with_what_it_is_conditioned_on_and_without(class_name, keys):
    case = case_with(class_name, keys, **{"frames": 9} if "frames" in denoisers()[class_name].needs else {})
    if "_unknown" in keys:
        known = denoisers()[class_name].trained_part.parameters["full"]
        assert architecture_of(case.model).trained_part.parameters["full"] == known
    measured(case)


def test_parameters_that_a_class_makes_on_the_host_are_moved():
    with torch.device("meta"):
        model = zoo.build(case_of("stable-video-diffusion"), "tiny").model
    assert {value.device.type for value in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("class_name", "keys", "fields", "sentence"),
    [
        ("AuraFlowTransformer2DModel", {"in_channels": 8}, {}, "has in_channels=8 and out_channels=4 in its config.json"),
        ("CogVideoXTransformer3DModel", {"in_channels": 8}, {}, "has in_channels=8 in its config.json, fewer than the 16"),
        ("CogVideoXTransformer3DModel", {"in_channels": 0}, {}, "has in_channels=0 in its config.json; give the channels"),
        ("UNet2DConditionModel", {"in_channels": 9}, {}, "has in_channels=9 and out_channels=4 in its config.json: its in"),
        (
            "UNet2DConditionModel",
            {"encoder_hid_dim": 768, "encoder_hid_dim_type": "text_proj"},
            {},
            "has encoder_hid_dim_type='text_proj' in its config.json, a cond",
        ),
        ("UNet2DModel", {"class_embed_type": "timestep"}, {}, "has class_embed_type='timestep' in its config.json, a cond"),
        ("Kandinsky5Transformer3DModel", {"attention_type": "nabla"}, {}, "has attention_type='nabla' in its config.json"),
        ("PixArtTransformer2DModel", {}, {}, "lacks the key caption_channels in its config.json"),
        ("SanaTransformer2DModel", {}, {"resolution": "500x512"}, "takes sides of a multiple of 32 pixels, as 512x512, not"),
        ("DiTTransformer2DModel", {"out_channels": 8}, {"resolution": "512x256"}, "takes square images, as 512x512, not 51"),
        ("LTXVideoTransformer3DModel", {}, {"frames": 12}, "takes one frame and whole groups of 8 more, as 9 or 17, not 12"),
        ("SkyReelsV2Transformer3DModel", {"num_layers": "x"}, {}, "cannot be built from its config.json: "),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_is_not_known_of_a_denoiser_is_one_sentence(class_name, keys, fields, sentence):
    case = case_with(class_name, keys, **fields)
    said = refused(case)
    assert said.startswith(f"{case.model} {sentence}")
    assert "\n" not in said
    assert run(case).refused
