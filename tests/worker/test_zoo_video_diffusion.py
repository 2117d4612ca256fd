"""Video diffusion: sizes as their encoders leave them, the velocity that each model learns, and who gets a gradient."""

import math
import re

import pytest
import torch
import zoo_examples
from hypothesis import given
from hypothesis import strategies as st
from zoo_examples import example, measured, run

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.validation import PRECISIONS
from pytest_gputrain.records import Crashed
from pytest_gputrain.worker import checks
from pytest_gputrain.worker import training as recipe
from pytest_gputrain.worker.zoo import video_diffusion

VIDEO = [model for model, architecture in architectures().items() if architecture.family == "video_diffusion"]
CPU, META = torch.device("cpu"), torch.device("meta")


def built(*arguments, **knobs):
    torch.manual_seed(0)
    return zoo_examples.built(*arguments, **knobs)


def shapes(inputs):
    return {name: tuple(value.shape) for name, value in inputs.items()}


# What a step trains on.


@pytest.mark.parametrize(
    ("name", "resolution", "frames", "latents", "tokens"),
    [
        ("mochi-1", "960x544", 9, (12, 2, 68, 120), 4080),
        ("mochi-1", "848x480", 30, (12, 5, 60, 106), 7950),
        ("hunyuan-video", "960x544", 9, (16, 3, 68, 120), 6120),
        ("hunyuan-video", "1280x720", 129, (16, 33, 90, 160), 118_800),
        ("wan2.1-i2v", "832x480", 81, (16, 21, 60, 104), 32_760),
        ("wan2.1-i2v", "1280x720", 81, (16, 21, 90, 160), 75_600),
        ("wan2.1-i2v", "768x512", 129, (16, 33, 64, 96), 50_688),
    ],
)
def test_full_size_videos_have_the_published_latents(name, resolution, frames, latents, tokens):
    inputs = built(name, "full", "meta", resolution=resolution, frames=frames, batch_size=3).batch(META).inputs
    assert inputs["latents"].shape == inputs["noise"].shape == (3, *latents)
    assert math.prod(latents[1:]) // 4 == tokens


@pytest.mark.parametrize(
    ("name", "conditions"),
    [
        ("mochi-1", {"encoder_hidden_states": (1, 256, 4096), "encoder_attention_mask": (1, 256)}),
        (
            "hunyuan-video",
            {
                "encoder_hidden_states": (1, 256, 4096),
                "encoder_attention_mask": (1, 256),
                "pooled_projections": (1, 768),
                "guidance": (1,),
            },
        ),
        (
            "wan2.1-i2v",
            {
                "condition": (1, 20, 3, 64, 96),
                "encoder_hidden_states": (1, 512, 4096),
                "encoder_hidden_states_image": (1, 257, 1280),
            },
        ),
    ],
)
def test_full_size_conditions_are_the_published_ones(name, conditions):
    inputs = built(name, "full", "meta", resolution="768x512", batch_size=1).batch(META).inputs
    assert {key: shape for key, shape in shapes(inputs).items() if key not in ("latents", "noise", "time")} == conditions


def test_tiny_videos_are_cut_down_but_never_enlarged():
    large = built("wan2.1-i2v", resolution="768x512", frames=129).batch(CPU).inputs
    small = built("wan2.1-i2v", resolution="32x16", frames=5).batch(CPU).inputs
    assert large["latents"].shape == (2, 16, 4, 8, 16)
    assert small["latents"].shape == (2, 16, 2, 2, 4)


