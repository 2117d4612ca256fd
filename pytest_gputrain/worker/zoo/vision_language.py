"""Builds the family of language models that read an image through a vision tower, by transformers: LLaVA-1.6 and Qwen2-VL as
their published tables train them, and whole models that a config.json describes."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pytest_gputrain.cases.architectures.facts import Part, language_config
from pytest_gputrain.records import Scale
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.zoo.headed import keep_in_fp32
from pytest_gputrain.worker.zoo.language import IGNORED_LABEL, LOSSES, next_token_labels, padded
from pytest_gputrain.worker.zoo.samples import spread_lengths
from pytest_gputrain.worker.zoo.workload import Batch, Workload

TINY_SHRINK: Final = 6
"""Both sides of an image are divided by it, as LLaVA's tiles are: a tiny image has as many of them as the full one."""
TINY_TEXT_LENGTH: Final = 32
TINY_BATCH_SIZE: Final = 4
"""The batch at tiny scale: in bf16, 16 samples take over a second per step on one CPU thread."""

DEFAULT_SIDE: Final = 1024
"""Pixels of a side of an image whose size neither the case nor the model says."""

LEAD: Final = 1
"""Text tokens before the image: the start of the sequence, or of the image."""


class VisionLanguageModel(Workload):
    """A vision-language model with random weights and sdpa attention. Every sample is one image and the text that follows
    it.

    All methods of the published models freeze the vision tower, where the forward pass begins, so autograd never records
    it. It stays so because only the language model's blocks are wrapped for recomputation: transformers' own switch, and
    peft where that is on, let all embeddings require gradients, the tower's too, and it joins the backward pass. Of a model
    that a config.json describes, the tower trains as well.
    """

    def _built(self, part: Part) -> nn.Module:
        model = super()._built(part)
        keep_in_fp32(model)
        return model

    @property
    def notes(self) -> tuple[str, ...]:
        """Say which images a whole model gets."""
        if not self.architecture.is_whole:
            return ()
        image = self._image(self.scale)
        return (
            f"the whole model trains, vision tower included: each sample has one image of {image.width}x{image.height} "
            f"pixels, which takes {image.tokens:,} of its tokens",
        )

    def batch(self, device: torch.device) -> Batch:
        """Return a batch of random text and images, with labels for the text after the image only.

        Raises:
            CheckFailed: the case's sequences cannot hold its image, at full size.
        """
        full = self._image("full")
        image_length = full.tokens
        text = self.case.sequence_length - image_length
        if text <= LEAD:
            raise CheckFailed(
                f"{self.case} has sequence_length={self.case.sequence_length}, but its image of {full.width}x{full.height} "
                f"pixels alone takes {image_length} tokens; set sequence_length to at least {image_length + LEAD + 1}, or a "
                "lower resolution"
            )
        image, samples = self._image(self.scale), self.case.batch_size
        if self.scale == "tiny":
            text, samples = min(text, TINY_TEXT_LENGTH), min(samples, TINY_BATCH_SIZE)
        ids = torch.randint(*self._words(image), (samples, image.tokens + text), device=device)
        ids[:, LEAD : LEAD + image.tokens] = image.placeholder
        labels = next_token_labels(ids)
        labels[labels == image.placeholder] = IGNORED_LABEL
        inputs = {"input_ids": ids, "labels": labels, **image.inputs(samples, text, device)}
        tokens = None
        if self.case.lengths == "padded":
            # The image is equally large in every sample, so only the text differs in length.
            lengths = [image.tokens + LEAD + after for after in spread_lengths(text - LEAD, samples)]
            inputs |= padded(labels, lengths)
            tokens = sum(lengths)
        return Batch(inputs=inputs, samples=samples, sequence_length=ids.shape[1], tokens=tokens)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy of the tokens that follow the image."""
        model_inputs = {name: value for name, value in inputs.items() if name != "labels"}
        return LOSSES[self.case.loss or self.architecture.loss](
            self.model(**model_inputs, use_cache=False).logits, inputs["labels"]
        )

    def _words(self, image: Image) -> tuple[int, int]:
        """Return the range of token ids for text: all ids below the image's own id or all above it, whichever are more."""
        words: int = language_config(image.facts).get("vocab_size", image.placeholder)
        return (0, min(image.placeholder, words)) if 2 * image.placeholder > words else (image.placeholder + 1, words)

    def _image(self, scale: Scale) -> Image:
        part = self.architecture.trained_part
        kind, facts = IMAGES[part.model_class], part.facts(scale)
        if self.case.resolution:
            width, height = self.case.sides
            if (fixed := kind.fixed_side(part.facts("full"))) and (width, height) != (fixed, fixed):
                raise CheckFailed(
                    f"{self.case} has resolution={self.case.resolution}, but images of {self.case.model} have "
                    f"{fixed}x{fixed} pixels; leave resolution out"
                )
        else:
            width = height = kind.fixed_side(part.facts("full")) or DEFAULT_SIDE
        if fixed := kind.fixed_side(facts):
            width = height = fixed
        elif scale == "tiny":
            width, height = (max(1, round(side / TINY_SHRINK)) for side in (width, height))
        return kind(facts=facts, width=width, height=height)


