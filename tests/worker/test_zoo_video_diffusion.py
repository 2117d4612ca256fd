"""Video diffusion: sizes as their encoders leave them, the velocity that each model learns, and who gets a gradient."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo_examples import DEVICE, built, example, measured, refused

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records.case import KNOBS
from pytest_gputrain.worker import checks
from pytest_gputrain.worker.zoo import denoiser

VIDEO = [model for model, architecture in architectures().items() if architecture.family == "video_diffusion"]
META = torch.device("meta")


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


TEXT = {"encoder_hidden_states": (1, 256, 4096), "encoder_attention_mask": (1, 256)}
IMAGE = {"condition": (1, 20, 3, 64, 96), "encoder_hidden_states_image": (1, 257, 1280)}
CONDITIONS = {
    "mochi-1": TEXT,
    "hunyuan-video": TEXT | {"pooled_projections": (1, 768), "guidance": (1,)},
    "wan2.1-i2v": IMAGE | {"encoder_hidden_states": (1, 512, 4096)},
}


@pytest.mark.parametrize("name", VIDEO)
def test_full_size_conditions_are_the_published_ones(name):
    inputs = built(name, "full", "meta", resolution="768x512", batch_size=1).batch(META).inputs
    shapes = {key: tuple(value.shape) for key, value in inputs.items() if key not in ("latents", "noise", "time")}
    assert shapes == CONDITIONS[name]


@given(name=st.sampled_from(VIDEO), width=st.integers(1, 4096), height=st.integers(1, 4096), frames=st.integers(1, 300))
def test_a_video_that_does_not_fit_is_told_one_that_does(name, width, height, frames):
    def size(width, height, frames):
        case = example(name, resolution=f"{width}x{height}", frames=frames)
        sizes = denoiser.sizes(architectures()[name], case, "full")
        return sizes.frames, sizes.height, sizes.width

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
    inputs = workload.batch(DEVICE).inputs
    own_loss = workload.loss(inputs)
    other = {"latents": "noise", "noise": "latents"}[end]
    workload.model = Oracle(inputs[end])
    torch.testing.assert_close(workload.loss(inputs), torch.tensor(0.0), atol=1e-6, rtol=0)
    workload.model = Oracle(inputs[other])
    assert workload.loss(inputs) > own_loss


def test_wan_sees_the_noisy_video_beside_its_condition():
    workload = built("wan2.1-i2v")
    inputs = workload.batch(DEVICE).inputs
    seen = []
    workload.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    workload.loss(inputs)
    assert torch.equal(seen[0][:, 16:], inputs["condition"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "name", "method"),
    [
        # Each precision, model and method each time, in few combinations.
        pytest.param(precision, name, method, marks=[] if (of, by) == (at % len(VIDEO), at % 2) else [pytest.mark.weekly])
        for at, precision in enumerate(KNOBS["precision"].words)
        for of, name in enumerate(VIDEO)
        for by, method in enumerate(("full", "lora"))
    ],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning:torch")  # Wan's, under autocast
def test_every_precision_moves_what_trains(name, method, precision):
    assert measured(example(name, method, precision=precision, batch_size=1, steps=1, warmup=1)).updates == 4


def test_a_blind_image_branch_of_wan_is_no_measurement(monkeypatch):
    monkeypatch.setitem(architectures()["wan2.1-i2v"].step["text_tokens"], "tiny", 255)
    sentence = refused(example("wan2.1-i2v", steps=1, warmup=1))
    assert re.search(r"tensors (did not change|got no gradient).*\(first: blocks\.0\.attn2\.add_k_proj\.weight\)", sentence)


@pytest.mark.parametrize("name", VIDEO)
def test_constructors_leave_no_tensor_empty(name):
    model = built(name).model
    for key, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.isfinite().all(), key
        if value.ndim > 1:
            assert key == "pos_frequencies" or 0 < value.std() < 2, key
        elif re.search(r"norm\w*\.weight$", key):
            assert (value == 1).all(), key


# What is recomputed.


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
    model = built(name, "full", "meta", activation_checkpointing=share).model
    recomputed = [key for key, module in model.named_modules() if "forward" in vars(module)]
    assert recomputed == [f"{path}.{index}" for path, count in expected.items() for index in range(count)]
