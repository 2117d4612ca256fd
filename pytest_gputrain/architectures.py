"""Architecture facts of every model the zoo can build: data, read once, needed on both sides of the process boundary.

`architectures.json` holds, per model, its transformers (or diffusers) classes, the full-size hyper-parameters, the keys that
replace them at tiny scale, and the parameter counts that a build is checked against.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from pytest_gputrain.records import Scale


class Architecture(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of the zoo."""

    title: str
    """As published tables print it."""
    family: Literal["language"]
    """Module of `pytest_gputrain.worker.zoo` that builds it."""
    config_class: str
    model_class: str
    parameters: dict[Scale, int]
    """Count by scale: the published one at full size."""
    lora_targets: tuple[str, ...]
    """Names of the linear layers that LoRA adapts: never shared between families, where they would match nothing."""
    lora_parameters: dict[Scale, int]
    """Trainable count of LoRA at rank 8 by scale."""
    source: str
    """Public place the hyper-parameters were taken from."""
    config: dict[str, Any]
    tiny: dict[str, Any]
    """Keys that replace those of ``config`` for a step on a CPU through the same code path."""


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Every model by name."""
    return msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=dict[str, Architecture])
