"""Builds the denoisers of diffusers that train alone: those of videos, and any class in the table of classes.

Images, videos, texts and whatever else conditions them enter as their encoders left them, as trainers store them first. What
a class takes is a row in ``denoiser.json``, after its pipeline in diffusers: how many pixels and frames become one latent,
the order of the latents' dimensions, how many tokens a text has. `CONDITIONS` has what it takes beside latents and time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gputrain.cases.architectures.facts import Architecture
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.zoo.diffusion import TIMESTEPS, TINY_BATCH_SIZE, ddpm_times, epsilon_loss, recompute_stages
from pytest_gputrain.worker.zoo.workload import Batch, Workload

TINY_LATENTS: Final = (16, 8)
"""Width and height that the latents of a tiny image or video have at most: 8 x 4 tokens a latent frame of most models."""

TINY_FRAMES: Final = 13
"""Frames that a tiny video has at most: one, and whole groups of 4 as well as of 6."""

TINY_TEXT_TOKENS: Final = 16

GUIDANCE: Final = 1000.0
"""A guidance scale of 1 in the thousandths that Hunyuan embeds, like its time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The figures from which the shapes of a denoiser's inputs follow.

    Attributes:
        model: name of the case's model.
        scale: of the case.
        samples: of a batch.
        text: tokens of a text.
        frames: the number of latent frames, as ``height`` and ``width`` are sizes of latents; 1 for an image.
        pixels: height and width of the image.
        facts: keys of the config at this scale.
        step: of the class's row.
    """

    model: str
    scale: Scale
    samples: int
    text: int
    frames: int
    height: int
    width: int
    pixels: tuple[int, int]
    facts: dict[str, Any]
    step: dict[str, Any]

    @property
    def patch(self) -> int:
        """The number of latents along each side of a token."""
        patch = self.facts.get("all_patch_size") or self.facts.get("patch_size") or 1
        return int(patch if isinstance(patch, int) else patch[-1])

    @property
    def patch_frames(self) -> int:
        """The number of latent frames of a token."""
        patch = self.facts.get("patch_size")
        return int(patch[0] if isinstance(patch, list | tuple) and len(patch) == 3 else self.facts.get("patch_size_t") or 1)

    def latents(self, channels: int) -> tuple[int, ...]:
        """Return the shape of latents in the order of the row's layout, such as ``bcfhw``. Dimensions in brackets are
        one."""
        sizes = {"b": self.samples, "c": channels, "f": self.frames, "h": self.height, "w": self.width}
        layout: str = self.step["layout"]
        shape: list[int] = []
        for group in layout.replace("(", " ").replace(")", " ").split():
            packed = f"({group})" in layout
            shape += [math.prod(sizes[axis] for axis in group)] if packed else [sizes[axis] for axis in group]
        return tuple(shape)

    def embedded(self, key: str, tokens: int | None = None) -> Tensor:
        """Draw embeddings of a text, or of this many tokens. Their width is a key of the config."""
        width = self.facts[key]
        if width is None:
            raise CheckFailed(
                f"{self.model} lacks the key {key} in its config.json, so the width of a text is not known; add it"
            )
        return torch.randn(self.samples, self.text if tokens is None else tokens, width)

    def mask(self, tokens: int | None = None) -> Tensor:
        """Return a mask of a text without padding."""
        return torch.ones(self.samples, self.text if tokens is None else tokens, dtype=torch.bool)

    def few(self, tokens: int) -> int:
        """Return the number of tokens of a further text in the full-size model; at tiny scale fewer."""
        return tokens if self.scale == "full" else min(tokens, TINY_TEXT_TOKENS)


class Denoiser(Workload):
    """A denoiser with random weights from its class, and with the attention that diffusers chooses.

    The model learns the velocity between latents and noise (arXiv:2210.02747), or the noise where a row says so.
    """

    def __init__(self, architecture: Architecture, case: Case, scale: Scale) -> None:
        # The build takes minutes at full size, so a wrong size is refused before it.
        self._sizes = sizes(architecture, case, scale)
        facts, step = self._sizes.facts, self._sizes.step
        taken = facts.get("in_channels", facts.get("in_visual_dim"))
        if not taken:
            raise CheckFailed(f"{case.model} has in_channels={taken!r} in its config.json; give the channels of its latents")
        given = facts.get("out_channels")
        self._channels: int = step.get("latent_channels") or (given if given and step.get("takes_condition") else taken)
        known = (None, self._channels, *([2 * self._channels] if step.get("learns_variance") else []))
        if given not in known and not step.get("packs_channels"):
            raise CheckFailed(
                f"{case.model} has in_channels={taken} and out_channels={given} in its config.json: what it takes beside "
                "noisy latents is not known"
                if "latent_channels" not in step
                else f"{case.model} has out_channels={given} in its config.json: of its class only latents of "
                f"{self._channels} channels are known"
            )
        for key, values in step.get("only", {}).items():
            if (value := facts.get(key)) not in values:
                raise CheckFailed(f"{case.model} has {key}={value!r} in its config.json, a condition that is not known")
        # A model that makes a video from an image takes further channels for its first image.
        self._condition = taken - self._channels if step.get("takes_condition") else 0
        if self._condition < 0:
            raise CheckFailed(
                f"{case.model} has in_channels={taken} in its config.json, fewer than the {self._channels} of its latents"
            )
        super().__init__(architecture, case, scale)
        names = inspect.signature(type(self.model).forward).parameters
        self._time = next(name for name in names if name.startswith("timestep") or name == "t")
        self._constants: dict[str, Any] = {}

    def build_part(self, name: str) -> nn.Module:
        model: Any = super().build_part(name)
        device = torch.get_default_device()
        for module in model.modules():
            # A parameter that is made by torch.Tensor lies on the host, whatever the default device is.
            if any(value.device != device for value in module.parameters(recurse=False)):
                module.to(device)
        if self._sizes.step.get("keeps_fp32"):  # diffusers also keeps these modules in fp32, and they run in no other type.
            for path, module in model.named_modules():
                if path.rpartition(".")[2] in model._keep_in_fp32_modules:
                    module.float()
                    # Before training, the weights of these layers are zeros, which let no gradient through.
                    for layer in module.children():
                        if isinstance(layer, nn.Linear):
                            layer.reset_parameters()
        whole: nn.Module = model
        return whole

    def checkpoint_activations(self, share: float) -> None:
        """Recompute the blocks in backward, or the first ``share`` of them; in a UNet the stages."""
        if "mid_block" in self.architecture.blocks:
            recompute_stages(self, share)
        else:
            super().checkpoint_activations(share)

    @property
    def blocks(self) -> list[nn.Module]:
        """The model's repeated blocks; Stable Cascade has a list of them for each stage."""
        return [block for blocks in super().blocks for block in (blocks if isinstance(blocks, nn.ModuleList) else (blocks,))]

    def batch(self, device: torch.device) -> Batch:
        """Return random latents, noise of the same shape, times (batch), and the conditions of the model.

        The conditions have the names of the model's arguments. The name of an entry of a dictionary or list has a dot.

        Noise and times are drawn here, so that every step trains on the same. All tokens of the text are real.
        """
        sizes = self._sizes
        with device:
            shape = sizes.latents(self._channels)
            inputs = {"latents": torch.randn(shape), "noise": torch.randn(shape)}
            if sizes.step.get("objective") == "epsilon":
                inputs["time"], *factors = ddpm_times(sizes.samples)
                ways = [factor.view(-1, *[1] * (len(shape) - 1)) for factor in factors]
                inputs |= dict(zip(("signal", "spread"), ways, strict=True))
            else:
                inputs["time"] = torch.rand(sizes.samples, dtype=torch.float32)
            if self._condition:
                inputs["condition"] = torch.randn(sizes.latents(self._condition))
            conditions = CONDITIONS[self.architecture.trained_part.model_class](sizes)
            # Only tensors are moved between devices, so other values stay here.
            self._constants = {name: value for name, value in conditions.items() if not isinstance(value, Tensor)}
            inputs |= {name: value for name, value in conditions.items() if isinstance(value, Tensor)}
        return Batch(inputs=inputs, samples=sizes.samples)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the mean squared error of the noise, or of the velocity on the straight way between latents and noise.

        Time runs as the model has it: to the noise, or as with Mochi to the latents. The model gets it in thousandths, or as
        it is.
        """
        step = self._sizes.step
        conditions = {**self._constants, **inputs}
        latents, noise, time = (conditions.pop(name) for name in ("latents", "noise", "time"))
        if step.get("objective") == "epsilon":
            noisy = (conditions.pop("signal") * latents + conditions.pop("spread") * noise).to(noise.dtype)
            noisy = self._beside_condition(noisy, conditions)
            time = time * step["timesteps"] / TIMESTEPS if "timesteps" in step else time
            return epsilon_loss(self._denoised(noisy, time, conditions), noise)
        start, end = (noise, latents) if step["time_ends_at"] == "latents" else (latents, noise)
        way = time.view(-1, *[1] * (latents.dim() - 1))
        noisy = ((1 - way) * start + way * end).to(start.dtype)
        noisy = self._beside_condition(noisy, conditions)
        velocity = self._denoised(noisy, step.get("timesteps", TIMESTEPS) * time, conditions)
        return functional.mse_loss(velocity.float(), (end - start).float())

    def _beside_condition(self, noisy: Tensor, conditions: dict[str, Any]) -> Tensor:
        """Return noisy latents with the further channels that the model takes. The latents without them are freed."""
        if "condition" not in conditions:
            return noisy
        return torch.cat([noisy, conditions.pop("condition")], dim=self._sizes.step["layout"].index("c"))

    def _denoised(self, noisy: Tensor, time: Tensor, conditions: dict[str, Any]) -> Tensor:
        shape = self._sizes.latents(self._channels)
        if self._sizes.step.get("casts_time"):
            time = time.to(noisy.dtype)
        sample = list(noisy.unbind()) if self._sizes.step.get("takes_list") else noisy
        output = self.model(sample, **{self._time: time}, return_dict=False, **nested(conditions))
        predicted = output if isinstance(output, Tensor) else output[0]
        if isinstance(predicted, list):
            predicted = torch.stack(predicted)
        if self._sizes.step.get("learns_variance") and predicted.shape[1] == 2 * self._channels:
            predicted, _ = predicted.chunk(2, dim=1)
        if predicted.shape != shape:
            raise CheckFailed(
                f"{self.case.model} gives {tuple(predicted.shape)} for latents of {shape}: what its config.json "
                "describes is not known"
            )
        return predicted


def nested(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments from inputs with dots in their names: ``a.b`` becomes an entry of a dictionary ``a``, and
    ``a.0`` an element of a list ``a``."""
    arguments: dict[str, Any] = {}
    for name, value in inputs.items():
        whole, _, entry = name.partition(".")
        if not entry:
            arguments[whole] = value
        elif entry.isdecimal():
            arguments.setdefault(whole, []).append(value)
        else:
            arguments.setdefault(whole, {})[entry] = value
    return arguments


