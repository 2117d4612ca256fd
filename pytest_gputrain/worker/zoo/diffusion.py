"""Builds the family of image diffusion models, by diffusers: Stable Diffusion 1.5, XL, 3 and 3.5, FLUX.1 and FLUX.2."""

from __future__ import annotations

import abc
import contextlib
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gputrain.cases.architectures.facts import Architecture
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.zoo.workload import Batch, Workload, share_of

TINY_PIXELS: Final = 80
"""Side of a tiny image. With 64 the innermost self-attention of Stable Diffusion 1.5 would have one token, and its queries
and keys no gradient."""

TINY_TEXT_TOKENS: Final = 16

TINY_BATCH_SIZE: Final = 4
"""The most samples of a batch at tiny scale, because 96 of them would take seconds a step."""

PIXELS_PER_LATENT: Final = 8
"""The scale of all autoencoders: they halve an image's sides three times."""

SIDE_MULTIPLE: Final = 2 * PIXELS_PER_LATENT
"""Transformers take patches of 2x2 latents."""

TIMESTEPS: Final = 1000


def image_diffusion(architecture: Architecture, case: Case, scale: Scale) -> ImageDiffusion:
    """Return the workload of the model's denoiser."""
    return DENOISERS[architecture.trained_part.model_class](architecture, case, scale)


