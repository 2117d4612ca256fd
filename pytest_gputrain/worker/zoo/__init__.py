"""Builds the models with random weights from architecture facts: one module for each family. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pytest_gputrain.cases.architectures.facts import Architecture
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.worker.zoo.click_through import ClickThroughModel
from pytest_gputrain.worker.zoo.completed import architecture_of
from pytest_gputrain.worker.zoo.denoiser import Denoiser
from pytest_gputrain.worker.zoo.diffusion import image_diffusion
from pytest_gputrain.worker.zoo.language import LanguageModel
from pytest_gputrain.worker.zoo.masked_language import MaskedLanguageModel
from pytest_gputrain.worker.zoo.translation import TranslationModel
from pytest_gputrain.worker.zoo.vision import VisionModel
from pytest_gputrain.worker.zoo.vision_language import VisionLanguageModel
from pytest_gputrain.worker.zoo.word_vectors import WordVectorModel
from pytest_gputrain.worker.zoo.workload import Workload

FAMILIES: Final[dict[str, Callable[[Architecture, Case, Scale], Workload]]] = {
    "click_through": ClickThroughModel,
    "denoiser": Denoiser,
    "diffusion": image_diffusion,
    "language": LanguageModel,
    "masked_language": MaskedLanguageModel,
    "translation": TranslationModel,
    "video_diffusion": Denoiser,
    "vision": VisionModel,
    "vision_language": VisionLanguageModel,
    "word_vectors": WordVectorModel,
}
"""The families by the name of their file of facts."""


def build(case: Case, scale: Scale, architecture: Architecture | None = None) -> Workload:
    """Build the case's model on the default device and in the default dtype, not yet adapted.

    Args:
        architecture: instead of the model's own.
    """
    architecture = architecture or architecture_of(case.model)
    return FAMILIES[architecture.family](architecture, case, scale)