@given(
    name=st.sampled_from(VIDEO),
    width=st.integers(1, 4096),
    height=st.integers(1, 4096),
    frames=st.integers(1, 300),
)
def test_a_video_that_does_not_fit_is_told_one_that_does(name, width, height, frames):
    def size(width, height, frames):
        case = example(name, resolution=f"{width}x{height}", frames=frames)
        return video_diffusion.latent_size(architectures()[name], case, "full")

    try:
        latent_frames, latent_height, latent_width = size(width, height, frames)
    except checks.CheckFailed as error:
        numbers = [int(number) for number in re.findall(r"\d+", str(error).removeprefix(name))]
        if "pixels" in str(error):
            _, near_width, near_height, *asked = numbers
            assert asked == [width, height]
            assert abs(near_width - width) < 16 > abs(near_height - height)
            size(near_width, near_height, 1)
        else:
            _, fewer, more, asked = numbers
            assert asked == frames
            assert fewer < frames < more
            size(16, 16, fewer)
            size(16, 16, more)
    else:
        assert (8 * latent_width, 8 * latent_height) == (width, height)
        assert latent_width % 2 == latent_height % 2 == 0
        assert 1 <= latent_frames <= frames


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ({"resolution": "850x480"}, "wan2.1-i2v takes sides of a multiple of 16 pixels, as 848x480, not 850x480"),
        ({"frames": 100}, "wan2.1-i2v takes one frame and whole groups of 4 more, as 97 or 101, not 100"),
    ],
)
def test_a_video_that_does_not_fit_fails_before_anything_is_built(monkeypatch, field, sentence):
    monkeypatch.setattr(video_diffusion.VideoDiffusion, "build_part", None)
    result = run(example("wan2.1-i2v", **field))
    assert isinstance(result, Crashed)
    assert result.sentence == sentence


# What a step learns.


class Oracle(torch.nn.Module):
    """Knows where the way ends, and so the velocity that leads there in the time left."""

    def __init__(self, end):
        super().__init__()
        self.end = end

    def forward(self, noisy, timestep, **conditions):
        left = 1 - timestep.view(-1, 1, 1, 1, 1) / 1000
        return ((self.end - noisy[:, : self.end.shape[1]]) / left,)


@pytest.mark.parametrize(("name", "end"), [("mochi-1", "latents"), ("hunyuan-video", "noise"), ("wan2.1-i2v", "noise")])
def test_target_is_the_velocity_of_the_model_s_own_time(name, end):
    workload = built(name, batch_size=4)
    inputs = workload.batch(CPU).inputs
    own_loss = workload.loss(inputs)
    other = {"latents": "noise", "noise": "latents"}[end]
    workload.model = Oracle(inputs[end])
    torch.testing.assert_close(workload.loss(inputs), torch.tensor(0.0), atol=1e-6, rtol=0)
    workload.model = Oracle(inputs[other])
    assert workload.loss(inputs) > own_loss


def test_wan_sees_the_noisy_video_beside_its_condition():
    workload = built("wan2.1-i2v")
    inputs = workload.batch(CPU).inputs
    seen = []
    workload.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    workload.loss(inputs)
    assert torch.equal(seen[0][:, 16:], inputs["condition"])


