"""Image diffusion models: what goes into a step, what runs in it, and what the loss means."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from zoo_examples import example
from zoo_examples import trained as trained_case

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.worker import zoo
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.zoo import diffusion

FULL_BATCHES = {
    ("sd-1.5", "512x512"): {"noise": (2, 4, 64, 64), "pixels": (2, 3, 512, 512), "tokens": (2, 77)},
    ("sdxl", "1024x768"): {"latents": (2, 4, 96, 128), "text": (2, 77, 2048), "pooled": (2, 1280), "time_ids": (2, 6)},
    ("sd3", "512x512"): {"noise": (2, 16, 64, 64), "pixels": (2, 3, 512, 512), "text": (2, 154, 4096), "pooled": (2, 2048)},
    ("flux.1-dev", "512x512"): {"latents": (2, 1024, 64), "text": (2, 512, 4096), "pooled": (2, 768)},
}


def training(model, method=None, **knobs):
    return trained_case(example(model, method, **{"precision": "fp32", **knobs}))


def calls_in_a_step(trained, modules):
    """How often each module runs in one step, backward included."""
    calls = dict.fromkeys(modules, 0)

    def count(name, module, args):
        calls[name] += 1

    for name, module in modules.items():
        module.register_forward_pre_hook(functools.partial(count, name))
    trained.step(True)
    return calls


@pytest.mark.parametrize(("model", "resolution"), FULL_BATCHES)
def test_full_size_batch_has_the_published_shapes_and_fits_the_model(model, resolution):
    with torch.device("meta"), torch.no_grad():
        workload = zoo.build(example(model, resolution=resolution), "full")
        inputs = workload.batch(torch.device("meta")).inputs
        encoded = {"text": torch.empty(2, 77, 768)} if "tokens" in inputs else {}
        assert workload.denoise(inputs["noise"], {**inputs, **encoded}).shape == inputs["noise"].shape
    expected = FULL_BATCHES[model, resolution]
    assert {name: tuple(inputs[name].shape) for name in expected} == expected


@pytest.mark.parametrize("scale", ["full", "tiny"])
def test_a_resolution_that_gives_no_whole_latents_is_told(scale):
    with torch.device("meta"), pytest.raises(CheckFailed, match=r"sd3 .*500x512.*multiples of 16; .*'496x512'"):
        zoo.build(example("sd3", resolution="500x512"), scale)


@pytest.mark.parametrize("model", ["sd-1.5", "sd3"])
def test_encoders_run_once_a_step_without_gradients(model):
    trained = training(model, activation_checkpointing=True)
    encoders = {name: trained.model[name] for name in list(architectures()[model].parts)[1:]}
    seen = []
    for encoder in encoders.values():
        first = next(module for module in encoder.modules() if not list(module.children()))
        first.register_forward_hook(lambda module, args, output: seen.append(torch.is_grad_enabled()))
    trained.step(True)
    assert seen == [False] * len(encoders)
    assert all(parameter.grad is None for encoder in encoders.values() for parameter in encoder.parameters())


@pytest.mark.parametrize(
    ("model", "precision", "kind"), [("sd-1.5", "bf16-amp", "bfloat16"), ("sd3", "fp16-amp", "float32")]
)
def test_images_are_encoded_in_the_table_s_arithmetic(model, precision, kind):
    trained = training(model, precision=precision)
    seen = []
    trained.model["vae"].encoder.conv_out.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    trained.step(True)
    assert seen == [getattr(torch, kind)]


@pytest.mark.parametrize(("model", "scaling", "shift"), [("sd-1.5", 0.18215, 0), ("sd3", 1.5305, 0.0609)])
def test_latents_are_drawn_from_the_posterior_shifted_and_scaled(model, scaling, shift, monkeypatch):
    workload = zoo.build(example(model), "tiny")
    inputs = workload.batch(torch.device("cpu")).inputs
    posterior = SimpleNamespace(mean=torch.tensor(0.3), std=torch.tensor(2.0))
    monkeypatch.setattr(workload.encoders["vae"], "encode", lambda pixels: SimpleNamespace(latent_dist=posterior))
    seen = []
    monkeypatch.setattr(workload, "denoise", lambda noisy, inputs: seen.append(noisy) or noisy)
    workload.loss(inputs)
    latents = (0.3 + 2 * inputs["posterior_noise"] - shift) * scaling
    torch.testing.assert_close(seen, [inputs["signal"] * latents + inputs["spread"] * inputs["noise"]])


@pytest.mark.parametrize(
    ("model", "share", "knobs"),
    [
        *((model, share, {}) for model in ("sd-1.5", "sdxl") for share in (True, False, 0.5, 0.75)),
        *((model, 0.5, {"reentrant_checkpointing": True}) for model in ("sd-1.5", "sdxl")),
    ],
)
def test_a_unet_recomputes_the_first_of_its_stages(model, share, knobs):
    trained = training(model, activation_checkpointing=share, **knobs)
    unet = trained.model["unet"] if "unet" in trained.model._modules else trained.model
    stages = [f"{path}.{index}." for path in ("down_blocks", "up_blocks") for index in range(len(getattr(unet, path)))]
    stages.insert(len(unet.down_blocks), "mid_block.")
    recomputed = tuple(stages[: int(len(stages) * share)])
    # The first layers of residual and of transformer blocks. diffusers leaves one block out.
    firsts = {name: module for name, module in unet.named_modules() if name.endswith((".conv1", ".attn1"))}
    del firsts["mid_block.resnets.0.conv1"]
    calls = calls_in_a_step(trained, firsts)
    assert len(calls) > 8
    assert calls == {name: 2 if name.startswith(recomputed) else 1 for name in firsts}


def test_a_share_of_a_unet_that_is_none_of_its_stages_is_told():
    with pytest.raises(CheckFailed, match=r"sdxl-full-fp32 recomputes 0.1 of 7 blocks, which is none; set at least 0.143"):
        training("sdxl", activation_checkpointing=0.1)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(False, [1, 1, 1, 1]), (0.25, [2, 1, 1, 1]), (0.5, [2, 2, 1, 1]), (0.75, [2, 2, 2, 1]), (True, [2, 2, 2, 2])],
)
def test_a_share_of_flux_is_of_its_blocks_of_both_kinds(share, expected):
    trained = training("flux.1-dev", activation_checkpointing=share)
    blocks = {name: module for name, module in trained.model.named_modules() if re.search(r"blocks\.\d+\.attn$", name)}
    assert list(calls_in_a_step(trained, blocks).values()) == expected


def test_ddpm_noise_and_min_snr_weights_are_the_library_s():
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    timesteps, signal, spread = diffusion.ddpm_times(256)
    latents, noise = torch.randn(256, 4), torch.randn(256, 4)
    mixed = signal[:, None] * latents + spread[:, None] * noise
    torch.testing.assert_close(mixed, scheduler.add_noise(latents, noise, timesteps), rtol=1e-4, atol=1e-5)
    ratio = compute_snr(scheduler, timesteps)
    weight = diffusion.min_snr_weight(signal, spread, gamma=5.0)
    torch.testing.assert_close(weight, torch.clamp(5 / ratio, max=1), rtol=1e-3, atol=0)
    assert weight.min() < 1 == weight.max()


def test_flow_times_are_logit_normal_and_shifted_towards_noise():
    torch.manual_seed(0)
    timesteps, signal, spread = diffusion.flow_times(20_001, shift=3.0)
    torch.testing.assert_close(signal + spread, torch.ones_like(signal))
    torch.testing.assert_close(timesteps, 1000 * spread)
    # The median of the normal is 0, its sigmoid 1/2, shifted 3/2 / 2; and one deviation above likewise.
    upper = 3 * torch.tensor(1.0).sigmoid() / (1 + 2 * torch.tensor(1.0).sigmoid())
    assert spread.median() == pytest.approx(0.75, abs=0.01)
    assert spread.quantile(0.8413) == pytest.approx(upper.item(), abs=0.01)


def test_losses_are_of_what_each_model_predicts():
    latents, noise, predicted, spread = torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5), torch.rand(3, 1)
    weights, off = torch.rand(3, 1), predicted - (noise - latents)
    noisy = (1 - spread) * latents + spread * noise
    assert_close = torch.testing.assert_close
    assert_close(diffusion.epsilon_loss(predicted, noise, weights), (weights * (predicted - noise).square()).mean())
    assert_close(diffusion.flow_loss(predicted, latents, noise), off.square().mean())
    # Preconditioning weights the loss by the noise.
    assert_close(diffusion.preconditioned_flow_loss(predicted, noisy, latents, spread), (spread * off).square().mean())


@pytest.mark.parametrize(
    ("model", "loss"),
    [("sd-1.5", "epsilon_loss"), ("sdxl", "epsilon_loss"), ("sd3", "preconditioned_flow_loss"), ("flux.1-dev", "flow_loss")],
)
def test_models_are_trained_by_their_loss(model, loss, monkeypatch):
    seen = []
    monkeypatch.setattr(diffusion, loss, lambda *args: seen.append(args) or args[0].mean())
    training(model).step(True)
    assert len(seen) == 1
    assert loss != "epsilon_loss" or (seen[0][2] is not None) == (model == "sdxl")
