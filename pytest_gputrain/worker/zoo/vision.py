"""Builds the family that classifies images: ResNet by transformers, VGG by a module of our own."""

from __future__ import annotations

import itertools
import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gputrain.worker.zoo.workload import Batch, Workload

TINY_SIDE: Final = 64
"""Pixels. Five halvings leave four of them, so that a single image still has statistics for ResNet's last batch norms."""

VGG_16: Final = (2, 2, 3, 3, 3)
"""Convolutions by stage (configuration D of arXiv:1409.1556); the width doubles from stage to stage, up to eightfold."""


class Vgg(nn.Module):
    """VGG: maps images (batch, 3, height, width) to logits (batch, labels).

    Args:
        width: channels of the first stage.
        pooled: side of the feature map that the linear layers see: what 224 pixels leave of themselves. Other sizes are
            averaged to it, as torchvision does.
        hidden_size: width of the two hidden linear layers.
    """

    def __init__(self, *, width: int, pooled: int, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        widths = [width * min(2**stage, 8) for stage in range(len(VGG_16))]
        layers: list[nn.Module] = []
        for (before, after), count in zip(itertools.pairwise([3, *widths]), VGG_16, strict=True):
            for index in range(count):
                layers += [nn.Conv2d(after if index else before, after, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(pooled), nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(widths[-1] * pooled**2, hidden_size),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden_size, num_labels),
        )
        # torchvision starts VGG's linear layers with a deviation of 0.01. With that of arXiv:1502.01852, which convolutions
        # have, the loss becomes nan within ten steps.
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 4:
                nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")
            else:
                nn.init.normal_(parameter, std=0.01 * math.sqrt(4096 / parameter.shape[1]))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


class VisionModel(Workload):
    """An image classifier in training mode: batch norm by the statistics of the batch, dropout on, channels first."""

    own = (Vgg,)

    def batch(self, device: torch.device) -> Batch:
        """Draw images (batch, 3, height, width) in the default dtype, and labels (batch,).

        At tiny scale no side is longer than `TINY_SIDE`.
        """
        width, height = self.case.sides
        if self.scale == "tiny":
            width, height = min(width, TINY_SIDE), min(height, TINY_SIDE)
        classes: int = self.architecture.trained_part.facts(self.scale)["num_labels"]
        size = self.case.batch_size
        inputs = {
            "images": torch.randn(size, 3, height, width, device=device),
            "labels": torch.randint(0, classes, (size,), device=device),
        }
        return Batch(inputs=inputs, samples=size)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        output = self.model(inputs["images"])
        # Models of transformers return their logits inside of an object.
        return functional.cross_entropy(getattr(output, "logits", output), inputs["labels"])