@pytest.mark.parametrize("name", VIDEO)
def test_every_step_trains_on_the_same_noise_and_time(name):
    workload = built(name)
    inputs = workload.batch(CPU).inputs
    assert torch.equal(workload.loss(inputs), workload.loss(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", VIDEO)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning:torch")  # Wan's, under autocast
def test_every_precision_moves_what_trains(name, method, precision):
    assert measured(example(name, method, precision=precision, batch_size=1, steps=1, warmup=1)).updates == 4


def gradients(workload):
    """Norms by name, 0 where there is none."""
    workload.loss(workload.batch(CPU).inputs).backward()
    return {
        name: 0.0 if value.grad is None else float(value.grad.norm()) for name, value in workload.model.named_parameters()
    }


@pytest.fixture
def doubles():
    """Arithmetic in which rounding is far below any gradient."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", VIDEO)
@pytest.mark.usefixtures("doubles")
def test_idle_parameters_are_exactly_those_without_a_gradient(name):
    norms = gradients(built(name, batch_size=1))
    without = {key for key, norm in norms.items() if norm < 1e-15}
    assert {key for key, norm in norms.items() if norm < 1e-8} == without, "a gradient in doubt"
    assert without == {
        key for key in norms for pattern in architectures()[name].idle.get("tiny", ()) if re.fullmatch(pattern, key)
    }


def image_branch(name):
    return "image_embedder" in name or "add_k_proj" in name or "add_v_proj" in name or "norm_added_k" in name


def test_wan_s_image_branch_learns():
    norms = gradients(built("wan2.1-i2v", batch_size=1))
    branch = {name: norm for name, norm in norms.items() if image_branch(name)}
    assert len(branch) == 8 + 2 * 5  # of the embedder; and of two blocks: weight and bias of two projections, the norm
    assert min(branch.values()) > 1e-6


@pytest.mark.parametrize("text", [16, 255, 256, 511, 512, 513])
def test_wan_s_image_branch_sees_the_image_with_512_text_tokens_only(monkeypatch, text):
    """The trap that 512 tokens at every scale avoid. diffusers takes all but the last 512 tokens for the image's."""
    monkeypatch.setitem(architectures()["wan2.1-i2v"].step["text_tokens"], "tiny", text)
    workload = built("wan2.1-i2v")
    seen = []
    workload.model.blocks[0].attn2.add_k_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    workload.loss(workload.batch(CPU).inputs)
    assert (seen == [257]) == (text == 512)


def test_a_blind_image_branch_of_wan_is_no_measurement(monkeypatch):
    monkeypatch.setitem(architectures()["wan2.1-i2v"].step["text_tokens"], "tiny", 255)
    result = run(example("wan2.1-i2v", steps=1, warmup=1))
    assert isinstance(result, Crashed)
    assert re.search(
        r"trained tensors (did not change|got no gradient).*\(first: blocks\.0\.attn2\.add_k_proj\.weight\)", result.sentence
    )


@pytest.mark.parametrize("name", VIDEO)
def test_constructors_leave_no_tensor_empty(name):
    model = built(name).model
    for key, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.isfinite().all(), key
        if value.ndim > 1:
            assert key == "pos_frequencies" or 0 < value.std() < 2, key
        elif re.search(r"norm\w*\.weight$", key):
            assert (value == 1).all(), key


# Adapters, recomputation, arithmetic.


def test_lora_of_mochi_follows_from_the_hyper_parameters():
    facts = architectures()["mochi-1"].trained_part.facts("full")
    hidden = facts["num_attention_heads"] * facts["attention_head_dim"]
    blocks = facts["num_layers"] * 4 * 8 * (hidden + hidden)
    pooler = 8 * (facts["text_embed_dim"] + facts["text_embed_dim"])  # its to_q is named as those of the blocks
    assert architectures()["mochi-1"].trainable["lora"]["full"] == blocks + pooler == 9_502_720


def recomputed(name, share):
    model = built(name, "full", "meta", activation_checkpointing=share).model
    return [key for key, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(
    ("name", "share", "expected"),
    [
        ("mochi-1", True, {"transformer_blocks": 48}),
        ("mochi-1", 0.5, {"transformer_blocks": 24}),
        ("hunyuan-video", True, {"transformer_blocks": 20, "single_transformer_blocks": 40}),
        ("hunyuan-video", 0.33, {"transformer_blocks": 19}),
        ("hunyuan-video", 0.5, {"transformer_blocks": 20, "single_transformer_blocks": 10}),
        ("wan2.1-i2v", True, {"blocks": 40}),
        ("wan2.1-i2v", 0.5, {"blocks": 20}),
    ],
)
def test_recomputed_blocks_are_the_first_as_they_run(name, share, expected):
    assert recomputed(name, share) == [f"{path}.{index}" for path, count in expected.items() for index in range(count)]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", VIDEO)
def test_checkpointing_saves_memory_and_repeats_arithmetic(name, method):
    case = example(name, method, precision="fp32", steps=1, warmup=0)
    without, with_it = measured(case), measured(case.replace(activation_checkpointing=True))
    assert with_it.peak_allocated_bytes < without.peak_allocated_bytes
    assert with_it.losses == without.losses
    assert with_it.flops_per_step == without.flops_per_step
    assert without.recomputed_flops_per_step == 0
    # Forward is a third of a full step; not all of it lies in the blocks.
    assert 0.3 * with_it.flops_per_step / 3 < with_it.recomputed_flops_per_step


def test_flops_are_those_of_layers_and_attention(monkeypatch):
    """Twice a layer's products for gradients of input and weight, the former only where the input wants one; attention as
    two products forward, five backward."""
    case = example("wan2.1-i2v", precision="fp32", steps=1, warmup=0)
    counted = measured(case).flops_per_step
    training = recipe.Training(case, "tiny", CPU)
    flops = 0

    def layer(module, args, output):
        nonlocal flops
        products = 2 * output.numel() * module.weight[0].numel()
        flops += products * (3 if args[0].requires_grad else 2)

    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, **options):
        nonlocal flops
        flops += 7 * 2 * query.numel() * key.shape[-2]
        return plain(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    for module in training.model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv3d):
            module.register_forward_hook(layer)
    training.step(True)
    assert counted == flops