def sizes(architecture: Architecture, case: Case, scale: Scale) -> Sizes:
    """Return the sizes of a case's inputs, as encoders would produce them.

    Raises:
        CheckFailed: an image does not come out in whole tokens, or a video in whole latents.
    """
    facts = architecture.trained_part.facts(scale)
    step = {"layout": "bcfhw" if "frames" in architecture.needs else "bchw", **architecture.step}
    for variant in step.get("variants", []):
        if all(architecture.trained_part.config.get(key) in values for key, values in variant["where"].items()):
            step |= variant["step"]
    pixels, group = step["pixels_per_latent"], step.get("frames_per_latent", 1)
    width, height = case.sides
    frames = case.frames or 1
    text: int | dict[Scale, int] = step.get("text_tokens", 0)
    samples = case.batch_size
    made = Sizes(
        model=case.model,
        scale=scale,
        samples=samples,
        text=text[scale] if isinstance(text, dict) else text if scale == "full" else min(text, TINY_TEXT_TOKENS),
        frames=1,
        height=1,
        width=1,
        pixels=(height, width),
        facts=facts,
        step=step,
    )
    stages: Any = facts.get("block_out_channels")
    side = pixels * (2 ** (len(stages) - 1) if stages else 1) * (1 if "(" in step["layout"] else made.patch)
    if isinstance(side, int) and (width % side or height % side):
        near = "x".join(str(max(side, round(length / side) * side)) for length in (width, height))
        raise CheckFailed(f"{case.model} takes sides of a multiple of {side} pixels, as {near}, not {case.resolution}")
    if step.get("square") and width != height:
        raise CheckFailed(f"{case.model} takes square images, as {width}x{width}, not {case.resolution}")
    last = (frames - 1) % group
    if last and not step.get("cuts_last_frames"):
        near = f"{frames - last} or {frames - last + group}"
        raise CheckFailed(f"{case.model} takes one frame and whole groups of {group} more, as {near}, not {frames}")
    if scale == "tiny":
        whole = math.ceil(side)
        most = TINY_LATENTS[1:] * 2 if step.get("square") else TINY_LATENTS
        width, height = (
            min(length, math.ceil(count * pixels / whole) * whole)
            for length, count in zip((width, height), most, strict=True)
        )
        frames = min(frames, TINY_FRAMES)
        samples = samples if case.frames else min(samples, TINY_BATCH_SIZE)
    latent_frames = (frames - 1) // group + 1
    return dataclasses.replace(
        made,
        samples=samples,
        frames=math.ceil(latent_frames / made.patch_frames) * made.patch_frames,
        height=math.ceil(height / pixels),
        width=math.ceil(width / pixels),
        pixels=(height, width),
    )


