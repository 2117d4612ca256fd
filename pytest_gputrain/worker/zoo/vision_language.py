"""Builds the family of language models that read an image through a vision tower, by transformers: LLaVA-1.6, Qwen2-VL."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pytest_gputrain.records import Scale
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.zoo.language import IGNORED_LABEL, LOSSES, next_token_labels, padded
from pytest_gputrain.worker.zoo.samples import spread_lengths
from pytest_gputrain.worker.zoo.workload import Batch, Workload

TINY_SHRINK: Final = 6
"""Both sides of an image are divided by it, as LLaVA's tiles are: a tiny image has as many of them as the full one."""
TINY_TEXT_LENGTH: Final = 32
TINY_BATCH_SIZE: Final = 4
"""The batch at tiny scale: in bf16, 16 samples take over a second per step on one CPU thread."""

LEAD: Final = 1
"""Text tokens before the image: the start of the sequence, or of the image."""


class VisionLanguageModel(Workload):
    """Random weights, sdpa attention; every sample is one image and the text that follows it, of the lengths of the case.

    All methods freeze the vision tower, where the forward pass begins, so autograd never records it. It stays so because
    only the language model's blocks are wrapped for recomputation: transformers' own switch, and peft where that is on, let
    all embeddings require gradients, the tower's too, and it joins the backward pass.
    """

    def batch(self, device: torch.device) -> Batch:
        """Draw random text and images, labels for the text after the image. The tiny scale caps all three sizes.

        Raises:
            CheckFailed: the case's sequences cannot hold its image, at full size.
        """
        image_length = self._image("full").tokens
        text = self.case.sequence_length - image_length
        if text <= LEAD:
            raise CheckFailed(
                f"{self.case} has sequence_length={self.case.sequence_length}, but its image of {self.case.resolution} "
                f"pixels alone takes {image_length} tokens; set sequence_length to at least {image_length + LEAD + 1}, or a "
                "lower resolution"
            )
        image, samples = self._image(self.scale), self.case.batch_size
        if self.scale == "tiny":
            text, samples = min(text, TINY_TEXT_LENGTH), min(samples, TINY_BATCH_SIZE)
        ids = torch.randint(0, image.placeholder, (samples, image.tokens + text), device=device)
        ids[:, LEAD : LEAD + image.tokens] = image.placeholder
        labels = next_token_labels(ids)
        labels[labels == image.placeholder] = IGNORED_LABEL
        inputs = {"input_ids": ids, "labels": labels, **image.inputs(samples, text, device)}
        tokens = None
        if self.case.lengths == "padded":
            # The image is as large in every sample: it is the text behind it that is short.
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

    def _image(self, scale: Scale) -> Image:
        part = self.architecture.trained_part
        width, height = self.case.sides
        if scale == "tiny":
            width, height = (max(1, round(side / TINY_SHRINK)) for side in (width, height))
        return IMAGES[part.model_class](facts=part.facts(scale), width=width, height=height)


@dataclass(frozen=True, kw_only=True)
class Image(abc.ABC):
    """The shape of an image of ``width`` x ``height`` pixels in a model."""

    facts: dict[str, Any]
    width: int
    height: int

    @property
    @abc.abstractmethod
    def placeholder(self) -> int:
        """Id of the tokens that the image's features replace. Ids below it are text."""

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """Tokens that the image takes in a sequence."""

    @abc.abstractmethod
    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Return what the model takes beside token ids, for one image a sample and ``text`` tokens around each.

        Sizes of images stay on the host: the library reads them in every step, and would wait for the device.
        """


class TiledImage(Image):
    """LLaVA-1.6: the image in one tile, then in the grid of tiles that fits it best; padding taken out, rows ended."""

    @property
    def placeholder(self) -> int:
        return int(self.facts["image_token_index"])

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
    """Qwen2-VL: patches at the image's own resolution, four of them a token.

    Each side is rounded to the nearest multiple of two patches (28 pixels), at least one. The library's processor does this
    too, and beyond it resizes what has under 56 x 56 or over 1,003,520 pixels, which is not done here.
    """

    @property
    def placeholder(self) -> int:
        return int(self.facts["image_token_id"])

    @property
    def tokens(self) -> int:
        rows, columns = self._grid
        return rows * columns

    def inputs(self, samples: int, text: int, device: torch.device) -> dict[str, Tensor]:
        """Draw flat ``pixel_values`` (patches of all images, values) and what the library would find out by reading the
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
        """Return row and column of every patch (patches, 2), those of one token together."""
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


IMAGES: Final[dict[str, type[Image]]] = {
    "LlavaNextForConditionalGeneration": TiledImage,
    "Qwen2VLForConditionalGeneration": PatchedImage,
}
"""The classes of images, by class of the model."""