class ImageDiffusion(Workload):
    """A denoiser under training: noise is added to latents, and the denoiser predicts it.

    Images and captions are encoded in the step where the encoder is a part of the model; else their latents and embeddings
    are in the batch, as if cached. Noise and timesteps are drawn once with the batch, so that every step solves the same
    problem: losses can be compared, and drawing is not in what is timed.
    """

    def __init__(self, architecture: Architecture, case: Case, scale: Scale) -> None:
        if any(side % SIDE_MULTIPLE for side in case.sides):
            nearest = "x".join(str(max(SIDE_MULTIPLE, side // SIDE_MULTIPLE * SIDE_MULTIPLE)) for side in case.sides)
            raise CheckFailed(
                f"{case.model} cannot train on images of {case.resolution}: both sides must be multiples of "
                f"{SIDE_MULTIPLE}; choose resolution={nearest!r}"
            )
        self.width, self.height = case.sides if scale == "full" else (TINY_PIXELS, TINY_PIXELS)
        self.samples = case.batch_size if scale == "full" else min(case.batch_size, TINY_BATCH_SIZE)
        tokens: int = architecture.step["text_tokens"]
        self.text_tokens = tokens if scale == "full" else min(tokens, TINY_TEXT_TOKENS)
        self.facts = architecture.trained_part.facts(scale)
        taken, given = self.facts["in_channels"], self.facts.get("out_channels")
        if given not in (None, taken):
            raise CheckFailed(
                f"{case.model} has in_channels={taken} and out_channels={given} in its config.json: its inputs beside "
                "noisy latents is not known"
            )
        super().__init__(architecture, case, scale)

    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of the batch's latents as the denoiser takes them, samples first."""
        height, width = self.height // PIXELS_PER_LATENT, self.width // PIXELS_PER_LATENT
        return (self.samples, self.facts["in_channels"], height, width)

    @abc.abstractmethod
    def conditions(self) -> dict[str, Tensor]:
        """Return the inputs of the denoiser beside latents and timesteps, on the default device; ``text`` unless it is
        encoded."""

    @abc.abstractmethod
    def denoise(self, noisy: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the model's prediction, in the shape of ``noisy``."""

    def batch(self, device: torch.device) -> Batch:
        """Draw random images or latents, captions or embeddings, noise, and a timestep a sample."""
        shape = self.latent_shape()
        with device:
            inputs = {"noise": torch.randn(shape), **self.conditions(), **self._times(len(shape))}
            if "vae" in self.encoders:
                inputs["pixels"] = torch.rand(self.samples, 3, self.height, self.width) * 2 - 1
                inputs["posterior_noise"] = torch.randn(shape)
            else:
                inputs["latents"] = torch.randn(shape)
            if "text_encoder" in self.encoders:
                vocabulary: int = self.architecture.parts["text_encoder"].facts(self.scale)["vocab_size"]
                inputs["tokens"] = torch.randint(0, vocabulary, (self.samples, self.text_tokens))
        return Batch(inputs=inputs, samples=self.samples)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        signal, spread, noise = inputs["signal"], inputs["spread"], inputs["noise"]
        with torch.no_grad():
            latents = self._latents(inputs)
            noisy = (signal * latents + spread * noise).to(noise.dtype)
            if "text_encoder" in self.encoders:
                inputs = {**inputs, "text": self.encoders["text_encoder"](inputs["tokens"]).last_hidden_state}
        predicted = self.denoise(noisy, inputs)
        if self.architecture.step["objective"] == "epsilon":
            return epsilon_loss(predicted, noise, inputs.get("weight"))
        if self.architecture.step.get("preconditioned"):
            return preconditioned_flow_loss(predicted, noisy, latents, spread)
        return flow_loss(predicted, latents, noise)

    def _times(self, dimensions: int) -> dict[str, Tensor]:
        """Draw timesteps (samples,). Return the factors of latents and noise that they stand for, in fp32 and
        broadcastable."""
        step = self.architecture.step
        if step["objective"] == "epsilon":
            timesteps, signal, spread = ddpm_times(self.samples)
        else:
            timesteps, signal, spread = flow_times(self.samples, step["shift"])
        shape = (-1, *[1] * (dimensions - 1))
        times = {"signal": signal.view(shape), "spread": spread.view(shape)}
        if "min_snr_gamma" in step:
            times["weight"] = min_snr_weight(signal, spread, step["min_snr_gamma"]).view(shape)
        return {"timesteps": timesteps, **times}

    def _latents(self, inputs: dict[str, Tensor]) -> Tensor:
        if "vae" not in self.encoders:
            return inputs["latents"]
        vae: Any = self.encoders["vae"]
        pixels = inputs["pixels"]
        casting = (
            contextlib.nullcontext()
            if self.architecture.step.get("autocast_vae", True)
            else torch.autocast(pixels.device.type, enabled=False)
        )
        with casting:
            posterior = vae.encode(pixels).latent_dist
        latents = posterior.mean + posterior.std * inputs["posterior_noise"]
        scaled: Tensor = (latents - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
        return scaled

    def _embeddings(self, text_width: int, pooled_width: int) -> dict[str, Tensor]:
        """Draw cached embeddings of captions, one of every token and one pooled."""
        return {
            "text": torch.randn(self.samples, self.text_tokens, text_width),
            "pooled": torch.randn(self.samples, pooled_width),
        }


class UNet(ImageDiffusion):
    """Stable Diffusion 1.5 and XL."""

    def __init__(self, architecture: Architecture, case: Case, scale: Scale) -> None:
        config = architecture.trained_part.config
        known = {"class_embed_type": (), "encoder_hid_dim_type": (), "addition_embed_type": ("text_time",)}
        for key, values in known.items():
            if (value := config.get(key)) is not None and value not in values:
                raise CheckFailed(f"{case.model} has {key}={value!r} in its config.json, a condition that is not known")
        super().__init__(architecture, case, scale)

    def checkpoint_activations(self, share: float) -> None:
        recompute_stages(self, share)

    def conditions(self) -> dict[str, Tensor]:
        if not self.facts.get("addition_embed_type"):
            width = self.facts["cross_attention_dim"]
            return {} if self.encoders else {"text": torch.randn(self.samples, self.text_tokens, width)}
        # These numbers are the size before cropping, the place of the crop, and the size. Each is embedded by itself.
        sizes = torch.tensor([self.height, self.width, 0, 0, self.height, self.width], dtype=torch.float32)
        pooled = self.facts["projection_class_embeddings_input_dim"] - len(sizes) * self.facts["addition_time_embed_dim"]
        cached = self._embeddings(self.facts["cross_attention_dim"], pooled)
        return {**cached, "time_ids": sizes.repeat(self.samples, 1)}

    def denoise(self, noisy: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        added = {"text_embeds": inputs["pooled"], "time_ids": inputs["time_ids"]} if "time_ids" in inputs else None
        predicted: Tensor = self.model(
            noisy, inputs["timesteps"], encoder_hidden_states=inputs["text"], added_cond_kwargs=added
        ).sample
        return predicted


class MultimodalTransformer(ImageDiffusion):
    """Stable Diffusion 3."""

    def conditions(self) -> dict[str, Tensor]:
        return self._embeddings(self.facts["joint_attention_dim"], self.facts["pooled_projection_dim"])

    def denoise(self, noisy: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        predicted: Tensor = self.model(
            hidden_states=noisy,
            timestep=inputs["timesteps"],
            encoder_hidden_states=inputs["text"],
            pooled_projections=inputs["pooled"],
        ).sample
        return predicted


class Flux(ImageDiffusion):
    """FLUX.1. Its latents are cached as it takes them: squares of 2x2 packed into one token, row by row."""

    def latent_shape(self) -> tuple[int, ...]:
        return (self.samples, self.height // SIDE_MULTIPLE * (self.width // SIDE_MULTIPLE), self.facts["in_channels"])

    def conditions(self) -> dict[str, Tensor]:
        cached = self._embeddings(self.facts["joint_attention_dim"], self.facts["pooled_projection_dim"])
        rows, columns = torch.arange(self.height // SIDE_MULTIPLE), torch.arange(self.width // SIDE_MULTIPLE)
        positions = torch.cartesian_prod(torch.zeros(1, dtype=rows.dtype), rows, columns)
        return {
            **cached,
            "guidance": torch.full((self.samples,), self.architecture.step["guidance"], dtype=torch.float32),
            "text_ids": torch.zeros(self.text_tokens, 3, dtype=torch.float32),
            "image_ids": positions.to(torch.float32),
        }

    def denoise(self, noisy: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        predicted: Tensor = self.model(
            hidden_states=noisy,
            timestep=inputs["timesteps"] / TIMESTEPS,
            guidance=inputs["guidance"] if self.facts["guidance_embeds"] else None,
            encoder_hidden_states=inputs["text"],
            pooled_projections=inputs["pooled"],
            txt_ids=inputs["text_ids"],
            img_ids=inputs["image_ids"],
        ).sample
        return predicted


class Flux2(Flux):
    """FLUX.2. It knows positions in time, height, width and text, and nothing of a text as a whole."""

    def conditions(self) -> dict[str, Tensor]:
        rows, columns = torch.arange(self.height // SIDE_MULTIPLE), torch.arange(self.width // SIDE_MULTIPLE)
        nowhere = torch.zeros(1, dtype=rows.dtype)
        words = torch.arange(self.text_tokens)
        return {
            "text": torch.randn(self.samples, self.text_tokens, self.facts["joint_attention_dim"]),
            "guidance": torch.full((self.samples,), self.architecture.step["guidance"], dtype=torch.float32),
            "text_ids": torch.cartesian_prod(nowhere, nowhere, nowhere, words),
            "image_ids": torch.cartesian_prod(nowhere, rows, columns, nowhere),
        }

    def denoise(self, noisy: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        predicted: Tensor = self.model(
            hidden_states=noisy,
            timestep=inputs["timesteps"] / TIMESTEPS,
            guidance=inputs["guidance"] if self.facts["guidance_embeds"] else None,
            encoder_hidden_states=inputs["text"],
            txt_ids=inputs["text_ids"],
            img_ids=inputs["image_ids"],
        ).sample
        return predicted


DENOISERS: Final[dict[str, type[ImageDiffusion]]] = {
    "UNet2DConditionModel": UNet,
    "SD3Transformer2DModel": MultimodalTransformer,
    "FluxTransformer2DModel": Flux,
    "Flux2Transformer2DModel": Flux2,
}
"""The denoisers by diffusers' class."""


def recompute_stages(workload: Workload, share: float) -> None:
    """Recompute a UNet's residual and transformer blocks as diffusers does: all but the first one of the middle stage.

    A share is one of the stages, those on the way down first, then the middle, then those on the way up.
    """
    model: Any = workload.model
    model.enable_gradient_checkpointing(workload.checkpointed)
    stages = [*model.down_blocks, model.mid_block, *model.up_blocks]
    for stage in stages[share_of(len(stages), share, str(workload.case)) :]:
        for module in stage.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False


def ddpm_times(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw uniform timesteps of DDPM (arXiv:2006.11239) with Stable Diffusion's betas, whose roots are equally spaced.

    Returns:
        Timesteps as int64, and the factors of latents and of noise; each (samples,), the factors' squares add up to 1.
    """
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, TIMESTEPS, dtype=torch.float32).square()
    signal_shares = torch.cumprod(1 - betas, dim=0)
    timesteps = torch.randint(0, TIMESTEPS, (samples,))
    return timesteps, signal_shares[timesteps].sqrt(), (1 - signal_shares[timesteps]).sqrt()


def flow_times(samples: int, shift: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draw logit-normal times of rectified flow, shifted towards noise (arXiv:2403.03206, sections 3.1 and 5.3.2).

    Returns:
        Timesteps from 0 to 1000, and the factors of latents and of noise; each (samples,), the factors add up to 1.
    """
    uniform = torch.randn(samples, dtype=torch.float32).sigmoid()
    sigmas = shift * uniform / (1 + (shift - 1) * uniform)
    return sigmas * TIMESTEPS, 1 - sigmas, sigmas


def min_snr_weight(signal: Tensor, spread: Tensor, gamma: float) -> Tensor:
    """Return the weight of each sample's epsilon loss (arXiv:2303.09556): min(snr, gamma) / snr."""
    ratio = (signal / spread).square()
    return ratio.clamp(max=gamma) / ratio


def epsilon_loss(predicted: Tensor, noise: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the weighted mean squared error of the predicted noise, in fp32."""
    if weight is None:
        return functional.mse_loss(predicted.float(), noise.float())
    return (weight * (predicted.float() - noise.float()).square()).mean()


def flow_loss(predicted: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
    """Return the mean squared error of the predicted velocity from latents to noise, in fp32."""
    return functional.mse_loss(predicted.float(), noise.float() - latents.float())


def preconditioned_flow_loss(predicted: Tensor, noisy: Tensor, latents: Tensor, spread: Tensor) -> Tensor:
    """Return the mean squared error, in fp32, of the latents that the predicted velocity leads to from ``noisy``."""
    return functional.mse_loss(noisy.float() - spread * predicted.float(), latents.float())