Conditions = dict[str, Any]
"""Arguments of a model by their names; an entry of a dictionary or list has a dot in its name."""


def _text(key: str, *, mask: str = "") -> Callable[[Sizes], Conditions]:
    """Return a function that makes embeddings of a text, with a mask if ``mask`` names one. Their width is a key of the
    config."""

    def conditions(sizes: Sizes) -> Conditions:
        return {"encoder_hidden_states": sizes.embedded(key), **({mask: sizes.mask()} if mask else {})}

    return conditions


_MASK: Final = "encoder_attention_mask"
_masked_text = _text("text_embed_dim", mask=_MASK)
_caption = _text("caption_channels", mask=_MASK)


def _guidance(sizes: Sizes, scale: float = GUIDANCE) -> Conditions:
    return {"guidance": torch.full((sizes.samples,), scale, dtype=torch.float32)} if sizes.facts["guidance_embeds"] else {}


def _hunyuan_video(sizes: Sizes) -> Conditions:
    pooled = torch.randn(sizes.samples, sizes.facts["pooled_projection_dim"])
    return {**_masked_text(sizes), "pooled_projections": pooled, **_guidance(sizes)}


def _hunyuan_image(sizes: Sizes) -> Conditions:
    dtype = torch.get_default_dtype()
    conditions = {**_masked_text(sizes), **{name: value.to(dtype) for name, value in _guidance(sizes).items()}}
    if sizes.facts["text_embed_2_dim"] is not None:  # ByT5 embeds the words that the image is to show.
        tokens = sizes.few(128)
        conditions["encoder_hidden_states_2"] = sizes.embedded("text_embed_2_dim", tokens)
        conditions["encoder_attention_mask_2"] = sizes.mask(tokens)
    if sizes.facts["use_meanflow"]:
        conditions["timestep_r"] = torch.rand(sizes.samples) * TIMESTEPS
    return conditions


