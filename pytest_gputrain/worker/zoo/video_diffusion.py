"""Builds the family of video diffusion transformers, by diffusers: Mochi, Hunyuan, Wan.

Only the transformer trains: videos, texts and images enter as their encoders left them, as trainers store them first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gputrain.cases.architectures.facts import Architecture
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.zoo.workload import Batch, Workload

TINY_RESOLUTION: Final = (128, 64)
"""Width and height that a tiny video has at most: 8 x 4 tokens a latent frame."""

TINY_FRAMES: Final = 13
"""Frames that a tiny video has at most: one, and whole groups of 4 as well as of 6."""

PATCH: Final = 2
"""Latents a side of one token, in all three models."""

GUIDANCE: Final = 1000.0
"""A guidance scale of 1 in the thousandths that Hunyuan embeds, like its time."""


class VideoDiffusion(Workload):
    """Random weights by the constructors, flow matching (arXiv:2210.02747), the attention that diffusers picks."""

    def __init__(self, architecture: Architecture, case: Case, scale: Scale) -> None:
        # First, because a full-size build takes minutes.
        self._latent_size = latent_size(architecture, case, scale)
        known, given = architecture.step["latent_channels"], architecture.trained_part.config.get("out_channels")
        if given not in (None, known):
            raise CheckFailed(
                f"{case.model} has out_channels={given} in its config.json: of its class only latents of {known} channels "
                "are known"
            )
        super().__init__(architecture, case, scale)

    def batch(self, device: torch.device) -> Batch:
        """Draw random latents of videos with noise of the same shape (batch, channels, frames, height, width), times in 0..1
        (batch), and what the model is conditioned on, by the names of its arguments.

        Noise and times are drawn here, so that every step trains on the same. All tokens of the text are real.
        """
        step, samples = self.architecture.step, self.case.batch_size
        part = self.architecture.trained_part
        with device:
            shape = (samples, step["latent_channels"], *self._latent_size)
            inputs = {"latents": torch.randn(shape), "noise": torch.randn(shape)}
            inputs["time"] = torch.rand(samples, dtype=torch.float32)
            # What the model takes beside noisy latents: a first image, of those that make a video of one.
            if condition := part.facts(self.scale)["in_channels"] - step["latent_channels"]:
                inputs["condition"] = torch.randn(samples, condition, *self._latent_size)
            tokens = {"text": step["text_tokens"][self.scale], "image": step.get("image_tokens", 0)}
            inputs |= CONDITIONS[part.model_class](samples, tokens, part.facts(self.scale))
        return Batch(inputs=inputs, samples=samples)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the mean squared error of the velocity on the straight way between latents and noise.

        Time runs as the model has it: to the noise, or with Mochi to the latents. The model gets thousandths of it.
        """
        conditions = dict(inputs)
        start, end = conditions.pop("latents"), conditions.pop("noise")
        if self.architecture.step["time_ends_at"] == "latents":
            start, end = end, start
        time = conditions.pop("time")
        way = time.view(-1, 1, 1, 1, 1)
        noisy = ((1 - way) * start + way * end).to(start.dtype)
        if "condition" in conditions:
            noisy = torch.cat([noisy, conditions.pop("condition")], dim=1)
        (velocity,) = self.model(noisy, timestep=1000 * time, return_dict=False, **conditions)
        return functional.mse_loss(velocity.float(), (end - start).float())


def latent_size(architecture: Architecture, case: Case, scale: Scale) -> tuple[int, int, int]:
    """Return frames, height and width of the case's videos as their encoder leaves them.

    Raises:
        CheckFailed: the video does not come out in whole tokens.
    """
    pixels, group = architecture.step["pixels_per_latent"], architecture.step["frames_per_latent"]
    side = PATCH * pixels
    width, height = case.sides
    if width % side or height % side:
        near = "x".join(str(max(side, round(length / side) * side)) for length in (width, height))
        raise CheckFailed(f"{case.model} takes sides of a multiple of {side} pixels, as {near}, not {case.resolution}")
    last = (case.frames - 1) % group
    if last and not architecture.step.get("cuts_last_frames"):
        near = f"{case.frames - last} or {case.frames - last + group}"
        raise CheckFailed(f"{case.model} takes one frame and whole groups of {group} more, as {near}, not {case.frames}")
    frames = case.frames
    if scale == "tiny":
        width, height = (min(length, most) for length, most in zip((width, height), TINY_RESOLUTION, strict=True))
        frames = min(frames, TINY_FRAMES)
    return (frames - 1) // group + 1, height // pixels, width // pixels


def _mochi(samples: int, tokens: dict[str, int], facts: dict[str, Any]) -> dict[str, Tensor]:
    return {
        "encoder_hidden_states": torch.randn(samples, tokens["text"], facts["text_embed_dim"]),
        "encoder_attention_mask": torch.ones(samples, tokens["text"], dtype=torch.bool),
    }


def _hunyuan(samples: int, tokens: dict[str, int], facts: dict[str, Any]) -> dict[str, Tensor]:
    guidance = {"guidance": torch.full((samples,), GUIDANCE, dtype=torch.float32)} if facts["guidance_embeds"] else {}
    return {
        **_mochi(samples, tokens, facts),
        "pooled_projections": torch.randn(samples, facts["pooled_projection_dim"]),
        **guidance,
    }


def _wan(samples: int, tokens: dict[str, int], facts: dict[str, Any]) -> dict[str, Tensor]:
    """Keep 512 tokens of text at every scale: diffusers splits text from image there. With any other number the model runs
    and its loss falls, but its image branch gets no gradient or the wrong tokens."""
    text = {"encoder_hidden_states": torch.randn(samples, tokens["text"], facts["text_dim"])}
    if facts["image_dim"] is None:
        return text
    return {**text, "encoder_hidden_states_image": torch.randn(samples, tokens["image"], facts["image_dim"])}


CONDITIONS: Final[dict[str, Callable[[int, dict[str, int], dict[str, Any]], dict[str, Tensor]]]] = {
    "MochiTransformer3DModel": _mochi,
    "HunyuanVideoTransformer3DModel": _hunyuan,
    "WanTransformer3DModel": _wan,
}
"""The conditions of each model, by its class: from the samples, the tokens of text and image, and its facts."""