@dataclass(frozen=True, kw_only=True)
class Image(abc.ABC):
    """The shape of an image of ``width`` x ``height`` pixels in a model."""

    facts: dict[str, Any]
    width: int
    height: int

    @staticmethod
    def fixed_side(facts: dict[str, Any]) -> int:
        """Return the side in pixels of all images of a model; 0 if it takes images of any size."""
        return 0

    @property
    def placeholder(self) -> int:
        """Id of the tokens that the image's features replace. Ids on one side of it are text."""
        return next(int(self.facts[key]) for key in ("image_token_id", "image_token_index") if key in self.facts)

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """Tokens that the image takes in a sequence."""

    @abc.abstractmethod
    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs beside token ids, for one image in each sample with ``text`` tokens around it.

        Sizes of images stay on the host: the library reads them in every step, and would wait for the device.
        """


class TiledImage(Image):
    """LLaVA-1.6: the image in one tile, then in the grid of tiles that fits it best; padding taken out, rows ended."""

    @property
    def tokens(self) -> int:
        from transformers.models.llava_next.modeling_llava_next import unpad_image

        side = self.facts["vision_config"]["image_size"] // self.facts["vision_config"]["patch_size"]
        rows, columns = self._grid
        height, width = unpad_image(
            torch.empty(1, rows * side, columns * side, device="meta"), (self.height, self.width)
        ).shape[1:]
        return int(side * side + height * (width + 1))

    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Draw ``pixel_values`` (batch, tiles, 3, height, width) and ``image_sizes`` (batch, 2), height first."""
        rows, columns = self._grid
        side = self.facts["vision_config"]["image_size"]
        return {
            "pixel_values": torch.randn(samples, 1 + rows * columns, 3, side, side, device=device),
            "image_sizes": torch.tensor([[self.height, self.width]] * samples, device="cpu"),
        }

    @property
    def _grid(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

        tile = self.facts["vision_config"]["image_size"]
        rows, columns = get_anyres_image_grid_shape((self.height, self.width), self.facts["image_grid_pinpoints"], tile)
        return rows, columns


class PatchedImage(Image):
    """Qwen2-VL and later ones: patches at the image's own resolution, four of them a token.

    Each side is rounded to the nearest multiple of two patches (28 or 32 pixels), at least one. The library's processor does
    this too, and beyond it resizes what has under 56 x 56 or over 1,003,520 pixels, which is not done here.
    """

    @property
    def tokens(self) -> int:
        rows, columns = self._grid
        return rows * columns

    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Draw flat ``pixel_values`` (patches of all images, values), and what transformers would find out by reading the
        device.

        That is ``image_grid_thw`` (batch, 3) in patches, ``position_ids`` (3, batch, sequence), and the row and column of
        every patch (patches, 2).
        """
        vision = self.facts["vision_config"]
        merge: int = vision["spatial_merge_size"]
        height, width = (merge * cells for cells in self._grid)
        values = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        return {
            "pixel_values": torch.randn(samples * height * width, values, device=device),
            "image_grid_thw": torch.tensor([[1, height, width]] * samples, device="cpu"),
            "image_position_ids": self._patches(merge).repeat(samples, 1).to(device),
            "position_ids": self._positions(text).unsqueeze(1).repeat(1, samples, 1).to(device),
        }

    @property
    def _grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        vision = self.facts["vision_config"]
        pixels = vision["patch_size"] * vision["spatial_merge_size"]
        return max(1, round(self.height / pixels)), max(1, round(self.width / pixels))

    def _patches(self, merge: int) -> Tensor:
        """Return the row and the column of every patch (patches, 2). Patches of one token follow each other."""
        rows, columns = self._grid
        row, row_in, column, column_in = torch.meshgrid(
            *(torch.arange(count, device="cpu") for count in (rows, merge, columns, merge)), indexing="ij"
        )
        positions = torch.stack([row * merge + row_in, column * merge + column_in], dim=-1)
        return positions.transpose(1, 2).flatten(0, 3)

    def _positions(self, text: int) -> Tensor:
        """Return the position of every token in time, height and width (3, sequence): text goes on after the image's longer
        side."""
        rows, columns = self._grid
        before = torch.arange(LEAD, device="cpu")
        row, column = torch.meshgrid(torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu"), indexing="ij")
        image = LEAD + torch.stack([torch.zeros_like(row), row, column]).flatten(1)
        after = LEAD + max(rows, columns) + torch.arange(text - LEAD, device="cpu")
        return torch.cat([before.expand(3, -1), image, after.expand(3, -1)], dim=1)


class GridImage(PatchedImage):
    """Qwen2.5-VL and later ones: the same patches, whose positions the model reads from the device, as in a trainer."""

    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Draw ``pixel_values`` and ``position_ids`` as of Qwen2-VL, and ``image_grid_thw`` on the device."""
        drawn = super().inputs(samples, text, device)
        del drawn["image_position_ids"]
        return {**drawn, "image_grid_thw": drawn["image_grid_thw"].to(device)}


class RowImage(Image):
    """Mistral 3: patches at the image's own resolution, each side rounded up to a multiple of a token.

    The tokens that end the rows of an image are text here.
    """

    @property
    def tokens(self) -> int:
        rows, columns = (side // self._pixels for side in self._sides)
        return rows * columns

    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Draw ``pixel_values`` (batch, 3, height, width) and ``image_sizes`` (batch, 2), height first."""
        return {
            "pixel_values": torch.randn(samples, 3, *self._sides, device=device),
            "image_sizes": torch.tensor([self._sides] * samples, device="cpu").to(device),
        }

    @property
    def _pixels(self) -> int:
        """The side in pixels of the square of an image that becomes one token."""
        return int(self.facts["vision_config"]["patch_size"] * self.facts["spatial_merge_size"])

    @property
    def _sides(self) -> tuple[int, int]:
        """Height and width in pixels, rounded up to whole tokens."""
        height, width = (-(-side // self._pixels) * self._pixels for side in (self.height, self.width))
        return height, width


class SquareImage(Image):
    """An image of the one size that the tower takes, with a token for each patch: LLaVA-1.5 and PaliGemma."""

    @staticmethod
    def fixed_side(facts: dict[str, Any]) -> int:
        """Return the side in pixels of the images that the vision tower takes."""
        side = facts["vision_config"]["image_size"]
        return int(side[0] if isinstance(side, list) else side)

    @property
    def tokens(self) -> int:
        tower = self.facts["vision_config"]
        patch = tower["patch_size"]
        # CLIP also has a token for the class, which is left out by default.
        of_class = self.facts.get("vision_feature_select_strategy") == "full" and tower["model_type"] == "clip_vision_model"
        return int((self.width // (patch[0] if isinstance(patch, list) else patch)) ** 2) + of_class

    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Draw ``pixel_values`` (batch, 3, height, width)."""
        return {"pixel_values": torch.randn(samples, 3, self.height, self.width, device=device)}


class ShuffledImage(SquareImage):
    """A `SquareImage` with neighbouring patches in one token: one tile of InternVL or of Llama 4."""

    @property
    def tokens(self) -> int:
        ratio = self.facts.get("downsample_ratio") or self.facts["vision_config"]["pixel_shuffle_ratio"]
        return int(super().tokens * ratio * ratio)


class TypedImage(SquareImage):
    """A `SquareImage` for a model that gets the type of each token, because tokens of the image attend to each other: Gemma
    3."""

    @property
    def tokens(self) -> int:
        return int(self.facts["mm_tokens_per_image"])

    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Draw the inputs of a `SquareImage`, and ``token_type_ids`` (batch, sequence), 1 for the image."""
        kinds = torch.zeros(samples, self.tokens + text, dtype=torch.long, device="cpu")
        kinds[:, LEAD : LEAD + self.tokens] = 1
        return {**super().inputs(samples, text, device), "token_type_ids": kinds.to(device)}


class PrefixedImage(SquareImage):
    """A `SquareImage` for a model that gets the type of each token, because tokens of the prompt attend to each other:
    PaliGemma."""

    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Draw the inputs of a `SquareImage`, and ``token_type_ids``, 0 for the prompt: all but the last half of text."""
        kinds = torch.zeros(samples, self.tokens + text, dtype=torch.long, device="cpu")
        kinds[:, LEAD + self.tokens + text // 2 :] = 1
        return {**super().inputs(samples, text, device), "token_type_ids": kinds.to(device)}


IMAGES: Final[dict[str, type[Image]]] = {
    "Gemma3ForConditionalGeneration": TypedImage,
    "InternVLForConditionalGeneration": ShuffledImage,
    "Llama4ForConditionalGeneration": ShuffledImage,
    "LlavaForConditionalGeneration": SquareImage,
    "LlavaNextForConditionalGeneration": TiledImage,
    "Mistral3ForConditionalGeneration": RowImage,
    "PaliGemmaForConditionalGeneration": PrefixedImage,
    "Qwen2VLForConditionalGeneration": PatchedImage,
    "Qwen2_5_VLForConditionalGeneration": GridImage,
    "Qwen3VLForConditionalGeneration": GridImage,
    "Qwen3VLMoeForConditionalGeneration": GridImage,
    "Qwen3_5ForConditionalGeneration": GridImage,
    "Qwen3_5MoeForConditionalGeneration": GridImage,
}
"""The classes of images, by class of the model."""