def _wan(sizes: Sizes) -> Conditions:
    """Keep 512 tokens of text at every scale: diffusers splits text from image there. With any other number the model runs
    and its loss falls, but its image branch gets no gradient or the wrong tokens."""
    text = _text("text_dim")(sizes)
    if sizes.facts["image_dim"] is None:
        return text
    return {**text, "encoder_hidden_states_image": sizes.embedded("image_dim", sizes.step["image_tokens"])}


def _wan_vace(sizes: Sizes) -> Conditions:
    return {**_wan(sizes), "control_hidden_states": torch.randn(sizes.latents(sizes.facts["vace_in_channels"]))}


def _pixart(sizes: Sizes) -> Conditions:
    """Add the size of the image as PixArt-alpha for 1024 pixels does. Its class recognises that model by its sample_size."""
    added = sizes.facts["use_additional_conditions"]
    if sizes.facts["sample_size"] == 128 if added is None else added:
        resolution = torch.tensor(sizes.pixels, dtype=torch.get_default_dtype()).repeat(sizes.samples, 1)
        size = {"resolution": resolution, "aspect_ratio": resolution[:, :1] / resolution[:, 1:]}
        return {**_caption(sizes), **{f"added_cond_kwargs.{name}": value for name, value in size.items()}}
    return {**_caption(sizes), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


def _sana(sizes: Sizes) -> Conditions:
    return {**_caption(sizes), **_guidance(sizes, 1.0)}


def _ltx(sizes: Sizes) -> Conditions:
    seconds, side = sizes.step["frames_per_latent"] / sizes.step["frame_rate"], sizes.step["pixels_per_latent"]
    return {
        **_caption(sizes),
        "num_frames": sizes.frames,
        "height": sizes.height,
        "width": sizes.width,
        "rope_interpolation_scale": (seconds, side, side),
    }


def _cog_video(sizes: Sizes) -> Conditions:
    facts = sizes.facts
    conditions = _text("text_embed_dim")(sizes)
    if facts["use_rotary_positional_embeddings"]:
        tokens = sizes.frames // sizes.patch_frames * (sizes.height // sizes.patch) * (sizes.width // sizes.patch)
        angles = torch.rand(tokens, facts["attention_head_dim"], dtype=torch.float32)
        conditions |= {"image_rotary_emb.0": angles.cos(), "image_rotary_emb.1": angles.sin()}
    if facts["ofs_embed_dim"] is not None:
        conditions["ofs"] = torch.full((1,), 2.0)
    return conditions


def _cog_view(sizes: Sizes) -> Conditions:
    size = torch.tensor(sizes.pixels, dtype=torch.get_default_dtype()).repeat(sizes.samples, 1)
    places = {"original_size": size, "target_size": size.clone(), "crop_coords": torch.zeros_like(size)}
    return {**_text("text_embed_dim")(sizes), **places}


def _qwen_image(sizes: Sizes) -> Conditions:
    """Leave out the mask, as the pipeline does if all texts have no padding."""
    shapes = [[(1, sizes.height, sizes.width)]] * sizes.samples
    guidance = _guidance(sizes, 1.0)
    return {**_text("joint_attention_dim")(sizes), "img_shapes": shapes, **guidance}


def _flux_like(sizes: Sizes) -> Conditions:
    places = [torch.zeros(1), torch.arange(sizes.height), torch.arange(sizes.width)]
    image = torch.cartesian_prod(*[place.to(torch.get_default_dtype()) for place in places])
    return {**_text("joint_attention_dim")(sizes), "txt_ids": torch.zeros(sizes.text, 3), "img_ids": image}


def _chroma(sizes: Sizes) -> Conditions:
    tokens = sizes.text + sizes.height * sizes.width
    return {**_flux_like(sizes), "attention_mask": torch.ones(sizes.samples, tokens)}


def _z_image(sizes: Sizes) -> Conditions:
    width = sizes.facts["cap_feat_dim"]
    return {f"cap_feats.{sample}": torch.randn(sizes.text, width) for sample in range(sizes.samples)}


def _kandinsky(sizes: Sizes) -> Conditions:
    conditions = {
        "encoder_hidden_states": sizes.embedded("in_text_dim"),
        "pooled_projections": torch.randn(sizes.samples, sizes.facts["in_text_dim2"]),
        "text_rope_pos": torch.arange(sizes.text),
    }
    lengths = (sizes.frames, sizes.height // sizes.patch, sizes.width // sizes.patch)
    places = {f"visual_rope_pos.{axis}": torch.arange(length) for axis, length in enumerate(lengths)}
    if sizes.facts["visual_cond"]:  # The condition is a first image, and a channel that says which frames have one.
        conditions["condition"] = torch.randn(sizes.latents(sizes.facts["in_visual_dim"] + 1))
    return {**conditions, **places}


def _cosmos(sizes: Sizes) -> Conditions:
    facts = sizes.facts
    projected = facts.get("use_crossattn_projection")
    conditions = _text("crossattn_proj_in_channels" if projected else "text_embed_dim")(sizes)
    if facts["concat_padding_mask"]:
        if importlib.util.find_spec("torchvision") is None:
            raise CheckFailed(f"{sizes.model} needs torchvision, by which diffusers resizes its mask; install it")
        conditions["padding_mask"] = torch.zeros(1, 1, *sizes.pixels)
    if facts["in_channels"] == facts["out_channels"] + 1:  # One more channel says which frames are given.
        conditions["condition_mask"] = torch.zeros(sizes.latents(1))
    return {**conditions, "fps": sizes.step["frame_rate"]}


def _hunyuan_dit(sizes: Sizes) -> Conditions:
    facts = sizes.facts
    tokens = sizes.few(256)
    image = sizes.height // sizes.patch * (sizes.width // sizes.patch)
    angles = torch.rand(image, facts["hidden_size"] // facts["num_attention_heads"], dtype=torch.float32)
    conditions = {
        "encoder_hidden_states": sizes.embedded("cross_attention_dim"),
        "text_embedding_mask": sizes.mask(),
        "encoder_hidden_states_t5": sizes.embedded("cross_attention_dim_t5", tokens),
        "text_embedding_mask_t5": sizes.mask(tokens),
        "image_rotary_emb.0": angles.cos(),
        "image_rotary_emb.1": angles.sin(),
    }
    if facts["use_style_cond_and_image_meta_size"]:
        six = [*sizes.pixels, *sizes.pixels, 0, 0]
        conditions["image_meta_size"] = torch.tensor(six, dtype=torch.get_default_dtype()).repeat(sizes.samples, 1)
        conditions["style"] = torch.zeros(sizes.samples, dtype=torch.int64)
    return conditions


def _classes(key: str) -> Callable[[Sizes], Conditions]:
    """Return a function that draws a class for each sample; nothing if the config has no number of classes."""

    def conditions(sizes: Sizes) -> Conditions:
        count = sizes.facts[key]
        return {"class_labels": torch.randint(0, count, (sizes.samples,))} if count else {}

    return conditions


def _motion(sizes: Sizes) -> Conditions:
    """Repeat the text for each frame, as the pipeline does."""
    return {"encoder_hidden_states": sizes.embedded("cross_attention_dim").repeat_interleave(sizes.frames, dim=0)}


def _stable_video(sizes: Sizes) -> Conditions:
    # The three numbers are frames per second, strength of the motion, and noise on the image.
    return {
        "encoder_hidden_states": sizes.embedded("cross_attention_dim", 1),
        "added_time_ids": torch.ones(sizes.samples, 3),
    }


def _cascade(sizes: Sizes) -> Conditions:
    """Return the inputs of the prior (stage C), or for the decoder (stage B) latents that the prior made."""
    facts = sizes.facts
    conditions = {"clip_text_pooled": sizes.embedded("clip_text_pooled_in_channels", 1)}
    if facts["clip_text_in_channels"]:
        conditions["clip_text"] = sizes.embedded("clip_text_in_channels")
    if facts["clip_image_in_channels"]:
        conditions["clip_img"] = sizes.embedded("clip_image_in_channels", 1)
    if facts["effnet_in_channels"]:
        sides = (math.ceil(side / sizes.step["pixels_per_prior_latent"]) for side in sizes.pixels)
        conditions["effnet"] = torch.randn(sizes.samples, facts["effnet_in_channels"], *sides)
    return conditions


CONDITIONS: Final[dict[str, Callable[[Sizes], Conditions]]] = {
    "AuraFlowTransformer2DModel": _text("joint_attention_dim"),
    "ChromaTransformer2DModel": _chroma,
    "CogVideoXTransformer3DModel": _cog_video,
    "CogView3PlusTransformer2DModel": _cog_view,
    "CogView4Transformer2DModel": _cog_view,
    "CosmosTransformer3DModel": _cosmos,
    "DiTTransformer2DModel": _classes("num_embeds_ada_norm"),
    "HunyuanDiT2DModel": _hunyuan_dit,
    "HunyuanImageTransformer2DModel": _hunyuan_image,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "Kandinsky5Transformer3DModel": _kandinsky,
    "LTXVideoTransformer3DModel": _ltx,
    "LongCatImageTransformer2DModel": _flux_like,
    "Lumina2Transformer2DModel": _text("cap_feat_dim", mask=_MASK),
    "MochiTransformer3DModel": _masked_text,
    "OvisImageTransformer2DModel": _flux_like,
    "PixArtTransformer2DModel": _pixart,
    "QwenImageTransformer2DModel": _qwen_image,
    "SanaTransformer2DModel": _sana,
    "SanaVideoTransformer3DModel": _sana,
    "SkyReelsV2Transformer3DModel": _wan,
    "StableCascadeUNet": _cascade,
    "UNet2DModel": _classes("num_class_embeds"),
    "UNet3DConditionModel": _text("cross_attention_dim"),
    "UNetMotionModel": _motion,
    "UNetSpatioTemporalConditionModel": _stable_video,
    "WanTransformer3DModel": _wan,
    "WanVACETransformer3DModel": _wan_vace,
    "ZImageTransformer2DModel": _z_image,
}
"""The conditions of each model, by its class."""
